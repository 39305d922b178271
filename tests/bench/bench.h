/* One line a figure, so that all benches together make one table:
 *
 *     name   ours   peer   limit   unit   ratio
 *
 * `peer` is what the figure is measured beside in the same run (0 = nothing: "-"), ratio is ours /
 * peer, `limit` is the least that is acceptable, or the most (0 = no target yet: "-"); a row with a
 * limit says "ok" or that it was missed. */
#ifndef TESTS_BENCH_BENCH_H
#define TESTS_BENCH_BENCH_H

#include <stdbool.h>
#include <stdio.h>

static inline void bench_cell(double value)
{
    if (value > 0)
        printf(" %10.3f", value);
    else
        printf(" %10s", "-");
}

static inline void bench_line(const char *name, double ours, double peer, double limit,
                              const char *unit, const char *verdict)
{
    printf("%-44s", name);
    bench_cell(ours);
    bench_cell(peer);
    bench_cell(limit);
    printf("  %-12s", unit);
    bench_cell(peer > 0 ? ours / peer : 0);
    printf("  %s\n", verdict);
    fflush(stdout);
}

/* False when the limit is missed; the bench then exits with 1. */
static inline bool bench_row(const char *name, double ours, double peer, double limit,
                             const char *unit)
{
    bench_line(name, ours, peer, limit, unit,
               limit <= 0      ? ""
               : ours >= limit ? "ok"
                               : "BELOW ITS LIMIT");
    return ours >= limit;
}

/* The same for a figure of which less is better. */
static inline bool bench_at_most(const char *name, double ours, double peer, double limit,
                                 const char *unit)
{
    bench_line(name, ours, peer, limit, unit,
               limit <= 0      ? ""
               : ours <= limit ? "ok"
                               : "ABOVE ITS LIMIT");
    return limit <= 0 || ours <= limit;
}

/* What could not be measured is said, and is no failure. */
static inline void bench_unmeasured(const char *name, const char *why)
{
    printf("%-44s not measured: %s\n", name, why);
}

#endif

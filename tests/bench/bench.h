/* One line a figure, so that all benches together make one table:
 *
 *     name   ours   peer   limit   unit   ratio
 *
 * `peer` is what the figure is measured beside in the same run (0 = nothing: "-"), ratio is ours /
 * peer, `limit` is the least that is acceptable (0 = no target yet: "-"). */
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

/* False when the limit is missed; the bench then exits with 1. */
static inline bool bench_row(const char *name, double ours, double peer, double limit,
                             const char *unit)
{
    printf("%-36s", name);
    bench_cell(ours);
    bench_cell(peer);
    bench_cell(limit);
    printf("  %-12s", unit);
    bench_cell(peer > 0 ? ours / peer : 0);
    printf("%s\n", ours < limit ? "  BELOW ITS LIMIT" : "");
    fflush(stdout);
    return ours >= limit;
}

#endif

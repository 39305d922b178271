/* Agent traces of published shapes: 33 turns (median), 2,242 tokens a turn (mean), tools of 5.2 s
 * (median) and 81 s (99th percentile), from the Codex traces in the vLLM x Mooncake report (May
 * 2026); groups of 8 to 16 that share their prompt; and an eighth of the trajectories carried over
 * from the iteration before with 32 K to 1 M tokens, which all come back at its start: the storm of
 * K3's section 5.3.1.  Log-normal where a median and a tail are known, log-uniform for lengths that
 * span decades.  Everything is a function of the seed and a counter, so each mode of a comparison
 * meets the same trajectories. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "tests/bench/sim/sim.h"

enum { MAX_CONTEXT = 1 << 20, MAX_TURNS = 400 };
enum { PROMPT = 1, TURNS, OBSERVED, SAMPLED, TOOL, CARRIED, LENGTH, GROUP }; /* what is drawn */

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

double sim_uniform(uint64_t seed, uint64_t i)
{
    return (double)((mix(mix(seed) + i) >> 11) + 1) / 9007199254740992.0;
}

static double normal(uint64_t seed, uint64_t i)
{
    return sqrt(-2 * log(sim_uniform(seed, 2 * i))) * cos(2 * M_PI * sim_uniform(seed, 2 * i + 1));
}

static double log_normal(uint64_t seed, uint64_t i, double median, double sigma)
{
    return median * exp(sigma * normal(seed, i));
}

void sim_tokens(const struct sim_trajectory *t, size_t first, unsigned n, int32_t *tokens)
{
    for (size_t i = first; i < first + n; i++)
        tokens[i - first] = (int32_t)mix((i < t->shared ? t->group : ~t->id) * 1000003 + i);
}

static void make_turns(struct sim_trajectory *t, uint64_t seed)
{
    size_t tokens = t->prefix;

    for (unsigned i = 0; i < t->n_turns; i++) {
        struct sim_turn *u = &t->turns[i];
        double observed = log_normal(seed + OBSERVED, i, 1250, 0.9);
        if (i == 0 && !t->prefix)
            observed = (double)t->shared + 256;
        *u = (struct sim_turn){
            .observed = (uint32_t)fmin(fmax(observed, 16), 32768),
            .sampled = (uint32_t)fmin(fmax(log_normal(seed + SAMPLED, i, 250, 0.7), 8), 4096),
            .tool_us = (int64_t)(1e6 * fmin(log_normal(seed + TOOL, i, 5.2, 1.18), 600)),
        };
        tokens += u->observed + u->sampled;
        if (tokens > MAX_CONTEXT) {
            t->n_turns = i ? i : 1;
            return;
        }
    }
}

static int make_trajectory(struct sim_trajectory *t, uint64_t id, uint64_t group, uint64_t seed,
                           struct lh_error *err)
{
    uint64_t own = mix(seed + id * 64), theirs = mix(seed + group * 64 + 32);
    bool carried = sim_uniform(own, CARRIED) < 0.125;
    double turns = log_normal(own + TURNS, 0, carried ? 16 : 33, 0.6);

    *t = (struct sim_trajectory){.id = id, .group = theirs};
    t->shared = (size_t)(2048 * exp2(3 * sim_uniform(theirs, PROMPT)));
    if (carried)
        t->prefix = (size_t)(32768 * exp2(4.95 * sim_uniform(own, LENGTH)));
    t->n_turns = (unsigned)fmin(fmax(turns, 2), MAX_TURNS);
    t->turns = calloc(t->n_turns, sizeof *t->turns);
    if (!t->turns)
        return lh_fail_errno(err, ENOMEM, "trajectory of %u turns", t->n_turns);
    make_turns(t, own);
    return 0;
}

int sim_workload_init(struct sim_workload *w, unsigned n, uint64_t seed, struct lh_error *err)
{
    unsigned group = 0, left = 0;
    int r = 0;

    *w = (struct sim_workload){.trajectories = calloc(n, sizeof *w->trajectories), .n = n};
    if (!w->trajectories)
        return lh_fail_errno(err, ENOMEM, "%u trajectories", n);
    for (unsigned i = 0; r == 0 && i < n; i++, left--) {
        if (!left) {
            left = 8 + (unsigned)(8 * sim_uniform(seed + GROUP, group));
            group++;
        }
        struct sim_trajectory *t = &w->trajectories[i];
        r = make_trajectory(t, i + 1, group, seed, err);
        w->turns += t->n_turns;
        for (unsigned k = 0; r == 0 && k < t->n_turns; k++)
            w->tokens += t->turns[k].observed + t->turns[k].sampled;
    }
    return r;
}

void sim_workload_finish(struct sim_workload *w)
{
    for (unsigned i = 0; w->trajectories && i < w->n; i++)
        free(w->trajectories[i].turns);
    free(w->trajectories);
}

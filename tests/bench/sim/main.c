/* bench-sim: the sweep of docs/THROTTLE.md, or a short one that `check` runs. */
#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "tests/bench/sim/sim.h"

static const double ALL_RATES[] = {0.25, 0.5, 1, 2, 4, 8}; /* GB/s */
static const unsigned ALL_COUNTS[] = {1, 4, 16, 64, 256};
static const double WORST_RATIO = 1.05, MIDDLE_RATIO = 0.9, WORST_WAIT = 3, SOME_WAIT_S = 1;
/* Both ways matter where neither baseline is near the other or far from it, and where a store
 * without limits would be so much faster that there is something to win. */
static const double NEAR = 1.1, FAR = 4, REACHABLE = 0.8, NO_LIMIT = 1e15;
enum { CROWD = 64, WORST_PREEMPTIONS_PERCENT = 1, SEEDS = 3 };

struct arguments {
    bool quick, steady;
    int model;
    unsigned trajectories;
    double rate;
    uint64_t seed;
    const char *trace;
};

struct comparison {
    struct sim_result of[SIM_MODES];
    double ratio; /* of the throttle's time to the better baseline's */
    bool middle;  /* both ways matter */
};

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct arguments *a = state->input;

    switch (key) {
    case 'q':
        a->quick = true;
        return 0;
    case 'n':
        a->trajectories = (unsigned)strtoul(arg, NULL, 10);
        return 0;
    case 'b':
        a->rate = strtod(arg, NULL);
        return 0;
    case 'm':
        a->model = !strcmp(arg, "k3") ? 1 : 0;
        return 0;
    case 's':
        a->seed = strtoul(arg, NULL, 10);
        return 0;
    case 'd':
        a->steady = true;
        return 0;
    case 't':
        a->trace = arg;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option options[] = {
    {"quick", 'q', 0, 0, "few points, and the run with real bytes; fails when a target is missed",
     0},
    {"trajectories", 'n', "N", 0, "only this many", 0},
    {"bandwidth", 'b', "GB/S", 0, "only this one", 0},
    {"model", 'm', "kimi|k3", 0, "only this one", 0},
    {"seed", 's', "SEED", 0, "of the workload and the drift; only this one (1 to 3)", 0},
    {"steady", 'd', 0, 0, "rates that do not drift", 0},
    {"trace", 't', "FILE", 0, "the throttle's decisions, for kvstore explain", 0},
    {0}};

static int compare(const struct arguments *a, const struct sim_model *model, double rate,
                   unsigned n, struct comparison *c, struct lh_error *err)
{
    struct sim_options o = {.model = model,
                            .mode = SIM_LOAD,
                            .bytes_per_s = NO_LIMIT,
                            .trajectories = n,
                            .seed = a->seed,
                            .drift = !a->steady};
    struct sim_result best;

    if (sim_run(&o, &best, err) < 0)
        return err->code;
    o.bytes_per_s = rate * 1e9;

    for (int mode = 0; mode < SIM_MODES; mode++) {
        o.mode = (enum sim_mode)mode;
        o.trace = mode == SIM_THROTTLE ? a->trace : NULL;
        int r = sim_run(&o, &c->of[mode], err);
        if (r < 0)
            return r;
    }
    double compute = c->of[SIM_RECOMPUTE].finish_s, load = c->of[SIM_LOAD].finish_s;
    double better = compute < load ? compute : load, worse = compute < load ? load : compute;
    c->ratio = c->of[SIM_THROTTLE].finish_s / better;
    c->middle = n >= CROWD && worse < FAR * better && worse > NEAR * better &&
                best.finish_s < REACHABLE * better;
    return 0;
}

static void print_head(uint64_t seed)
{
    printf("seed %llu\n", (unsigned long long)seed);
    printf("%-15s %4s %5s | %9s %9s %9s %5s | %5s %5s %5s | %7s %7s | %5s %5s %5s | %4s %6s %5s "
           "%s\n",
           "model", "traj", "GB/s", "recompute", "load", "throttle", "ratio", "hit", "load's",
           "ideal", "p50 s", "p99 s", "worst", "both", "Jain", "pre", "B/tok", "GB", "window");
}

static void print_row(const struct sim_model *m, double rate, unsigned n,
                      const struct comparison *c)
{
    const struct sim_result *r = &c->of[SIM_THROTTLE], *load = &c->of[SIM_LOAD];

    printf("%-15s %4u %5.2f | %9.0f %9.0f %9.0f %5.2f%s| %5.3f %5.3f %5.3f | %7.2f %7.1f | %5.2f "
           "%5.2f %5.2f | %4llu %6.0f %5.1f %u-%u\n",
           m->name, n, rate, c->of[SIM_RECOMPUTE].finish_s, load->finish_s, r->finish_s, c->ratio,
           c->middle ? "*" : " ", r->hit, load->hit, r->ideal, r->wait_p50_s, r->wait_p99_s,
           r->worst_wait, r->worst_of_both, r->jain, (unsigned long long)r->preemptions,
           r->written_per_token, (double)r->staging_peak / 1e9, r->window_min, r->window_max);
    fflush(stdout);
}

static unsigned miss(const char *what)
{
    printf("    missed: %s\n", what);
    return 1;
}

static unsigned check(const struct sim_model *m, const struct comparison *c)
{
    const struct sim_result *r = &c->of[SIM_THROTTLE];
    unsigned misses = 0;

    if (c->ratio > WORST_RATIO)
        misses += miss("more than 1.05 x the better baseline");
    if (c->middle && c->ratio > MIDDLE_RATIO)
        misses += miss("not below 0.9 x both where both ways matter");
    if (r->preemptions * 100 > r->turns * WORST_PREEMPTIONS_PERCENT)
        misses += miss("preemptions");
    if (r->worst_of_both > WORST_WAIT && r->mean_wait_s > SOME_WAIT_S)
        misses += miss("a trajectory waits more than 3 x the mean");
    if (r->staging_peak > m->staging_bytes)
        misses += miss("staging beyond its limit");
    return misses;
}

static int sweep(const struct arguments *a, unsigned *misses, struct lh_error *err)
{
    print_head(a->seed);
    for (int m = 0; m < SIM_MODEL_COUNT; m++)
        for (size_t i = 0; i < LH_ARRAY_SIZE(ALL_COUNTS); i++)
            for (size_t b = 0; b < LH_ARRAY_SIZE(ALL_RATES); b++) {
                unsigned n = ALL_COUNTS[i];
                struct comparison c;
                if ((a->model >= 0 && m != a->model) || (a->trajectories && n != a->trajectories) ||
                    (a->rate > 0 && ALL_RATES[b] != a->rate))
                    continue;
                int r = compare(a, &sim_models[m], ALL_RATES[b], n, &c, err);
                if (r < 0)
                    return r;
                print_row(&sim_models[m], ALL_RATES[b], n, &c);
                *misses += check(&sim_models[m], &c);
            }
    return 0;
}

/* The same run with bytes that exist: every number must come out the same, and every byte back. */
static int real_bytes(const struct arguments *a, unsigned *misses, struct lh_error *err)
{
    struct sim_options o = {.model = &sim_models[0],
                            .mode = SIM_THROTTLE,
                            .bytes_per_s = 0.5e9,
                            .trajectories = 64,
                            .seed = a->seed,
                            .drift = true};
    struct sim_result virtual, real;
    int r = sim_run(&o, &virtual, err);

    o.real_bytes = true;
    if (r == 0)
        r = sim_run(&o, &real, err);
    if (r < 0)
        return r;
    printf("real bytes: %.1f s against %.1f s, hit %.4f against %.4f, %llu wrong bytes\n",
           real.finish_s, virtual.finish_s, real.hit, virtual.hit,
           (unsigned long long)real.wrong_bytes);
    if (real.wrong_bytes || real.finish_s != virtual.finish_s || real.hit != virtual.hit)
        *misses += miss("virtual and real bytes differ");
    return 0;
}

/* Points of the two ends and of the middle. */
static int quick(const struct arguments *a, unsigned *misses, struct lh_error *err)
{
    static const double rates[] = {0.25, 0.5, 8};

    print_head(a->seed);
    for (size_t i = 0; i < LH_ARRAY_SIZE(rates); i++) {
        struct comparison c;
        int r = compare(a, &sim_models[0], rates[i], 128, &c, err);
        if (r < 0)
            return r;
        print_row(&sim_models[0], rates[i], 128, &c);
        *misses += check(&sim_models[0], &c);
    }
    return 0;
}

static int every_seed(struct arguments *a, unsigned *misses, struct lh_error *err)
{
    uint64_t first = a->seed ? a->seed : 1, last = a->seed ? a->seed : SEEDS;
    int r = 0;

    for (a->seed = first; r == 0 && a->seed <= last; a->seed++)
        r = a->quick ? quick(a, misses, err) : sweep(a, misses, err);
    a->seed = first;
    return r == 0 && a->quick ? real_bytes(a, misses, err) : r;
}

int main(int argc, char **argv)
{
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .doc = "Rollout against a store of limited bandwidth: always recompute, always load, and "
               "the throttle, with time to finish, waits and hit rates (docs/THROTTLE.md)."};
    struct arguments a = {.model = -1};
    struct lh_error err = {0};
    struct rusage usage;
    unsigned misses = 0;

    argp_parse(&argp, argc, argv, 0, NULL, &a);
    int r = every_seed(&a, &misses, &err);
    if (r < 0) {
        fprintf(stderr, "bench-sim: %s\n", err.message);
        return EXIT_FAILURE;
    }
    getrusage(RUSAGE_SELF, &usage);
    printf("%u targets missed; %ld MiB of memory at the most\n", misses, usage.ru_maxrss / 1024);
    return a.quick && misses ? EXIT_FAILURE : EXIT_SUCCESS;
}

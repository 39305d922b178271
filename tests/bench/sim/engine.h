/* Between engine.c, restore.c and run.c. */
#ifndef TESTS_BENCH_SIM_ENGINE_H
#define TESTS_BENCH_SIM_ENGINE_H

#include "tests/bench/sim/sim.h"

enum phase { IDLE, WAITING, RUNNING, OVER };

/* Between the device and the store: units first..units-1 and the state at the end. */
struct transfer {
    struct kv_op op;
    struct sequence *q;
    size_t first, units;
    uint64_t handed; /* bytes: a load's state first, then its blocks from the end */
    uint64_t lease;
    bool looked_up, over, unwanted;
};

struct sequence {
    const struct sim_trajectory *t;
    enum phase phase;
    unsigned turn;
    size_t known, goal;     /* tokens now, and at the turn's end */
    size_t computed, ever;  /* on the device; at their most */
    size_t found, findable; /* of this turn's prefix: not computed again; computed once */
    uint64_t held;          /* bytes of the device */
    bool restored;          /* this turn's prefix is all there */
    size_t stored;          /* units in the store, and those on their way there */
    struct kv_key *chain;
    size_t chained;
    struct transfer *load; /* of this turn; also when it has ended and waits to be taken */
    size_t front;          /* tokens to compute before the load is joined */
    int64_t place_us, idle_us, tool_us, waits_since_us;
    double turn_waited_s, waited_s; /* for its prefix: in this turn, in all that have ended */
};

/* A part of a transfer that the device works on; in the order in which they end. */
struct piece {
    struct transfer *transfer;
    uint64_t bytes;
    int64_t began_us, ends_us;
    struct piece *next;
};

struct row {
    struct sequence *q;
    size_t n; /* tokens of a prompt; 0 = decodes one */
};

struct engine {
    const struct sim_options *o;
    const struct sim_model *model;
    struct sim_machine machine;
    struct sim_vault *vault;
    struct kv_lanes lanes;
    struct kv_compute compute;
    struct kv_trace *trace;
    struct window window;
    struct sequence *sequences;
    unsigned n, over;
    int64_t now_us;
    uint64_t used; /* bytes of the device */
    double turn_tokens, mean_wait_s;

    struct piece *first, **last;
    struct row *rows;
    unsigned n_rows;
    double prompt_tokens, prompt_contexts;
    unsigned decoding;

    uint64_t turns, preemptions, new_tokens;
    uint64_t known_tokens, found_tokens, ever_tokens; /* of all turns' prefixes */
    uint64_t staging_peak, staging;                   /* of unthrottled transfers too */
    double *waits;                                    /* of the turns */
    bool failed;                                      /* memory ran out */
};

/* engine.c */
int engine_init(struct engine *e, const struct sim_options *o, const struct sim_workload *w,
                struct lh_error *err);
void engine_finish(struct engine *e);
void engine_ask(struct engine *e, struct sequence *q);
void engine_admit(struct engine *e);
/* Plans a pass and returns its seconds; 0 = nothing to do. */
double engine_plan(struct engine *e);
void engine_pass_done(struct engine *e, double seconds);
/* Everything leaves the device. */
void engine_park(struct engine *e);
unsigned engine_count(const struct engine *e, enum phase phase);
double engine_forecast(const struct engine *e);

/* restore.c */
void restore_plan(struct engine *e, struct sequence *q);
/* Takes over what has been loaded, or moves the split; true when the prefix is complete. */
bool restore_advance(struct engine *e, struct sequence *q);
void restore_spill(struct engine *e, struct sequence *q);
void restore_forget(struct engine *e, struct sequence *q); /* its load */
void restore_pump(struct engine *e);                       /* hands out what may move now */
void restore_piece_done(struct engine *e);
void restore_hash(struct engine *e, struct sequence *q); /* whole units of what is known */
void restore_prefill_store(struct engine *e, struct sequence *q);

#endif

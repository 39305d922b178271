/* The ledger: what the job has durably received, and what became of it (docs/DESIGN.md 3.5).
 *
 * SQLite (WAL, synchronous=FULL) holds the state; token arrays lie in append-only files beside it,
 * because they are read once, in bulk, and would triple the write volume of a database.  One
 * commit: segment bytes, fdatasync, rows, COMMIT.  Rows of a transaction are inserted while its
 * bytes are still being written, but they exist only after ledger_commit(), which syncs the bytes
 * first; so a row always points at bytes that are there, and bytes without a row are a torn tail
 * that opening cuts off. Many segments share one commit (two fsyncs), which is what makes a commit
 * point a turn affordable.
 *
 * Everything asked of workers is a *group* in a numbered *round*: "train" has group_size members of
 * one task; "demo" and "eval/..." have one.  So dispatch, retries, drops and recovery are written
 * once.
 *
 * Rejected: tokens in BLOBs (write amplification, checkpoints of the WAL stall the intake); a log
 * without a database (every query of the audit becomes a scan with its own bugs).
 *
 * Used by one thread at a time; the intake's lock sees to it. */
#ifndef TRAINER_INTAKE_LEDGER_H
#define TRAINER_INTAKE_LEDGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/cleanup.h"
#include "proto/error.h"
#include "proto/id.h"
#include "trainer/intake/db.h"

enum { LEDGER_FORMAT = 2, LEDGER_ROUND = 96 };

enum ledger_group_state {
    GROUP_DISPATCHED = 1, /* members are being worked on */
    GROUP_READY = 2,      /* every member is scored; not trained on */
    GROUP_CONSUMED = 3,   /* trained on in `step` */
    GROUP_DROPPED = 4,    /* a member ran out of infra retries */
};

enum ledger_trajectory_state {
    TRAJECTORY_OPEN = 1,    /* not ended; who works on it is the intake's memory, not a record */
    TRAJECTORY_DONE = 2,    /* scored */
    TRAJECTORY_DROPPED = 3, /* with its group */
};

struct ledger;

/* Creates DIR or opens it: checks that it is of this job and format, cuts torn tails. */
struct ledger *ledger_open(const char *dir, const char *job_id, uint64_t seed,
                           struct lh_error *err);
/* For the audit: changes nothing, checks nothing. */
struct ledger *ledger_open_read_only(const char *dir, struct lh_error *err);
void ledger_close(struct ledger *l);
LH_DEFINE_AUTO(ledger, ledger_close)
sqlite3 *ledger_db(struct ledger *l);

/* A unit of durability.  Everything below that changes the ledger belongs into one. */
int ledger_begin(struct ledger *l, struct lh_error *err);
int ledger_commit(struct ledger *l, struct lh_error *err);
void ledger_rollback(struct ledger *l);

/* ---- groups and trajectories ---- */

struct ledger_group {
    int64_t id;
    char round[LEDGER_ROUND];
    int64_t index; /* in dispatch order within the round */
    const char *task, *family;
    enum ledger_group_state state;
    int64_t step;    /* consumed by; -1 */
    int64_t planned; /* consumed by a step that was rolled back; -1 */
};

struct ledger_trajectory {
    char id[LH_ID_SIZE];
    int64_t group;
    uint32_t member, attempt, invalid; /* invalid: verdicts of that kind so far */
    enum ledger_trajectory_state state;
    uint64_t seed;
    uint32_t turns, tokens; /* live ones committed */
};

int ledger_add_group(struct ledger *l, struct ledger_group *g, struct lh_error *err); /* sets id */
int ledger_add_trajectory(struct ledger *l, const struct ledger_trajectory *t,
                          struct lh_error *err);
int ledger_set_group(struct ledger *l, int64_t group, enum ledger_group_state state, int64_t step,
                     struct lh_error *err);
/* Next attempt of a trajectory: cuts its history back to where it can resume (see
 * ledger_resume_point) or, with `restart`, to nothing. */
int ledger_next_attempt(struct ledger *l, const char *trajectory, uint32_t attempt,
                        uint32_t invalid, bool restart, struct lh_error *err);
/* The same for every open trajectory: what a new intake begins with. */
int ledger_next_attempt_of_all(struct ledger *l, struct lh_error *err);

typedef int ledger_group_fn(void *ctx, const struct ledger_group *g, struct lh_error *err);
typedef int ledger_trajectory_fn(void *ctx, const struct ledger_trajectory *t,
                                 struct lh_error *err);
/* In order of index, of the states in `states` (bit mask 1 << state). */
int ledger_each_group(struct ledger *l, const char *round, unsigned states, ledger_group_fn *fn,
                      void *ctx, struct lh_error *err);
/* In order of member. */
int ledger_each_trajectory(struct ledger *l, int64_t group, ledger_trajectory_fn *fn, void *ctx,
                           struct lh_error *err);
/* NOT_FOUND when the ledger never heard of it. */
int ledger_find_trajectory(struct ledger *l, const char *id, struct ledger_trajectory *out,
                           struct lh_error *err);
/* Highest index of the round + 1; groups of it that are not dropped. */
int ledger_round_extent(struct ledger *l, const char *round, int64_t *next, int64_t *kept,
                        struct lh_error *err);

/* ---- what workers send ---- */

struct ledger_span {
    uint32_t first;
    uint32_t pad;
    uint64_t step;
    uint8_t id[16];
};

struct ledger_segment {
    const char *trajectory;
    uint32_t attempt, turn, first_token, tokens;
    const int32_t *token;
    const float *logprob;
    const uint8_t *mask;
    const struct ledger_span *spans;
    uint32_t n_spans;
    const char *snapshot; /* "" = none */
    float temperature;
    int64_t agent_ms; /* of the agent's wall time, up to its end */
    bool last;
};

/* 0 = stored, 1 = the same segment was stored before.  ABORTED: of a lower attempt.  OUT_OF_RANGE:
 * not the turn or token that comes next.  ALREADY_EXISTS: differs from the one stored. */
int ledger_append(struct ledger *l, const struct ledger_segment *s, struct lh_error *err);

struct ledger_done {
    const char *trajectory;
    uint32_t attempt;
    int kind; /* VerdictKind */
    double reward;
    bool passed;
    const char *code, *message;
    int finish;
    uint32_t turns, tokens, sampled, wall_ms;
};
/* A scored end.  1 = stored before; ABORTED and OUT_OF_RANGE as above. */
int ledger_finish_trajectory(struct ledger *l, const struct ledger_done *d, struct lh_error *err);

/* ---- reading back ---- */

/* Tokens of a trajectory, arrays of `n`; versions by span.  Free with ledger_history_finish(). */
struct ledger_history {
    uint32_t n, turns, n_spans;
    int32_t *token;
    float *logprob;
    uint8_t *mask;
    struct ledger_span *spans;
    float temperature;
    int64_t agent_ms; /* of the last segment, as snapshot */
    char snapshot[64];
};
/* DATA_LOSS when bytes are missing or a checksum is wrong. */
int ledger_read_history(struct ledger *l, const char *trajectory, struct ledger_history *h,
                        struct lh_error *err);
void ledger_history_finish(struct ledger_history *h);

/* Snapshots that unfinished trajectories can resume from. */
typedef int ledger_snapshot_fn(void *ctx, const char *trajectory, const char *snapshot,
                               struct lh_error *err);
int ledger_each_snapshot(struct ledger *l, ledger_snapshot_fn *fn, void *ctx, struct lh_error *err);
/* The snapshot is gone: what it stood for can no longer be resumed from. */
int ledger_forget_snapshot(struct ledger *l, const char *snapshot, struct lh_error *err);

/* Groups of steps after `step` become READY again and remember the step that took them, so that a
 * replay makes the same batches. */
int ledger_roll_back(struct ledger *l, int64_t step, struct lh_error *err);

#endif

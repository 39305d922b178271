/* Inside the intake: its tables and which file does what.  Everything here holds in->lock. */
#ifndef TRAINER_INTAKE_INTAKE_PRIVATE_H
#define TRAINER_INTAKE_INTAKE_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "proto/channel.h"
#include "trainer/intake/intake.h"
#include "trainer/intake/janitor.h"

enum { INTAKE_MESSAGES = 64 }; /* received and committed together, at most */

struct worker {
    char name[CHANNEL_PEER];
    char instance[CHANNEL_PEER];
    uint32_t capacity; /* 0 = has not said HELLO */
    uint32_t held;     /* assigned to it, not ended */
    bool alive;
    bool beaten;              /* gauges and counters below are of this instance */
    struct intake_stats last; /* of the last heartbeat */
};

struct trajectory {
    struct ledger_trajectory row;
    struct group *group;
    struct worker *worker; /* NULL = waits for one */
    bool cleaning;         /* the janitor is removing what earlier attempts left */
    bool listed;           /* a heartbeat of its worker named it */
    uint32_t outages;      /* that ended its attempts since it last came on by a turn */
    int64_t sent_ms, listed_ms;
};

struct group {
    struct ledger_group row;
    const struct plan_task *task;
    struct round *round;
    uint32_t n_done;
    struct trajectory *members; /* [round->spec.members] */
};

struct round {
    struct intake_round spec;
    int64_t next, kept, limit; /* next index; groups not dropped; wanted */
    int64_t ready;
    struct group **groups; /* dispatched or ready, by index */
    size_t n_groups, room;
};

struct intake {
    struct intake_options options;
    char *job_id;
    struct ledger *ledger;
    struct channel_intake *channel;
    struct janitor *janitor;
    struct quarantine quarantine;
    pthread_t thread;
    bool thread_runs;
    atomic_bool stop;

    pthread_mutex_t lock;
    pthread_cond_t changed; /* a group became ready, or the thread failed */
    struct lh_error failed;
    struct worker *workers[256];
    size_t n_workers;
    struct round *rounds[8];
    size_t n_rounds;
    uint64_t version_step;
    uint8_t version_id[16];
    struct intake_stats past; /* counters of instances that ended */
    uint64_t committed, invalid, outages, dropped, reassigned;
};

/* rounds.c */
struct round *intake_find_round(struct intake *in, const char *name);
struct trajectory *intake_find_trajectory(struct intake *in, const char *id);
int intake_fill_rounds(struct intake *in, struct lh_error *err); /* up to their limits */
void intake_forget_group(struct round *r, struct group *g);
void intake_free_round(struct round *r);
int intake_group_done(struct intake *in, struct group *g, struct lh_error *err);
int intake_drop_group(struct intake *in, struct group *g, struct lh_error *err);

/* workers.c */
struct worker *intake_worker(struct intake *in, const char *name);
int intake_worker_instance(struct intake *in, struct worker *w, const char *instance,
                           struct lh_error *err);
void intake_heartbeat(struct worker *w, const Longhaul__Experience__V1__Heartbeat *h);
int intake_watch_workers(struct intake *in, struct lh_error *err); /* in a transaction */
/* The next attempt: counted as invalid, or only moved elsewhere.  In a transaction. */
int intake_retry(struct intake *in, struct trajectory *t, bool invalid, struct lh_error *err);

/* dispatch.c */
int intake_dispatch(struct intake *in, struct lh_error *err);
void intake_say_cancel(struct intake *in, const char *peer, const char *trajectory,
                       uint32_t attempt);
void intake_say_settled(struct intake *in, const char *peer, const char *trajectory);

/* receive.c: a batch of messages, committed and acknowledged. */
int intake_receive(struct intake *in, struct channel_message **m, size_t n, struct lh_error *err);

#endif

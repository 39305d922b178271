/* The inside of struct daemon, for agentenv/daemon and agentenv/snapshot only.
 *
 * Locks: `lock` guards the table of sandboxes and the watchers, and is held for computing only.
 * The database has its own, taken after it or alone, never before it. */
#ifndef AGENTENV_DAEMON_INTERNAL_H
#define AGENTENV_DAEMON_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "agentenv/daemon/daemon.h"
#include "agentenv/sandbox/box.h"

#define V1(name) Longhaul__Sandbox__V1__##name

enum {
    SB_CREATING = LONGHAUL__SANDBOX__V1__STATE__STATE_CREATING,
    SB_RUNNING = LONGHAUL__SANDBOX__V1__STATE__STATE_RUNNING,
    SB_FROZEN = LONGHAUL__SANDBOX__V1__STATE__STATE_FROZEN,
    SB_HIBERNATED = LONGHAUL__SANDBOX__V1__STATE__STATE_HIBERNATED,
    SB_RESUMING = LONGHAUL__SANDBOX__V1__STATE__STATE_RESUMING,
    SB_SNAPSHOTTING = LONGHAUL__SANDBOX__V1__STATE__STATE_SNAPSHOTTING,
    SB_FORKING = LONGHAUL__SANDBOX__V1__STATE__STATE_FORKING,
    SB_DEAD = LONGHAUL__SANDBOX__V1__STATE__STATE_DEAD,
    SB_DELETED = LONGHAUL__SANDBOX__V1__STATE__STATE_DELETED,
};
#define SB_IN(state) (1u << (state))
#define SB_ANY       (~0u)

enum { DEATH_CAUSES = LONGHAUL__SANDBOX__V1__DEATH_CAUSE__DEATH_ERROR + 1 };
/* How sandboxes of images with a warm-up were started. */
enum warm_start { WARM_RESTORED, COLD_NO_ENGINE, COLD_NOT_MADE, COLD_FAILED, WARM_STARTS };
enum { WAIT_DEFAULT_MS = 60000 }; /* for an operation whose caller gave no deadline */

/* One sandbox that exists, dead ones included.  Strings are set before it enters the table and
 * never change; the rest is under daemon.lock. */
struct sandbox {
    char id[LH_ID_SIZE];
    char *name, *owner, *image, *image_id, *image_path, *snapshot, *task;
    char *top_layer; /* read-only directory above the sealed layers, "" = none */
    int64_t created_ms;
    int64_t ttl_at_ms; /* lh_now_ms(); INT64_MAX = never */
    bool transient;
    bool warm;       /* starts from its image's zygote */
    bool unrestored; /* its images were there, but could not be restored */
    bool cold;       /* has none, so that its image's warm-up is run in it */
    bool has_policy; /* that was asked for; for its creation */
    V1(Policy) policy;
    int64_t used_ms;  /* lh_now_ms() when the last call ended */
    int64_t retry_ms; /* the janitor leaves it alone until then */
    bool unmade;      /* its create failed, and could not be undone either; its key is still its */
    Longhaul__Task__V1__Limits limits; /* resolved: no zero fields */
    Longhaul__Task__V1__Network network;
    V1(NetworkRules) * rules; /* NULL = none */

    int state, cause;
    uint32_t attempt;
    struct gate_opening *opening; /* its rules, in effect; NULL = not */
    struct box *box;      /* NULL before it runs, and when it was hibernated by an earlier daemon */
    struct sandbox *over; /* held alone while its files lie below this one's */
    int before;           /* its state before that */
    bool lent;            /* held so: until the one that lies over it ends */
    pid_t init_pid;

    unsigned refs;   /* the table's and those of operations */
    unsigned execs;  /* commands running in it */
    unsigned files;  /* transfers going on */
    bool had_layers; /* sealed layers lie below it */
    bool busy;       /* one operation has it alone */
    bool ending;     /* being destroyed or put away: its death is no news */
    bool gone;       /* no longer in the table */
    pthread_cond_t changed;
    struct sandbox *next;
};

enum { BUCKETS = 4096, WATCH_BACKLOG = 1024 };

struct watcher {
    struct watcher *next;
    V1(Event) queue[WATCH_BACKLOG];
    char ids[WATCH_BACKLOG][LH_ID_SIZE];
    size_t head, count;
    bool overrun;
    pthread_cond_t ready;
};

struct daemon {
    char *state_dir;
    struct db *db;
    char *boot; /* id of this boot of the host */
    struct box_host *host;
    struct gate *gate;
    struct metrics *metrics; /* NULL before anything is served */
    atomic_ullong deaths[DEATH_CAUSES];
    atomic_ullong warm_starts[WARM_STARTS];
    atomic_ullong hibernate_us, resume_us; /* smoothed; 0 = not measured yet */
    const struct daemon_hooks *hooks;
    struct rpc_method methods[64]; /* of the service; lives as long as the server */

    pthread_mutex_t spare_lock;
    unsigned first_spare, end_spare; /* STATE/spare/NUMBER, some of which may be missing */

    pthread_mutex_t lock;
    struct sandbox *buckets[BUCKETS];
    struct watcher *watchers;
    unsigned readers; /* of images, which stay where they are meanwhile (snapshot/sharing.c) */
    bool making_zygote;
    bool sharing; /* a round of it goes on */

    int epoll_fd, stop_fd;
    uint64_t store_limit;      /* bytes (snapshot/quota.c); 0 = none */
    struct contents *contents; /* snapshot/contents.c */
    struct engines *engines;   /* engines.c */
    pthread_t monitor;
    pthread_t janitor;
    pthread_cond_t janitor_wake; /* with lock */
    bool monitor_runs, janitor_runs, stopping;
};

/* ---- table.c: sandboxes in memory ---- */

enum sandbox_hold {
    HOLD_EXEC,  /* beside each other; waits for an operation that has it alone */
    HOLD_FILES, /* the same, and such operations wait for it */
    HOLD_ALONE, /* one at a time; running execs go on */
};

struct sandbox *sandbox_new(struct lh_error *err);        /* with one reference, not in the table */
void sandbox_add(struct daemon *d, struct sandbox *s);    /* the table takes the reference */
void sandbox_forget(struct daemon *d, struct sandbox *s); /* out of the table */
void sandbox_unref(struct daemon *d, struct sandbox *s);

/* By id or name, with a reference. */
int sandbox_find(struct daemon *d, const char *id, struct sandbox **out, struct lh_error *err);
/* Finds it so, refuses a lower `attempt` (ABORTED; ANY_ATTEMPT = do not ask) and takes
 * note of a higher one, waits until `hold` is possible, and refuses states that are not in `states`
 * (FAILED_PRECONDITION). */
enum { ANY_ATTEMPT = UINT32_MAX };
int sandbox_begin(struct daemon *d, const char *id, uint32_t attempt, unsigned states,
                  enum sandbox_hold hold, int64_t deadline_ms, struct sandbox **out,
                  struct lh_error *err);
void sandbox_end(struct daemon *d, struct sandbox *s, enum sandbox_hold hold);
/* Waits, holding it alone, until no exec runs in it. */
int sandbox_wait_execs(struct daemon *d, struct sandbox *s, int64_t deadline_ms,
                       struct lh_error *err);

/* Ends the hold on a sandbox that another one lay over. */
void sandbox_end_over(struct daemon *d, struct sandbox *over);

/* Changes the state, tells watchers and waiters; writes nothing. */
/* DATA_LOSS, and why: for one without a box, which is dead. */
int sandbox_has_no_files(const struct sandbox *s, struct lh_error *err);
void sandbox_set_state(struct daemon *d, struct sandbox *s, int state, int cause);
const char *sandbox_state_name(int state);
/* A message for List and Show.  With `usage`, asks the kernel for memory and processes. */
V1(Sandbox) *
    sandbox_message(struct daemon *d, struct sandbox *s, bool usage, struct lh_error *err);
/* References to all that match, oldest first; the caller unrefs each and frees the array. */
size_t sandbox_list(struct daemon *d, const char *owner_prefix, bool dead, struct sandbox ***out,
                    struct lh_error *err);

/* ---- registry.c: rows ---- */

int registry_open(struct daemon *d, struct lh_error *err);
/* Row of a sandbox being created, its key (NULL = none) and the layers of the snapshot it starts
 * from (NULL = none), in one transaction. */
int registry_insert(struct daemon *d, const struct sandbox *s, const char *kind, const char *key,
                    const char *from_snapshot, struct lh_error *err);
int registry_set_rules(struct daemon *d, const struct sandbox *s, struct lh_error *err);
/* Those that its sandbox had; *out stays as it is when there are none. */
int registry_snapshot_rules(struct daemon *d, const char *snapshot, V1(NetworkRules) * *out,
                            struct lh_error *err);
int registry_set_running(struct daemon *d, const struct sandbox *s,
                         const struct box_identity *identity, struct lh_error *err);
int registry_set_state(struct daemon *d, const char *id, int state, int cause,
                       struct lh_error *err);
int registry_set_policy(struct daemon *d, const struct sandbox *s, struct lh_error *err);
int registry_set_ttl(struct daemon *d, const char *id, int64_t at_ms, struct lh_error *err);
int registry_set_attempt(struct daemon *d, const char *id, uint32_t attempt, struct lh_error *err);
/* The row and its references to layers; with `key_too` its idempotency key is free again. */
int registry_delete(struct daemon *d, const char *id, bool key_too, struct lh_error *err);
/* Idempotency keys are apart by kind: "create", "snapshot", "fork", and "child" of a fork.  find
 * leaves "" in id when the key is free; bind says ALREADY_EXISTS when it is not. */
int registry_find_key(struct daemon *d, const char *kind, const char *key, char id[LH_ID_SIZE],
                      struct lh_error *err);
int registry_bind_key(struct daemon *d, const char *kind, const char *key, const char *object,
                      struct lh_error *err);

struct registry_row {
    struct sandbox *sandbox;
    struct box_identity identity;
    bool this_boot; /* its processes may still run */
};
typedef int registry_row_fn(void *ctx, struct registry_row *row, struct lh_error *err);
/* Every sandbox; the row function takes row->sandbox when it returns 0.  For recovery only: it runs
 * with the database locked. */
int registry_each(struct daemon *d, registry_row_fn *fn, void *ctx, struct lh_error *err);

int registry_read_limits(Longhaul__Task__V1__Limits *to, sqlite3_stmt *row, int column,
                         struct lh_error *err);

/* ---- network.c: what is open between a sandbox and the world ---- */

/* The rules of a new sandbox, which imply a loopback network: what was asked for or, when nothing
 * is said of its network, those of the snapshot that it starts from, with host ports of its own.
 * INVALID_ARGUMENT for rules that cannot be. */
int network_describe(struct daemon *d, struct sandbox *s, const V1(CreateRequest) * req,
                     struct lh_error *err);
/* Opens what the rules say for a sandbox that runs; host ports that were left open are chosen and
 * recorded.  Nothing without rules. */
int network_open(struct daemon *d, struct sandbox *s, struct lh_error *err);
void network_close(struct daemon *d, struct sandbox *s);
/* The ports of a message; -1: no memory.  With daemon.lock held. */
int network_fill(const struct sandbox *s, V1(Sandbox) * m);
/* The rules of one that is to be made like it: with host ports of its own. */
V1(NetworkRules) * network_rules_for_child(const struct sandbox *s, struct lh_error *err);

/* ---- chain.c: the layers below a sandbox ---- */

struct chain {
    struct box_layer *layers; /* paths owned */
    size_t n;
};
/* Top first: the sandbox's top layer, its sealed layers as recorded (or the one given, if not NULL,
 * in place of them), its image. */
int chain_load(struct daemon *d, const struct sandbox *s, const char *instead, struct chain *out,
               struct lh_error *err);
void chain_finish(struct chain *c);
struct box_spec sandbox_box_spec(const struct sandbox *s, const char *dir, const struct chain *c);

char *sandbox_dir(const struct daemon *d, const char *id); /* STATE/boxes/ID; NULL: no memory */
char *layer_dir(const struct daemon *d, const char *id);   /* STATE/layers/ID */
char *images_dir(const struct daemon *d, const char *id);  /* STATE/checkpoints/ID, of a snapshot */

/* ---- spare.c: directories of sandboxes ---- */

int spare_open(struct daemon *d, struct lh_error *err);
/* Makes STATE/boxes/ID; one of another sandbox, emptied, where there is one. */
int spare_take(struct daemon *d, const char *dir, struct lh_error *err);
/* Keeps that of a sandbox that has ended; false: it must be removed. */
bool spare_give(struct daemon *d, const char *dir);

/* ---- the rest ---- */

int sandbox_check_key(const char *key, struct lh_error *err);
/* create.c: makes the box of a sandbox, on the chain that is recorded; of a snapshot with
 * processes: restored from `images`, else (NULL) with init alone.  Held alone, without a box. */
int sandbox_start_box(struct daemon *d, struct sandbox *s, const char *images,
                      struct lh_error *err);
/* remove.c: kills, waits for the commands that are being served, takes the box away from the table
 * and its directory from the disk. */
int sandbox_end_box(struct daemon *d, struct sandbox *s, struct lh_error *err);

/* ---- hibernate.c ---- */

int daemon_hibernate(struct daemon *d, const char *id, uint32_t attempt, int64_t deadline_ms,
                     struct lh_error *err);
/* Adds what has been going on since start_us to a smoothed mean. */
void note_cost(atomic_ullong *mean_us, int64_t start_us);
int daemon_resume(struct daemon *d, const char *id, uint32_t attempt, int64_t deadline_ms,
                  struct lh_error *err);
int daemon_rollback(struct daemon *d, const V1(RollbackRequest) * req, int64_t deadline_ms,
                    struct lh_error *err);
/* At the start: a sandbox that was hibernated, or was about to be resumed. */
int recover_hibernated(struct daemon *d, struct sandbox *s, bool this_boot, struct lh_error *err);

/* ---- policy.c ---- */

int policy_set(struct daemon *d, const V1(SetPolicyRequest) * req, int64_t deadline_ms,
               struct lh_error *err);
void policy_copy(V1(Policy) * to, const V1(Policy) * from); /* NULL: none */
/* What a message says of it; -1: no memory.  With daemon.lock held. */
int policy_fill(const struct sandbox *s, V1(Sandbox) * m);
/* As sandbox_begin() for a command; what its own policy put to rest is thawed or resumed. */
int policy_begin_exec(struct daemon *d, const char *id, uint32_t attempt, unsigned states,
                      int64_t deadline_ms, struct sandbox **out, struct lh_error *err);
/* Freezes or hibernates a sandbox that is idle for so long as its policy says; 1: it is not any
 * more. */
int policy_rest(struct daemon *d, const char *id, bool hibernate, int64_t deadline_ms,
                struct lh_error *err);
int daemon_set_frozen(struct daemon *d, const V1(SandboxAttempt) * req, bool frozen,
                      int64_t deadline_ms, struct lh_error *err);
/* The same for one that is held alone. */
int set_frozen_held(struct daemon *d, struct sandbox *s, bool frozen, struct lh_error *err);
/* Ends a sandbox whose time is over. */
int daemon_expire(struct daemon *d, const char *id, struct lh_error *err);

/* ---- zygote.c: images that are warm already ---- */

/* Of a sandbox being described: its snapshot becomes the zygote of its image, which is made if
 * there is none, or s->cold is set; nothing for an image without a warm-up.  `retry`: after a
 * restore that failed. */
int zygote_choose(struct daemon *d, struct sandbox *s, bool retry, int64_t deadline_ms,
                  struct lh_error *err);
/* Runs the warm-up in a cold one. */
int zygote_run(struct daemon *d, const struct sandbox *s, int64_t deadline_ms,
               struct lh_error *err);
/* Counts: it was restored, or was not. */
void zygote_count(struct daemon *d, const struct sandbox *s, int result);
/* Its restore failed: counted against the zygote if the sandbox had room for it. */
void zygote_blame(struct daemon *d, const struct sandbox *s);

/* ---- engines.c: which engines are offered ---- */

int engines_start(struct daemon *d, struct lh_error *err);
void engines_stop(struct daemon *d);
/* FAILED_PRECONDITION with the reason; waits for the self-test until the deadline. */
int engines_need_criu(struct daemon *d, int64_t deadline_ms, struct lh_error *err);
bool engines_have_criu(struct daemon *d); /* now, without waiting */
int engines_reply(struct daemon *d, V1(EnginesReply) * reply, struct lh_error *err);

/* Ends and forgets a sandbox that is held alone: processes, cgroup, mounts, files, layers nobody
 * else needs, row.  After an error it stays, DEAD, and can be removed again. */
int sandbox_destroy_held(struct daemon *d, struct sandbox *s, bool key_too, struct lh_error *err);

/* Notices the death of sandboxes by their pidfds. */
int monitor_start(struct daemon *d, struct lh_error *err);
void monitor_stop(struct daemon *d);
int monitor_add(struct daemon *d, struct sandbox *s, struct lh_error *err);

/* Removes sandboxes whose time is up, and runs gc once a minute. */
int janitor_start(struct daemon *d, struct lh_error *err);
void janitor_stop(struct daemon *d);
void janitor_wake(struct daemon *d); /* a new time to live */

/* Before anything is served: makes registry, memory and machine agree. */
int recover(struct daemon *d, struct lh_error *err);

/* With daemon.lock held. */
void watch_publish(struct daemon *d, const struct sandbox *s, int from, int to, int cause);

#endif

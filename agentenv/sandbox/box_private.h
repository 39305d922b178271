/* What the files that implement box.h share. */
#ifndef AGENTENV_SANDBOX_BOX_PRIVATE_H
#define AGENTENV_SANDBOX_BOX_PRIVATE_H

#include <pthread.h>

#include "agentenv/criu/engine.h"
#include "agentenv/init/wire.h"
#include "agentenv/sandbox/box.h"
#include "agentenv/sandbox/cgroup.h"

enum { BOX_MAX_LEFTOVER = 32 };

struct box_host {
    struct cgroup_root cgroups;
    int userns;  /* maps host-owned layers */
    int spawner; /* socket */
    pid_t spawner_pid;
    int criu; /* the program, opened; -1 = there is none */
};

/* An exec that a thread of ours follows. */
struct attached {
    struct attached *next;
    const char *exec_id;
    int channel;
};

enum box_life {
    BOX_AWAKE,
    BOX_ASLEEP, /* nobody talks to init, which may not exist: connection.c */
    BOX_OVER,   /* killed; it will not wake */
};

struct box {
    struct box_host *host;
    char id[65], hostname[65];
    char *dir;
    struct box_layer *layers; /* with own copies of the paths; top first */
    size_t n_layers;
    struct box_limits limits;
    enum box_network network;
    struct box_identity identity;
    int pidfd;
    int cgroup;            /* directory in the v2 hierarchy */
    int control;           /* socket to init; under life_lock */
    int files;             /* its overlay, as a detached mount; -1 when adopted */
    int memory;            /* of a box in memory: what stands for dir; else -1 */
    unsigned upper;        /* the upper directory is dir/upper.N, its work directory dir/work.N */
    pthread_mutex_t state; /* freeze, thaw, seal, kill */
    pthread_mutex_t execs_lock;                    /* for what follows */
    char leftover[BOX_MAX_LEFTOVER][WIRE_ID_SIZE]; /* ended execs whose cgroup has processes */
    size_t n_leftover;
    struct attached *attached;
    pthread_mutex_t life_lock; /* control, life; held while a request is sent */
    pthread_cond_t life_changed;
    enum box_life life;
    bool was_frozen;   /* before the checkpoint that it is in */
    int64_t asleep_ms; /* since when; slept_ms: how long the last time */
    int64_t slept_ms;
};

enum { BOX_START_MS = 10000, BOX_KILL_MS = 10000, BOX_FREEZE_MS = 10000 };

/* A handle without processes; box_close() ends it. */
struct box *box_new(struct box_host *h, const struct box_spec *spec, struct lh_error *err);
/* Sets b->upper.  FAILED_PRECONDITION unless there is exactly one: the trace of an unfinished seal.
 */
int box_find_upper(struct box *b, struct lh_error *err);
void box_upper_names(unsigned n, char upper[32], char work[32]);
/* Makes dir/upper.N and dir/work.N. */
int box_make_upper(int dir_fd, unsigned n, struct lh_error *err);
/* Upper and work directory of any names; those that are there stay. */
int box_make_dirs(int dir_fd, const char *const names[2], struct lh_error *err);
char *box_upper_path(const struct box *b); /* NULL: no memory */
int box_upper_fd(const struct box *b, struct lh_error *err);
/* A new overlay over the box's layers and, if that is not NULL, the files of `below`, with upper
 * directory b->upper under dir_fd: b->files.  Returns another mount of it, for the sandbox. */
int box_mount(struct box *b, const struct box *below, int dir_fd, struct lh_error *err);
bool box_name_valid(const char *name);

/* Asks init for an exec in `cgroup`; kill is its cgroup.kill. */
int box_send_exec(struct box *b, const struct box_exec_spec *s, int channel, int cgroup, int kill,
                  struct lh_error *err);
/* One request to init, with n_fds descriptors. */
int box_send_request(struct box *b, const struct wire_request *req, const int *fds, size_t n_fds,
                     struct lh_error *err);

/* ---- connection.c: init is left alone, and found again -------------------------------------- */

/* Init gives up everything that leads outside; threads that follow execs wait. */
int box_quiesce(struct box *b, struct lh_error *err);
/* Connects to the init of b->pidfd, gives the execs their cgroups' kill files, and lets the waiting
 * threads attach again.  Init may be frozen. */
int box_connect(struct box *b, struct lh_error *err);
/* Waiting threads give up. */
void box_give_up(struct box *b);
/* 1 = awake, 0 = not before deadline_ms, UNAVAILABLE = it is dead or will not wake.  *slept_ms: how
 * long it slept. */
int box_wait_awake(struct box *b, int64_t deadline_ms, int64_t *slept_ms, struct lh_error *err);
bool box_is_dead(struct box *b); /* its init was there and has ended */

/* ---- placement.c: which process is in which exec's cgroup ------------------------------------ */

/* Written beside the images while all stand still; a restored tree is in one cgroup at first. */
int placement_save(struct box *b, int images, struct lh_error *err);
int placement_restore(const struct box *b, int images, struct lh_error *err);

struct box_criu {
    int socket, pidfd;
    pid_t pid;
};

/* Starts CRIU by the spawner: in b's cgroups and with `root` mounted at BOX_CRIU_ROOT, or (-1) in
 * the daemon's. */
#define BOX_CRIU_ROOT "/run/root"
int box_start_criu(struct box *b, int root, struct box_criu *c, struct lh_error *err);
/* Kills it if it does not end by itself, and what is left of one that failed. */
void box_end_criu(const struct box_criu *c, bool failed);
enum { BOX_MAX_BINDS = 32 };
size_t box_binds(struct criu_bind binds[BOX_MAX_BINDS]);
/* An empty file in the root of a restored sandbox: criu/images.c. */
#define BOX_EXECUTABLE ".agentenv-init"
/* A box's PID 1, by pid; fills pidfd and identity. */
int box_identify(struct box *b, pid_t pid, struct lh_error *err);
struct box *box_new(struct box_host *h, const struct box_spec *spec, struct lh_error *err);

/* Receives one report; closes nothing. *pass_fd receives a descriptor or -1. */
int box_receive_report(int fd, int64_t deadline_ms, struct wire_report *r, int *pass_fd,
                       struct lh_error *err);
int box_push_layer(struct box *b, const char *path, struct lh_error *err);

/* tree.c: both take any tree an agent can make. */

/* Bytes on disk below an open directory. */
uint64_t box_tree_bytes(int dir_fd);
/* rm -r, never leaving the file system; absent is fine. */
int box_remove_tree(const char *path, struct lh_error *err);

/* copy.c: a layer with all that overlay keeps in it. `to` must not exist. */
int box_copy_tree(const char *from, const char *to, struct lh_error *err);

#endif

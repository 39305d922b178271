/* What the files that implement box.h share. */
#ifndef AGENTENV_SANDBOX_BOX_PRIVATE_H
#define AGENTENV_SANDBOX_BOX_PRIVATE_H

#include <pthread.h>

#include "agentenv/init/wire.h"
#include "agentenv/sandbox/box.h"
#include "agentenv/sandbox/cgroup.h"

enum { BOX_MAX_LEFTOVER = 32 };

struct box_host {
    struct cgroup_root cgroups;
    int userns;  /* maps host-owned layers */
    int spawner; /* socket */
    pid_t spawner_pid;
};

/* An exec that a thread of ours follows. */
struct attached {
    struct attached *next;
    const char *exec_id;
    int channel;
};

struct box {
    struct box_host *host;
    char id[65], hostname[65];
    char *dir;
    struct box_layer *layers; /* with own copies of the paths; top first */
    size_t n_layers;
    struct box_limits limits;
    struct box_identity identity;
    int pidfd;
    int cgroup;            /* directory in the v2 hierarchy */
    int control;           /* socket to init */
    unsigned upper;        /* the upper directory is dir/upper.N, its work directory dir/work.N */
    pthread_mutex_t state; /* freeze, thaw, seal, kill */
    pthread_mutex_t execs_lock;                    /* for what follows */
    char leftover[BOX_MAX_LEFTOVER][WIRE_ID_SIZE]; /* ended execs whose cgroup has processes */
    size_t n_leftover;
    struct attached *attached;
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
int box_upper_fd(const struct box *b, struct lh_error *err);
bool box_name_valid(const char *name);

/* One request to init, with n_fds descriptors. */
int box_send_request(const struct box *b, const struct wire_request *req, const int *fds,
                     size_t n_fds, struct lh_error *err);

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

/* The cgroups of one daemon's sandboxes, on hosts of every layout.
 *
 * Membership, freezing and killing always use the v2 core: it is there on hybrid hosts too, and
 * where nobody mounted it a private mount will do.  Limits use v2 controllers, or the v1 ones where
 * the host has bound them to v1.  So a sandbox has one v2 cgroup, with one below it for each exec
 * (that is how an exec's whole tree is killed, double forks and new sessions included), and on v1
 * hosts three more of the same name that only count and limit.  Without cgroups, as most ordinary
 * users are, plain directories stand for them: cgroup_plain.c. */
#ifndef AGENTENV_SANDBOX_CGROUP_H
#define AGENTENV_SANDBOX_CGROUP_H

#include <stdbool.h>
#include <sys/types.h>

#include "agentenv/sandbox/box.h"

enum { CGROUP_MEMORY, CGROUP_PIDS, CGROUP_CPU, CGROUP_CONTROLLERS };

struct cgroup_root {
    char parent[72];
    int base; /* of the v2 hierarchy */
    int v2;   /* the parent in it */
    bool v2_limits;
    int v1_base[CGROUP_CONTROLLERS]; /* -1 with v2_limits */
    int v1[CGROUP_CONTROLLERS];
};

int cgroup_root_open(struct cgroup_root *r, const char *parent, struct lh_error *err);
/* Removes the parent if it is empty. */
void cgroup_root_close(struct cgroup_root *r);

/* Creates the sandbox's cgroups with their limits; returns the v2 directory. */
int cgroup_create(const struct cgroup_root *r, const char *id, const struct box_limits *limits,
                  struct lh_error *err);
int cgroup_open(const struct cgroup_root *r, const char *id); /* -1 with errno */

/* Puts the calling process, which has one thread, into the v1 cgroups; nothing to do with
 * v2_limits.  0 or -errno. */
int cgroup_enter(const struct cgroup_root *r, const char *id);
/* Where directories stand for cgroups: writes down in `fd`, which is a sandbox's, that `pid` is its
 * init.  0 or -errno. */
#define CGROUP_PLAIN_RECORD "init"
int cgroup_record(int fd, pid_t pid);
/* Field 22 of /proc/PID/stat: tells a reused pid from the real one.  -1 when there is no such
 * process. */
int cgroup_start_ticks(pid_t pid, uint64_t *ticks);

/* Below the sandbox's: one for an exec, which init may fork into.  Fills dir and kill. */
int cgroup_exec_create(int box_fd, const char *exec_id, int *dir, int *kill, struct lh_error *err);
/* The same file of one that exists; -1 without. */
int cgroup_exec_kill_fd(int box_fd, const char *exec_id);
/* False while something runs in it. */
bool cgroup_exec_remove(int box_fd, const char *exec_id);

/* cgroup_members.c.  A negative return of each() ends the walk and is returned; else 0 or -errno.
 */
int cgroup_each_exec(int box_fd, int (*each)(void *ctx, const char *exec_id), void *ctx);
int cgroup_exec_open(int box_fd, const char *exec_id);
int cgroup_each_pid(int fd, int (*each)(void *ctx, pid_t pid), void *ctx);
int cgroup_move(int fd, pid_t pid);
/* Limits of one that exists; the fd is cgroup_create()'s. */
int cgroup_limit(const struct cgroup_root *r, int box_fd, const char *id,
                 const struct box_limits *limits, struct lh_error *err);

int cgroup_freeze_soon(int fd); /* does not wait: stopped tasks freeze when they are let go */
int cgroup_set_frozen(int fd, bool frozen, int64_t deadline_ms, struct lh_error *err);
bool cgroup_is_frozen(int fd);
int cgroup_no_freezer(struct lh_error *err); /* why nothing can be frozen here */
/* Kills everything below fd, also what is frozen; returns when it is empty.  `pidfd` is of its
 * sandbox's init, or -1. */
int cgroup_kill(int fd, int pidfd, int64_t deadline_ms, struct lh_error *err);
/* Removes the sandbox's cgroups; absent is fine.  The processes must be dead. */
int cgroup_remove(const struct cgroup_root *r, const char *id, int64_t deadline_ms,
                  struct lh_error *err);

struct cgroup_counts {
    uint64_t memory_bytes, oom_kills;
    uint32_t processes;
};

/* 0 also where it cannot be read. */
uint64_t cgroup_oom_kills(const struct cgroup_root *r, const char *id);
int cgroup_count(const struct cgroup_root *r, const char *id, struct cgroup_counts *out,
                 struct lh_error *err);

/* The host pid of a sandbox's init, or of another process of it; -1 = none runs. */
pid_t cgroup_init(const struct cgroup_root *r, const char *id);

/* Calls each() with the id of every sandbox cgroup under the parent, of any hierarchy. */
int cgroup_each(const struct cgroup_root *r, int (*each)(void *ctx, const char *id), void *ctx);

#endif

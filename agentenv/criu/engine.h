/* CRIU: a tree of processes into a directory of images, and back.
 *
 * Spoken is CRIU's own protocol, to a `criu swrk` that the spawner has started for this one call
 * (sandbox/spawner.h).  Not libcriu: it forks in the calling process, which has gRPC's threads,
 * cannot put CRIU into a cgroup, keeps its options in globals, and the one of Debian 12 knows
 * neither `empty_ns` nor a network lock that is skipped.  Not the command line: it has no stations.
 *
 * Who dies.  A call whose CRIU is killed fails with UNAVAILABLE; what CRIU had stopped goes on (a
 * dump) or must be killed by the caller (a restore).  When the caller dies instead, CRIU finds its
 * socket closed, fails, and lets a dumped tree go on.
 *
 * Threads: any; calls do not know of each other. */
#ifndef AGENTENV_CRIU_ENGINE_H
#define AGENTENV_CRIU_ENGINE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/error.h"

/* A mount that comes from the host and not from the images. */
struct criu_bind {
    char inside[64];  /* mount point in the sandbox */
    char outside[64]; /* path on the host, bound at restore */
};

struct criu_call {
    int socket;          /* SOCK_SEQPACKET, the near end; stays the caller's */
    int pidfd;           /* of CRIU: its helpers keep the socket open when it is killed */
    int64_t deadline_ms; /* then the call fails; the caller kills CRIU */
    const struct criu_bind *binds;
    size_t n_binds;
    /* While all tasks stand still: "post-dump" when the images are complete; at a restore
     * "setup-namespaces" when the namespaces are there and no socket is, "post-restore" when all
     * is.  `root` is the host's pid of PID 1.  A negative return fails the call. */
    int (*station)(void *ctx, const char *name, pid_t root, struct lh_error *err);
    void *ctx;
};

/* Directories are descriptors of this process. */

/* The tree below `pid`, which is PID 1 of its pid namespace and leads a session.  It goes on when
 * the call returns, whatever happened. */
int criu_dump(const struct criu_call *c, pid_t pid, int images, struct lh_error *err);
/* Into the cgroup and cgroup namespace that CRIU was started in; the tree's PID 1 becomes a child
 * of the spawner.  `root`: a mount point in CRIU's mount namespace, which becomes "/".  The log
 * goes to `work`.  After an error tasks may be left in the cgroup. */
int criu_restore(const struct criu_call *c, int images, int work, const char *root,
                 struct lh_error *err);

/* Of the program behind the socket, e.g. 40201 for 4.2.1. */
int criu_version(const struct criu_call *c, int *version, struct lh_error *err);

/* images.c: PID 1 gets `path`, on mount `mount_id`, for its executable: see there. */
int criu_set_executable(int images, const char *path, int mount_id, struct lh_error *err);

/* log.c: the reasons that CRIU gives in a log of its own; "" when there are none. */
void criu_reason(int dir, const char *log, char *out, size_t size);

#endif

/* The process that forks sandboxes.
 *
 * gRPC and threads make fork() unsafe in the daemon, and entering a user namespace needs a process
 * with one thread.  So a small process is split off before either exists; it serves two requests
 * and answers on a socket that comes with each, so that the daemon's threads need no lock and no
 * order among them.  It ends when the daemon's end of the socket closes.
 *
 * It executes agentenv-init, which is static and small: a copy of the daemon would do too, but has
 * 388 mappings (gRPC's), and to copy and drop those for each sandbox took half of the spawner's
 * time.  Its children go on as the inits of their sandboxes, in the same program: an exec of it
 * for each cost 0.6 ms, most of it in glibc's start, which asks the processor about itself (CPUID)
 * thirty times, and each answer comes from the hypervisor.  What an exec would take away the child
 * gives up itself (enter.c): descriptors, signal handlers, capabilities.  What stays is memory that
 * no agent can read; all inits lie at the same addresses.
 *
 * Children are reaped by ignoring SIGCHLD: the daemon watches them by pidfd. */
#ifndef AGENTENV_SANDBOX_SPAWNER_H
#define AGENTENV_SANDBOX_SPAWNER_H

#include "agentenv/sandbox/cgroup.h"
#include "agentenv/sandbox/confine.h"
#include "agentenv/sandbox/enter.h"

enum spawner_op {
    SPAWNER_START,    /* descriptors: reply (the control socket's inner end), root */
    SPAWNER_SWITCH,   /* descriptors: reply, root, user namespace, mount namespace */
    SPAWNER_CRIU,     /* descriptors: reply, the program, its socket; for a restore also root, and
                         `id` is set */
    SPAWNER_LOOPBACK, /* descriptors: reply, network namespace whose lo is brought up */
};

enum { SPAWNER_MAX_FDS = 4 };

/* The program's arguments, as decimal numbers. */
enum spawner_own_fd {
    SPAWNER_FD_SOCKET,
    SPAWNER_FD_FILTERS, /* sealed memfd of the seccomp programs */
    SPAWNER_FD_V2,      /* the cgroup parents; -1 = that hierarchy is not used */
    SPAWNER_FD_V1,
    SPAWNER_OWN_FDS = SPAWNER_FD_V1 + CGROUP_CONTROLLERS,
    /* Behind them, of facts.h: */
    SPAWNER_UID_BASE = SPAWNER_OWN_FDS,
    SPAWNER_UID_COUNT,
    SPAWNER_INIT_UID,
    SPAWNER_CGROUPS,
    SPAWNER_ARGS,
};

/* A child that has entered its sandbox calls init(). */
_Noreturn void spawner_main(char *const args[SPAWNER_ARGS], void (*init)(void));

struct spawner_request {
    uint32_t op, network;
    struct confine_limits limits;
    char id[65], hostname[65];
};

/* Forks; returns the daemon's end of the socket.  *pid receives the process. */
int spawner_start(const struct cgroup_root *cgroups, int init_fd, int filters_fd, pid_t *pid,
                  struct lh_error *err);

/* Replies are struct wire_report on the first descriptor: for START first WIRE_SPAWNED with a
 * pidfd, then init's; for CRIU that WIRE_SPAWNED or WIRE_FAILED; for the others one WIRE_READY or
 * WIRE_FAILED. */
int spawner_send(int socket, const struct spawner_request *req, const int *fds, size_t n_fds,
                 struct lh_error *err);

/* ---- between spawner_main.c and spawner_criu.c, in the spawner ---- */

/* Once, before the first CRIU: the mount namespace in which it runs.  0 or -errno. */
int spawner_criu_prepare(void);
/* In the child, which is in its cgroups: becomes CRIU.  root = -1: a dump. */
_Noreturn void spawner_criu_run(int program, int socket, int root);

#endif

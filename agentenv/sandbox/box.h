/* Sandboxes as the kernel sees them: start, adopt, exec, freeze, seal, destroy.
 *
 * A *box* is one sandbox: an init process (PID 1 of its own user, pid, mount, net, ipc, uts, cgroup
 * and time namespaces) on an overlay file system, in a cgroup.  Snapshot graphs, names and states
 * belong to the daemon.
 *
 * Processes.  box_host_create() forks the *spawner* and must be called while the process has one
 * thread and before grpc_init(); from then on only the spawner forks.  Sandboxes need neither the
 * spawner nor the daemon to go on: after a `kill -9` a new daemon adopts them by what was recorded
 * (struct box_identity).
 *
 * What the caller records, and when.  Before box_start(): the id and the directory.  After it: the
 * identity.  After a crash in between, box_host_sweep() ends whatever runs under the host's cgroup
 * parent without being kept, and box_destroy_named() removes cgroup and files by id and directory.
 *
 * Threads.  All functions may be called from any thread.  Execs of one box run in parallel;
 * freeze, thaw, seal and kill of one box exclude each other.  A box must not be closed or destroyed
 * while another thread is inside a function with it; box_kill() makes box_exec() calls return.
 *
 * User ids.  Inside 0..65535 is outside BOX_UID_BASE + n; init runs as inside id BOX_INIT_UID,
 * which the agent can neither become nor signal nor trace.  Files that the host writes into a box
 * must be chowned to BOX_UID_BASE + n, or they belong to nobody inside. */
#ifndef AGENTENV_SANDBOX_BOX_H
#define AGENTENV_SANDBOX_BOX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/cleanup.h"
#include "proto/error.h"

enum { BOX_UID_BASE = 100000, BOX_UID_COUNT = 65536, BOX_INIT_UID = 65536 };

/* ---- the host side: spawner, cgroup parent, seccomp programs -------------------------------- */

struct box_host;

struct box_host_options {
    const char *cgroup_parent; /* a name, no slash, e.g. "longhaul-JOB"; unique to this daemon: the
                                  cgroups of its sandboxes lie below it and nothing else does */
    const char *init_path;     /* the agentenv-init program; NULL = beside the running executable,
                                  ../libexec/longhaul from it, or where the build put it */
    const char *criu_path;     /* the criu program; NULL = where deploy/criu or Debian puts it */
};

/* Forks the spawner; see "Processes" above.  FAILED_PRECONDITION names what the kernel lacks. */
struct box_host *box_host_create(const struct box_host_options *o, struct lh_error *err);
/* Ends the spawner and removes the cgroup parent if it is empty.  Sandboxes run on. */
void box_host_destroy(struct box_host *h);
LH_DEFINE_AUTO(box_host, box_host_destroy)
/* False when the spawner is dead: nothing can be started any more.  Its end is a SIGCHLD. */
bool box_host_alive(const struct box_host *h);

/* Kills and removes every cgroup under the parent whose sandbox id is not among keep[0..n).
 * Returns how many, or an error. */
int box_host_sweep(struct box_host *h, const char *const keep[], size_t n, struct lh_error *err);

/* Checks what sandboxes need of this machine.  Calls problem() for each thing that is missing, with
 * the remedy, and returns their number.  Forks, so: before grpc_init(); needs no host. */
int box_selftest(void (*problem)(void *ctx, const char *text), void *ctx);

/* ---- start, adopt, end ---------------------------------------------------------------------- */

/* One lower directory.  host_owned: its files belong to host ids as in an unpacked image, and are
 * ID-mapped; otherwise they belong to BOX_UID_BASE + n already, as sealed layers do. */
struct box_layer {
    const char *path;
    bool host_owned;
};

enum box_network {
    BOX_NET_NONE,     /* loopback interface down */
    BOX_NET_LOOPBACK, /* loopback up, nothing else */
};

/* Every field must be set: defaults are the caller's business. */
struct box_limits {
    uint32_t cpu_millis;   /* thousandths of a core */
    uint64_t memory_bytes; /* at least 4 MiB */
    uint32_t pids;         /* init included */
    uint32_t open_files;   /* of a process */
    uint64_t disk_bytes;   /* of the writable layer; no file may be larger, and while an exec runs
                              the sum is checked: its tree is killed when it is over */
    uint64_t output_bytes; /* kept of one exec's stdout + stderr */
};

struct box_spec {
    const char *id;  /* [A-Za-z0-9._-], at most 64: names the cgroup */
    const char *dir; /* existing directory of this box alone, on a file system that can be overlay's
                        upper; upper and work directories are made in it, unless box_reset_dir()
                        left them there */
    const struct box_layer *layers; /* top first; at least one, at most 400 */
    size_t n_layers;
    struct box_limits limits;
    enum box_network network;
    const char *hostname; /* "" or NULL = "sandbox" */
    /* NULL, or a box whose files, as they are, lie below `layers`.  Nothing may be written in it,
     * and it must not be destroyed, while this one lives. */
    const struct box *below;
    /* What it writes is kept in memory, which is added to limits.memory_bytes; `dir` is not used
     * and need not exist.  For boxes that are thrown away: such a box cannot be adopted, nor put
     * away. */
    bool in_memory;
};

/* What finds a running box again; plain data, to be recorded. */
struct box_identity {
    int32_t init_pid;     /* host pid of its PID 1 */
    uint64_t start_ticks; /* field 22 of /proc/PID/stat: tells a reused pid from the real one */
};

struct box;

/* Returns when init has confirmed that the sandbox is complete.  After an error nothing is left but
 * `dir`, empty. */
struct box *box_start(struct box_host *h, const struct box_spec *spec, struct lh_error *err);

/* Takes over a box that an earlier process started.  `spec` as at the start, with the layers it has
 * now (after live seals).  NOT_FOUND: it no longer runs; FAILED_PRECONDITION: it was being sealed
 * when the earlier process died; box_destroy_named() ends either.  A frozen box stays frozen. */
struct box *box_adopt(struct box_host *h, const struct box_spec *spec,
                      const struct box_identity *identity, struct lh_error *err);

/* A handle on a box that no longer runs, for what is still there, its files: box_dead_root_fd(),
 * box_seal() and box_destroy() work on it.  FAILED_PRECONDITION: it was being sealed when it ended,
 * and which of its directories is the upper one cannot be told. */
struct box *box_bury(struct box_host *h, const struct box_spec *spec, struct lh_error *err);

struct box_identity box_identity(const struct box *b);

/* Whether another box can be started over its files now: nothing but its init runs, and it was not
 * adopted from another process. */
bool box_stands_still(const struct box *b);

/* A pidfd of init, owned by the box: readable (poll) once the sandbox is dead. */
int box_pidfd(const struct box *b);

/* Frees the handle; the sandbox runs on. */
void box_close(struct box *b);
LH_DEFINE_AUTO(box, box_close)

/* Kills every process of the box and waits for their end.  Files stay.  Idempotent. */
int box_kill(struct box *b, struct lh_error *err);

/* box_kill, then removes the cgroup and `dir` with everything in it; frees the handle, also after
 * an error. */
int box_destroy(struct box *b, struct lh_error *err);

/* The same for a box without a handle, from the recorded names; idempotent. */
int box_destroy_named(struct box_host *h, const char *id, const char *dir, struct lh_error *err);

/* What this process has made in a tree that boxes will have for a host_owned layer becomes their
 * root's, where such layers cannot be ID-mapped (facts.h); nothing to do elsewhere. */
int box_own_tree(const char *path, struct lh_error *err);

/* Empties the directory of a box that has ended, so that another can be started in it.  False: it
 * bears a trace of its box, or could not be emptied, and is to be removed. */
bool box_reset_dir(const char *path);

/* ---- exec ----------------------------------------------------------------------------------- */

enum box_stream { BOX_OUT = 1, BOX_ERR = 2 };

/* Of each process of an exec; 0 = as the sandbox has it, more than that is not given. */
struct box_exec_limits {
    uint32_t open_files;
    uint32_t cpu_seconds;  /* then SIGXCPU, at last SIGKILL */
    uint64_t memory_bytes; /* address space: what is reserved counts, touched or not */
    uint64_t file_bytes;   /* of any file it writes */
};

struct box_exec_spec {
    const char *exec_id;     /* [A-Za-z0-9._-], at most 64, unique in the box: re-attach by it */
    const char *const *argv; /* NULL at the end; argv[0] is looked up in PATH */
    const char *const *env;  /* NULL at the end, or NULL; PATH, HOME and USER are added if absent */
    const char *cwd;         /* absolute; "" or NULL = "/" */
    const char *user;        /* "name", "uid" or "uid:gid"; "" or NULL = root of the sandbox */
    const void *stdin_data;
    size_t stdin_len;    /* 0 = empty */
    bool stdin_open;     /* instead of stdin_data: it comes by box_exec_input() */
    bool terminal;       /* rows × cols, for all three; input by box_exec_input(), output is OUT */
    uint16_t rows, cols; /* 0 = unknown to the command */
    uint32_t timeout_ms; /* not 0; then the whole process tree of this exec is killed */
    uint64_t output_bytes; /* 0 = the box's limit */
    bool keep_tail;        /* of more output than that the end is kept; the beginning otherwise */
    bool outlives; /* a cancelled call leaves the command running, and the result stays with init:
                      that of the last 8 such execs, for box_exec_attach() */
    struct box_exec_limits limits;
    uint64_t offset; /* for attach: output from this byte on */
    /* Once, before output, when attached or with stdin_open, terminal or outlives: the command
     * runs, and how many bytes of input have arrived.  NULL = not wanted. */
    void (*attached)(void *ctx, uint64_t stdin_bytes);
    /* Called in order, on the calling thread, with pieces of at most 64 KiB; nonzero = cancel.
     * `offset` is where the piece begins in the output of both streams.  NULL = discard. */
    int (*output)(void *ctx, enum box_stream stream, uint64_t offset, const void *data, size_t len);
    /* Asked about ten times a second; true ends the call (`outlives`) or kills the tree. */
    bool (*cancelled)(void *ctx);
    void *ctx;
};

struct box_exec_result {
    int status; /* exit status, or 128 + signal */
    int signal; /* 0 = it exited */
    bool timed_out;
    bool cancelled;        /* the tree was killed; with `outlives`: the command goes on */
    bool oom_killed;       /* the memory limit killed something while it ran, and it failed */
    bool disk_exceeded;    /* killed because the writable layer was over its limit */
    bool truncated;        /* output was cut at its limit, or began after `offset` */
    uint64_t output_bytes; /* produced, the cut part too */
    uint32_t wall_ms;
};

/* Runs one command to its end, which is the end of its first process: what that left in the
 * background goes on, and what it writes later is discarded.  A command that cannot be started is
 * an error (NOT_FOUND, PERMISSION_DENIED, INVALID_ARGUMENT for an unknown user); one that fails is
 * a result.  ALREADY_EXISTS: the id is known to init.  UNAVAILABLE: the box died. */
int box_exec(struct box *b, const struct box_exec_spec *spec, struct box_exec_result *result,
             struct lh_error *err);

/* Goes on with an exec that an earlier call or process began: its output from `offset`, then the
 * result.  The caller that was attached gets ABORTED.  Of `spec` only exec_id, outlives, offset and
 * the functions are used.  NOT_FOUND: init knows no such exec, or its result was delivered. */
int box_exec_attach(struct box *b, const struct box_exec_spec *spec, struct box_exec_result *result,
                    struct lh_error *err);

/* What a running exec can be told; what is zero is left as it is. */
struct box_exec_input {
    const void *data; /* for its standard input */
    size_t len;
    uint64_t offset;     /* of data in the whole input: what arrived before is skipped */
    bool end;            /* the input ends behind data (a terminal gets Ctrl-D) */
    uint16_t rows, cols; /* both: the terminal's new size */
    int signal; /* to the process group of the command; SIGKILL to its whole process tree */
};

/* Input needs somebody attached (FAILED_PRECONDITION), waits until `deadline_ms` while the command
 * does not read it, and is exactly-once by `offset`; size and signal reach an exec that init knows,
 * attached or not, and nothing happens if it has ended. */
int box_exec_input(struct box *b, const char *exec_id, const struct box_exec_input *input,
                   int64_t deadline_ms, struct lh_error *err);

/* ---- state ---------------------------------------------------------------------------------- */

int box_freeze(struct box *b, struct lh_error *err); /* idempotent; returns when all stand still */
int box_thaw(struct box *b, struct lh_error *err);

struct box_usage {
    uint64_t memory_bytes; /* charged now */
    uint32_t processes;    /* init included */
    uint64_t oom_kills;    /* since the start */
    uint64_t disk_bytes;   /* of the writable layer, by walking it */
};

int box_usage(struct box *b, struct box_usage *out, struct lh_error *err);

/* O_PATH descriptor of the box's root directory; the caller closes it. */
int box_root_fd(struct box *b, struct lh_error *err);

/* The same of a dead box, read-only; only when every process of it has gone. */
int box_dead_root_fd(struct box *b, struct lh_error *err);

/* Its network namespace; the caller closes it. */
int box_net_fd(struct box *b, struct lh_error *err);

/* Opens `path` inside the root that box_root_fd() gave: no symbolic link, magic link or ".." leads
 * out of it or onto another mount (/proc, device nodes).  flags and mode as in open(2). */
int box_open_in(int root_fd, const char *path, int flags, mode_t mode, struct lh_error *err);

/* ---- checkpoint and restore ----------------------------------------------------------------- */

/* The processes of a box as images of CRIU in the existing, empty directory `images`: memory, open
 * and deleted files, pipes, terminals, unix sockets, connections within the box, timers, locks.
 * Not kept: a connection to the outside, which none can have.  Afterwards the box is asleep and
 * frozen until box_go_on(), which makes it as it was before, or box_put_away(); calls that follow
 * execs wait, and go on where they were.  After an error it runs on as before, and the message has
 * CRIU's own reason. */
int box_checkpoint(struct box *b, const char *images, struct lh_error *err);
int box_go_on(struct box *b, struct lh_error *err);
/* Kills the processes and removes the cgroup; box_pidfd() is closed.  Files stay, and the handle,
 * asleep: the upper directory is moved away, or lost with the next box_restore(). */
int box_put_away(struct box *b, struct lh_error *err);
/* Moves the upper directory of a box without processes to `sealed_path`, which must not exist.
 * NOT_FOUND: there is none (any more). */
int box_take_upper(const char *dir, const char *sealed_path, struct lh_error *err);

/* A handle without processes.  As for box_start(), but `dir` need not be empty. */
struct box *box_asleep(struct box_host *h, const struct box_spec *spec, struct lh_error *err);
/* A box that is asleep wakes with the processes in `images`, on its layers (box_set_layers()) and a
 * fresh upper directory.  They must have the content that the root had at the checkpoint.  After an
 * error it is asleep as before. */
int box_restore(struct box *b, const char *images, struct lh_error *err);

/* Path of a program of ours that is no command: agentenv-init, agentenv-witness.  The caller frees.
 */
char *box_find_program(const char *name, struct lh_error *err);
/* Changes with the programs that a checkpoint depends on.  NULL: no memory. */
char *box_host_fingerprint(const struct box_host *h);

/* Whether CRIU is there at all, and its version (40201 = 4.2.1). */
int box_host_criu(struct box_host *h, int *version, struct lh_error *err);

/* ---- seal ----------------------------------------------------------------------------------- */

/* Makes the files written so far an immutable layer at `sealed_path`, which must not exist and must
 * be on the file system of `dir`.  Live when init is the only process and no file is open for
 * writing: the upper directory itself becomes the layer, and the box goes on at a fresh upper above
 * it (*live = true: add the layer on top of the recorded ones).  Otherwise the box is stopped while
 * its upper is copied, and keeps its own.  The layer is not fsynced: the caller does that before it
 * acknowledges.  A frozen box stays frozen. */
int box_seal(struct box *b, const char *sealed_path, bool *live, struct lh_error *err);

/* Other layers with the same content below the upper directory (a long chain, merged); used from
 * the next live seal on, until which the old ones must stay. */
int box_set_layers(struct box *b, const struct box_layer *layers, size_t n, struct lh_error *err);

#endif

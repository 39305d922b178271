/* What the daemon and init say to each other.  All sockets are SOCK_SEQPACKET pairs without a name,
 * so there is nothing inside a sandbox that an agent could connect to.
 *
 * *Control* (one per daemon, WIRE_CONTROL_FD at the start) carries requests with descriptors.  Each
 * exec has a *channel* of its own, which came with its request: events flow to the daemon there,
 * and execs need no demultiplexing.  A channel that closes detaches the daemon; the command goes on
 * and its output is kept.
 *
 * Reconnecting.  Init always keeps both ends of one more pair, the far one at WIRE_PARKED_FD.  A
 * new daemon takes a copy of that end with pidfd_getfd(2), which needs ptrace rights over init: the
 * host's root has them, the sandbox's root does not.  It is thereby certain to speak with init.
 * The first message on the pair makes it the control socket, and init parks a fresh pair.
 *
 * A checkpoint can hold no descriptor whose other end is outside.  QUIESCE makes init close them,
 * once no command is between its fork and its exec, where it still holds them too; the end of the
 * control socket is the answer.  Whoever goes on with the sandbox, or with a copy, connects as
 * above, gives each exec its KILL, and attaches. */
#ifndef AGENTENV_INIT_WIRE_H
#define AGENTENV_INIT_WIRE_H

#include <stdint.h>

enum { WIRE_CONTROL_FD = 3, WIRE_PARKED_FD = 4 };

enum { WIRE_ID_SIZE = 65, WIRE_CHUNK = 65536, WIRE_INPUT_MAX = 32768, WIRE_MAX_EXECS = 64 };

/* Init's start reports to the daemon, on the control socket. */
enum wire_report_kind {
    WIRE_SPAWNED = 1, /* from the spawner, with a pidfd: `value` is the host's pid */
    WIRE_READY,       /* from init: all is set up */
    WIRE_FAILED,      /* `value` is an errno, `step` what was tried */
};

struct wire_report {
    uint32_t kind;
    int32_t value;
    char step[120];
};

enum wire_op {
    WIRE_HELLO = 1, /* no descriptors: makes a parked pair the control socket */
    WIRE_EXEC,      /* enum wire_exec_fd */
    WIRE_ATTACH,    /* one descriptor, the channel; output from `offset` on */
    WIRE_SIGNAL,    /* to the command's process group; SIGKILL to its whole tree */
    WIRE_RESIZE,    /* its terminal to rows × cols */
    WIRE_QUIESCE,   /* no descriptors: close all from outside, at last the control socket */
    WIRE_KILL,      /* one descriptor: the exec's cgroup.kill, given up by QUIESCE */
};

enum wire_exec_flag {
    WIRE_PTY = 1,   /* a terminal of rows × cols instead of pipes; its output is WIRE_OUT */
    WIRE_STDIN = 2, /* stdin comes by the channel (a terminal's does always) */
    WIRE_KEPT = 4,  /* the result stays when the daemon has it, until its place is needed */
    WIRE_LED = 16,  /* its tree has no cgroup; the last two descriptors are nothing */
    WIRE_TAIL = 8,  /* of output beyond output_bytes the end is kept, not the beginning */
};

enum wire_exec_fd {
    WIRE_FD_CHANNEL,
    WIRE_FD_STRINGS, /* memfd: struct wire_strings, then NUL-terminated cwd, user, argv…, env… */
    WIRE_FD_STDIN,   /* memfd, or /dev/null */
    WIRE_FD_CGROUP,  /* directory of the exec's cgroup */
    WIRE_FD_KILL,    /* its cgroup.kill, open for writing */
    WIRE_EXEC_FDS,
};

/* Of each process of the exec; 0 = as the sandbox has it. */
struct wire_limits {
    uint32_t open_files; /* never 0 */
    uint32_t cpu_seconds;
    uint64_t memory_bytes; /* address space */
    uint64_t file_bytes;
};

struct wire_request {
    uint32_t op;
    uint32_t flags; /* enum wire_exec_flag */
    uint32_t timeout_ms;
    int32_t signal;
    uint16_t rows, cols;
    uint64_t output_bytes;
    uint64_t offset;
    struct wire_limits limits;
    char exec_id[WIRE_ID_SIZE];
};

struct wire_strings {
    uint32_t argc, envc;
    uint32_t length; /* of the strings that follow */
};

enum wire_event_kind {
    WIRE_OUT = 1, /* data follows the header */
    WIRE_ERR,
    WIRE_EXIT,     /* the last; the daemon answers with WIRE_TAKEN, and init forgets the exec */
    WIRE_NO_START, /* the last: `value` is an errno, data names the step; also for ATTACH */
    WIRE_ATTACHED, /* the first after ATTACH, or with WIRE_STDIN, WIRE_PTY or WIRE_KEPT */
    WIRE_MOVED,    /* the last: another channel was attached */
};

struct wire_event {
    uint32_t kind;
    int32_t value; /* of EXIT: the status of wait(2) */
    uint32_t wall_ms;
    uint32_t timed_out, truncated;
    uint64_t output_bytes; /* produced so far, the cut part too */
    uint64_t offset;       /* of OUT and ERR: position of the data in the output of both */
    uint64_t stdin_bytes;  /* of ATTACHED: bytes of input that arrived */
};

/* From the daemon, on a channel. */
enum wire_input_kind {
    WIRE_TAKEN = 1, /* the result has arrived */
    WIRE_INPUT,     /* at most WIRE_INPUT_MAX bytes follow, of position `offset` in the input */
    WIRE_INPUT_END,
};

struct wire_input {
    uint32_t kind;
    uint64_t offset;
};

#endif

/* One exec, as exec.c keeps it and channel.c tells the daemon of it. */
#ifndef AGENTENV_INIT_EXEC_H
#define AGENTENV_INIT_EXEC_H

#include <unistd.h>

#include "agentenv/init/init.h"

enum { EXEC_OUTPUTS = STREAM_REPORT + 1 }; /* out, err, report: what init reads */

struct exec {
    bool used, ended, told; /* told: the last event was sent */
    uint32_t flags;         /* enum wire_exec_flag */
    char id[WIRE_ID_SIZE];
    pid_t pid;    /* with WIRE_LED 0 until the leader has told it */
    pid_t leader; /* WIRE_LED only, and `words`, what it says */
    int words;
    bool heard_end; /* the leader has told its end */
    bool killing;   /* its tree is to be killed until the exec ends, next at kill_ms */
    int64_t kill_ms;
    int status, pipe[EXEC_OUTPUTS], kill_fd, channel;
    bool blocked; /* the channel is full */
    int64_t started_ms, deadline_ms;
    uint32_t wall_ms;
    bool timed_out;
    struct wire_report failure; /* kind 0 = it was started */
    struct input input;
    struct journal journal;
    struct journal_cursor sent;
    bool gap; /* what the daemon asked for was not all there any more */
};

static inline void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* Everything of the exec; its place is free. */
void exec_forget(struct exec *e);

/* ---- leader.c: execs with WIRE_LED ---- */

/* 0 or -errno. */
int leader_start(struct exec *e, const struct launch *l);
/* What the leader has said; true when the command has ended, with its status. */
bool leader_heard(struct exec *e, int *status);
/* For who needs e->pid now. */
void leader_await_pid(struct exec *e);
/* Everything below the leader; what escapes for the moment is there the next time. */
void leader_kill(const struct exec *e);
/* Of any child of init's. */
void leader_reaped(pid_t pid, int status);

/* ---- channel.c ---- */

/* The last event on a channel that has no exec; closes it. */
void channel_refuse(int channel, int errnum, const char *why);
/* Takes a channel over: the first event, then output from `offset` on. */
void channel_attach(struct exec *e, int channel, uint64_t offset);
/* Sends what there is to send and takes note of what the daemon says, which may be that the exec
 * can be forgotten. */
void channel_step(struct exec *e);
/* The second half of it. */
void channel_hear(struct exec *e);

#endif

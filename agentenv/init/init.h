/* The parts of agentenv-init: small, static, single-threaded. */
#ifndef AGENTENV_INIT_INIT_H
#define AGENTENV_INIT_INIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "agentenv/init/wire.h"

/* ---- journal.c: the output of one exec, kept until the daemon has it ----------------------- */

struct journal {
    char *bytes;
    size_t start, used, size; /* bytes[start..used) is kept */
    uint64_t base;            /* bytes dropped before bytes[0]: makes cursors last */
    size_t kept, cap;         /* bytes of output */
    bool tail;
    uint64_t produced;
};

struct journal_cursor {
    uint64_t at;     /* of a piece */
    uint64_t offset; /* in the output */
};

struct journal_piece {
    enum wire_event_kind stream;
    uint64_t offset;
    const char *data;
    size_t len;
};

void journal_init(struct journal *j, size_t cap, bool tail);
void journal_finish(struct journal *j);
/* What does not fit, or finds no memory, is counted and dropped. */
void journal_append(struct journal *j, enum wire_event_kind stream, const void *data, size_t len);
/* Drops the oldest beyond the cap of a tail, but nothing that `reader` (NULL = none) has ahead. */
void journal_trim(struct journal *j, const struct journal_cursor *reader);
/* True while the reader should be waited for. */
bool journal_full(const struct journal *j);
struct journal_cursor journal_seek(const struct journal *j, uint64_t offset);
/* The piece at *c, which moves behind it; false at the end. */
bool journal_next(const struct journal *j, struct journal_cursor *c, struct journal_piece *out);

/* ---- input.c: stdin that comes while the command runs --------------------------------------- */

struct input {
    int fd; /* non-blocking; -1 = closed, or there is none */
    bool terminal, end;
    uint64_t taken; /* bytes that arrived */
    char *data;     /* WIRE_INPUT_MAX bytes; the message at hand is data[at..len) */
    size_t at, len;
};

/* Takes over fd; -ENOMEM. */
int input_open(struct input *in, int fd, bool terminal);
void input_finish(struct input *in);
/* While true, no further message may be put into `data`. */
bool input_pending(const struct input *in);
void input_accept(struct input *in, uint64_t offset, size_t len); /* data[0..len) has come */
void input_end(struct input *in);
void input_flush(struct input *in);

/* ---- streams.c: pipes and terminals --------------------------------------------------------- */

enum stream { STREAM_OUT, STREAM_ERR, STREAM_REPORT, STREAM_IN, STREAMS };

struct streams {
    int ours[STREAMS]; /* non-blocking; -1 where there is none */
    int theirs[STREAMS];
};

/* 0 or -errno, and then nothing is open. */
int streams_open(const struct wire_request *req, struct streams *s);
void streams_close_theirs(struct streams *s);
int streams_resize(int terminal, unsigned rows, unsigned cols);

/* ---- launch.c: the way from a fork of init to the command ---------------------------------- */

struct launch {
    int strings, in, out, err;
    int report; /* receives struct wire_report if the command cannot be started */
    bool terminal;
    struct wire_limits limits;
};

void launch_prepare(int fd); /* reads the seccomp programs, once for all inits; closes fd */
_Noreturn void launch_command(const struct launch *l);

/* ---- user.c --------------------------------------------------------------------------------- */

enum { USER_MAX_GROUPS = 64 };

struct user {
    uid_t uid;
    gid_t gid;
    gid_t groups[USER_MAX_GROUPS];
    size_t n_groups;
    char name[64], home[256];
};

/* Looks `text` ("", name, uid, uid:gid) up in the sandbox's /etc/passwd and /etc/group: 0 or an
 * errno.  Never blocks: these files belong to the agent. */
int user_find(const char *text, struct user *u);

/* ---- exec.c: running commands ---------------------------------------------------------------- */

struct pollfd;

void exec_start(const struct wire_request *req, const int fds[WIRE_EXEC_FDS]);
void exec_attach(const struct wire_request *req, int channel);
void exec_signal(const struct wire_request *req);
void exec_resize(const struct wire_request *req);
void exec_reaped(pid_t pid, int status);
/* For a checkpoint.  True when no command is between fork and exec. */
bool exec_settled(void);
/* Closes what leads outside: channels, and the files that kill; deadlines wait until these are
 * given back by exec_arm(), which takes the descriptor. */
void exec_detach(void);
void exec_arm(const char *exec_id, int kill_fd);
/* Fills p with what the execs wait for and returns how many; *timeout_ms is lowered to the nearest
 * deadline.  exec_step() then handles what came, and deadlines. */
size_t exec_poll(struct pollfd *p, size_t max, int *timeout_ms);
void exec_step(void);

/* ---- pipes that outlive their exec: kept open, so that what a command left in the background is
 * not killed by SIGPIPE, and emptied. ---------------------------------------------------------- */

void drain_add(int fd);
size_t drain_poll(struct pollfd *p, size_t max);
void drain_step(void);

int64_t init_now_ms(void);

#endif

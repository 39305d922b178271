/* The parts of agentenv-init: small, static, single-threaded. */
#ifndef AGENTENV_INIT_INIT_H
#define AGENTENV_INIT_INIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "agentenv/init/wire.h"

/* ---- journal.c: the output of one exec, kept until the daemon has it ----------------------- */

/* Pieces of two streams in the order of arrival, at most `cap` bytes of them. */
struct journal {
    char *bytes;
    size_t used, size;
    size_t kept, cap;
    uint64_t produced;
};

void journal_init(struct journal *j, size_t cap);
void journal_finish(struct journal *j);
/* What does not fit, or finds no memory, is counted and dropped. */
void journal_append(struct journal *j, enum wire_event_kind stream, const void *data, size_t len);
/* The piece at *cursor, which moves behind it; false at the end. */
bool journal_next(const struct journal *j, size_t *cursor, enum wire_event_kind *stream,
                  const char **data, size_t *len);

/* ---- launch.c: the way from a fork of init to the command ---------------------------------- */

struct launch_fds {
    int strings, stdin_fd, out, err;
    int report; /* receives struct wire_report if the command cannot be started */
};

void launch_prepare(void); /* reads the seccomp programs */
_Noreturn void launch_command(const struct launch_fds *fds, uint32_t open_files);

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
void exec_attach(const char *exec_id, int channel);
void exec_reaped(pid_t pid, int status);
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

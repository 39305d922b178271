/* A command in a sandbox with this process at its other end. */
#ifndef AGENTENV_CLI_SESSION_H
#define AGENTENV_CLI_SESSION_H

#include <pthread.h>
#include <stdatomic.h>

#include "agentenv/cli/verbs.h"

struct session {
    struct cli *cli;
    V1(ExecRequest) req;
    bool pass_input;  /* our standard input becomes the command's */
    bool at_terminal; /* our terminal's keys and size go to the command's */
    bool only_begin;  /* leave as soon as it runs */
    /* results */
    V1(ExecExit) exit;
    bool done; /* `exit` is there */
    atomic_bool left;
    /* the rest is the session's own */
    uint64_t offset;
    atomic_ullong stdin_at; /* where input goes on: what arrived before we joined first */
    atomic_bool joined, over;
    pthread_t input;
    int wake_fd, winch_fd;
};

/* Follows the command until its end, or until we leave it (session.left).  A command with exec_id
 * that does not end with its stream is joined again when the daemon was away or the sandbox stood
 * still; input goes on at the byte where it was. */
int session_run(struct session *s, struct lh_error *err);

/* The thread that passes input on, in session_input.c. */
int session_input_start(struct session *s, struct lh_error *err);
void session_input_stop(struct session *s);

#endif

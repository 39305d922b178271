/* A conversation with a command that runs: a thread of its own follows the exec and collects what
 * comes, the test types, signals, leaves and waits for words.  What fails here ends the test. */
#ifndef TESTS_UNIT_AGENTENV_TALK_H
#define TESTS_UNIT_AGENTENV_TALK_H

#include <pthread.h>
#include <stdatomic.h>

#include "agentenv/sandbox/box.h"

enum { TALK_PATIENCE_MS = 10000 };

/* An exec that a thread of its own follows. */
struct talk {
    struct box *box;
    struct box_exec_spec spec;
    bool join; /* box_exec_attach */
    pthread_t thread;
    struct box_exec_result result;
    struct lh_error error;
    int rc;
    atomic_bool leave;
    pthread_mutex_t lock;
    pthread_cond_t more;
    char out[1 << 20]; /* with a NUL */
    size_t len;
    uint64_t first, next; /* where its output began, and where it goes on */
    bool gap, joined;
    uint64_t stdin_bytes;
};

/* {"sh", "-c", script}; static per thread. */
const char **talk_sh(const char *script);

/* The callbacks of `spec` are the conversation's; 30 s unless it says otherwise.  With `join`, goes
 * on with an exec that runs.  free() it after talk_finish() or talk_leave(). */
struct talk *talk_begin(struct box *b, const struct box_exec_spec *spec, bool join);

void talk_wait_joined(struct talk *t);
void talk_wait_output(struct talk *t, const char *text);

/* Input whose first byte is byte `offset` of all that was ever typed. */
void talk_type(struct talk *t, const char *text, uint64_t offset);
void talk_tell(struct talk *t, struct box_exec_input in);

/* Until the exec has ended; returns `t`. */
struct talk *talk_finish(struct talk *t);
/* Stops following; the command goes on. */
void talk_leave(struct talk *t);

#endif

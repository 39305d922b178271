/* How a conversation becomes tokens, and back.
 *
 *     BOS  [SYSTEM text]  USER prompt  ( ASSISTANT action RUN  TOOL observation )*
 *     ASSISTANT action EOS
 *
 * Only what the policy samples, the action's bytes and RUN or EOS, is trained on (mask 1).  RUN
 * asks for the action's output; EOS runs the action and ends the episode. */
#ifndef ROLLOUT_HARNESS_LAYOUT_H
#define ROLLOUT_HARNESS_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>

#include "longhaul/task/v1/task.pb-c.h"
#include "proto/error.h"
#include "rollout/transcript.h"

/* BOS and the task's messages. */
int layout_prompt(struct transcript *t, const Longhaul__Task__V1__Task *task, struct lh_error *err);
int layout_begin_turn(struct transcript *t, struct lh_error *err);
int layout_observation(struct transcript *t, const char *text, size_t len, struct lh_error *err);
/* An action of a demonstration, as if it had been sampled. */
int layout_demonstrate(struct transcript *t, const char *action, bool last, struct lh_error *err);

enum action_end {
    ACTION_RUN,
    ACTION_SUBMIT,
    ACTION_CUT, /* a budget ended it: it is not run */
};

struct action {
    enum action_end end;
    bool malformed; /* empty, NUL, invalid UTF-8, or special tokens inside: the agent's mistake */
    char *text;     /* NUL-terminated; free() */
};
/* The sampled tokens of one turn, the end token included. */
int layout_action(const int32_t *tokens, size_t n, struct action *out, struct lh_error *err);

/* Output of an exec as the agent sees it: trailing newlines cut, at most max bytes, a note where
 * bytes are missing, and "!N" on a line of its own for an exit status N other than 0. */
struct observation {
    const char *output;
    size_t len, produced; /* produced: bytes the command wrote, kept or not */
    int status;
    const char *note; /* instead of the status: "!timeout"; NULL = none */
};
/* Writes to `to` (max + 1 bytes) and returns the length. */
size_t layout_observe(const struct observation *o, char *to, size_t max);

#endif

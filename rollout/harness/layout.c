#include "rollout/harness/layout.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/parse.h"
#include "trainer/policy.h"

static const int32_t role_token[] = {
    [LONGHAUL__TASK__V1__ROLE__ROLE_SYSTEM] = TOKEN_SYSTEM,
    [LONGHAUL__TASK__V1__ROLE__ROLE_USER] = TOKEN_USER,
    [LONGHAUL__TASK__V1__ROLE__ROLE_ASSISTANT] = TOKEN_ASSISTANT,
    [LONGHAUL__TASK__V1__ROLE__ROLE_TOOL] = TOKEN_TOOL,
};

int layout_prompt(struct transcript *t, const Longhaul__Task__V1__Task *task, struct lh_error *err)
{
    static const int32_t bos = TOKEN_BOS;
    int r = transcript_add(t, &bos, 1, err);

    for (size_t i = 0; r == 0 && i < task->n_prompt; i++) {
        const Longhaul__Task__V1__Message *m = task->prompt[i];
        if (m->role < LONGHAUL__TASK__V1__ROLE__ROLE_SYSTEM ||
            m->role > LONGHAUL__TASK__V1__ROLE__ROLE_TOOL)
            return lh_fail(err, LH_INVALID_ARGUMENT, "task %s: message %zu has role %d", task->name,
                           i, (int)m->role);
        r = transcript_add_text(t, role_token[m->role], m->text, strlen(m->text), err);
    }
    return r;
}

int layout_begin_turn(struct transcript *t, struct lh_error *err)
{
    return transcript_add_text(t, TOKEN_ASSISTANT, "", 0, err);
}

int layout_observation(struct transcript *t, const char *text, size_t len, struct lh_error *err)
{
    return transcript_add_text(t, TOKEN_TOOL, text, len, err);
}

int layout_demonstrate(struct transcript *t, const char *action, bool last, struct lh_error *err)
{
    size_t len = strlen(action);
    lh_autofree int32_t *tokens = malloc((len + 1) * sizeof *tokens);
    int r = 0;

    if (!tokens)
        return lh_fail_errno(err, ENOMEM, "demonstration");
    size_t n = policy_encode(action, len, tokens);
    tokens[n++] = last ? TOKEN_EOS : TOKEN_RUN;
    for (size_t i = 0; r == 0 && i < n; i++)
        r = transcript_sampled(t, tokens[i], 0, NULL, err);
    return r;
}

int layout_action(const int32_t *tokens, size_t n, struct action *out, struct lh_error *err)
{
    int32_t end = n ? tokens[n - 1] : TOKEN_PAD;
    bool ended = end == TOKEN_RUN || end == TOKEN_EOS;
    size_t body = n - ended;

    *out = (struct action){.end = end == TOKEN_RUN   ? ACTION_RUN
                                  : end == TOKEN_EOS ? ACTION_SUBMIT
                                                     : ACTION_CUT};
    out->text = malloc(n + 1);
    if (!out->text)
        return lh_fail_errno(err, ENOMEM, "action of %zu tokens", n);
    size_t len = policy_decode(tokens, body, out->text);
    out->text[len] = 0;
    out->malformed = !len || len != body || !lh_text_valid(out->text, len);
    return 0;
}

static size_t cut_newlines(const char *s, size_t n)
{
    while (n && s[n - 1] == '\n')
        n--;
    return n;
}

size_t layout_observe(const struct observation *o, char *to, size_t max)
{
    char tail[96] = "", cut[48] = "";
    size_t len = cut_newlines(o->output, o->len);

    if (o->note)
        snprintf(tail, sizeof tail, "%s", o->note);
    else if (o->status)
        snprintf(tail, sizeof tail, "!%d", o->status);
    size_t end = strlen(tail) + (*tail && len);
    if (o->produced > o->len || len + end > max) {
        size_t room = max > end + sizeof cut ? max - end - sizeof cut : 0;
        len = len < room ? len : room;
        snprintf(cut, sizeof cut, "%s[%zu more bytes]", len ? "\n" : "", o->produced - len);
    }
    memcpy(to, o->output, len);
    snprintf(to + len, max + 1 - len, "%s%s%s", cut, *tail && (len || *cut) ? "\n" : "", tail);
    return len + strlen(to + len);
}

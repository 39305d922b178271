#include "agentenv/cli/session.h"

#include <stdio.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/file.h"
#include "proto/parse.h"

/* A daemon that is not back by then is not restarted by anybody. */
enum { AWAY_MS = 60000, RETRY_MS = 200 };

static int on_event(void *ctx, const ProtobufCMessage *message, struct lh_error *err)
{
    const V1(ExecEvent) *e = (const void *)message;
    struct session *s = ctx;

    switch (e->event_case) {
    case LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_OUT:
        s->offset = e->offset + e->out.len;
        return lh_write_all(STDOUT_FILENO, e->out.data, e->out.len, err);
    case LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_ERR:
        s->offset = e->offset + e->err.len;
        return lh_write_all(STDERR_FILENO, e->err.data, e->err.len, err);
    case LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_JOINED:
        if (!s->joined)
            s->stdin_at = e->joined->stdin_bytes;
        s->joined = true;
        s->left = s->only_begin;
        return s->only_begin ? LH_CANCELLED : 0;
    case LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_EXIT:
        s->exit = *e->exit; /* numbers only */
        s->done = true;
        return 0;
    default:
        return 0;
    }
}

static int follow_once(struct session *s, struct lh_error *err)
{
    uint64_t wait_ms = (uint64_t)s->req.timeout_ms + CALL_MS;

    s->req.offset = s->offset;
    int r = cli_stream(s->cli, "Exec", &s->req.base, &longhaul__sandbox__v1__exec_event__descriptor,
                       wait_ms > INT32_MAX ? INT32_MAX : (int)wait_ms, on_event, s, err);
    if (r == 0 && !s->done)
        r = lh_fail(err, LH_UNAVAILABLE, "the daemon ended the stream without a result");
    return r;
}

/* Frozen or put away, it will go on: then there is no hurry. */
static bool stands_still(struct session *s)
{
    V1(SandboxId) req = LONGHAUL__SANDBOX__V1__SANDBOX_ID__INIT;
    lh_automsg(V1(Sandbox)) now = NULL;

    req.id = s->req.id;
    return cli_call(s->cli, "Show", &req.base, &longhaul__sandbox__v1__sandbox__descriptor, CALL_MS,
                    (ProtobufCMessage **)&now, NULL) == 0 &&
           now->state != LONGHAUL__SANDBOX__V1__STATE__STATE_DEAD &&
           now->state != LONGHAUL__SANDBOX__V1__STATE__STATE_DELETED;
}

static bool try_again(struct session *s, int r, int64_t *away_until)
{
    if (!s->req.exec_id[0] || s->req.ends_with_stream || !s->joined || s->left)
        return false;
    if (r == LH_FAILED_PRECONDITION) {
        *away_until = lh_now_ms() + AWAY_MS;
        return stands_still(s);
    }
    return r == LH_UNAVAILABLE && lh_ms_left(*away_until) > 0;
}

static int follow(struct session *s, struct lh_error *err)
{
    int64_t away_until = lh_now_ms() + AWAY_MS;
    int r;

    while ((r = follow_once(s, err)) < 0 && try_again(s, r, &away_until)) {
        usleep(RETRY_MS * 1000);
        if (s->left)
            return 0;
    }
    return s->left ? 0 : r;
}

int session_run(struct session *s, struct lh_error *err)
{
    int r = s->pass_input ? session_input_start(s, err) : 0;

    if (r < 0)
        return r;
    r = follow(s, err);
    s->over = true;
    if (s->pass_input)
        session_input_stop(s);
    return r;
}

#include "tests/unit/agentenv/talk.h"

#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/wait.h"

static int on_output(void *ctx, enum box_stream stream, uint64_t offset, const void *data,
                     size_t len)
{
    struct talk *t = ctx;

    LH_LOCKED(&t->lock);
    if (t->len == 0)
        t->first = offset;
    t->gap |= t->len > 0 && offset != t->next;
    t->next = offset + len;
    if (t->len + len < sizeof t->out) {
        memcpy(t->out + t->len, data, len);
        t->len += len;
    }
    pthread_cond_broadcast(&t->more);
    return 0;
}

static void on_attached(void *ctx, uint64_t stdin_bytes)
{
    struct talk *t = ctx;

    LH_LOCKED(&t->lock);
    t->joined = true;
    t->stdin_bytes = stdin_bytes;
    pthread_cond_broadcast(&t->more);
}

static bool on_cancelled(void *ctx)
{
    return ((struct talk *)ctx)->leave;
}

static void *follow(void *arg)
{
    struct talk *t = arg;

    t->rc = (t->join ? box_exec_attach : box_exec)(t->box, &t->spec, &t->result, &t->error);
    return NULL;
}

struct talk *talk_begin(struct box *b, const struct box_exec_spec *spec, bool join)
{
    struct talk *t = calloc(1, sizeof *t);
    pthread_condattr_t attr;

    cr_assert(t != NULL);
    t->box = b;
    t->spec = *spec;
    t->join = join;
    t->spec.output = on_output;
    t->spec.attached = on_attached;
    t->spec.cancelled = on_cancelled;
    t->spec.ctx = t;
    if (!t->spec.timeout_ms)
        t->spec.timeout_ms = 30000;
    pthread_mutex_init(&t->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&t->more, &attr);
    pthread_condattr_destroy(&attr);
    cr_assert(pthread_create(&t->thread, NULL, follow, t) == 0);
    return t;
}

const char **talk_sh(const char *script)
{
    static __thread const char *argv[] = {"sh", "-c", NULL, NULL};

    argv[2] = script;
    return argv;
}

void talk_wait_joined(struct talk *t)
{
    int64_t until = lh_now_ms() + TALK_PATIENCE_MS;

    LH_LOCKED(&t->lock);
    while (!t->joined)
        cr_assert(lh_wait_until(&t->more, &t->lock, until), "not joined");
}

void talk_wait_output(struct talk *t, const char *text)
{
    int64_t until = lh_now_ms() + TALK_PATIENCE_MS;

    LH_LOCKED(&t->lock);
    while (!memmem(t->out, t->len, text, strlen(text)))
        cr_assert(lh_wait_until(&t->more, &t->lock, until), "\"%s\" never came in \"%.1000s\"",
                  text, t->out);
}

void talk_type(struct talk *t, const char *text, uint64_t offset)
{
    struct box_exec_input in = {.data = text, .len = strlen(text), .offset = offset};
    struct lh_error err = {0};

    cr_assert(box_exec_input(t->box, t->spec.exec_id, &in, lh_now_ms() + TALK_PATIENCE_MS, &err) ==
                  0,
              "%s", err.message);
}

void talk_tell(struct talk *t, struct box_exec_input in)
{
    struct lh_error err = {0};

    cr_assert(box_exec_input(t->box, t->spec.exec_id, &in, lh_now_ms() + TALK_PATIENCE_MS, &err) ==
                  0,
              "%s", err.message);
}

struct talk *talk_finish(struct talk *t)
{
    pthread_join(t->thread, NULL);
    t->out[t->len] = 0;
    return t;
}

void talk_leave(struct talk *t)
{
    t->leave = true;
    talk_finish(t);
    cr_assert(t->rc == 0 && t->result.cancelled, "%s", t->error.message);
}

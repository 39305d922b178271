#include "fake_worker.h"

#include <unistd.h>

#include "proto/clock.h"

const uint8_t version_id[16] = {7};

struct fake fake_start(const char *endpoint, const char *name)
{
    struct fake f = {.name = name};
    struct lh_error err = {0};

    lh_id_new_text(f.instance);
    const struct channel_worker_options o = {
        .endpoint = endpoint, .name = name, .instance = f.instance, .resend_ms = 200};
    f.channel = channel_worker_create(&o, &err);
    cr_assert(f.channel != NULL, "%s", err.message);
    return f;
}

void fake_stop(struct fake *f)
{
    channel_worker_destroy(f->channel);
}

static void send(struct fake *f, envelope *e, const struct channel_frame *frames, size_t n,
                 bool reliable)
{
    struct lh_error err = {0};

    FINE(channel_worker_send(f->channel, e, frames, n, reliable, WAIT_MS, &err));
}

void say_hello(struct fake *f, uint32_t capacity)
{
    envelope e = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;
    Longhaul__Experience__V1__Hello h = LONGHAUL__EXPERIENCE__V1__HELLO__INIT;

    h.worker = (char *)f->name;
    h.instance = f->instance;
    h.capacity = capacity;
    e.body_case = BODY(HELLO);
    e.hello = &h;
    send(f, &e, NULL, 0, false);
}

void say_heartbeat(struct fake *f, const char *const *ids, size_t n)
{
    envelope e = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;
    Longhaul__Experience__V1__Heartbeat h = LONGHAUL__EXPERIENCE__V1__HEARTBEAT__INIT;

    h.worker = (char *)f->name;
    h.instance = f->instance;
    h.trajectories = (char **)ids;
    h.n_trajectories = n;
    h.running = (uint32_t)n;
    e.body_case = BODY(HEARTBEAT);
    e.heartbeat = &h;
    send(f, &e, NULL, 0, false);
}

struct channel_message *next_within(struct fake *f, int kind, int wait_ms)
{
    int64_t deadline = lh_now_ms() + wait_ms;

    while (lh_now_ms() < deadline) {
        struct lh_error err = {0};
        struct channel_message *m = channel_worker_recv(f->channel, lh_ms_left(deadline), &err);
        if (m && (int)m->envelope->body_case == kind)
            return m;
        channel_message_free(m);
    }
    return NULL;
}

struct channel_message *next(struct fake *f, int kind)
{
    struct channel_message *m = next_within(f, kind, WAIT_MS);

    cr_assert(m != NULL, "%s got no message of kind %d", f->name, kind);
    return m;
}

struct channel_message *next_new_assign(struct fake *f, struct channel_message *const *seen,
                                        size_t n)
{
    for (;;) {
        struct channel_message *m = next(f, BODY(ASSIGN));
        const assign *a = m->envelope->assign;
        bool known = false;
        for (size_t i = 0; i < n; i++)
            known |= !strcmp(seen[i]->envelope->assign->trajectory, a->trajectory) &&
                     seen[i]->envelope->assign->attempt == a->attempt;
        if (!known)
            return m;
        channel_message_free(m);
    }
}

void send_segment(struct fake *f, const assign *a, uint32_t turn, const struct test_segment *t)
{
    envelope e = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;
    Longhaul__Experience__V1__Segment s = LONGHAUL__EXPERIENCE__V1__SEGMENT__INIT;
    Longhaul__Experience__V1__VersionSpan span = LONGHAUL__EXPERIENCE__V1__VERSION_SPAN__INIT;
    Longhaul__Experience__V1__PolicyVersion v = LONGHAUL__EXPERIENCE__V1__POLICY_VERSION__INIT;
    Longhaul__Experience__V1__VersionSpan *spans[] = {&span};
    const struct channel_frame frames[] = {
        {t->token, sizeof t->token}, {t->logprob, sizeof t->logprob}, {t->mask, sizeof t->mask}};

    v.id = (ProtobufCBinaryData){16, (uint8_t *)version_id};
    span.first = t->s.first_token;
    span.version = &v;
    s.trajectory = a->trajectory;
    s.attempt = a->attempt;
    s.turn = turn;
    s.first_token = t->s.first_token;
    s.tokens = TURN_TOKENS;
    s.snapshot = (char *)"01SNAPSHOT";
    s.versions = spans;
    s.n_versions = 1;
    s.temperature = 1;
    s.agent_ms = 1000 * (turn + 1);
    e.body_case = BODY(SEGMENT);
    e.segment = &s;
    send(f, &e, frames, 3, true);
}

void send_turn(struct fake *f, const assign *a, uint32_t turn)
{
    struct test_segment t;

    make_segment(&t, a->trajectory, a->attempt, turn);
    send_segment(f, a, turn, &t);
}

static void send_verdict(struct fake *f, const assign *a, uint32_t turns,
                         Longhaul__Task__V1__Verdict *v)
{
    envelope e = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;
    Longhaul__Experience__V1__Done d = LONGHAUL__EXPERIENCE__V1__DONE__INIT;

    d.trajectory = a->trajectory;
    d.attempt = a->attempt;
    d.verdict = v;
    d.turns = turns;
    d.tokens = turns * TURN_TOKENS;
    e.body_case = BODY(DONE);
    e.done = &d;
    send(f, &e, NULL, 0, true);
}

void send_done(struct fake *f, const assign *a, uint32_t turns, int kind, double reward)
{
    Longhaul__Task__V1__Verdict v = LONGHAUL__TASK__V1__VERDICT__INIT;

    v.kind = (Longhaul__Task__V1__VerdictKind)kind;
    v.reward = reward;
    v.passed = reward > 0;
    v.code = (char *)"boot";
    send_verdict(f, a, turns, &v);
}

void send_outage(struct fake *f, const assign *a, uint32_t turns)
{
    Longhaul__Task__V1__Verdict v = LONGHAUL__TASK__V1__VERDICT__INIT;

    v.kind = LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_INVALID;
    v.code = (char *)"action";
    v.outage = true;
    send_verdict(f, a, turns, &v);
}

void wait_acked(struct fake *f)
{
    int64_t deadline = lh_now_ms() + WAIT_MS;

    while (channel_worker_pending(f->channel) && lh_now_ms() < deadline)
        usleep(5000);
    cr_assert(eq(sz, channel_worker_pending(f->channel), 0), "not acknowledged");
}

#include "rollout/harness/rest.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "longhaul/sandbox/v1/sandbox.pb-c.h"
#include "proto/clock.h"
#include "proto/parse.h"

/* Of a machine where nothing was hibernated yet: the first one there is measured. */
static const double COST_UNKNOWN_MS = 200, SMOOTHING = 0.25;

enum { ASK_EVERY_MS = 10000, ASK_AGAIN_MS = 1000 /* after no answer */ };

enum mode { AUTO, NEVER, ALWAYS };

struct rest {
    struct rpc_channel *agentenv;
    enum mode mode;
    pthread_mutex_t lock;
    double turn_ms;   /* smoothed; 0 = none has ended */
    double in_engine; /* when those were asked for, smoothed */
    unsigned now_in_engine;
    bool offered, asking;
    double cost_ms; /* 0 = not measured */
    int64_t ask_at_ms;
    uint64_t counts[REST_EVENTS];
};

static int parse_mode(const char *text, enum mode *mode, struct lh_error *err)
{
    static const char *const names[] = {"auto", "never", "always"};

    *mode = AUTO;
    for (unsigned i = 0; i < LH_ARRAY_SIZE(names); i++)
        if (!strcmp(text, names[i])) {
            *mode = (enum mode)i;
            return 0;
        }
    return *text ? lh_fail(err, LH_INVALID_ARGUMENT,
                           "rollout.hibernate \"%.40s\": auto, never or always", text)
                 : 0;
}

struct rest *rest_create(struct rpc_channel *agentenv, const char *mode, struct lh_error *err)
{
    lh_auto(rest) r = calloc(1, sizeof *r);

    if (!r)
        return lh_fail_errno(err, ENOMEM, "harness"), NULL;
    pthread_mutex_init(&r->lock, NULL);
    r->agentenv = agentenv;
    return parse_mode(mode, &r->mode, err) < 0 ? NULL : lh_steal(&r);
}

void rest_destroy(struct rest *r)
{
    if (!r)
        return;
    pthread_mutex_destroy(&r->lock);
    free(r);
}

/* ---- the wait ---- */

void rest_note_turn(struct rest *r, int64_t ms, unsigned in_engine)
{
    LH_LOCKED(&r->lock);
    double a = r->turn_ms > 0 ? SMOOTHING : 1;

    r->turn_ms += a * ((double)ms - r->turn_ms);
    r->in_engine += a * ((double)in_engine - r->in_engine);
}

void rest_note_queue(struct rest *r, unsigned in_engine)
{
    LH_LOCKED(&r->lock);
    r->now_in_engine = in_engine;
}

/* With the lock. */
static double expected_ms(const struct rest *r)
{
    double longer = ((double)r->now_in_engine + 1) / (r->in_engine + 1);

    return r->turn_ms * (longer > 1 ? longer : 1);
}

/* ---- the cost ---- */

static void ask(struct rest *r, int64_t deadline_ms)
{
    int left = lh_ms_left(deadline_ms);
    Longhaul__Sandbox__V1__Empty req = LONGHAUL__SANDBOX__V1__EMPTY__INIT;
    lh_automsg(Longhaul__Sandbox__V1__EnginesReply) reply = NULL;
    int status = rpc_unary(r->agentenv, "/longhaul.sandbox.v1.Sandboxes/Engines", &req.base,
                           &longhaul__sandbox__v1__engines_reply__descriptor, left > 1 ? left : 1,
                           (ProtobufCMessage **)&reply, NULL);
    bool offered = false;

    for (size_t i = 0; status == 0 && i < reply->n_engines; i++)
        offered |= !strcmp(reply->engines[i], "criu");
    LH_LOCKED(&r->lock);
    r->asking = false;
    r->ask_at_ms = lh_now_ms() + (status == 0 ? ASK_EVERY_MS : ASK_AGAIN_MS);
    if (status < 0)
        return; /* what is known holds */
    r->offered = offered;
    r->cost_ms = (double)(reply->hibernate_us + reply->resume_us) / 1e3;
}

/* Whoever finds it out of date asks; others go on with what is known. */
static bool begin_asking(struct rest *r)
{
    LH_LOCKED(&r->lock);
    bool due = !r->asking && r->ask_at_ms <= lh_now_ms();

    r->asking |= due;
    return due;
}

enum rest_answer rest_judge(struct rest *r, int64_t deadline_ms)
{
    if (r->mode == NEVER)
        return REST_NO;
    if (begin_asking(r))
        ask(r, deadline_ms);
    LH_LOCKED(&r->lock);
    double cost_ms = r->cost_ms > 0 ? r->cost_ms : COST_UNKNOWN_MS;
    enum rest_answer answer = !r->offered                ? REST_NO
                              : r->mode == ALWAYS        ? REST_YES
                              : expected_ms(r) > cost_ms ? REST_IF_IT_HOLDS
                                                         : REST_NO;

    r->counts[REST_KEPT] += answer == REST_NO;
    return answer;
}

void rest_count(struct rest *r, enum rest_event what)
{
    LH_LOCKED(&r->lock);
    r->counts[what]++;
}

struct rest_counts rest_counts(struct rest *r)
{
    LH_LOCKED(&r->lock);
    struct rest_counts c = {.wait_ms = expected_ms(r), .cost_ms = r->cost_ms};

    memcpy(c.n, r->counts, sizeof c.n);
    return c;
}

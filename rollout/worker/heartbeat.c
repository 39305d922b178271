/* What the trainer hears of a worker four times a second: that it lives, what it holds, how its
 * memory is used.  A worker that starts anew has another instance, by which the trainer knows. */
#include <stdlib.h>

#include "proto/channel.h"
#include "proto/clock.h"
#include "rollout/harness/harness.h"
#include "rollout/worker/worker_private.h"

enum { HEARTBEAT_MS = 250 };

static void say_hello(struct worker *w)
{
    Longhaul__Experience__V1__Hello h = LONGHAUL__EXPERIENCE__V1__HELLO__INIT;
    Longhaul__Experience__V1__Envelope e = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;

    h.worker = w->name;
    h.instance = w->instance;
    h.capacity = worker_capacity(w);
    e.body_case = LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_HELLO;
    e.hello = &h;
    channel_worker_send(w->channel, &e, NULL, 0, false, 0, NULL);
}

static void fill_heartbeat(const struct worker *w, Longhaul__Experience__V1__Heartbeat *b,
                           Longhaul__Experience__V1__PolicyVersion *version)
{
    struct engine_stats s = engine_stats(w->engine);
    const struct policy_version *v = engine_version(w->engine);

    b->tokens_decoded = s.tokens_decoded;
    b->tokens_prefilled = s.tokens_prefilled;
    b->running = s.running;
    b->waiting = s.waiting;
    b->spilled = s.spilled;
    b->kv_used_bytes = s.used_bytes;
    b->kv_budget_bytes = s.budget_bytes;
    b->spilled_bytes = s.spilled_bytes;
    b->loaded_bytes = s.loaded_bytes;
    b->store_lookups = s.store_lookups;
    b->store_hits = s.store_hits;
    b->preemptions = s.preemptions;
    b->window = window_size(&w->scheduler.window);
    b->load_wait_ms = (float)w->scheduler.load_wait_ms;
    version->step = v->step;
    version->id = (ProtobufCBinaryData){sizeof v->id, (uint8_t *)v->id};
    b->version = version;
}

void worker_heartbeat(struct worker *w)
{
    Longhaul__Experience__V1__Heartbeat b = LONGHAUL__EXPERIENCE__V1__HEARTBEAT__INIT;
    Longhaul__Experience__V1__PolicyVersion v = LONGHAUL__EXPERIENCE__V1__POLICY_VERSION__INIT;
    Longhaul__Experience__V1__Envelope e = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;
    struct harness_counts c = harness_counts(w->harness);

    if (lh_now_ms() < w->heartbeat_ms)
        return;
    lh_autofree char **names = calloc(c.held + 1, sizeof *names);
    if (!names)
        return;
    w->heartbeat_ms = lh_now_ms() + HEARTBEAT_MS;
    say_hello(w);
    b.worker = w->name;
    b.instance = w->instance;
    b.trajectories = names;
    b.n_trajectories = harness_names(w->harness, names, c.held);
    b.in_tool = c.in_tool;
    struct rest_counts rest = rest_counts(w->rest);
    b.hibernated = rest.n[REST_PUT_AWAY];
    b.hibernations_failed = rest.n[REST_FAILED];
    if (w->engine)
        fill_heartbeat(w, &b, &v);
    e.body_case = LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_HEARTBEAT;
    e.heartbeat = &b;
    channel_worker_send(w->channel, &e, NULL, 0, false, 0, NULL);
}

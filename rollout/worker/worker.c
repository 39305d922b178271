#include "rollout/worker/worker.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvstore/client.h"
#include "proto/channel.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/id.h"
#include "proto/log.h"
#include "proto/rpc.h"
#include "rollout/harness/harness.h"
#include "rollout/scheduler/scheduler.h"
#include "rollout/worker/gate.h"
#include "rollout/worker/inbox.h"

LH_LOG_COMPONENT("rollout");

enum {
    TOOL_THREADS = 8,
    HOLD_PER_SLOT = 2, /* while one is in a tool, another has its place in the batch */
    HEARTBEAT_MS = 250,
    WEIGHTS_RETRY_MS = 100,
    WEIGHTS_PATIENCE_MS = 60000,
    SHUTDOWN_MS = 3500,
    TRACE_RECORDS = 1 << 14, /* 1.6 MiB */
};

struct worker {
    struct worker_options o;
    char name[32], instance[LH_ID_SIZE];
    struct inbox inbox;
    struct gate gate;
    struct policy_model *model;
    struct arbiter *arbiter;
    struct kv_client *store;
    struct kv_trace *trace;
    struct channel_worker *channel;
    struct rpc_channel *agentenv;
    struct tools *tools;
    struct rest *rest;
    struct harness *harness;
    struct engine *engine; /* once the weights are there */
    struct scheduler scheduler;
    struct engine_options eo;
    const struct arbiter_weights_header *weights;
    int64_t heartbeat_ms, weights_try_ms, weightless_since_ms;
    bool stopped; /* by STOP */
};

/* ---- construction ---- */

static int connect_arbiter(struct worker *w, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/run/arbiter.sock", w->o.job_dir);
    struct arbiter_options ao = {
        .path = path,
        .client = w->name,
        .on_revoke = gate_on_revoke,
        .on_phase = gate_on_phase,
        .ctx = &w->gate,
    };

    if (!path)
        return lh_fail_errno(err, ENOMEM, "connecting");
    w->arbiter = arbiter_connect(&ao, err);
    if (!w->arbiter)
        return err->code;
    gate_first_phase(&w->gate, arbiter_phase_now(w->arbiter));
    return 0;
}

static int declare(struct worker *w, const char *what, Longhaul__Arbiter__V1__Class class,
                   size_t bytes, void **addr, struct lh_error *err)
{
    lh_autofree char *name = lh_format("%s-%s", w->name, what);

    if (!name)
        return lh_fail_errno(err, ENOMEM, "declaring %s", what);
    return arbiter_declare(w->arbiter, name, class, bytes, ARBITER_IN(ARBITER_ROLLOUT),
                           LONGHAUL__ARBITER__V1__PARK__PARK_DISCARD, addr, err);
}

static int connect_store(struct worker *w, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/run/kv.sock", w->o.job_dir);
    struct kv_options ko = {
        .path = path,
        .name = w->name,
        .tenant = w->o.job->kvstore->tenant,
        .unit_tokens = w->eo.unit_tokens,
        .block_bytes = policy_kv_floats(w->model) * w->eo.unit_tokens * sizeof(float),
        .state_bytes = policy_state_floats(w->model) * sizeof(float),
    };

    if (!path)
        return lh_fail_errno(err, ENOMEM, "connecting");
    w->store = kv_client_create(&ko, err);
    return w->store ? 0 : err->code;
}

/* What the throttle decides, for `kvstore explain`; a job runs without it, too. */
static void open_trace(struct worker *w)
{
    struct lh_error err = {0};
    lh_autofree char *path = lh_format("%s/run/%s.trace", w->o.job_dir, w->name);

    w->trace = path ? kv_trace_create(path, TRACE_RECORDS, &err) : NULL;
    if (!w->trace)
        lh_warn("trace", "decisions are not recorded: %s", err.message);
    w->eo.trace = w->trace;
}

/* The memory is declared before the weights exist; the engine needs both. */
static int prepare_engine(struct worker *w, struct lh_error *err)
{
    const Longhaul__Job__V1__Rollout *r = w->o.job->rollout;

    w->model = policy_model_open(w->o.job->model->path, err);
    if (!w->model)
        return err->code;
    w->eo = (struct engine_options){
        .model = w->model,
        .kv_bytes = r->kv_budget_bytes,
        .page_tokens = r->page_tokens,
        .unit_tokens = r->unit_tokens,
        .step_tokens = r->prefill_chunk,
        .max_running = r->max_running,
        .max_context_tokens = r->context_tokens,
        .carry = r->carry,
        .max_inflight_bytes = w->o.job->kvstore->max_inflight_bytes,
        .wake = inbox_ring,
        .ctx = &w->inbox,
    };
    w->eo.scratch_bytes = engine_scratch_bytes(&w->eo);
    int e = engine_check(&w->eo, err);
    if (e == 0)
        e = connect_store(w, err);
    if (e == 0)
        e = declare(w, "kv", LONGHAUL__ARBITER__V1__CLASS__CLASS_KV, w->eo.kv_bytes, &w->eo.kv,
                    err);
    if (e == 0)
        e = declare(w, "scratch", LONGHAUL__ARBITER__V1__CLASS__CLASS_WORKSPACE,
                    w->eo.scratch_bytes, &w->eo.scratch, err);
    w->eo.store = w->store;
    open_trace(w);
    return e;
}

static int connect_channel(struct worker *w, struct lh_error *err)
{
    lh_autofree char *endpoint = lh_format("ipc://%s/run/experience.sock", w->o.job_dir);
    struct channel_worker_options co = {
        .endpoint = endpoint,
        .name = w->name,
        .instance = w->instance,
    };

    if (!endpoint)
        return lh_fail_errno(err, ENOMEM, "connecting");
    w->channel = channel_worker_create(&co, err);
    return w->channel ? 0 : err->code;
}

static int connect_agentenv(struct worker *w, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/run/agentenv.sock", w->o.job_dir);

    if (!path)
        return lh_fail_errno(err, ENOMEM, "connecting");
    w->agentenv = rpc_channel_create(path, err);
    return w->agentenv ? 0 : err->code;
}

static unsigned capacity(const struct worker *w)
{
    return w->o.job->rollout->max_running * HOLD_PER_SLOT;
}

static int make_harness(struct worker *w, struct lh_error *err)
{
    const Longhaul__Job__V1__Rollout *r = w->o.job->rollout;
    struct harness_options ho = {
        .agentenv = w->agentenv,
        .channel = w->channel,
        .job_id = w->o.job->id,
        .budgets = LONGHAUL__EXPERIENCE__V1__BUDGETS__INIT,
        .capacity = capacity(w),
    };

    w->rest = rest_create(w->agentenv, r->hibernate, err);
    if (!w->rest)
        return err->code;
    ho.rest = w->rest;
    w->tools = tools_create(TOOL_THREADS, inbox_ring, &w->inbox, err);
    if (!w->tools)
        return err->code;
    ho.tools = w->tools;
    ho.budgets.context_tokens = r->context_tokens;
    ho.budgets.turn_tokens = r->turn_tokens;
    ho.budgets.total_tokens = r->total_tokens;
    ho.budgets.turns = r->turns;
    w->harness = harness_create(&ho, err);
    return w->harness ? 0 : err->code;
}

struct worker *worker_create(const struct worker_options *o, struct lh_error *err)
{
    static int (*const steps[])(struct worker *, struct lh_error *) = {
        connect_arbiter, prepare_engine, connect_channel, connect_agentenv, make_harness,
    };
    lh_auto(worker) w = calloc(1, sizeof *w);

    if (!w)
        return lh_fail_errno(err, ENOMEM, "worker"), NULL;
    w->o = *o;
    snprintf(w->name, sizeof w->name, "rollout-%u", o->index);
    lh_id_new_text(w->instance);
    inbox_init(&w->inbox);
    gate_init(&w->gate, inbox_ring, &w->inbox);
    for (size_t i = 0; i < LH_ARRAY_SIZE(steps); i++)
        if (steps[i](w, err) < 0)
            return NULL;
    if (inbox_start(&w->inbox, w->channel, err) < 0)
        return NULL;
    return lh_steal(&w);
}

bool worker_shut_down(struct worker *w)
{
    return tools_stop(w->tools, lh_now_ms() + SHUTDOWN_MS);
}

void worker_destroy(struct worker *w)
{
    if (!w)
        return;
    harness_destroy(w->harness);
    tools_destroy(w->tools);
    rest_destroy(w->rest);
    engine_destroy(w->engine);
    inbox_finish(&w->inbox);
    rpc_channel_destroy(w->agentenv);
    channel_worker_destroy(w->channel);
    kv_trace_destroy(w->trace);
    kv_client_destroy(w->store);
    arbiter_destroy(w->arbiter);
    policy_model_destroy(w->model);
    gate_finish(&w->gate);
    free(w);
}

/* ---- weights ---- */

/* One try; NOT_FOUND while the trainer has not declared them. */
static int attach_weights(struct worker *w, struct lh_error *err)
{
    uint8_t fingerprint[16];
    const void *addr;
    size_t bytes;
    int r = arbiter_attach(w->arbiter, "weights", &addr, &bytes, err);

    if (r < 0)
        return r;
    if (bytes < ARBITER_WEIGHTS_OFFSET + policy_model_floats(w->model) * sizeof(float))
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "the weights have %zu bytes, too few for the model at %s", bytes,
                       w->o.job->model->path);
    w->weights = addr;
    w->eo.weights = (const float *)((const char *)addr + ARBITER_WEIGHTS_OFFSET);
    policy_model_fingerprint(w->model, fingerprint);
    w->engine = engine_create(&w->eo, err);
    if (!w->engine)
        return err->code;
    scheduler_init(&w->scheduler, w->engine, w->eo.max_running);
    harness_use_engine(w->harness, w->engine);
    return 0;
}

/* Valid weights, or an error after a long time without. */
static int lacks_weights(struct worker *w, struct lh_error *err)
{
    int64_t now = lh_now_ms();

    if (!w->weightless_since_ms)
        w->weightless_since_ms = now;
    if (now - w->weightless_since_ms > WEIGHTS_PATIENCE_MS)
        return lh_fail(err, LH_UNAVAILABLE, "no valid weights for %d s in the rollout phase",
                       WEIGHTS_PATIENCE_MS / 1000);
    return 0;
}

/* Inside the gate.  True when the engine can step. */
static int ready_engine(struct worker *w, bool *ready, struct lh_error *err)
{
    struct policy_version v = {0};

    *ready = false;
    if (!arbiter_weights_read(w->weights, &v.step, v.id))
        return lacks_weights(w, err);
    w->weightless_since_ms = 0;
    int r = scheduler_resume(&w->scheduler, &v, err);
    *ready = r == 0;
    return r;
}

static int try_attach(struct worker *w, struct lh_error *err)
{
    struct lh_error why = {0};
    int64_t now = lh_now_ms();

    if (now < w->weights_try_ms)
        return 0;
    w->weights_try_ms = now + WEIGHTS_RETRY_MS;
    int r = attach_weights(w, &why);
    if (r == 0)
        return 0;
    if (r == LH_NOT_FOUND || r == LH_DEADLINE_EXCEEDED)
        return lacks_weights(w, err);
    *err = why;
    return r;
}

/* At most one pass; *worked when tokens were processed. */
static int drive_engine(struct worker *w, bool *worked, struct lh_error *err)
{
    bool discarded, ready = false;
    size_t tokens = 0;
    int r = 0;

    if (!harness_counts(w->harness).wants_engine)
        return 0;
    if (!w->engine)
        return try_attach(w, err);
    bool inside = gate_enter(&w->gate, &discarded);
    if (discarded)
        engine_pause(w->engine);
    if (!inside)
        return 0;
    r = ready_engine(w, &ready, err);
    if (r == 0 && ready)
        r = scheduler_step(&w->scheduler, &tokens, err);
    gate_leave(&w->gate);
    *worked = tokens > 0;
    return r;
}

/* ---- heartbeats ---- */

static void say_hello(struct worker *w)
{
    Longhaul__Experience__V1__Hello h = LONGHAUL__EXPERIENCE__V1__HELLO__INIT;
    Longhaul__Experience__V1__Envelope e = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;

    h.worker = w->name;
    h.instance = w->instance;
    h.capacity = capacity(w);
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

static void heartbeat(struct worker *w)
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

/* ---- the loop ---- */

static bool receive(struct worker *w)
{
    struct channel_message *m = inbox_take(&w->inbox);

    if (!m)
        return false;
    if (m->envelope->body_case == LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_STOP) {
        w->stopped = true;
        channel_message_free(m);
    } else {
        harness_receive(w->harness, m);
    }
    return true;
}

int worker_run(struct worker *w, struct lh_error *err)
{
    lh_info("ready", "worker=%s instance=%s capacity=%u", w->name, w->instance, capacity(w));
    while (!*w->o.stop && !w->stopped) {
        bool worked = false;
        if (arbiter_lost(w->arbiter))
            return lh_fail(err, LH_UNAVAILABLE, "arbiterd is gone: the phase is over");
        while (receive(w))
            worked = true;
        worked |= harness_poll(w->harness);
        bool stepped = false;
        int r = drive_engine(w, &stepped, err);
        if (r < 0)
            return r;
        heartbeat(w);
        if (!worked && !stepped)
            inbox_wait(&w->inbox, lh_ms_left(w->heartbeat_ms));
    }
    return 0;
}

#include "rollout/worker/worker.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvstore/client.h"
#include "proto/channel.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/rpc.h"
#include "rollout/harness/harness.h"
#include "rollout/worker/worker_private.h"

LH_LOG_COMPONENT("rollout");

enum {
    TOOL_THREADS = 8,
    HOLD_PER_SLOT = 2, /* while one is in a tool, another has its place in the batch */
    SHUTDOWN_MS = 3500,
    TRACE_RECORDS = 1 << 14, /* 1.6 MiB */
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

unsigned worker_capacity(const struct worker *w)
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
        .capacity = worker_capacity(w),
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
    lh_info("ready", "worker=%s instance=%s capacity=%u", w->name, w->instance, worker_capacity(w));
    while (!*w->o.stop && !w->stopped) {
        bool worked = false;
        if (arbiter_lost(w->arbiter))
            return lh_fail(err, LH_UNAVAILABLE, "arbiterd is gone: the phase is over");
        while (receive(w))
            worked = true;
        worked |= harness_poll(w->harness);
        bool stepped = false;
        int r = worker_drive(w, &stepped, err);
        if (r < 0)
            return r;
        worker_heartbeat(w);
        if (!worked && !stepped)
            inbox_wait(&w->inbox, lh_ms_left(w->heartbeat_ms));
    }
    return 0;
}

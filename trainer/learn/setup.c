/* Bringing a trainer up: job, model, memory, weights, ledger, intake; and down again. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/parse.h"
#include "trainer/learn/trainer.h"

LH_LOG_COMPONENT("trainer");

enum { JOB_MAX = 1 << 20, SWITCH_MS = 30000 };

static int read_job(struct trainer *t, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/job.pb", t->job_dir);
    size_t len;
    lh_autofree char *bytes = path ? lh_read_file(path, JOB_MAX, &len, err) : NULL;

    if (!bytes)
        return lh_wrap(err, "not a job directory");
    t->job = (Longhaul__Job__V1__Job *)lh_parse(&longhaul__job__v1__job__descriptor, bytes, len,
                                                (struct lh_parse_limits){0}, err);
    if (!t->job)
        return lh_wrap(err, "%s", path);
    if (t->job->format != 1 || strcmp(t->job->version, LONGHAUL_VERSION))
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "%s was made by longhaul %s, this is %s: resume with that version", path,
                       t->job->version, LONGHAUL_VERSION);
    return 0;
}

/* ---- memory ---- */

static int declare(struct trainer *t, const char *name, Longhaul__Arbiter__V1__Class class,
                   size_t bytes, unsigned phases, Longhaul__Arbiter__V1__Park park, void **addr,
                   struct lh_error *err)
{
    int r = arbiter_declare(t->arbiter, name, class, bytes, phases, park, addr, err);

    return r < 0 ? lh_wrap(err, "region %s of %zu bytes", name, bytes) : 0;
}

#define CLASS(x) LONGHAUL__ARBITER__V1__CLASS__CLASS_##x
#define PARK(x)  LONGHAUL__ARBITER__V1__PARK__PARK_##x

static int declare_regions(struct trainer *t, struct lh_error *err)
{
    const size_t n = policy_model_floats(t->model), bytes = n * sizeof(float);
    void *weights, *optimizer, *gradients, *activations;
    int r;

    t->memory.arena_bytes =
        gradient_arena_bytes(t->model, t->threads, t->job->rollout->context_tokens);
    if ((r = declare(t, "weights", CLASS(WEIGHTS), ARBITER_WEIGHTS_OFFSET + bytes,
                     ARBITER_ALL_PHASES, PARK(KEEP), &weights, err)) < 0 ||
        (r = declare(t, "optimizer", CLASS(OPTIMIZER), 2 * bytes, ARBITER_ALL_PHASES, PARK(KEEP),
                     &optimizer, err)) < 0 ||
        (r = declare(t, "gradients", CLASS(GRADIENTS), GRADIENT_SHARDS * bytes,
                     ARBITER_IN(ARBITER_TRAIN), PARK(DISCARD), &gradients, err)) < 0 ||
        (r = declare(t, "activations", CLASS(ACTIVATIONS), t->memory.arena_bytes,
                     ARBITER_IN(ARBITER_TRAIN), PARK(DISCARD), &activations, err)) < 0)
        return r;
    t->header = weights;
    t->arrays.weights = (float *)((char *)weights + ARBITER_WEIGHTS_OFFSET);
    t->arrays.m = optimizer;
    t->arrays.v = t->arrays.m + n;
    t->memory.shards = gradients;
    t->memory.arena = activations;
    return 0;
}

static int open_memory(struct trainer *t, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/run/arbiter.sock", t->job_dir);
    const struct arbiter_options o = {.path = path, .client = "trainer-0", .leader = true};

    if (!path)
        return lh_fail_errno(err, ENOMEM, "connecting to arbiterd");
    t->arbiter = arbiter_connect(&o, err);
    return t->arbiter ? declare_regions(t, err) : err->code;
}

/* ---- weights ---- */

static int initial_weights(struct trainer *t, struct lh_error *err)
{
    const Longhaul__Job__V1__Model *m = t->job->model;
    lh_autofree char *file = lh_format("%s/model.safetensors", m->path);
    const size_t n = policy_model_floats(t->model);

    if (!file)
        return lh_fail_errno(err, ENOMEM, "initial weights");
    if (access(file, F_OK) < 0)
        policy_init(t->model, t->arrays.weights, m->init_seed);
    else if (policy_load(t->model, m->path, t->arrays.weights, err) < 0)
        return lh_wrap(err, "initial weights");
    memset(t->arrays.m, 0, n * sizeof(float));
    memset(t->arrays.v, 0, n * sizeof(float));
    t->state.version = version_initial(t->state.fingerprint, t->arrays.weights, n);
    return 0;
}

/* What a crash left in the slot is not looked at: the checkpoint decides. */
static int load_weights(struct trainer *t, struct lh_error *err)
{
    char name[CHECKPOINT_NAME];
    struct lh_error none = {0};

    policy_model_fingerprint(t->model, t->state.fingerprint);
    t->state.seed = t->job->seed;
    arbiter_weights_begin(t->header);
    int r = checkpoint_latest(t->job_dir, name, &none);
    if (r == LH_NOT_FOUND)
        r = initial_weights(t, err);
    else if (r < 0)
        return lh_fail(err, none.code, "%s", none.message);
    else
        r = checkpoint_load(t->job_dir, name, t->model, &t->state, &t->arrays, err);
    if (r < 0)
        return r;
    if (none.code == 0)
        t->saved = t->state.version;
    t->header->floats = policy_model_floats(t->model);
    memcpy(t->header->model_fingerprint, t->state.fingerprint, 16);
    arbiter_weights_publish(t->header, t->state.version.step, t->state.version.id);
    lh_info("weights", "step=%llu warm=%llu rl=%llu", (unsigned long long)t->state.version.step,
            (unsigned long long)t->state.warm_steps, (unsigned long long)t->state.steps);
    return 0;
}

/* ---- ledger and intake ---- */

static void report_infra(void *ctx, const struct intake_infra *f)
{
    struct trainer *t = ctx;

    metrics_write(t->metrics, json_pack("{ss ss sI ss ss sb}", "kind", "infra", "trajectory",
                                        f->trajectory, "attempt", (json_int_t)f->attempt, "code",
                                        f->code, "message", f->message, "outage", (int)f->outage));
}

static int roll_back(struct trainer *t, struct lh_error *err)
{
    int r = ledger_begin(t->ledger, err);

    if (r == 0 && (r = ledger_roll_back(t->ledger, (int64_t)t->state.steps, err)) == 0)
        return ledger_commit(t->ledger, err);
    ledger_rollback(t->ledger);
    return r;
}

static int open_ledger(struct trainer *t, struct lh_error *err)
{
    lh_autofree char *dir = lh_format("%s/ledger", t->job_dir);

    if (!dir)
        return lh_fail_errno(err, ENOMEM, "opening the ledger");
    t->ledger = ledger_open(dir, t->job->id, t->job->seed, err);
    if (!t->ledger)
        return err->code;
    int r = roll_back(t, err);
    return r < 0 ? r : trainer_load_tasks(t, err);
}

static int open_intake(struct trainer *t, struct lh_error *err)
{
    const Longhaul__Job__V1__Rollout *r = t->job->rollout;
    lh_autofree char *endpoint = lh_format("ipc://%s/run/experience.sock", t->job_dir);
    struct intake_options o = {
        .endpoint = endpoint,
        .ledger = t->ledger,
        .job_id = t->job->id,
        .job_seed = t->job->seed,
        .infra_retries = t->job->train->infra_retries,
        .budgets = LONGHAUL__EXPERIENCE__V1__BUDGETS__INIT,
        .agentenv = t->agentenv,
        .on_infra = report_infra,
        .ctx = t,
    };

    if (!endpoint)
        return lh_fail_errno(err, ENOMEM, "opening the intake");
    o.budgets.context_tokens = r->context_tokens;
    o.budgets.turn_tokens = r->turn_tokens;
    o.budgets.total_tokens = r->total_tokens;
    o.budgets.turns = r->turns;
    t->intake = intake_create(&o, err);
    if (!t->intake)
        return err->code;
    intake_set_version(t->intake, t->state.version.step, t->state.version.id);
    return 0;
}

/* ---- life ---- */

static int open_agentenv(struct trainer *t, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/run/agentenv.sock", t->job_dir);

    t->agentenv = path ? rpc_channel_create(path, err) : NULL;
    return t->agentenv ? 0 : lh_wrap(err, "agentenvd");
}

static int open_model(struct trainer *t, struct lh_error *err)
{
    t->model = policy_model_open(t->job->model->path, err);
    return t->model ? 0 : lh_wrap(err, "model");
}

static int open_metrics(struct trainer *t, struct lh_error *err)
{
    t->metrics = metrics_open(t->job_dir, t->state.warm_steps, t->state.steps, err);
    return t->metrics ? 0 : lh_wrap(err, "metrics");
}

static int limit_threads(struct trainer *t, struct lh_error *err)
{
    t->threads = t->job->train->threads;
    if (t->threads < 1)
        return lh_fail(err, LH_INVALID_ARGUMENT, "train.threads is 0; the job file must say");
    t->threads = t->threads > GRADIENT_SHARDS ? GRADIENT_SHARDS : t->threads;
    return 0;
}

int trainer_init(struct trainer *t, const char *job_dir, const atomic_bool *stop,
                 struct lh_error *err)
{
    static int (*const steps[])(struct trainer *, struct lh_error *) = {
        read_job,     limit_threads, open_model,  open_agentenv, open_memory,
        load_weights, open_metrics,  open_ledger, open_intake,   status_start};
    int r = 0;

    *t = (struct trainer){.job_dir = job_dir, .stop = stop};
    pthread_mutex_init(&t->progress.lock, NULL);
    t->progress.phase = "starting";
    for (size_t i = 0; i < LH_ARRAY_SIZE(steps) && r == 0; i++)
        r = steps[i](t, err);
    /* Nothing here is given a time but the answers of daemons: one that is stopped or drowned is as
     * good as away, and a later start may meet it in a better state. */
    if (r == LH_DEADLINE_EXCEEDED)
        r = err->code = LH_UNAVAILABLE;
    return r;
}

void trainer_finish(struct trainer *t)
{
    status_stop(t);
    intake_destroy(t->intake);
    ledger_close(t->ledger);
    metrics_close(t->metrics);
    plan_finish(&t->train_tasks);
    plan_finish(&t->eval_tasks);
    arbiter_destroy(t->arbiter);
    rpc_channel_destroy(t->agentenv);
    policy_model_destroy(t->model);
    lh_message_free((ProtobufCMessage *)t->job);
    pthread_mutex_destroy(&t->progress.lock);
}

int trainer_enter(struct trainer *t, enum arbiter_phase phase, struct lh_error *err)
{
    struct arbiter_switch s;
    int64_t began = lh_now_us();

    if (arbiter_phase_now(t->arbiter) == phase)
        return arbiter_wait_phase(t->arbiter, phase, lh_now_ms() + SWITCH_MS, err);
    int r = arbiter_switch_phase(t->arbiter, phase, SWITCH_MS, &s, err);
    if (r < 0)
        return lh_wrap(err, "switching memory to phase %d", (int)phase);
    t->switch_ms += (double)(lh_now_us() - began) / 1000;
    if (s.residual_bytes > t->residual_bytes)
        t->residual_bytes = s.residual_bytes;
    return 0;
}

int trainer_check(const struct trainer *t, struct lh_error *err)
{
    if (atomic_load(t->stop))
        return lh_fail(err, LH_CANCELLED, "asked to stop");
    if (arbiter_lost(t->arbiter))
        return lh_fail(err, LH_UNAVAILABLE, "arbiterd is gone");
    return 0;
}

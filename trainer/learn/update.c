/* One optimizer step, from sequences to published weights. */
#include <math.h>
#include <string.h>

#include "trainer/learn/adamw.h"
#include "trainer/learn/trainer.h"

static void step_weights(struct trainer *t, const struct update *u, const struct gradient_result *g)
{
    const Longhaul__Job__V1__Train *c = t->job->train;
    const struct adamw a = {
        .learning_rate = u->learning_rate,
        .beta1 = c->adam_beta1,
        .beta2 = c->adam_beta2,
        .eps = c->adam_eps,
        .decay = c->weight_decay,
        .t = t->state.adam_steps + 1,
    };
    const struct adamw_state s = {t->arrays.weights, t->arrays.m, t->arrays.v, t->memory.shards};
    float scale = adamw_clip(g->norm, c->grad_clip);
    size_t n;
    const struct policy_param *p = policy_model_params(t->model, &n);

    for (size_t i = 0; i < n; i++)
        adamw_update(&a, &s, p[i].offset, p[i].offset + p[i].count, p[i].dims > 1, scale);
    t->state.adam_steps++;
}

int trainer_update(struct trainer *t, const struct update *u, struct update_result *out,
                   struct lh_error *err)
{
    out->parent = t->state.version;
    struct version next = version_next(&t->state.version, u->digest, out->batch);
    int r =
        gradient_compute(t->model, t->arrays.weights, u->objective, u->sequences, u->n, t->threads,
                         t->job->rollout->context_tokens, &t->memory, t->stop, &out->gradient, err);

    if (r < 0)
        return r;
    if (!isfinite(out->gradient.norm))
        return lh_fail(err, LH_INTERNAL,
                       "the gradient of step %llu is not finite; lower the learning rate",
                       (unsigned long long)next.step);
    arbiter_weights_begin(t->header);
    step_weights(t, u, &out->gradient);
    t->state.version = next;
    arbiter_weights_publish(t->header, next.step, next.id);
    intake_set_version(t->intake, next.step, next.id);
    return 0;
}

int trainer_checkpoint(struct trainer *t, struct lh_error *err)
{
    if (!memcmp(t->saved.id, t->state.version.id, sizeof t->saved.id))
        return 0;
    int r = checkpoint_write(t->job_dir, t->job->train->checkpoint_keep, t->model, &t->state,
                             &t->arrays, err);

    if (r < 0)
        return r;
    t->saved = t->state.version;
    metrics_write(t->metrics, json_pack("{ss sI so}", "kind", "checkpoint", "step",
                                        (json_int_t)t->state.version.step, "path",
                                        json_sprintf("checkpoints/step-%06llu",
                                                     (unsigned long long)t->state.version.step)));
    return 0;
}

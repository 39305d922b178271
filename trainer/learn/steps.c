/* Reinforcement: groups are collected under one version, trained on, and make the next.
 *
 * Synchronous (staleness 0, lambda 1): step s trains exactly the next `groups` groups in order, all
 * sampled at version s, so a job is one sequence of bytes.  Otherwise dispatch runs ahead, bounded
 * by accepted + running < (staleness + version + 1) * groups and a step begins once lambda of its
 * groups are complete; what it took is recorded, so a rolled back step takes the same again. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "trainer/learn/control.h"
#include "trainer/learn/trainer.h"

#define ROUND "train"

/* A batch as the gradient wants it. */
struct sequences {
    struct gradient_sequence *seq; /* in (group, member) order */
    uint8_t **current;             /* masks of tokens of the version being trained */
    double *rewards;               /* as trained on: permuted in the control */
    size_t n;
    uint64_t sampled;
};

/* Sums of a step for its line. */
struct tally {
    double reward;
    size_t passed, n;
};

static void sequences_finish(struct sequences *s)
{
    for (size_t i = 0; s->current && i < s->n; i++)
        free(s->current[i]);
    free(s->current);
    free(s->rewards);
    free(s->seq);
}

static int sequences_init(struct sequences *s, const struct intake_batch *b, struct lh_error *err)
{
    for (size_t i = 0; i < b->n; i++)
        s->n += b->groups[i].n_members;
    s->seq = calloc(s->n + 1, sizeof *s->seq);
    s->rewards = calloc(s->n + 1, sizeof *s->rewards);
    s->current = calloc(s->n + 1, sizeof(uint8_t *));
    if (!s->seq || !s->rewards || !s->current)
        return lh_fail_errno(err, ENOMEM, "a batch of %zu trajectories", s->n);
    return 0;
}

/* 1 for tokens that the version sampled. */
static uint8_t *mark_current(const struct ledger_history *h, const struct version *v)
{
    uint8_t *mask = calloc(h->n + 1u, 1);

    for (uint32_t i = 0; mask && i < h->n_spans; i++) {
        uint32_t end = i + 1 < h->n_spans ? h->spans[i + 1].first : h->n;
        if (memcmp(h->spans[i].id, v->id, 16) == 0 && end > h->spans[i].first && end <= h->n)
            memset(mask + h->spans[i].first, 1, end - h->spans[i].first);
    }
    return mask;
}

static int fill(struct trainer *t, const struct intake_batch *b, struct sequences *s,
                struct lh_error *err)
{
    size_t at = 0;

    for (size_t g = 0; g < b->n; g++) {
        for (uint32_t m = 0; m < b->groups[g].n_members; m++, at++) {
            const struct ledger_history *h = &b->groups[g].members[m].history;
            s->current[at] = mark_current(h, &t->state.version);
            if (!s->current[at])
                return lh_fail_errno(err, ENOMEM, "a trajectory of %u tokens", h->n);
            s->seq[at] = (struct gradient_sequence){
                .tokens = h->token,
                .behaviour = h->logprob,
                .mask = h->mask,
                .current = s->current[at],
                .n = h->n,
                .temperature = h->temperature,
            };
            s->rewards[at] = b->groups[g].members[m].reward;
            for (uint32_t k = 1; k < h->n; k++)
                s->sampled += h->mask[k];
        }
    }
    control_rewards(t->job, (int64_t)t->state.steps + 1, s->rewards, s->n);
    return 0;
}

/* Advantages by group; the digest covers what the step learns from. */
static int judge(const struct intake_batch *b, struct sequences *s, struct version_digest *d,
                 struct lh_error *err)
{
    size_t at = 0;

    for (size_t g = 0; g < b->n; g++) {
        const uint32_t n = b->groups[g].n_members;
        lh_autofree double *advantages = calloc(n, sizeof *advantages);
        if (!advantages)
            return lh_fail_errno(err, ENOMEM, "a group of %u", n);
        objective_advantages(s->rewards + at, n, advantages);
        for (uint32_t m = 0; m < n; m++, at++) {
            const struct gradient_sequence *q = &s->seq[at];
            s->seq[at].advantage = advantages[m];
            version_digest_trajectory(d, q->tokens, q->behaviour, q->mask, q->n, s->rewards[at]);
        }
    }
    return 0;
}

/* Falls in a line to its end share: late steps are small, the last weights no noisy draw. */
static float learning_rate(const Longhaul__Job__V1__Train *c, uint64_t done)
{
    float at = c->steps > 1 ? (float)done / (float)(c->steps - 1) : 0;

    return c->learning_rate * (1 - (1 - c->learning_rate_end) * (at < 1 ? at : 1));
}

static int learn(struct trainer *t, const struct intake_batch *b, struct sequences *s,
                 struct update_result *out, struct lh_error *err)
{
    const Longhaul__Job__V1__Train *c = t->job->train;
    struct version_digest *digest = version_digest_create();

    if (!digest)
        return lh_fail_errno(err, ENOMEM, "a step");
    int r = judge(b, s, digest, err);
    if (r < 0) {
        version_digest_destroy(digest);
        return r;
    }
    const struct objective o = {.log_min = c->ratio_log_min,
                                .log_max = c->ratio_log_max,
                                .tau = c->tau,
                                .tokens = s->sampled ? (double)s->sampled : 1};
    const struct update u = {&o, s->seq, s->n, learning_rate(c, t->state.steps), digest};
    return trainer_update(t, &u, out, err);
}

/* ---- the line of a step ---- */

static void add_to_family(json_t *passed, json_t *counts, const char *family, int pass)
{
    json_int_t p = json_integer_value(json_object_get(passed, family));
    json_int_t n = json_integer_value(json_object_get(counts, family));

    json_object_set_new(passed, family, json_integer(p + pass));
    json_object_set_new(counts, family, json_integer(n + 1));
}

static json_t *tally_batch(const struct intake_batch *b, struct tally *t)
{
    json_t *passed = json_object(), *counts = json_object(), *families = json_object(), *value;
    const char *name;

    for (size_t g = 0; g < b->n; g++) {
        for (uint32_t m = 0; m < b->groups[g].n_members; m++) {
            const struct intake_member *x = &b->groups[g].members[m];
            t->reward += x->reward;
            t->passed += x->passed;
            t->n++;
            add_to_family(passed, counts, b->groups[g].family, x->passed);
        }
    }
    json_object_foreach(counts, name, value)
        json_object_set_new(families, name,
                            json_real((double)json_integer_value(json_object_get(passed, name)) /
                                      (double)json_integer_value(value)));
    json_decref(passed);
    json_decref(counts);
    return families;
}

/* What the workers' counters have moved by since the last step. */
static void store_since(struct trainer *t, struct intake_stats *before, json_t *line)
{
    struct intake_stats now;

    intake_stats(t->intake, &now);
    json_object_set_new(line, "spilled_bytes",
                        json_integer((json_int_t)(now.spilled_bytes - before->spilled_bytes)));
    json_object_set_new(line, "loaded_bytes",
                        json_integer((json_int_t)(now.loaded_bytes - before->loaded_bytes)));
    json_object_set_new(line, "store_lookups",
                        json_integer((json_int_t)(now.store_lookups - before->store_lookups)));
    json_object_set_new(line, "store_hits",
                        json_integer((json_int_t)(now.store_hits - before->store_hits)));
    json_object_set_new(line, "hibernated",
                        json_integer((json_int_t)(now.hibernated - before->hibernated)));
    json_object_set_new(
        line, "hibernations_failed",
        json_integer((json_int_t)(now.hibernations_failed - before->hibernations_failed)));
    *before = now;
}

struct timing {
    int64_t began_us, collected_us, trained_us;
};

static void report(struct trainer *t, const struct intake_batch *b, const struct sequences *s,
                   const struct update_result *r, const struct timing *at,
                   struct intake_stats *stats)
{
    struct tally sum = {0};
    json_t *families = tally_batch(b, &sum);
    const double n = sum.n ? (double)sum.n : 1;
    json_t *line = json_pack(
        "{ss sI sI sI sI sf sf sf sf sf sI sf sf sf sI so}", "kind", "step", "step",
        (json_int_t)t->state.steps, "version", (json_int_t)t->state.version.step, "groups",
        (json_int_t)b->n, "trajectories", (json_int_t)s->n, "reward_mean", sum.reward / n,
        "success", (double)sum.passed / n, "loss", r->gradient.loss, "grad_norm", r->gradient.norm,
        "logprob_gap_max", r->gradient.logprob_gap, "tokens_sampled", (json_int_t)s->sampled,
        "rollout_s", (double)(at->collected_us - at->began_us) / 1e6, "train_s",
        (double)(at->trained_us - at->collected_us) / 1e6, "switch_ms", t->switch_ms,
        "residual_bytes", (json_int_t)t->residual_bytes, "families", families);

    store_since(t, stats, line);
    metrics_write(t->metrics, line);
    t->switch_ms = 0;
    t->residual_bytes = 0;
    pthread_mutex_lock(&t->progress.lock);
    t->progress.reward_mean = sum.reward / n;
    t->progress.step_s = (double)(at->trained_us - at->began_us) / 1e6;
    pthread_mutex_unlock(&t->progress.lock);
}

/* ---- one step ---- */

static int consume(struct trainer *t, const struct intake_batch *b, const struct update_result *r,
                   struct lh_error *err)
{
    const struct intake_version v = {t->state.version.step, t->state.version.id, r->parent.id,
                                     r->batch};

    t->state.steps++;
    for (size_t i = 0; i < b->n; i++)
        if (b->groups[i].index >= t->state.cursor)
            t->state.cursor = b->groups[i].index + 1;
    t->state.groups += (int64_t)b->n;
    return intake_consume(t->intake, ROUND, b, (int64_t)t->state.steps, &v, err);
}

/* Complete groups before training may begin. */
static int64_t needed(const Longhaul__Job__V1__Train *c)
{
    int64_t part = (int64_t)ceil((double)c->lambda * c->groups);

    if (c->lambda >= 1)
        return c->groups;
    return part < c->min_groups ? c->min_groups : part;
}

static int collect(struct trainer *t, struct intake_batch *b, struct lh_error *err)
{
    const Longhaul__Job__V1__Train *c = t->job->train;
    const struct intake_round round = {
        .name = ROUND,
        .mode = LONGHAUL__EXPERIENCE__V1__MODE__MODE_SAMPLE,
        .members = c->group_size,
        .tasks = &t->train_tasks,
        .temperature = t->job->rollout->temperature,
    };
    const int64_t step = (int64_t)t->state.steps;
    int r = trainer_collect(t, &round, (c->staleness + step + 1) * c->groups, needed(c), err);

    return r < 0 ? r : intake_take(t->intake, ROUND, step + 1, c->groups, true, b, err);
}

static int train(struct trainer *t, const struct intake_batch *b, struct sequences *s,
                 struct update_result *result, struct lh_error *err)
{
    int r = sequences_init(s, b, err);

    if (r == 0)
        r = fill(t, b, s, err);
    if (r == 0)
        r = trainer_enter(t, ARBITER_TRAIN, err);
    if (r == 0)
        r = learn(t, b, s, result, err);
    if (r == 0)
        r = consume(t, b, result, err);
    return r == 0 ? trainer_enter(t, ARBITER_ROLLOUT, err) : r;
}

static int step(struct trainer *t, struct intake_stats *stats, struct lh_error *err)
{
    struct intake_batch batch = {0};
    struct sequences s = {0};
    struct update_result result = {0};
    struct timing at = {.began_us = lh_now_us()};

    status_phase(t, "rollout", t->state.steps, t->job->train->steps);
    int r = collect(t, &batch, err);
    at.collected_us = lh_now_us();
    status_phase(t, "train", t->state.steps, t->job->train->steps);
    if (r == 0)
        r = train(t, &batch, &s, &result, err);
    at.trained_us = lh_now_us();
    if (r == 0)
        report(t, &batch, &s, &result, &at, stats);
    sequences_finish(&s);
    intake_batch_finish(&batch);
    return r;
}

/* 1 = good enough, stop early. */
static int evaluate(struct trainer *t, struct lh_error *err)
{
    const Longhaul__Job__V1__Train *c = t->job->train;
    const uint32_t every = t->job->eval->every;
    double success = 0;

    if (!every || t->state.steps % every || t->state.steps == c->steps)
        return 0;
    const struct eval e = {.name = "step", .unique = "", .episodes = t->job->eval->episodes};
    int r = trainer_eval(t, &e, &success, err);
    return r == 0 && c->target_success > 0 && success >= c->target_success ? 1 : r;
}

/* What is due between two steps. */
static int between(struct trainer *t, struct lh_error *err)
{
    const Longhaul__Job__V1__Train *c = t->job->train;
    int r = 0;

    if (t->state.steps % c->checkpoint_every == 0 || t->state.steps == c->steps)
        r = trainer_checkpoint(t, err);
    return r < 0 ? r : evaluate(t, err);
}

int trainer_steps(struct trainer *t, struct lh_error *err)
{
    struct intake_stats stats;
    /* A run that was killed behind its checkpoint did not come to the evaluation; and what it found
     * good enough still is. */
    int r = t->state.steps ? evaluate(t, err) : 0;

    intake_stats(t->intake, &stats);
    while (r == 0 && t->state.steps < t->job->train->steps) {
        r = trainer_check(t, err);
        if (r == 0)
            r = step(t, &stats, err);
        if (r == 0)
            r = between(t, err);
        if (r < 0)
            return lh_wrap(err, "step %llu", (unsigned long long)t->state.steps + 1);
    }
    return r == 1 ? trainer_checkpoint(t, err) : r;
}

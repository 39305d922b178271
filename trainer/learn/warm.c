/* Demonstrations and the warm start: the tasks' oracles act in real sandboxes, the policy learns to
 * do as they do, until it succeeds often enough for rewards to teach the rest. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "trainer/intake/random.h"
#include "trainer/learn/trainer.h"

LH_LOG_COMPONENT("trainer");

enum { CHECKPOINT_STEPS = 100, REPORT_STEPS = 10 };

/* The demonstrations worth cloning, and the order of the current epoch. */
struct corpus {
    struct intake_batch demos;
    const struct intake_member **member; /* [n] */
    uint32_t *order;                     /* [n] */
    size_t n;
    int64_t epoch; /* of `order`; -1 = none */
};

static void corpus_finish(struct corpus *c)
{
    free(c->member);
    free(c->order);
    intake_batch_finish(&c->demos);
}

static int record_demonstrations(struct trainer *t, struct corpus *c, struct lh_error *err)
{
    const int64_t wanted = t->job->warm_start->demonstrations;
    const struct intake_round round = {
        .name = "demo",
        .mode = LONGHAUL__EXPERIENCE__V1__MODE__MODE_DEMONSTRATE,
        .members = 1,
        .tasks = &t->train_tasks,
        .even_total = wanted,
        .temperature = 1,
    };
    int r = trainer_collect(t, &round, wanted, wanted, err);

    if (r == 0)
        r = intake_take(t->intake, round.name, -1, (size_t)wanted, true, &c->demos, err);
    intake_close_round(t->intake, round.name);
    return r;
}

static int select_passed(struct corpus *c, struct lh_error *err)
{
    c->member = calloc(c->demos.n + 1, sizeof(const struct intake_member *));
    c->order = calloc(c->demos.n + 1, sizeof *c->order);
    c->epoch = -1;
    if (!c->member || !c->order)
        return lh_fail_errno(err, ENOMEM, "%zu demonstrations", c->demos.n);
    for (size_t i = 0; i < c->demos.n; i++)
        if (c->demos.groups[i].members[0].passed)
            c->member[c->n++] = &c->demos.groups[i].members[0];
    if (c->n < c->demos.n)
        lh_warn("demonstrations", "failed=%zu of=%zu", c->demos.n - c->n, c->demos.n);
    return c->n ? 0
                : lh_fail(err, LH_FAILED_PRECONDITION,
                          "no oracle solved its task; agentenv task register checks them");
}

/* The demonstration at a place in the endless sequence of shuffled epochs. */
static const struct intake_member *corpus_at(struct corpus *c, uint64_t seed, uint64_t place)
{
    const int64_t epoch = (int64_t)(place / c->n);

    if (epoch != c->epoch) {
        uint64_t s = plan_seed(seed, "warm", epoch, 0);
        for (size_t i = 0; i < c->n; i++)
            c->order[i] = (uint32_t)i;
        for (size_t i = c->n; i > 1; i--) {
            size_t j = random_below(s, i, i);
            uint32_t swap = c->order[i - 1];
            c->order[i - 1] = c->order[j];
            c->order[j] = swap;
        }
        c->epoch = epoch;
    }
    return c->member[c->order[place % c->n]];
}

/* Sequences of the next step; returns the tokens that are learned. */
static uint64_t next_batch(struct trainer *t, struct corpus *c, struct gradient_sequence *seq,
                           size_t n, struct version_digest *d)
{
    uint64_t tokens = 0;

    for (size_t i = 0; i < n; i++) {
        const struct ledger_history *h =
            &corpus_at(c, t->job->seed, t->state.warm_steps * n + i)->history;
        seq[i] = (struct gradient_sequence){
            .tokens = h->token, .mask = h->mask, .n = h->n, .temperature = 1};
        for (uint32_t k = 1; k < h->n; k++)
            tokens += h->mask[k];
        version_digest_add(d, h->token, h->n * sizeof *h->token);
        version_digest_add(d, h->mask, h->n);
    }
    return tokens;
}

static void report(struct trainer *t, const struct update_result *r, uint64_t tokens, int64_t us)
{
    const uint64_t step = t->state.warm_steps;

    status_phase(t, "warm_start", step, t->job->warm_start->steps);
    if (step % REPORT_STEPS && step != t->job->warm_start->steps)
        return;
    metrics_write(t->metrics,
                  json_pack("{ss sI sf sI sf}", "kind", "warm_start", "step", (json_int_t)step,
                            "loss", r->gradient.loss, "tokens", (json_int_t)tokens, "tokens_per_s",
                            us ? (double)tokens * 1e6 / (double)us : 0.0));
}

static int clone_step(struct trainer *t, struct corpus *c, struct gradient_sequence *seq,
                      struct lh_error *err)
{
    const Longhaul__Job__V1__WarmStart *w = t->job->warm_start;
    struct update_result result;
    int64_t began = lh_now_us();
    struct version_digest *digest = version_digest_create();

    if (!digest)
        return lh_fail_errno(err, ENOMEM, "warm start");
    uint64_t tokens = next_batch(t, c, seq, w->batch_sequences, digest);
    const struct objective o = {.tokens = tokens ? (double)tokens : 1};
    const struct update u = {&o, seq, w->batch_sequences, w->learning_rate, digest};
    int r = trainer_update(t, &u, &result, err);
    if (r < 0)
        return r;
    t->state.warm_steps++;
    report(t, &result, tokens, lh_now_us() - began);
    return 0;
}

/* Reinforcement goes on with the moments of cloning. Zeroed, the first steps would move every
 * weight by the whole rate on a noisy gradient: at 2e-3 the reward fell from 0.70 to 0.29 within 8
 * steps.  The second moments of cloning, of larger gradients, make those steps small instead, and
 * fade within some 20. */
static int clone_all(struct trainer *t, struct corpus *c, struct lh_error *err)
{
    const Longhaul__Job__V1__WarmStart *w = t->job->warm_start;
    lh_autofree struct gradient_sequence *seq = calloc(w->batch_sequences, sizeof *seq);
    int r = seq ? trainer_enter(t, ARBITER_TRAIN, err) : lh_fail_errno(err, ENOMEM, "warm start");

    while (r == 0 && t->state.warm_steps < w->steps) {
        if ((r = trainer_check(t, err)) == 0)
            r = clone_step(t, c, seq, err);
        if (r < 0)
            break;
        if (t->state.warm_steps == w->steps || t->state.warm_steps % CHECKPOINT_STEPS == 0)
            r = trainer_checkpoint(t, err);
    }
    return r;
}

int trainer_warm_start(struct trainer *t, struct lh_error *err)
{
    const Longhaul__Job__V1__WarmStart *w = t->job->warm_start;
    struct corpus c = {0};

    if (t->state.warm_steps >= w->steps)
        return 0;
    status_phase(t, "demonstrations", t->state.warm_steps, w->steps);
    int r = record_demonstrations(t, &c, err);
    if (r == 0)
        r = select_passed(&c, err);
    if (r == 0)
        r = clone_all(t, &c, err);
    corpus_finish(&c);
    return r < 0 ? lh_wrap(err, "warm start") : 0;
}

/* One forward pass: who takes part, with how many tokens, and what comes out of it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "rollout/engine/internal.h"

static size_t known(const struct engine_sequence *q)
{
    return q->spec.transcript->n;
}

/* Cuts a piece of a prompt so that the pass ends at a unit's end: only there can a checkpoint be
 * made.  The last unit end strictly before the prompt's end counts, not the one at its end: another
 * sequence with the same prompt must still compute the last token and can take up only before it.
 */
static int cut(const struct engine *e, const struct engine_sequence *q, size_t n)
{
    size_t unit = e->o.unit_tokens, end = q->computed + n;
    size_t aligned = (end == known(q) ? end - 1 : end) / unit * unit;

    return (int)(aligned > q->computed ? aligned - q->computed : n);
}

/* True when a row of this pass will end at a boundary of q's own prefix that q has not reached:
 * q waits and takes it from the cache instead of computing the same. */
static bool computed_by_another(struct engine *e, struct engine_sequence *q)
{
    for (size_t i = 0; i < e->n_plan; i++) {
        struct engine_sequence *o = e->plan[i].q;
        size_t end = o->computed + (size_t)e->plan[i].n, unit = e->o.unit_tokens;
        if (end % unit || end >= known(q))
            continue;
        const struct kv_key *mine = residence_chain(e, q, end / unit);
        const struct kv_key *theirs = residence_chain(e, o, end / unit);
        if (mine && theirs && !memcmp(&mine[end / unit - 1], &theirs[end / unit - 1], sizeof *mine))
            return true;
    }
    return false;
}

static void preempt_self(struct engine *e, struct engine_sequence *q)
{
    residence_evict(e, q);
    q->phase = SEQUENCE_WAITING;
    e->counters.preemptions++;
    restore_note(e, q, KV_PREEMPTED);
}

/* Tokens for q in this pass; 0 = none. */
static int share(struct engine *e, struct engine_sequence *q, size_t budget)
{
    size_t to = known(q);

    if (known(q) - q->computed == 1)
        return 1;
    if (!q->computed && !q->loading && !q->load) {
        if (computed_by_another(e, q))
            return 0;
        if (!residence_restore(e, q)) {
            preempt_self(e, q);
            return 0;
        }
    }
    if (!restore_advance(e, q, &to)) {
        preempt_self(e, q);
        return 0;
    }
    if (to == known(q))
        engine_settled(e, q);
    size_t todo = to > q->computed ? to - q->computed : 0;
    if (!todo || !budget)
        return 0;
    return cut(e, q, todo < budget ? todo : budget);
}

/* Oldest first, so that whoever is displaced on the way has not been planned yet. */
static void plan(struct engine *e)
{
    size_t budget = e->o.step_tokens;

    e->n_plan = 0;
    for (struct engine_sequence *q = e->sequences; q; q = q->next) {
        if (q->phase != SEQUENCE_RUNNING || e->n_plan == e->o.max_running)
            continue;
        bool prompt = known(q) - q->computed > 1;
        int n = share(e, q, budget);
        if (!n)
            continue;
        if (!residence_reserve(e, q, (size_t)n)) {
            preempt_self(e, q);
            continue;
        }
        if (prompt)
            budget -= (size_t)n;
        e->plan[e->n_plan++] = (struct plan_row){q, n, q->computed + (size_t)n == known(q)};
    }
}

static int page_room(struct engine *e, size_t pages, struct lh_error *err)
{
    if (pages <= e->page_pointer_capacity)
        return 0;
    float **bigger = reallocarray(e->page_pointers, pages * 2, sizeof *bigger);
    if (!bigger)
        return lh_fail_errno(err, ENOMEM, "page table of %zu pages", pages);
    e->page_pointers = bigger;
    e->page_pointer_capacity = pages * 2;
    return 0;
}

/* After the last allocation of the step: addresses hold from here to the end of the pass. */
static int build_chunks(struct engine *e, struct lh_error *err)
{
    size_t pages = 0;

    for (size_t i = 0; i < e->n_plan; i++)
        pages += e->plan[i].q->n_pages;
    int r = page_room(e, pages, err);
    if (r < 0)
        return r;
    float **at = e->page_pointers;
    for (size_t i = 0; i < e->n_plan; i++) {
        const struct plan_row *row = &e->plan[i];
        struct engine_sequence *q = row->q;
        e->chunks[i] = (struct policy_chunk){
            .tokens = q->spec.transcript->tokens + q->computed,
            .n = row->n,
            .start = (int64_t)q->computed,
            .pages = at,
            .state = pool_data(e->pool, q->state),
            .logits_from = row->sample ? row->n - 1 : row->n,
        };
        for (size_t p = 0; p < q->n_pages; p++)
            *at++ = pool_data(e->pool, q->pages[p]);
    }
    return 0;
}

static void end_turn(struct engine *e, struct engine_sequence *q)
{
    q->idle_us = lh_now_us();
    q->phase = SEQUENCE_IDLE;
    q->ended = true;
    q->idle_since = e->clock;
    e->turn_tokens += 0.1 * ((double)q->sampled - e->turn_tokens);
    e->counters.turns++;
}

static int sample(struct engine *e, struct engine_sequence *q, const float *logits,
                  struct lh_error *err)
{
    float temperature = q->spec.temperature;
    int vocab = e->config->vocab;
    int32_t token = policy_sample(logits, vocab, temperature, q->spec.seed, known(q));
    float logprob = policy_logprob(logits, vocab, temperature > 0 ? temperature : 1, token);
    int r = transcript_sampled(q->spec.transcript, token, logprob, &e->version, err);

    if (r < 0)
        return r;
    q->spec.transcript->carried |= q->old;
    q->sampled++;
    e->counters.tokens_decoded++;
    if (token == TOKEN_RUN || token == TOKEN_EOS || q->sampled >= q->max_new)
        end_turn(e, q);
    return 0;
}

static int finish_row(struct engine *e, const struct plan_row *row, const float *logits,
                      struct lh_error *err)
{
    struct engine_sequence *q = row->q;
    size_t unit = e->o.unit_tokens, end = known(q);

    q->computed += (size_t)row->n;
    e->counters.tokens_prefilled += (size_t)row->n - row->sample;
    if (q->computed % unit == 0)
        residence_checkpoint(e, q, !q->sampled && q->computed == (end - 1) / unit * unit);
    return row->sample ? sample(e, q, logits, err) : 0;
}

/* What this pass has told about the speed of computing. */
static void measure(struct engine *e, int64_t began_us)
{
    double tokens = 0, contexts = 0;
    unsigned decoding = 0;

    for (size_t i = 0; i < e->n_plan; i++) {
        double n = e->plan[i].n;
        if (e->plan[i].n == 1) {
            decoding++;
            continue;
        }
        tokens += n;
        contexts += n * ((double)e->plan[i].q->computed + n / 2);
    }
    kv_compute_pass(&e->compute, decoding, tokens, contexts,
                    (double)(lh_now_us() - began_us) * 1e-6);
}

int engine_step(struct engine *e, size_t *tokens, struct lh_error *err)
{
    const float *logits = e->logits;

    *tokens = 0;
    if (!e->exec)
        return lh_fail(err, LH_FAILED_PRECONDITION, "a step while the engine is paused");
    e->clock++;
    residence_collect(e);
    plan(e);
    if (!e->n_plan)
        return 0;
    int64_t began = lh_now_us();
    int r = build_chunks(e, err);
    if (r == 0)
        r = policy_forward(e->exec, e->chunks, (int)e->n_plan, e->logits, err);
    measure(e, began);
    for (size_t i = 0; r == 0 && i < e->n_plan; i++) {
        *tokens += (size_t)e->plan[i].n;
        r = finish_row(e, &e->plan[i], logits, err);
        logits += e->plan[i].sample ? e->config->vocab : 0;
    }
    return r < 0 ? lh_wrap(err, "forward pass of %zu sequences", e->n_plan) : 0;
}

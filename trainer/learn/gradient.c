#include "trainer/learn/gradient.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/learn/adamw.h"

struct shared {
    const struct policy_model *model;
    const float *weights;
    const struct objective *objective;
    const struct gradient_sequence *seq;
    size_t n, floats;
    uint32_t max_tokens;
    const struct gradient_memory *memory;
    const atomic_bool *stop;
    atomic_uint next_shard;
};

/* What a shard found; combined in shard order, so that the sums are fixed too. */
struct shard_result {
    double loss, gap;
    uint64_t current_tokens;
};

struct worker {
    struct shared *shared;
    struct policy_trainer *trainer;
    float *theta, *dlogprob; /* [max_tokens], index of the token they predict */
    struct shard_result *results;
    pthread_t thread;
    struct lh_error err;
};

static size_t arena_of_thread(const struct policy_model *m, uint32_t max_tokens)
{
    return (policy_trainer_bytes(m, (int)max_tokens) + 63) & ~(size_t)63;
}

size_t gradient_arena_bytes(const struct policy_model *m, unsigned threads, uint32_t max_tokens)
{
    return arena_of_thread(m, max_tokens) * threads;
}

static void note_gap(const struct gradient_sequence *s, const float *theta, struct shard_result *r)
{
    for (uint32_t i = 1; s->current && i < s->n; i++) {
        if (!s->mask[i] || !s->current[i])
            continue;
        double gap = fabs((double)theta[i] - s->behaviour[i]);
        /* NaN must not look like agreement. */
        r->gap = gap > r->gap || isnan(gap) ? gap : r->gap;
        r->current_tokens++;
    }
}

static bool all_zero(const float *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (x[i] != 0)
            return false;
    return true;
}

/* The first token has no prediction: the pass yields n-1 numbers, for tokens 1..n-1. */
static int run_sequence(struct worker *w, const struct gradient_sequence *s, float *grads,
                        struct shard_result *out)
{
    const struct shared *sh = w->shared;

    if (s->n < 2)
        return 0;
    if (s->n > sh->max_tokens)
        return lh_fail(&w->err, LH_OUT_OF_RANGE, "a sequence of %u tokens, the context has %u",
                       s->n, sh->max_tokens);
    int r = policy_train_forward(w->trainer, s->tokens, (int)s->n, s->temperature, w->theta + 1,
                                 &w->err);
    if (r < 0)
        return r;
    note_gap(s, w->theta, out);
    out->loss += s->behaviour ? objective_policy_gradient(sh->objective, s->advantage, w->theta + 1,
                                                          s->behaviour + 1, s->mask + 1, s->n - 1,
                                                          w->dlogprob + 1)
                              : objective_cloning(sh->objective, w->theta + 1, s->mask + 1,
                                                  s->n - 1, w->dlogprob + 1);
    if (all_zero(w->dlogprob + 1, s->n - 1))
        return 0;
    return policy_train_backward(w->trainer, w->dlogprob + 1, grads, &w->err);
}

static int run_shard(struct worker *w, unsigned shard)
{
    const struct shared *sh = w->shared;
    float *grads = sh->memory->shards + shard * sh->floats;
    struct shard_result result = {0};

    memset(grads, 0, sh->floats * sizeof *grads);
    for (size_t i = shard; i < sh->n; i += GRADIENT_SHARDS) {
        if (sh->stop && atomic_load(sh->stop))
            return lh_fail(&w->err, LH_CANCELLED, "training was asked to stop");
        int r = run_sequence(w, &sh->seq[i], grads, &result);
        if (r < 0)
            return r;
    }
    w->results[shard] = result;
    return 0;
}

static void *work(void *arg)
{
    struct worker *w = arg;

    for (unsigned shard; (shard = atomic_fetch_add(&w->shared->next_shard, 1)) < GRADIENT_SHARDS;)
        if (run_shard(w, shard) < 0)
            break;
    return NULL;
}

static int prepare_worker(struct worker *w, struct shared *sh, unsigned index,
                          struct shard_result *results, struct lh_error *err)
{
    size_t bytes = arena_of_thread(sh->model, sh->max_tokens);

    w->shared = sh;
    w->results = results;
    w->theta = calloc(sh->max_tokens + 1, sizeof *w->theta);
    w->dlogprob = calloc(sh->max_tokens + 1, sizeof *w->dlogprob);
    if (!w->theta || !w->dlogprob)
        return lh_fail_errno(err, ENOMEM, "training thread %u", index);
    w->trainer =
        policy_trainer_create(sh->model, sh->weights, (char *)sh->memory->arena + index * bytes,
                              bytes, (int)sh->max_tokens, err);
    return w->trainer ? 0 : lh_wrap(err, "training thread %u", index);
}

static void finish_worker(struct worker *w)
{
    policy_trainer_destroy(w->trainer);
    free(w->theta);
    free(w->dlogprob);
}

/* Worker 0 is the calling thread.  Waits for every thread that was started. */
static int run_workers(struct worker *w, unsigned threads, struct lh_error *err)
{
    unsigned started = 1;
    int r = 0;

    for (; started < threads && r == 0; started++) {
        r = pthread_create(&w[started].thread, NULL, work, &w[started]);
        if (r != 0) {
            lh_fail_errno(err, r, "cannot start training thread %u", started);
            break;
        }
    }
    if (r == 0)
        work(&w[0]);
    for (unsigned i = 1; i < started; i++)
        pthread_join(w[i].thread, NULL);
    if (r != 0)
        return LH_RESOURCE_EXHAUSTED;
    for (unsigned i = 0; i < threads; i++) {
        if (w[i].err.code) {
            *err = w[i].err;
            return err->code;
        }
    }
    return 0;
}

static void combine(const struct shared *sh, const struct shard_result *results,
                    struct gradient_result *out)
{
    float *sum = sh->memory->shards;

    *out = (struct gradient_result){0};
    for (unsigned s = 0; s < GRADIENT_SHARDS; s++) {
        out->loss += results[s].loss;
        out->logprob_gap = results[s].gap > out->logprob_gap || isnan(results[s].gap)
                               ? results[s].gap
                               : out->logprob_gap;
        out->current_tokens += results[s].current_tokens;
        for (size_t i = 0; s > 0 && i < sh->floats; i++)
            sum[i] += sum[s * sh->floats + i];
    }
    out->norm = adamw_norm(sum, sh->floats);
}

int gradient_compute(const struct policy_model *m, const float *weights, const struct objective *o,
                     const struct gradient_sequence *seq, size_t n, unsigned threads,
                     uint32_t max_tokens, const struct gradient_memory *memory,
                     const atomic_bool *stop, struct gradient_result *out, struct lh_error *err)
{
    struct shared sh = {.model = m,
                        .weights = weights,
                        .objective = o,
                        .seq = seq,
                        .n = n,
                        .floats = policy_model_floats(m),
                        .max_tokens = max_tokens,
                        .memory = memory,
                        .stop = stop};
    struct shard_result results[GRADIENT_SHARDS] = {0};
    struct worker workers[GRADIENT_SHARDS] = {0};
    struct lh_error local = {0};
    int r = 0;

    if (threads > GRADIENT_SHARDS)
        threads = GRADIENT_SHARDS;
    if (memory->arena_bytes < gradient_arena_bytes(m, threads, max_tokens))
        return lh_fail(err, LH_INVALID_ARGUMENT, "the activation arena is too small for %u threads",
                       threads);
    for (unsigned i = 0; i < threads && r == 0; i++)
        r = prepare_worker(&workers[i], &sh, i, results, &local);
    if (r == 0)
        r = run_workers(workers, threads, &local);
    for (unsigned i = 0; i < threads; i++)
        finish_worker(&workers[i]);
    if (r < 0)
        return lh_fail(err, local.code, "%s", local.message);
    combine(&sh, results, out);
    return 0;
}

/* policy.h over the kinds of number: a model's backend says which it stores. */
#include <stdlib.h>
#include <string.h>

#include "proto/cleanup.h"
#include "trainer/policy/backend.h"
#include "trainer/policy/exec.h"
#include "trainer/policy/model.h"

/* The same declarations for bf16. */
struct exec_bf16;
struct sequence_trainer_bf16;
size_t exec_bytes_bf16(const struct policy_model *m, int max_tokens);
struct exec_bf16 *exec_create_bf16(const struct policy_model *m, const void *weights, void *arena,
                                   size_t bytes, int max_tokens, int page_tokens,
                                   struct lh_error *err);
void exec_destroy_bf16(struct exec_bf16 *x);
int exec_forward_bf16(struct exec_bf16 *x, const struct policy_chunk *chunks, int n_chunks,
                      float *logits, struct lh_error *err);
size_t train_bytes_bf16(const struct policy_model *m, int max_tokens);
struct sequence_trainer_bf16 *train_create_bf16(const struct policy_model *m, const void *weights,
                                                void *arena, size_t bytes, int max_tokens,
                                                struct lh_error *err);
void train_destroy_bf16(struct sequence_trainer_bf16 *p);
int train_forward_bf16(struct sequence_trainer_bf16 *p, const int32_t *tokens, int n,
                       float temperature, float *logprobs, struct lh_error *err);
int train_backward_bf16(struct sequence_trainer_bf16 *p, const float *dlogprobs, float *grads,
                        struct lh_error *err);

/* One of the two is not NULL. */
struct policy_exec {
    struct exec_f32 *f32;
    struct exec_bf16 *bf16;
};

struct policy_trainer {
    struct sequence_trainer_f32 *f32;
    struct sequence_trainer_bf16 *bf16;
};

static bool is_bf16(const struct policy_model *m)
{
    return m->backend->number_bytes == 2;
}

size_t policy_exec_bytes(const struct policy_model *m, int max_tokens)
{
    return is_bf16(m) ? exec_bytes_bf16(m, max_tokens) : exec_bytes_f32(m, max_tokens);
}

struct policy_exec *policy_exec_create(const struct policy_model *m, const void *weights,
                                       void *arena, size_t bytes, int max_tokens, int page_tokens,
                                       struct lh_error *err)
{
    lh_auto(policy_exec) x = calloc(1, sizeof *x);

    if (!x) {
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "policy_exec: out of memory");
        return NULL;
    }
    if (is_bf16(m))
        x->bf16 = exec_create_bf16(m, weights, arena, bytes, max_tokens, page_tokens, err);
    else
        x->f32 = exec_create_f32(m, weights, arena, bytes, max_tokens, page_tokens, err);
    return x->bf16 || x->f32 ? lh_steal(&x) : NULL;
}

void policy_exec_destroy(struct policy_exec *x)
{
    if (!x)
        return;
    exec_destroy_f32(x->f32);
    exec_destroy_bf16(x->bf16);
    free(x);
}

int policy_forward(struct policy_exec *x, const struct policy_chunk *chunks, int n_chunks,
                   float *logits, struct lh_error *err)
{
    return x->bf16 ? exec_forward_bf16(x->bf16, chunks, n_chunks, logits, err)
                   : exec_forward_f32(x->f32, chunks, n_chunks, logits, err);
}

size_t policy_trainer_bytes(const struct policy_model *m, int max_tokens)
{
    return is_bf16(m) ? train_bytes_bf16(m, max_tokens) : train_bytes_f32(m, max_tokens);
}

struct policy_trainer *policy_trainer_create(const struct policy_model *m, const void *weights,
                                             void *arena, size_t bytes, int max_tokens,
                                             struct lh_error *err)
{
    lh_auto(policy_trainer) p = calloc(1, sizeof *p);

    if (!p) {
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "policy_trainer: out of memory");
        return NULL;
    }
    if (is_bf16(m))
        p->bf16 = train_create_bf16(m, weights, arena, bytes, max_tokens, err);
    else
        p->f32 = train_create_f32(m, weights, arena, bytes, max_tokens, err);
    return p->bf16 || p->f32 ? lh_steal(&p) : NULL;
}

void policy_trainer_destroy(struct policy_trainer *p)
{
    if (!p)
        return;
    train_destroy_f32(p->f32);
    train_destroy_bf16(p->bf16);
    free(p);
}

int policy_train_forward(struct policy_trainer *p, const int32_t *tokens, int n, float temperature,
                         float *logprobs, struct lh_error *err)
{
    return p->bf16 ? train_forward_bf16(p->bf16, tokens, n, temperature, logprobs, err)
                   : train_forward_f32(p->f32, tokens, n, temperature, logprobs, err);
}

int policy_train_backward(struct policy_trainer *p, const float *dlogprobs, float *grads,
                          struct lh_error *err)
{
    return p->bf16 ? train_backward_bf16(p->bf16, dlogprobs, grads, err)
                   : train_backward_f32(p->f32, dlogprobs, grads, err);
}

size_t policy_number_bytes(const struct policy_model *m)
{
    return m->backend->number_bytes;
}

/* To nearest, ties to even; weights are finite. */
static uint16_t to_bf16(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

int policy_put_weights(const struct policy_model *m, void *to, const float *from,
                       struct lh_error *err)
{
    size_t n = m->floats;
    lh_autofree uint16_t *small = NULL;

    if (!is_bf16(m))
        return m->backend->put(to, from, n * sizeof *from, err);
    small = malloc(n * sizeof *small);
    if (!small)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%zu weights as bf16: out of memory", n);
    for (size_t i = 0; i < n; i++)
        small[i] = to_bf16(from[i]);
    return m->backend->put(to, small, n * sizeof *small, err);
}

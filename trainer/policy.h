/* The policy: Kimi-Linear (KDA and MLA layers, dense and MoE feed-forward), one code for rollout
 * and trainer, on the CPU (docs/DESIGN.md 3.10).
 *
 * Weights are ONE flat array of float32, laid out by the model description, in memory the caller
 * owns (an arbiter segment, usually); gradients and optimizer moments use the same layout.
 *
 * Bit-for-bit: the log-probability of a token does not depend on how its sequence was cut into
 * chunks, on what else was in the batch, on the thread, or on whether policy_forward() or
 * policy_train_forward() computed it.  How: one KDA recurrence (token by token) and one MLA form
 * (absorbed, over cached latents) everywhere; attention reduces in fixed blocks by absolute
 * position; every element of a forward matrix product is summed in one fixed order whatever the
 * tile (trainer/policy/cpu_gemm.c); OpenBLAS, used by backward, runs one thread.
 *
 * Objects here are not thread-safe; several policy_exec over one model and one weights array are.
 */
#ifndef TRAINER_POLICY_H
#define TRAINER_POLICY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/cleanup.h"
#include "proto/error.h"

enum policy_layer { POLICY_KDA, POLICY_MLA };

/* config.json of the family, checked. */
struct policy_config {
    int vocab, hidden, layers, heads;
    int kda_heads, kda_head_dim, conv_kernel;
    int kv_lora, q_lora, qk_nope, qk_rope, v_head; /* q_lora 0 = full-rank queries */
    int ffn, moe_ffn, experts, experts_per_token, shared_experts;
    float rms_eps, routed_scale;
    bool renormalize, tie_embeddings;
    enum policy_layer *layer_type; /* [layers] */
    bool *moe;                     /* [layers] */
};

struct policy_param {
    const char *name; /* as in model.safetensors */
    int dims;
    int64_t shape[4];
    size_t offset, count; /* floats */
};

struct policy_model;

/* Reads config.json (and tokenizer names) of a model directory. */
struct policy_model *policy_model_open(const char *dir, struct lh_error *err);
void policy_model_destroy(struct policy_model *m);
LH_DEFINE_AUTO(policy_model, policy_model_destroy)
const struct policy_config *policy_model_config(const struct policy_model *m);
const struct policy_param *policy_model_params(const struct policy_model *m, size_t *n);
size_t policy_model_floats(const struct policy_model *m);
/* H(config, dtype, layout, tokenizer): the model's part of a KV root. */
void policy_model_fingerprint(const struct policy_model *m, uint8_t out[16]);

/* ---- where it is computed ----
 *
 * Weights, arenas, pages and the tables of them, states, gradients and logits lie in memory of the
 * model's backend, which is the CPU unless policy_model_use() has changed it; token ids and
 * log-probabilities are the caller's. */

/* "cpu"; "cuda", float32 as the CPU has it; "cuda-bf16", which stores weights, activations and
 * pages in bf16 and keeps sums, states, logits and gradients of weights in float32.  Before
 * anything else is done with the model: parameters lie otherwise on a GPU, each aligned.
 * UNAVAILABLE, in one line that says why, on a machine or in a build without. */
int policy_model_use(struct policy_model *m, const char *backend, struct lh_error *err);
const char *policy_model_backend(const struct policy_model *m);
/* Of a weight and of what pages hold: 4, or 2 for bf16 (pages are then cast to float *). */
size_t policy_number_bytes(const struct policy_model *m);
/* The whole flat array from float32 in the caller's memory to the backend's. */
int policy_put_weights(const struct policy_model *m, void *to, const float *from,
                       struct lh_error *err);
void *policy_alloc(const struct policy_model *m, size_t bytes, struct lh_error *err);
void policy_free(const struct policy_model *m, void *p);
int policy_put(const struct policy_model *m, void *to, const void *from, size_t bytes,
               struct lh_error *err);
int policy_get(const struct policy_model *m, void *to, const void *from, size_t bytes,
               struct lh_error *err);

/* safetensors in and out.  policy_save writes config.json and model.safetensors, same bytes for
 * same weights; files are complete or absent after a crash. */
int policy_load(const struct policy_model *m, const char *dir, float *weights,
                struct lh_error *err);
int policy_save(const struct policy_model *m, const char *dir, const float *weights,
                struct lh_error *err);
void policy_init(const struct policy_model *m, float *weights, uint64_t seed);

/* ---- incremental forward: rollout ---- */

/* Sizes of what a sequence keeps between calls. */
size_t policy_kv_floats(const struct policy_model *m); /* a token: latents of every MLA layer */
size_t
policy_state_floats(const struct policy_model *m); /* a sequence: KDA states + conv history */

/* The next tokens of one sequence.  A page holds page_tokens tokens as [MLA layer][token][latent];
 * pages[p] covers positions p*page_tokens.. ; page_tokens is a multiple of 16; state is zero before
 * position 0. */
struct policy_chunk {
    const int32_t *tokens;
    int n;         /* >= 1 */
    int64_t start; /* absolute position of tokens[0] = tokens already in pages and state */
    float *const *pages;
    float *state;
    int logits_from; /* logits are wanted for tokens[logits_from..n); n = none */
};

struct policy_exec;

/* Scratch for forward passes of up to max_tokens tokens in all chunks of a call, in an arena the
 * caller owns (64-byte aligned, policy_exec_bytes() long). */
size_t policy_exec_bytes(const struct policy_model *m, int max_tokens);
struct policy_exec *policy_exec_create(const struct policy_model *m, const void *weights,
                                       void *arena, size_t bytes, int max_tokens, int page_tokens,
                                       struct lh_error *err);
void policy_exec_destroy(struct policy_exec *x);
LH_DEFINE_AUTO(policy_exec, policy_exec_destroy)

/* Runs all chunks as one batch; writes pages and states; logits rows [vocab] in chunk order. Chunks
 * of a call are of different sequences. */
int policy_forward(struct policy_exec *x, const struct policy_chunk *chunks, int n_chunks,
                   float *logits, struct lh_error *err);

/* log softmax(logits / temperature)[token], the one function that rollout records with and the
 * trainer recomputes with.  Temperature 0 (greedy) is recorded at temperature 1. */
float policy_logprob(const float *logits, int vocab, float temperature, int32_t token);
/* Draws from softmax(logits / temperature) with the uniform number of (seed, index): same inputs,
 * same token.  temperature 0 = argmax, lowest id wins ties. */
int32_t policy_sample(const float *logits, int vocab, float temperature, uint64_t seed,
                      uint64_t index);

/* ---- training ---- */

struct policy_trainer; /* one thread's activations, for sequences of up to max_tokens */

size_t policy_trainer_bytes(const struct policy_model *m, int max_tokens);
struct policy_trainer *policy_trainer_create(const struct policy_model *m, const void *weights,
                                             void *arena, size_t bytes, int max_tokens,
                                             struct lh_error *err);
void policy_trainer_destroy(struct policy_trainer *t);
LH_DEFINE_AUTO(policy_trainer, policy_trainer_destroy)

/* logprobs[i] = log p(tokens[i+1] | tokens[0..i]) at the temperature, i < n-1; keeps activations.
 */
int policy_train_forward(struct policy_trainer *t, const int32_t *tokens, int n, float temperature,
                         float *logprobs, struct lh_error *err);
/* grads += sum_i dlogprobs[i] * d logprobs[i] / d weights, of the last policy_train_forward. */
int policy_train_backward(struct policy_trainer *t, const float *dlogprobs, float *grads,
                          struct lh_error *err);

/* ---- tokenizer: bytes and special tokens ----
 * Ids 0..n_special-1 are special, then come the 256 bytes. */
enum policy_special {
    TOKEN_PAD,
    TOKEN_BOS,
    TOKEN_EOS, /* EOS: run this action, and I am done */
    TOKEN_SYSTEM,
    TOKEN_USER,
    TOKEN_ASSISTANT,
    TOKEN_TOOL, /* a message of that role begins */
    TOKEN_RUN,  /* run this action and show me the output */
    TOKEN_SPECIALS
};
enum { POLICY_BYTE_VOCAB = TOKEN_SPECIALS + 256 };
/* Appends the bytes of text; returns how many ids that made.  `to` has room for len. */
size_t policy_encode(const char *text, size_t len, int32_t *to);
/* Bytes of ids that are bytes; specials are skipped.  Returns the length. */
size_t policy_decode(const int32_t *tokens, size_t n, char *to);

#endif

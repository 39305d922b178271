/* The ops of the policy, as a table that a backend fills: cpu here, cuda in trainer/policy/cuda.
 *
 * Arrays lie in the backend's memory; structs that hold pointers to them lie with the caller.
 * Arrays are row-major, one row a token; `ld*` is the distance of two rows.  Forward ops of the
 * CPU: what a row becomes depends on that row and its sequence alone, never on how many rows the
 * call has or where the row lies (policy.h, "bit for bit").  Backward ops are deterministic on
 * both. */
#ifndef TRAINER_POLICY_OPS_H
#define TRAINER_POLICY_OPS_H

#include "trainer/policy/kind.h"

enum {
    KDA_SPAN = 16,   /* tokens between two kept states; backward recomputes in between */
    MLA_BLOCK = 16,  /* keys of one step of the running softmax, by absolute position */
    MLA_TILE = 32,   /* queries of one tile in backward */
    MAX_HEADS = 256, /* of either kind; bounds stack arrays */
};

struct kda_shape {
    int heads, dim, kernel; /* dim: of a head's key and of its value */
};

struct mla_shape {
    int heads, nope, rope, value, lora; /* a cached latent: lora + rope */
};

/* Where the latents of one layer lie in a page. */
struct mla_layout {
    size_t offset;   /* numbers before them */
    int page_tokens; /* a multiple of MLA_BLOCK */
};

/* Rows [row, row + n) of a batch continue one sequence at position `start`. */
struct R(seq) {
    int row, n;
    int64_t start;
    real *const *pages;
    wide *state;
};

struct R(batch) {
    int rows, n_seqs, longest;
    const int32_t *tokens;      /* [rows] */
    const struct R(seq) * seqs; /* [n_seqs] */
};

/* What KDA keeps per token between forward and backward; rows are dense. */
struct R(kda_rows) {
    real *conv;  /* [3 heads dim] q, k, v after the convolution, before SiLU */
    real *qkv;   /* [3 heads dim] q normed and scaled, k normed, v */
    real *z;     /* [heads dim] decay, before dt_bias and softplus */
    wide *g;     /* [heads dim] log decay */
    wide *alpha; /* [heads dim] e^g */
    wide *beta;  /* [heads] */
    real *o;     /* [heads dim] what the recurrence reads out */
};

#define POLICY_OPS(X)                                                                              \
    X(clear, (void *to, size_t bytes))                                                             \
    X(copy_columns, (int m, int n, const real *x, int ldx, real *y, int ldy))                      \
    X(clear_columns, (int m, int n, real *y, int ldy))                                             \
    /* y[i] = x[list[i]] */                                                                        \
    X(pick, (int m, int n, const int32_t *list, const real *x, real *y))                           \
    /* y[m,n] = x[m,k] w[n,k]' */                                                                  \
    X(linear, (int m, int n, int k, const real *x, int ldx, const real *w, real *y, int ldy))      \
    X(linear_wide, (int m, int n, int k, const real *x, int ldx, const real *w, wide *y, int ldy)) \
    X(rmsnorm, (int m, int n, wide eps, const real *w, const real *x, int ldx, real *y, int ldy))  \
    X(add, (size_t n, const real *a, const real *b, real *y))                                      \
    /* h[m,f] = silu(gu[m,:f]) gu[m,f:2f] */                                                       \
    X(silu_mul, (int m, int f, const real *gu, real *h))                                           \
    /* w [c][kernel] of the file becomes [kernel][c], so that channels are lanes */                \
    X(conv_taps, (int c, int kernel, const real *w, real *taps))                                   \
    /* Causal depthwise convolution; the kernel-1 inputs before are in the state, from `at`, and   \
     * updated */                                                                                  \
    X(conv, (const struct R(batch) * b, int c, int kernel, const real *taps, const real *x,        \
             int ldx, size_t at, real *y))                                                         \
    X(kda_inputs, (const struct kda_shape *s, int m, const real *a_log, const real *dt_bias,       \
                   const real *b, int ldb, const struct R(kda_rows) * r))                          \
    /* State [heads][dim][dim], from `at`; kept every KDA_SPAN tokens in snaps unless NULL */      \
    X(kda_scan, (const struct kda_shape *s, const struct R(batch) * b,                             \
                 const struct R(kda_rows) * r, size_t at, wide * snaps))                           \
    /* y = rmsnorm(o) w, a head at a time, times sigmoid(gate) */                                  \
    X(gated_norm, (const struct kda_shape *s, int m, wide eps, const real *w, const real *o,       \
                   const real *gate, real *y))                                                     \
    /* Queries into the latent space: qabs of a head = [q_nope W_uk, q_rope]; kv_b: of each head   \
     * nope rows W_uk, value rows W_uv */                                                          \
    X(mla_absorb,                                                                                  \
      (const struct mla_shape *s, int m, const real *q, int ldq, const real *kv_b, real *qabs))    \
    /* Latents of new tokens, their lora part normed, into their pages */                          \
    X(mla_store, (const struct mla_shape *s, const struct R(batch) * b,                            \
                  const struct mla_layout *l, wide eps, const real *w, const real *kv, int ldkv))  \
    /* q[heads][lora+rope] of a token at t over the latents of positions 0..t */                   \
    X(mla_attend, (const struct mla_shape *s, const struct R(batch) * b,                           \
                   const struct mla_layout *l, const real *q, real *o, wide *lse))                 \
    /* y of a head = o W_uv' */                                                                    \
    X(mla_values, (const struct mla_shape *s, int m, const real *o, const real *kv_b, real *y))    \
    /* scores = sigmoid(logits) in place; choice and weight [m][top] */                            \
    X(route, (int m, int experts, int top, int renormalize, wide scale, const real *bias,          \
              wide *scores, int32_t *choice, wide *weight))                                        \
    /* Sorts the choices by expert, stable in tokens: place[i] is the row of choice i, first[e]    \
     * the first row of expert e */                                                                \
    X(dispatch, (int choices, int experts, const int32_t *choice, int32_t *place, int32_t *first)) \
    /* y[place[i]] = x[i / top] */                                                                 \
    X(gather, (int m, int n, int top, const int32_t *place, const real *x, real *y))               \
    /* linear for rows first[e]..first[e+1] with the weights of expert e, w + e stride; m in all   \
     */                                                                                            \
    X(experts_linear, (int experts, const int32_t *first, int m, int n, int k, const real *x,      \
                       const real *w, size_t stride, real *y))                                     \
    /* out[t] += sum_i weight[t,i] y[place[t,i]] */                                                \
    X(mix,                                                                                         \
      (int m, int n, int top, const int32_t *place, const wide *weight, const real *y, real *out)) \
    /* dx[m,k] = dy[m,n] w[n,k]; add: += */                                                        \
    X(back_input,                                                                                  \
      (int m, int n, int k, const real *dy, int ldy, const real *w, real *dx, int ldx, int add))   \
    /* dw[n,k] += dy[m,n]' x[m,k] */                                                               \
    X(back_weight,                                                                                 \
      (int m, int n, int k, const real *dy, int ldy, const real *x, int ldx, wide *dw, int ldw))   \
    /* y[m,n] = x[m,k] w[n,k]', as fast as it goes */                                              \
    X(product,                                                                                     \
      (int m, int n, int k, const real *x, int ldx, const real *w, int ldw, real *y, int ldy))     \
    X(back_experts_input, (int experts, const int32_t *first, int m, int n, int k, const real *dy, \
                           const real *w, size_t stride, real *dx))                                \
    X(back_experts_weight, (int experts, const int32_t *first, int m, int n, int k,                \
                            const real *dy, const real *x, wide *dw, size_t stride))               \
    /* dx += */                                                                                    \
    X(back_rmsnorm, (int m, int n, wide eps, const real *w, const real *x, int ldx,                \
                     const real *dy, int ldy, real *dx, int lddx, wide *dw))                       \
    X(back_silu_mul, (int m, int f, const real *gu, const real *dh, real *dgu))                    \
    /* x begins at position 0 (no history before it) */                                            \
    X(back_conv, (int m, int c, int kernel, const real *taps, const real *x, int ldx,              \
                  const real *dy, real *dx, int lddx, wide *dtaps))                                \
    /* dw of the file's layout += dtaps */                                                         \
    X(back_conv_taps, (int c, int kernel, const wide *dtaps, wide *dw))                            \
    /* d: gradients of r's qkv, g and beta in; of conv and z out */                                \
    X(back_kda_inputs, (const struct kda_shape *s, int m, const real *a_log, const real *dt_bias,  \
                        const struct R(kda_rows) * r, const struct R(kda_rows) * d, real * db,     \
                        int lddb, wide *da_log, wide *ddt_bias))                                   \
    /* d->o in; d->qkv, d->g, d->beta out */                                                       \
    X(back_kda_scan, (const struct kda_shape *s, int m, const struct R(kda_rows) * r,              \
                      const wide *snaps, const struct R(kda_rows) * d, wide * work))               \
    X(back_gated_norm, (const struct kda_shape *s, int m, wide eps, const real *w, const real *o,  \
                        const real *gate, const real *dy, real *do_, real *dgate, wide *dw))       \
    /* latents c [m][lora+rope] of one sequence; dq, dc out */                                     \
    X(back_mla_attend,                                                                             \
      (const struct mla_shape *s, int m, const real *c, const real *q, const real *o,              \
       const wide *lse, const real *do_, real *dq, real *dc, wide *work))                          \
    /* dy[place] = weight dout, dweight = dout . y[place] */                                       \
    X(back_mix, (int m, int n, int top, const int32_t *place, const wide *weight, const real *y,   \
                 const real *dout, real *dy, wide *dweight))                                       \
    /* dx[t] += sum_i dy[place[t,i]] */                                                            \
    X(back_gather, (int m, int n, int top, const int32_t *place, const real *dy, real *dx))        \
    /* dlogits from dweight */                                                                     \
    X(back_route, (int m, int experts, int top, int renormalize, wide scale, const wide *scores,   \
                   const int32_t *choice, const wide *dweight, real *dlogits))                     \
    /* y[i] = log softmax(logits[i] / temperature)[tokens[i]] */                                   \
    X(logprobs,                                                                                    \
      (int m, int n, const wide *logits, wide temperature, const int32_t *tokens, wide *y))        \
    /* dlogits = d (onehot(token) - softmax(logits / temperature)) / temperature, a row */         \
    X(back_logprob, (int m, int n, const wide *logits, wide temperature, const int32_t *tokens,    \
                     const wide *d, real *dlogits))                                                \
    /* dx[list[i]] += dy[i] */                                                                     \
    X(back_pick, (int m, int n, const int32_t *list, const real *dy, wide *dx))

#define POLICY_OP_MEMBER(name, args) void(*name) args;
struct R(policy_ops) {
    POLICY_OPS(POLICY_OP_MEMBER)
    /* Numbers of `work` that back_kda_scan and back_mla_attend need for m rows. */
    size_t (*work)(const struct kda_shape *k, const struct mla_shape *a, int m);
};
#undef POLICY_OP_MEMBER

#endif

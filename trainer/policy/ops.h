/* The ops of the policy, as a table that a backend fills: cpu here, cuda one day.
 *
 * Arrays are row-major, one row a token; `ld*` is the distance of two rows.  Forward ops: what a
 * row becomes depends on that row and its sequence alone, never on how many rows the call has or
 * where the row lies (policy.h, "bit for bit").  Backward ops are deterministic, and free to go
 * faster. */
#ifndef TRAINER_POLICY_OPS_H
#define TRAINER_POLICY_OPS_H

#include "trainer/policy/real.h"

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

/* The latents of one layer of one sequence. */
struct R(mla_cache) {
    real *const *pages;
    size_t layer_offset; /* of this layer in a page */
    int page_tokens;     /* a multiple of MLA_BLOCK */
};

/* What KDA keeps per token between forward and backward; rows are dense. */
struct R(kda_rows) {
    real *conv;  /* [3 heads dim] q, k, v after the convolution, before SiLU */
    real *qkv;   /* [3 heads dim] q normed and scaled, k normed, v */
    real *z;     /* [heads dim] decay, before softplus; in: without dt_bias */
    real *g;     /* [heads dim] log decay */
    real *alpha; /* [heads dim] e^g */
    real *beta;  /* [heads] */
    real *o;     /* [heads dim] what the recurrence reads out */
};

#define POLICY_OPS(X)                                                                              \
    /* y[m,n] = x[m,k] w[n,k]' */                                                                  \
    X(linear, (int m, int n, int k, const real *x, int ldx, const real *w, real *y, int ldy))      \
    /* y[m,n] (+)= x[m,k] w[k,n] */                                                                \
    X(linear_t, (int m, int n, int k, const real *x, int ldx, const real *w, int ldw, real *y,     \
                 int ldy, int add))                                                                \
    X(rmsnorm, (int m, int n, real eps, const real *w, const real *x, int ldx, real *y, int ldy))  \
    X(add, (size_t n, const real *a, const real *b, real *y))                                      \
    /* h[m,f] = silu(gu[m,:f]) gu[m,f:2f] */                                                       \
    X(silu_mul, (int m, int f, const real *gu, real *h))                                           \
    /* Causal depthwise convolution, w [kernel][c]; hist = the kernel-1 inputs before, updated */  \
    X(conv,                                                                                        \
      (int m, int c, int kernel, const real *w, const real *x, int ldx, real *hist, real *y))      \
    X(kda_inputs, (const struct kda_shape *s, int m, const real *a_log, const real *dt_bias,       \
                   const real *b, int ldb, const struct R(kda_rows) * r))                          \
    /* state [heads][dim][dim]; keeps it every KDA_SPAN tokens in snaps unless NULL */             \
    X(kda_scan, (const struct kda_shape *s, int m, const struct R(kda_rows) * r, real * state,     \
                 real * snaps))                                                                    \
    /* y = rmsnorm(o) w, a head at a time, times sigmoid(gate) */                                  \
    X(gated_norm, (const struct kda_shape *s, int m, real eps, const real *w, const real *o,       \
                   const real *gate, real *y))                                                     \
    /* One token at position t: q[heads][lora+rope] over the latents of positions 0..t */          \
    X(mla_attend, (const struct mla_shape *s, const struct R(mla_cache) * c, int64_t t,            \
                   const real *q, real *o, real *lse))                                             \
    /* scores = sigmoid(logits) in place; choice and weight [m][top] */                            \
    X(route, (int m, int experts, int top, int renormalize, real scale, const real *bias,          \
              real *scores, int32_t *choice, real *weight))                                        \
    /* dx[m,k] = dy[m,n] w[n,k]; add: += */                                                        \
    X(back_input,                                                                                  \
      (int m, int n, int k, const real *dy, int ldy, const real *w, real *dx, int ldx, int add))   \
    /* dw[n,k] += dy[m,n]' x[m,k] */                                                               \
    X(back_weight,                                                                                 \
      (int m, int n, int k, const real *dy, int ldy, const real *x, int ldx, real *dw, int ldw))   \
    /* y[m,n] = x[m,k] w[n,k]', as fast as it goes */                                              \
    X(product,                                                                                     \
      (int m, int n, int k, const real *x, int ldx, const real *w, int ldw, real *y, int ldy))     \
    /* dx += */                                                                                    \
    X(back_rmsnorm, (int m, int n, real eps, const real *w, const real *x, int ldx,                \
                     const real *dy, int ldy, real *dx, int lddx, real *dw))                       \
    X(back_silu_mul, (int m, int f, const real *gu, const real *dh, real *dgu))                    \
    /* x begins at position 0 (no history before it) */                                            \
    X(back_conv, (int m, int c, int kernel, const real *w, const real *x, int ldx, const real *dy, \
                  real *dx, int lddx, real *dw))                                                   \
    /* d: gradients of r's qkv, g and beta in; of conv and z out */                                \
    X(back_kda_inputs,                                                                             \
      (const struct kda_shape *s, int m, const real *a_log, const struct R(kda_rows) * r,          \
       const struct R(kda_rows) * d, real * db, int lddb, real *da_log, real *ddt_bias))           \
    /* d->o in; d->qkv, d->g, d->beta out; work: KDA_SPAN + 2 states,                              \
     * KDA_SPAN + 1 dim */                                                                         \
    X(back_kda_scan, (const struct kda_shape *s, int m, const struct R(kda_rows) * r,              \
                      const real *snaps, const struct R(kda_rows) * d, real * work))               \
    X(back_gated_norm, (const struct kda_shape *s, int m, real eps, const real *w, const real *o,  \
                        const real *gate, const real *dy, real *do_, real *dgate, real *dw))       \
    /* latents c [m][lora+rope] of one sequence; dq out, dc +=; work: 2 MLA_TILE m */              \
    X(back_mla_attend,                                                                             \
      (const struct mla_shape *s, int m, const real *c, const real *q, const real *o,              \
       const real *lse, const real *do_, real *dq, real *dc, real *work))                          \
    /* dlogits from dweight */                                                                     \
    X(back_route, (int m, int experts, int top, int renormalize, real scale, const real *scores,   \
                   const int32_t *choice, const real *dweight, real *dlogits))                     \
    /* dlogits = d (onehot(token) - softmax(logits / temperature)) / temperature, a row */         \
    X(back_logprob,                                                                                \
      (int n, const real *logits, real temperature, int32_t token, real d, real *dlogits))

#define POLICY_OP_MEMBER(name, args) void(*name) args;
struct R(policy_ops) {
    POLICY_OPS(POLICY_OP_MEMBER)
};
#undef POLICY_OP_MEMBER

/* The best CPU table for this machine. */
const struct R(policy_ops) * R(policy_cpu_ops)(void);

#endif

/* The network over the op table: one forward for rollout and trainer, and its gradient.  It does no
 * arithmetic and touches no array: that is the backend's, and so may the memory be.
 *
 * A net works on `rows` tokens that belong to one or more sequences.  Rollout needs one layer's
 * activations at a time, so all layers share one set; the trainer keeps a set per layer. */
#ifndef TRAINER_POLICY_NET_H
#define TRAINER_POLICY_NET_H

#include "trainer/policy/model.h"
#include "trainer/policy/ops.h"

/* Activations of a layer, one row a token.  [attention] x: the stream that enters; xn: normed;
 * proj: all projections of xn; KDA: struct kda_rows, gate: output gate; MLA: qn, q: low-rank
 * queries, qabs: queries in the latent space, lse, olat: what attention reads, in the latent space;
 * y: what o_proj takes.  [feed-forward] xm: stream between; xmn: normed; gu, h: gate|up and their
 * product, dense or shared; MoE: scores, weight of the router; egu, eh, ye: the experts', a row for
 * each (token, choice), sorted by expert; dscores: in gradients alone. */
/* clang-format off */
#define POLICY_ACTS(X)                                                                             \
    X(real, x) X(real, xn) X(real, proj)                                                           \
    X(real, conv) X(real, qkv) X(real, z) X(wide, g) X(wide, alpha) X(wide, beta) X(real, o)       \
    X(real, gate)                                                                                  \
    X(real, qn) X(real, q) X(real, qabs) X(wide, lse) X(real, olat)                                \
    X(real, y) X(real, xm) X(real, xmn) X(real, gu) X(real, h)                                     \
    X(wide, scores) X(wide, weight) X(real, dscores) X(real, egu) X(real, eh) X(real, ye)
/* clang-format on */
#define POLICY_ACT_POINTER(type, name) type *name;

struct R(acts) {
    POLICY_ACTS(POLICY_ACT_POINTER)
    wide *snaps;     /* KDA states every KDA_SPAN tokens; NULL in rollout */
    int32_t *choice; /* [rows][top] */
    int32_t *place;  /* [rows][top] row among the experts' */
    int32_t *first;  /* [experts + 1] first row of an expert */
};

struct R(net) {
    const struct policy_model *m;
    const real *w;
    const struct R(policy_ops) * ops;
    int max_rows, page_tokens;
    struct R(acts) * layers;  /* the table is the net's own; all else lies in the arena */
    real *last, *last_n;      /* stream after all layers; the normed rows that become logits */
    real *out, *taps;         /* output of a block; convolution weights, transposed */
    real *gathered;           /* rows of xmn sorted by expert */
    int32_t *tokens, *wanted; /* [max_rows] room for the batch, and for what is asked of it */
    struct R(seq) * seqs;
    struct R(batch) batch; /* of the last net_forward() */
    /* Trainer only. */
    struct R(acts) d; /* gradients of the layer at hand */
    real *dx;         /* gradient of the stream */
    wide *dlogprobs, *dtaps, *work;
    real *dlogits, *dlatents, *dgathered;
};

/* The norms inside MLA keep their own eps; rms_norm_eps of the config is for all others. */
#define POLICY_LATENT_EPS 1e-6

enum { POLICY_LOGIT_ROWS = 64 /* of dlogits */ };

/* Takes memory from base (NULL: counts only); returns the bytes used.  `train`: keep activations.
 * With a base it also allocates n->layers, NULL when memory is out; net_finish() frees them. */
size_t R(net_lay_out)(struct R(net) * n, const struct policy_model *m, int max_rows, int train,
                      void *base);
void R(net_finish)(struct R(net) * n);

/* Runs the layers on `b`, whose arrays lie in the caller's memory; writes pages and states. */
int R(net_forward)(struct R(net) * n, const struct R(batch) * b, struct lh_error *err);
/* Logits of rows list[0..count), in backend memory, or of rows 0..count when list is NULL. */
void R(net_logits)(struct R(net) * n, const int32_t *list, int count, wide *logits);

/* grads += sum over rows i < rows-1 of d[i] * gradient of log p(tokens[i+1]), of the one sequence
 * that net_forward() and net_logits() just went over; its latents are in the one page `page`. */
void R(net_backward)(struct R(net) * n, const real *page, const wide *logits, wide temperature,
                     const wide *d, wide *grads);

/* What forward and backward share. */
struct R(kda_rows) R(net_kda_rows)(const struct R(acts) * a);
struct kda_shape R(net_kda_shape)(const struct policy_model *m);
struct mla_shape R(net_mla_shape)(const struct policy_model *m);
/* Numbers of one expert's parameters: gate|up, and down behind it from expert_down on. */
size_t R(net_expert_stride)(const struct policy_model *m);
size_t R(net_expert_down)(const struct policy_model *m);

#endif

/* The network over the op table: one forward for rollout and trainer, and its gradient.
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
 * each (token, choice), sorted by expert. */
/* clang-format off */
#define POLICY_ACTS(X)                                                                             \
    X(x) X(xn) X(proj)                                                                             \
    X(conv) X(qkv) X(z) X(g) X(alpha) X(beta) X(o) X(gate)                                         \
    X(qn) X(q) X(qabs) X(lse) X(olat)                                                              \
    X(y) X(xm) X(xmn) X(gu) X(h)                                                                   \
    X(scores) X(weight) X(egu) X(eh) X(ye)
/* clang-format on */
#define POLICY_ACT_ONE(name)   +1
#define POLICY_ACT_REAL(name)  real *name;
#define POLICY_ACT_WIDTH(name) size_t name;
enum { POLICY_N_ACTS = 0 POLICY_ACTS(POLICY_ACT_ONE) };

struct R(acts) {
    union {
        struct {
            POLICY_ACTS(POLICY_ACT_REAL)
        };
        real *all[POLICY_N_ACTS];
    };
    real *snaps;     /* KDA states every KDA_SPAN tokens; NULL in rollout */
    int32_t *choice; /* [rows][top] */
    int32_t *place;  /* [rows][top] row among the experts' */
    int32_t *first;  /* [experts + 1] first row of an expert */
};

/* Tokens [row, row + n) of the batch continue one sequence at position `start`. */
struct R(seq) {
    int row, n;
    int64_t start;
    real *const *pages;
    real *state;
};

struct R(net) {
    const struct policy_model *m;
    const real *w;
    const struct R(policy_ops) * ops;
    int max_rows, page_tokens;
    struct R(acts) * layers;
    real *last, *last_n; /* stream after all layers; the normed rows that become logits */
    real *out, *taps;    /* output of a block; convolution weights, transposed */
    real *gathered;      /* rows of xmn sorted by expert */
    /* The batch, set by the caller. */
    int rows, n_seqs;
    int32_t *tokens;
    struct R(seq) * seqs;
    /* Trainer only. */
    struct R(acts) d; /* gradients of the layer at hand */
    real *dx;         /* gradient of the stream */
    real *dlogits, *dtaps, *dlatents, *dgathered, *work;
};

/* The norms inside MLA keep their own eps; rms_norm_eps of the config is for all others. */
#define POLICY_LATENT_EPS 1e-6

enum { POLICY_LOGIT_ROWS = 64 /* of dlogits */ };

/* Takes memory from base (NULL: counts only); returns the bytes used.  `train`: keep activations.
 */
size_t R(net_lay_out)(struct R(net) * n, const struct policy_model *m, int max_rows, int train,
                      void *base);

/* Runs the layers on the batch; writes pages and states. */
void R(net_forward)(struct R(net) * n);
/* Logits of rows list[0..count), or of rows 0..count when list is NULL. */
void R(net_logits)(struct R(net) * n, const int32_t *list, int count, real *logits);

/* grads += sum over rows i < rows-1 of d[i] * gradient of log p(tokens[i+1]), of the one sequence
 * that net_forward() and net_logits() just went over. */
void R(net_backward)(struct R(net) * n, const real *logits, real temperature, const real *d,
                     real *grads);

/* What forward and backward share. */
struct R(kda_rows) R(net_kda_rows)(const struct policy_model *m, const struct R(acts) * a, int row);
struct kda_shape R(net_kda_shape)(const struct policy_model *m);
struct mla_shape R(net_mla_shape)(const struct policy_model *m);
/* Parameters of expert e: gate|up, and down behind it. */
size_t R(net_expert)(const struct policy_model *m, int layer, int e);
void R(net_gather)(const struct R(net) * n, const struct R(acts) * a, const real *x, real *to);

#endif

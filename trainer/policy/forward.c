/* Forward over the layers: norm, attention, add, norm, feed-forward, add. */
#include "trainer/policy/backend.h"
#include "trainer/policy/net.h"

/* Where the KDA state of a layer begins in a sequence's: [layer]{[heads][dim][dim], history of the
 * convolution [kernel-1][3 width]}. */
static size_t layer_state(const struct R(net) * n, int layer)
{
    const struct policy_model *m = n->m;

    return (size_t)m->place[layer] * (policy_state_floats(m) / (size_t)m->n_kda);
}

static void kda_forward(struct R(net) * n, int layer, const struct R(acts) * a)
{
    const struct policy_model *m = n->m;
    const struct policy_layer_at *at = &m->layers[layer];
    struct kda_shape s = R(net_kda_shape)(m);
    struct R(kda_rows) r = R(net_kda_rows)(a);
    int rows = n->batch.rows, hidden = m->config.hidden, width = m->kda_width, in = m->kda_in;
    size_t state = layer_state(n, layer), history = state + (size_t)width * (size_t)s.dim;
    const real *f_a = a->proj + 3 * (ptrdiff_t)width, *g_a = f_a + s.dim, *b = g_a + s.dim;

    n->ops->linear(rows, in, hidden, a->xn, hidden, n->w + at->in, a->proj, in);
    n->ops->linear(rows, width, s.dim, f_a, in, n->w + at->f_b, a->z, width);
    n->ops->linear(rows, width, s.dim, g_a, in, n->w + at->g_b, a->gate, width);
    n->ops->conv_taps(3 * width, s.kernel, n->w + at->conv, n->taps);
    n->ops->conv(&n->batch, 3 * width, s.kernel, n->taps, a->proj, in, history, a->conv);
    n->ops->kda_inputs(&s, rows, n->w + at->a_log, n->w + at->dt_bias, b, in, &r);
    n->ops->kda_scan(&s, &n->batch, &r, state, a->snaps);
    n->ops->gated_norm(&s, rows, (wide)m->config.rms_eps, n->w + at->o_norm, a->o, a->gate, a->y);
    n->ops->linear(rows, hidden, width, a->y, width, n->w + at->o, n->out, hidden);
}

/* Where the queries are: among the projections, or behind the low-rank ones. */
static const real *mla_queries(struct R(net) * n, int layer, const struct R(acts) * a, int *ld)
{
    const struct policy_model *m = n->m;
    const struct policy_layer_at *at = &m->layers[layer];

    *ld = m->mla_in;
    if (!m->config.q_lora)
        return a->proj;
    n->ops->rmsnorm(n->batch.rows, m->q_in, (wide)POLICY_LATENT_EPS, n->w + at->q_norm, a->proj,
                    m->mla_in, a->qn, m->q_in);
    n->ops->linear(n->batch.rows, m->q_width, m->q_in, a->qn, m->q_in, n->w + at->q_b, a->q,
                   m->q_width);
    *ld = m->q_width;
    return a->q;
}

static void mla_forward(struct R(net) * n, int layer, const struct R(acts) * a)
{
    const struct policy_model *m = n->m;
    const struct policy_layer_at *at = &m->layers[layer];
    struct mla_shape s = R(net_mla_shape)(m);
    size_t page = (size_t)n->page_tokens * (size_t)m->latent;
    struct mla_layout l = {(size_t)m->place[layer] * page, n->page_tokens};
    int rows = n->batch.rows, hidden = m->config.hidden, in = m->mla_in, ldq;
    const real *q;

    n->ops->linear(rows, in, hidden, a->xn, hidden, n->w + at->in, a->proj, in);
    q = mla_queries(n, layer, a, &ldq);
    n->ops->mla_absorb(&s, rows, q, ldq, n->w + at->kv_b, a->qabs);
    n->ops->mla_store(&s, &n->batch, &l, (wide)POLICY_LATENT_EPS, n->w + at->kv_norm,
                      a->proj + m->q_in, in);
    n->ops->mla_attend(&s, &n->batch, &l, a->qabs, a->olat, a->lse);
    n->ops->mla_values(&s, rows, a->olat, n->w + at->kv_b, a->y);
    n->ops->linear(rows, hidden, m->v_width, a->y, m->v_width, n->w + at->o, n->out, hidden);
}

/* out = down (silu(gate x) * up x) */
static void glu_forward(struct R(net) * n, int rows, int ffn, const real *gate_up, const real *down,
                        const real *x, real *gu, real *h, real *out)
{
    int hidden = n->m->config.hidden;

    n->ops->linear(rows, 2 * ffn, hidden, x, hidden, gate_up, gu, 2 * ffn);
    n->ops->silu_mul(rows, ffn, gu, h);
    n->ops->linear(rows, hidden, ffn, h, ffn, down, out, hidden);
}

static void experts_forward(struct R(net) * n, int layer, const struct R(acts) * a)
{
    const struct policy_config *c = &n->m->config;
    const real *w = n->w + n->m->layers[layer].experts;
    size_t stride = R(net_expert_stride)(n->m);
    int rows = n->batch.rows * c->experts_per_token, ffn = c->moe_ffn, hidden = c->hidden;

    n->ops->gather(n->batch.rows, hidden, c->experts_per_token, a->place, a->xmn, n->gathered);
    n->ops->experts_linear(c->experts, a->first, rows, 2 * ffn, hidden, n->gathered, w, stride,
                           a->egu);
    n->ops->silu_mul(rows, ffn, a->egu, a->eh);
    n->ops->experts_linear(c->experts, a->first, rows, hidden, ffn, a->eh,
                           w + R(net_expert_down)(n->m), stride, a->ye);
}

static void moe_forward(struct R(net) * n, int layer, const struct R(acts) * a)
{
    const struct policy_config *c = &n->m->config;
    const struct policy_layer_at *at = &n->m->layers[layer];
    int rows = n->batch.rows, top = c->experts_per_token, hidden = c->hidden;

    n->ops->linear_wide(rows, c->experts, hidden, a->xmn, hidden, n->w + at->router, a->scores,
                        c->experts);
    n->ops->route(rows, c->experts, top, c->renormalize, (wide)c->routed_scale,
                  n->w + at->router_bias, a->scores, a->choice, a->weight);
    n->ops->dispatch(rows * top, c->experts, a->choice, a->place, a->first);
    experts_forward(n, layer, a);
    if (n->m->shared_ffn)
        glu_forward(n, rows, n->m->shared_ffn, n->w + at->gate_up, n->w + at->down, a->xmn, a->gu,
                    a->h, n->out);
    else
        n->ops->clear(n->out, (size_t)rows * (size_t)hidden * sizeof *n->out);
    n->ops->mix(rows, hidden, top, a->place, a->weight, a->ye, n->out);
}

static void layer_forward(struct R(net) * n, int layer, real *next)
{
    const struct policy_config *c = &n->m->config;
    const struct policy_layer_at *at = &n->m->layers[layer];
    const struct R(acts) *a = &n->layers[layer];
    size_t size = (size_t)n->batch.rows * (size_t)c->hidden;
    int hidden = c->hidden;

    n->ops->rmsnorm(n->batch.rows, hidden, (wide)c->rms_eps, n->w + at->norm, a->x, hidden, a->xn,
                    hidden);
    if (c->layer_type[layer] == POLICY_KDA)
        kda_forward(n, layer, a);
    else
        mla_forward(n, layer, a);
    n->ops->add(size, a->x, n->out, a->xm);
    n->ops->rmsnorm(n->batch.rows, hidden, (wide)c->rms_eps, n->w + at->ffn_norm, a->xm, hidden,
                    a->xmn, hidden);
    if (c->moe[layer])
        moe_forward(n, layer, a);
    else
        glu_forward(n, n->batch.rows, c->ffn, n->w + at->gate_up, n->w + at->down, a->xmn, a->gu,
                    a->h, n->out);
    n->ops->add(size, a->xm, n->out, next);
}

/* The batch's own arrays go to the backend's memory. */
static int put_batch(struct R(net) * n, const struct R(batch) * b, struct lh_error *err)
{
    const struct policy_backend *to = n->m->backend;
    int r = to->put(n->tokens, b->tokens, (size_t)b->rows * sizeof *b->tokens, err);

    if (!r)
        r = to->put(n->seqs, b->seqs, (size_t)b->n_seqs * sizeof *b->seqs, err);
    n->batch = (struct R(batch)){b->rows, b->n_seqs, b->longest, n->tokens, n->seqs};
    return r;
}

int R(net_forward)(struct R(net) * n, const struct R(batch) * b, struct lh_error *err)
{
    const struct policy_config *c = &n->m->config;
    int r = put_batch(n, b, err);

    if (r)
        return r;
    n->ops->pick(b->rows, c->hidden, n->tokens, n->w + n->m->embed, n->layers[0].x);
    for (int l = 0; l < c->layers; l++)
        layer_forward(n, l, l + 1 < c->layers ? n->layers[l + 1].x : n->last);
    return 0;
}

void R(net_logits)(struct R(net) * n, const int32_t *list, int count, wide *logits)
{
    const struct policy_config *c = &n->m->config;
    const real *rows = n->last;

    if (list) {
        n->ops->pick(count, c->hidden, list, n->last, n->out);
        rows = n->out;
    }
    n->ops->rmsnorm(count, c->hidden, (wide)c->rms_eps, n->w + n->m->norm, rows, c->hidden,
                    n->last_n, c->hidden);
    n->ops->linear_wide(count, c->vocab, c->hidden, n->last_n, c->hidden, n->w + n->m->head, logits,
                        c->vocab);
}

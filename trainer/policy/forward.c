/* Forward over the layers: norm, attention, add, norm, feed-forward, add. */
#include "trainer/policy/net.h"

/* w [c][1][kernel] of the file becomes [kernel][c], so that channels are lanes. */
static void transpose_taps(int c, int kernel, const real *w, real *to)
{
    for (int i = 0; i < c; i++)
        for (int j = 0; j < kernel; j++)
            to[(ptrdiff_t)j * c + i] = w[(ptrdiff_t)i * kernel + j];
}

/* The KDA state of a sequence: [layer]{[heads][dim][dim], [kernel-1][3 width]}. */
static real *layer_state(const struct R(net) * n, const struct R(seq) * s, int layer)
{
    const struct policy_model *m = n->m;
    size_t size = policy_state_floats(m) / (size_t)m->n_kda;

    return s->state + (size_t)m->place[layer] * size;
}

static void kda_sequences(struct R(net) * n, int layer, const struct R(acts) * a)
{
    const struct policy_model *m = n->m;
    struct kda_shape shape = R(net_kda_shape)(m);

    for (int i = 0; i < n->n_seqs; i++) {
        const struct R(seq) *s = &n->seqs[i];
        struct R(kda_rows) r = R(net_kda_rows)(m, a, s->row);
        real *hist = layer_state(n, s, layer) + (ptrdiff_t)m->kda_width * shape.dim;

        n->ops->conv(s->n, 3 * m->kda_width, shape.kernel, n->taps,
                     a->proj + (ptrdiff_t)s->row * m->kda_in, m->kda_in, hist, r.conv);
    }
}

static void kda_forward(struct R(net) * n, int layer, const struct R(acts) * a)
{
    const struct policy_model *m = n->m;
    const struct policy_layer_at *at = &m->layers[layer];
    struct kda_shape shape = R(net_kda_shape)(m);
    struct R(kda_rows) all = R(net_kda_rows)(m, a, 0);
    int rows = n->rows, hidden = m->config.hidden, width = m->kda_width, dim = shape.dim;
    const real *f_a = a->proj + 3 * (ptrdiff_t)width, *g_a = f_a + dim, *b = g_a + dim;

    n->ops->linear(rows, m->kda_in, hidden, a->xn, hidden, n->w + at->in, a->proj, m->kda_in);
    n->ops->linear(rows, width, dim, f_a, m->kda_in, n->w + at->f_b, a->z, width);
    n->ops->linear(rows, width, dim, g_a, m->kda_in, n->w + at->g_b, a->gate, width);
    transpose_taps(3 * width, shape.kernel, n->w + at->conv, n->taps);
    kda_sequences(n, layer, a);
    n->ops->kda_inputs(&shape, rows, n->w + at->a_log, n->w + at->dt_bias, b, m->kda_in, &all);
    for (int i = 0; i < n->n_seqs; i++) {
        struct R(kda_rows) r = R(net_kda_rows)(m, a, n->seqs[i].row);

        n->ops->kda_scan(&shape, n->seqs[i].n, &r, layer_state(n, &n->seqs[i], layer), a->snaps);
    }
    n->ops->gated_norm(&shape, rows, (real)m->config.rms_eps, n->w + at->o_norm, a->o, a->gate,
                       a->y);
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
    n->ops->rmsnorm(n->rows, m->q_in, (real)POLICY_LATENT_EPS, n->w + at->q_norm, a->proj,
                    m->mla_in, a->qn, m->q_in);
    n->ops->linear(n->rows, m->q_width, m->q_in, a->qn, m->q_in, n->w + at->q_b, a->q, m->q_width);
    *ld = m->q_width;
    return a->q;
}

static void mla_absorb(struct R(net) * n, int layer, const struct R(acts) * a)
{
    const struct policy_model *m = n->m;
    struct mla_shape s = R(net_mla_shape)(m);
    int ldq, ld = s.heads * m->latent;
    const real *q = mla_queries(n, layer, a, &ldq);

    for (int h = 0; h < s.heads; h++) {
        const real *from = q + (ptrdiff_t)h * (s.nope + s.rope);
        const real *keys =
            n->w + m->layers[layer].kv_b + (size_t)h * (size_t)(s.nope + s.value) * (size_t)s.lora;
        real *to = a->qabs + (ptrdiff_t)h * m->latent;

        n->ops->linear_t(n->rows, s.lora, s.nope, from, ldq, keys, s.lora, to, ld, 0);
        for (int t = 0; t < n->rows; t++)
            memcpy(to + (ptrdiff_t)t * ld + s.lora, from + (ptrdiff_t)t * ldq + s.nope,
                   (size_t)s.rope * sizeof *to);
    }
}

static struct R(mla_cache) layer_cache(const struct R(net) * n, const struct R(seq) * s, int layer)
{
    size_t size = (size_t)n->page_tokens * (size_t)n->m->latent;

    return (struct R(mla_cache)){s->pages, (size_t)n->m->place[layer] * size, n->page_tokens};
}

/* The new tokens' latents go to their pages. */
static void mla_store(struct R(net) * n, int layer, const struct R(acts) * a)
{
    const struct policy_model *m = n->m;
    struct mla_shape s = R(net_mla_shape)(m);

    for (int i = 0; i < n->n_seqs; i++) {
        struct R(mla_cache) c = layer_cache(n, &n->seqs[i], layer);

        for (int j = 0; j < n->seqs[i].n; j++) {
            int64_t t = n->seqs[i].start + j;
            const real *kv = a->proj + (ptrdiff_t)(n->seqs[i].row + j) * m->mla_in + m->q_in;
            real *to = c.pages[t / c.page_tokens] + c.layer_offset +
                       (size_t)(t % c.page_tokens) * (size_t)m->latent;

            n->ops->rmsnorm(1, s.lora, (real)POLICY_LATENT_EPS, n->w + m->layers[layer].kv_norm, kv,
                            m->mla_in, to, m->latent);
            memcpy(to + s.lora, kv + s.lora, (size_t)s.rope * sizeof *to);
        }
    }
}

static void mla_attend(struct R(net) * n, int layer, const struct R(acts) * a)
{
    struct mla_shape s = R(net_mla_shape)(n->m);

    for (int i = 0; i < n->n_seqs; i++) {
        struct R(mla_cache) c = layer_cache(n, &n->seqs[i], layer);

        for (int j = 0; j < n->seqs[i].n; j++) {
            ptrdiff_t row = n->seqs[i].row + j;

            n->ops->mla_attend(&s, &c, n->seqs[i].start + j, a->qabs + row * s.heads * n->m->latent,
                               a->olat + row * s.heads * s.lora, a->lse + row * s.heads);
        }
    }
}

static void mla_forward(struct R(net) * n, int layer, const struct R(acts) * a)
{
    const struct policy_model *m = n->m;
    const struct policy_layer_at *at = &m->layers[layer];
    struct mla_shape s = R(net_mla_shape)(m);
    int hidden = m->config.hidden;

    n->ops->linear(n->rows, m->mla_in, hidden, a->xn, hidden, n->w + at->in, a->proj, m->mla_in);
    mla_absorb(n, layer, a);
    mla_store(n, layer, a);
    mla_attend(n, layer, a);
    for (int h = 0; h < s.heads; h++) {
        size_t skip = (size_t)h * (size_t)(s.nope + s.value) + (size_t)s.nope;

        n->ops->linear(n->rows, s.value, s.lora, a->olat + (ptrdiff_t)h * s.lora, s.heads * s.lora,
                       n->w + at->kv_b + skip * (size_t)s.lora, a->y + (ptrdiff_t)h * s.value,
                       m->v_width);
    }
    n->ops->linear(n->rows, hidden, m->v_width, a->y, m->v_width, n->w + at->o, n->out, hidden);
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

/* Counting sort of the choices by expert, stable in tokens. */
static void sort_choices(const struct R(acts) * a, int choices, int experts)
{
    memset(a->first, 0, (size_t)(experts + 1) * sizeof *a->first);
    for (int i = 0; i < choices; i++)
        a->first[a->choice[i] + 1]++;
    for (int e = 0; e < experts; e++)
        a->first[e + 1] += a->first[e];
    for (int i = 0; i < choices; i++)
        a->place[i] = a->first[a->choice[i]]++;
    for (int e = experts; e > 0; e--)
        a->first[e] = a->first[e - 1];
    a->first[0] = 0;
}

static void experts_forward(struct R(net) * n, int layer, const struct R(acts) * a)
{
    const struct policy_config *c = &n->m->config;

    R(net_gather)(n, a, a->xmn, n->gathered);
    for (int e = 0; e < c->experts; e++) {
        ptrdiff_t from = a->first[e];
        const real *w = n->w + R(net_expert)(n->m, layer, e);

        glu_forward(n, a->first[e + 1] - a->first[e], c->moe_ffn, w,
                    w + 2 * (ptrdiff_t)c->moe_ffn * c->hidden, n->gathered + from * c->hidden,
                    a->egu + from * 2 * c->moe_ffn, a->eh + from * c->moe_ffn,
                    a->ye + from * c->hidden);
    }
}

static void moe_forward(struct R(net) * n, int layer, const struct R(acts) * a)
{
    const struct policy_config *c = &n->m->config;
    const struct policy_layer_at *at = &n->m->layers[layer];
    int top = c->experts_per_token, hidden = c->hidden;

    n->ops->linear(n->rows, c->experts, hidden, a->xmn, hidden, n->w + at->router, a->scores,
                   c->experts);
    n->ops->route(n->rows, c->experts, top, c->renormalize, (real)c->routed_scale,
                  n->w + at->router_bias, a->scores, a->choice, a->weight);
    sort_choices(a, n->rows * top, c->experts);
    experts_forward(n, layer, a);
    if (n->m->shared_ffn)
        glu_forward(n, n->rows, n->m->shared_ffn, n->w + at->gate_up, n->w + at->down, a->xmn,
                    a->gu, a->h, n->out);
    else
        memset(n->out, 0, (size_t)n->rows * (size_t)hidden * sizeof *n->out);
    for (int i = 0; i < n->rows * top; i++) { /* in a token's order of choice */
        real *out = n->out + (ptrdiff_t)(i / top) * hidden;
        const real *y = a->ye + (ptrdiff_t)a->place[i] * hidden;

        for (int j = 0; j < hidden; j++)
            out[j] = rfma(a->weight[i], y[j], out[j]);
    }
}

static void layer_forward(struct R(net) * n, int layer, real *next)
{
    const struct policy_config *c = &n->m->config;
    const struct policy_layer_at *at = &n->m->layers[layer];
    const struct R(acts) *a = &n->layers[layer];
    size_t size = (size_t)n->rows * (size_t)c->hidden;
    int hidden = c->hidden;

    n->ops->rmsnorm(n->rows, hidden, (real)c->rms_eps, n->w + at->norm, a->x, hidden, a->xn,
                    hidden);
    if (c->layer_type[layer] == POLICY_KDA)
        kda_forward(n, layer, a);
    else
        mla_forward(n, layer, a);
    n->ops->add(size, a->x, n->out, a->xm);
    n->ops->rmsnorm(n->rows, hidden, (real)c->rms_eps, n->w + at->ffn_norm, a->xm, hidden, a->xmn,
                    hidden);
    if (c->moe[layer])
        moe_forward(n, layer, a);
    else
        glu_forward(n, n->rows, c->ffn, n->w + at->gate_up, n->w + at->down, a->xmn, a->gu, a->h,
                    n->out);
    n->ops->add(size, a->xm, n->out, next);
}

void R(net_forward)(struct R(net) * n)
{
    const struct policy_config *c = &n->m->config;

    for (int t = 0; t < n->rows; t++)
        memcpy(n->layers[0].x + (ptrdiff_t)t * c->hidden,
               n->w + n->m->embed + (size_t)n->tokens[t] * (size_t)c->hidden,
               (size_t)c->hidden * sizeof(real));
    for (int l = 0; l < c->layers; l++)
        layer_forward(n, l, l + 1 < c->layers ? n->layers[l + 1].x : n->last);
}

void R(net_logits)(struct R(net) * n, const int32_t *list, int count, real *logits)
{
    const struct policy_config *c = &n->m->config;

    for (int i = 0; i < count; i++)
        n->ops->rmsnorm(1, c->hidden, (real)c->rms_eps, n->w + n->m->norm,
                        n->last + (ptrdiff_t)(list ? list[i] : i) * c->hidden, c->hidden,
                        n->last_n + (ptrdiff_t)i * c->hidden, c->hidden);
    n->ops->linear(count, c->vocab, c->hidden, n->last_n, c->hidden, n->w + n->m->head, logits,
                   c->vocab);
}

/* The gradient of forward.c, block by block in reverse.  n->dx holds the gradient of the stream at
 * the point reached; each block adds what comes through it. */
#include "trainer/policy/net.h"

struct R(back) {
    struct R(net) * n;
    const real *page;
    wide *g; /* gradients of the weights, laid out like them */
};

/* y = x w': dx, dw of a projection whose input and output are both dense or strided rows. */
static void back_linear(const struct R(back) * b, int rows, int out, int in, const real *dy,
                        int ldy, const real *x, int ldx, size_t w, real *dx, int lddx, int add)
{
    b->n->ops->back_weight(rows, out, in, dy, ldy, x, ldx, b->g + w, in);
    b->n->ops->back_input(rows, out, in, dy, ldy, b->n->w + w, dx, lddx, add);
}

static void conv_backward(const struct R(back) * b, size_t w, const real *proj, int in)
{
    struct R(net) *n = b->n;
    int taps = 3 * n->m->kda_width, kernel = n->m->config.conv_kernel;

    n->ops->conv_taps(taps, kernel, n->w + w, n->taps);
    n->ops->clear(n->dtaps, (size_t)taps * (size_t)kernel * sizeof *n->dtaps);
    n->ops->back_conv(n->batch.rows, taps, kernel, n->taps, proj, in, n->d.conv, n->d.proj, in,
                      n->dtaps);
    n->ops->back_conv_taps(taps, kernel, n->dtaps, b->g + w);
}

static void kda_backward(const struct R(back) * b, int layer, const struct R(acts) * a)
{
    struct R(net) *n = b->n;
    const struct policy_model *m = n->m;
    const struct policy_layer_at *at = &m->layers[layer];
    struct kda_shape s = R(net_kda_shape)(m);
    struct R(kda_rows) r = R(net_kda_rows)(a), d = R(net_kda_rows)(&n->d);
    int rows = n->batch.rows, hidden = m->config.hidden, width = m->kda_width, in = m->kda_in;
    ptrdiff_t f_a = 3 * (ptrdiff_t)width, g_a = f_a + s.dim, beta = g_a + s.dim;

    back_linear(b, rows, hidden, width, n->dx, hidden, a->y, width, at->o, n->d.y, width, 0);
    n->ops->back_gated_norm(&s, rows, (wide)m->config.rms_eps, n->w + at->o_norm, a->o, a->gate,
                            n->d.y, n->d.o, n->d.gate, b->g + at->o_norm);
    n->ops->back_kda_scan(&s, rows, &r, a->snaps, &d, n->work);
    n->ops->back_kda_inputs(&s, rows, n->w + at->a_log, n->w + at->dt_bias, &r, &d,
                            n->d.proj + beta, in, b->g + at->a_log, b->g + at->dt_bias);
    back_linear(b, rows, width, s.dim, n->d.z, width, a->proj + f_a, in, at->f_b, n->d.proj + f_a,
                in, 0);
    back_linear(b, rows, width, s.dim, n->d.gate, width, a->proj + g_a, in, at->g_b,
                n->d.proj + g_a, in, 0);
    conv_backward(b, at->conv, a->proj, in);
    back_linear(b, rows, in, hidden, n->d.proj, in, a->xn, hidden, at->in, n->d.xn, hidden, 0);
}

/* y of a head = olat W_uv', qabs of a head = [q_nope W_uk, q_rope]. */
static void mla_back_values(const struct R(back) * b, int layer, const struct R(acts) * a)
{
    struct R(net) *n = b->n;
    struct mla_shape s = R(net_mla_shape)(n->m);
    int ldy = n->m->v_width, ldo = s.heads * s.lora;

    for (int h = 0; h < s.heads; h++) {
        size_t skip = (size_t)h * (size_t)(s.nope + s.value) + (size_t)s.nope;

        back_linear(b, n->batch.rows, s.value, s.lora, n->d.y + (ptrdiff_t)h * s.value, ldy,
                    a->olat + (ptrdiff_t)h * s.lora, ldo,
                    n->m->layers[layer].kv_b + skip * (size_t)s.lora,
                    n->d.olat + (ptrdiff_t)h * s.lora, ldo, 0);
    }
}

static void mla_back_queries(const struct R(back) * b, int layer, const real *q, real *dq, int ldq)
{
    struct R(net) *n = b->n;
    struct mla_shape s = R(net_mla_shape)(n->m);
    int ld = s.heads * n->m->latent;

    for (int h = 0; h < s.heads; h++) {
        size_t w =
            n->m->layers[layer].kv_b + (size_t)h * (size_t)(s.nope + s.value) * (size_t)s.lora;
        const real *d = n->d.qabs + (ptrdiff_t)h * n->m->latent;
        ptrdiff_t head = (ptrdiff_t)h * (s.nope + s.rope);

        n->ops->back_weight(n->batch.rows, s.nope, s.lora, q + head, ldq, d, ld, b->g + w, s.lora);
        n->ops->product(n->batch.rows, s.nope, s.lora, d, ld, n->w + w, s.lora, dq + head, ldq);
        n->ops->copy_columns(n->batch.rows, s.rope, d + s.lora, ld, dq + head + s.nope, ldq);
    }
}

/* Gradient of the latents to the kv columns of proj. */
static void mla_back_latents(const struct R(back) * b, int layer, const struct R(acts) * a)
{
    struct R(net) *n = b->n;
    const struct policy_model *m = n->m;
    struct mla_shape s = R(net_mla_shape)(m);
    size_t norm = m->layers[layer].kv_norm;
    real *d = n->d.proj + m->q_in;

    n->ops->clear_columns(n->batch.rows, s.lora, d, m->mla_in);
    n->ops->copy_columns(n->batch.rows, s.rope, n->dlatents + s.lora, m->latent, d + s.lora,
                         m->mla_in);
    n->ops->back_rmsnorm(n->batch.rows, s.lora, (wide)POLICY_LATENT_EPS, n->w + norm,
                         a->proj + m->q_in, m->mla_in, n->dlatents, m->latent, d, m->mla_in,
                         b->g + norm);
}

static void mla_back_low_rank(const struct R(back) * b, int layer, const struct R(acts) * a)
{
    struct R(net) *n = b->n;
    const struct policy_model *m = n->m;
    const struct policy_layer_at *at = &m->layers[layer];

    back_linear(b, n->batch.rows, m->q_width, m->q_in, n->d.q, m->q_width, a->qn, m->q_in, at->q_b,
                n->d.qn, m->q_in, 0);
    n->ops->clear_columns(n->batch.rows, m->q_in, n->d.proj, m->mla_in);
    n->ops->back_rmsnorm(n->batch.rows, m->q_in, (wide)POLICY_LATENT_EPS, n->w + at->q_norm,
                         a->proj, m->mla_in, n->d.qn, m->q_in, n->d.proj, m->mla_in,
                         b->g + at->q_norm);
}

static void mla_backward(const struct R(back) * b, int layer, const struct R(acts) * a)
{
    struct R(net) *n = b->n;
    const struct policy_model *m = n->m;
    const struct policy_layer_at *at = &m->layers[layer];
    struct mla_shape s = R(net_mla_shape)(m);
    int hidden = m->config.hidden, in = m->mla_in;
    size_t page = (size_t)n->page_tokens * (size_t)m->latent;

    back_linear(b, n->batch.rows, hidden, m->v_width, n->dx, hidden, a->y, m->v_width, at->o,
                n->d.y, m->v_width, 0);
    mla_back_values(b, layer, a);
    n->ops->back_mla_attend(&s, n->batch.rows, b->page + (size_t)m->place[layer] * page, a->qabs,
                            a->olat, a->lse, n->d.olat, n->d.qabs, n->dlatents, n->work);
    if (m->config.q_lora) {
        mla_back_queries(b, layer, a->q, n->d.q, m->q_width);
        mla_back_low_rank(b, layer, a);
    } else {
        mla_back_queries(b, layer, a->proj, n->d.proj, in);
    }
    mla_back_latents(b, layer, a);
    back_linear(b, n->batch.rows, in, hidden, n->d.proj, in, a->xn, hidden, at->in, n->d.xn, hidden,
                0);
}

/* Of forward.c's glu_forward(); w is where gate|up lies, down behind it at w_down. */
static void glu_backward(const struct R(back) * b, int rows, int ffn, size_t w, size_t w_down,
                         const real *x, const real *gu, const real *h, const real *dout, real *dgu,
                         real *dh, real *dx)
{
    int hidden = b->n->m->config.hidden;

    back_linear(b, rows, hidden, ffn, dout, hidden, h, ffn, w_down, dh, ffn, 0);
    b->n->ops->back_silu_mul(rows, ffn, gu, dh, dgu);
    back_linear(b, rows, 2 * ffn, hidden, dgu, 2 * ffn, x, hidden, w, dx, hidden, 0);
}

static void experts_backward(const struct R(back) * b, int layer, const struct R(acts) * a)
{
    struct R(net) *n = b->n;
    const struct policy_config *c = &n->m->config;
    int rows = n->batch.rows, top = c->experts_per_token, hidden = c->hidden, ffn = c->moe_ffn;
    size_t w = n->m->layers[layer].experts, down = w + R(net_expert_down)(n->m);
    size_t stride = R(net_expert_stride)(n->m);

    n->ops->back_mix(rows, hidden, top, a->place, a->weight, a->ye, n->dx, n->d.ye, n->d.weight);
    n->ops->gather(rows, hidden, top, a->place, a->xmn, n->gathered);
    n->ops->back_experts_weight(c->experts, a->first, rows * top, hidden, ffn, n->d.ye, a->eh,
                                b->g + down, stride);
    n->ops->back_experts_input(c->experts, a->first, rows * top, hidden, ffn, n->d.ye, n->w + down,
                               stride, n->d.eh);
    n->ops->back_silu_mul(rows * top, ffn, a->egu, n->d.eh, n->d.egu);
    n->ops->back_experts_weight(c->experts, a->first, rows * top, 2 * ffn, hidden, n->d.egu,
                                n->gathered, b->g + w, stride);
    n->ops->back_experts_input(c->experts, a->first, rows * top, 2 * ffn, hidden, n->d.egu,
                               n->w + w, stride, n->dgathered);
    n->ops->back_gather(rows, hidden, top, a->place, n->dgathered, n->d.xmn);
}

static void moe_backward(const struct R(back) * b, int layer, const struct R(acts) * a)
{
    struct R(net) *n = b->n;
    const struct policy_config *c = &n->m->config;
    const struct policy_layer_at *at = &n->m->layers[layer];

    if (n->m->shared_ffn)
        glu_backward(b, n->batch.rows, n->m->shared_ffn, at->gate_up, at->down, a->xmn, a->gu, a->h,
                     n->dx, n->d.gu, n->d.h, n->d.xmn);
    else
        n->ops->clear(n->d.xmn, (size_t)n->batch.rows * (size_t)c->hidden * sizeof(real));
    experts_backward(b, layer, a);
    n->ops->back_route(n->batch.rows, c->experts, c->experts_per_token, c->renormalize,
                       (wide)c->routed_scale, a->scores, a->choice, n->d.weight, n->d.dscores);
    back_linear(b, n->batch.rows, c->experts, c->hidden, n->d.dscores, c->experts, a->xmn,
                c->hidden, at->router, n->d.xmn, c->hidden, 1);
}

static void layer_backward(const struct R(back) * b, int layer)
{
    struct R(net) *n = b->n;
    const struct policy_config *c = &n->m->config;
    const struct policy_layer_at *at = &n->m->layers[layer];
    const struct R(acts) *a = &n->layers[layer];
    int hidden = c->hidden;

    if (c->moe[layer])
        moe_backward(b, layer, a);
    else
        glu_backward(b, n->batch.rows, c->ffn, at->gate_up, at->down, a->xmn, a->gu, a->h, n->dx,
                     n->d.gu, n->d.h, n->d.xmn);
    n->ops->back_rmsnorm(n->batch.rows, hidden, (wide)c->rms_eps, n->w + at->ffn_norm, a->xm,
                         hidden, n->d.xmn, hidden, n->dx, hidden, b->g + at->ffn_norm);
    if (c->layer_type[layer] == POLICY_KDA)
        kda_backward(b, layer, a);
    else
        mla_backward(b, layer, a);
    n->ops->back_rmsnorm(n->batch.rows, hidden, (wide)c->rms_eps, n->w + at->norm, a->x, hidden,
                         n->d.xn, hidden, n->dx, hidden, b->g + at->norm);
}

/* Head and last norm, a block of rows at a time: a row of dlogits is as long as the vocabulary. */
static void head_backward(const struct R(back) * b, const wide *logits, wide temperature,
                          const wide *d)
{
    struct R(net) *n = b->n;
    const struct policy_config *c = &n->m->config;
    int hidden = c->hidden, count = n->batch.rows - 1;

    n->ops->clear(n->dx, (size_t)n->batch.rows * (size_t)hidden * sizeof(real));
    for (int from = 0; from < count; from += POLICY_LOGIT_ROWS) {
        int rows = count - from < POLICY_LOGIT_ROWS ? count - from : POLICY_LOGIT_ROWS;
        ptrdiff_t at = (ptrdiff_t)from * hidden;

        n->ops->back_logprob(rows, c->vocab, logits + (ptrdiff_t)from * c->vocab, temperature,
                             n->tokens + from + 1, d + from, n->dlogits);
        back_linear(b, rows, c->vocab, hidden, n->dlogits, c->vocab, n->last_n + at, hidden,
                    n->m->head, n->d.xn, hidden, 0);
        n->ops->back_rmsnorm(rows, hidden, (wide)c->rms_eps, n->w + n->m->norm, n->last + at,
                             hidden, n->d.xn, hidden, n->dx + at, hidden, b->g + n->m->norm);
    }
}

void R(net_backward)(struct R(net) * n, const real *page, const wide *logits, wide temperature,
                     const wide *d, wide *grads)
{
    const struct R(back) b = {n, page, grads};
    int hidden = n->m->config.hidden;

    head_backward(&b, logits, temperature, d);
    for (int l = n->m->config.layers - 1; l >= 0; l--)
        layer_backward(&b, l);
    n->ops->back_pick(n->batch.rows, hidden, n->tokens, n->dx, grads + n->m->embed);
}

/* Memory of a net, and the small things forward and backward share. */
#include "trainer/policy/net.h"

struct arena {
    char *base;
    size_t used;
};

static void *take(struct arena *a, size_t count, size_t size)
{
    void *p = a->base ? a->base + a->used : NULL;

    a->used += (count * size + 63) / 64 * 64;
    return p;
}

union widths {
    struct {
        POLICY_ACTS(POLICY_ACT_WIDTH)
    };
    size_t all[POLICY_N_ACTS];
};

static union widths attention_widths(const struct policy_model *m, enum policy_layer type)
{
    size_t kda = (size_t)m->kda_width, heads = (size_t)m->config.heads;

    if (type == POLICY_KDA)
        return (union widths){.proj = (size_t)m->kda_in,
                              .conv = 3 * kda,
                              .qkv = 3 * kda,
                              .z = kda,
                              .g = kda,
                              .alpha = kda,
                              .beta = (size_t)m->config.kda_heads,
                              .o = kda,
                              .gate = kda,
                              .y = kda};
    return (union widths){.proj = (size_t)m->mla_in,
                          .qn = (size_t)m->config.q_lora,
                          .q = m->config.q_lora ? (size_t)m->q_width : 0,
                          .qabs = heads * (size_t)m->latent,
                          .lse = heads,
                          .olat = heads * (size_t)m->config.kv_lora,
                          .y = (size_t)m->v_width};
}

static union widths layer_widths(const struct policy_model *m, int layer)
{
    union widths w = attention_widths(m, m->config.layer_type[layer]);
    size_t top = (size_t)m->config.experts_per_token, ffn = (size_t)m->config.ffn;

    w.x = w.xn = w.xm = w.xmn = (size_t)m->config.hidden;
    if (m->config.moe[layer]) {
        ffn = (size_t)m->shared_ffn;
        w.scores = (size_t)m->config.experts;
        w.weight = top;
        w.egu = 2 * top * (size_t)m->config.moe_ffn;
        w.eh = top * (size_t)m->config.moe_ffn;
        w.ye = top * (size_t)m->config.hidden;
    }
    w.gu = 2 * ffn;
    w.h = ffn;
    return w;
}

static union widths all_widths(const struct policy_model *m)
{
    union widths most = {.x = 0};

    for (int l = 0; l < m->config.layers; l++) {
        union widths w = layer_widths(m, l);

        for (int i = 0; i < POLICY_N_ACTS; i++)
            most.all[i] = w.all[i] > most.all[i] ? w.all[i] : most.all[i];
    }
    return most;
}

static struct R(acts)
    take_acts(struct arena *a, const struct policy_model *m, union widths w, size_t rows)
{
    size_t top = (size_t)m->config.experts_per_token;
    struct R(acts) acts = {.snaps = NULL};

    for (int i = 0; i < POLICY_N_ACTS; i++)
        acts.all[i] = take(a, rows * w.all[i], sizeof(real));
    if (w.weight) {
        acts.choice = take(a, rows * top, sizeof(int32_t));
        acts.place = take(a, rows * top, sizeof(int32_t));
        acts.first = take(a, (size_t)m->config.experts + 1, sizeof(int32_t));
    }
    return acts;
}

static void take_layers(struct R(net) * n, struct arena *a, int train)
{
    const struct policy_model *m = n->m;
    size_t rows = (size_t)n->max_rows, spans = (rows + KDA_SPAN - 1) / KDA_SPAN;
    size_t state = (size_t)m->kda_width * (size_t)m->config.kda_head_dim;
    struct R(acts) shared = {.snaps = NULL};

    n->layers = take(a, (size_t)m->config.layers, sizeof *n->layers);
    if (!train)
        shared = take_acts(a, m, all_widths(m), rows);
    for (int l = 0; l < m->config.layers; l++) {
        struct R(acts) acts = train ? take_acts(a, m, layer_widths(m, l), rows) : shared;

        if (train && m->config.layer_type[l] == POLICY_KDA)
            acts.snaps = take(a, spans * state, sizeof(real));
        if (n->layers)
            n->layers[l] = acts;
    }
}

static size_t largest(size_t a, size_t b)
{
    return a > b ? a : b;
}

static void take_gradients(struct R(net) * n, struct arena *a)
{
    const struct policy_model *m = n->m;
    size_t rows = (size_t)n->max_rows, hidden = (size_t)m->config.hidden;
    size_t dim = (size_t)m->config.kda_head_dim;
    size_t scan = (KDA_SPAN + 2) * dim * dim + (KDA_SPAN + 1) * dim, attend = 2 * MLA_TILE * rows;

    n->d = take_acts(a, m, all_widths(m), rows);
    n->dx = take(a, rows * hidden, sizeof(real));
    n->dlogits = take(a, POLICY_LOGIT_ROWS * (size_t)m->config.vocab, sizeof(real));
    n->dtaps = take(a, 3 * (size_t)m->kda_width * (size_t)m->config.conv_kernel, sizeof(real));
    n->dlatents = take(a, rows * (size_t)m->latent, sizeof(real));
    n->dgathered = take(a, rows * (size_t)m->config.experts_per_token * hidden, sizeof(real));
    n->work = take(a, largest(scan, attend), sizeof(real));
}

size_t R(net_lay_out)(struct R(net) * n, const struct policy_model *m, int max_rows, int train,
                      void *base)
{
    struct arena a = {.base = base};
    size_t rows = (size_t)max_rows, hidden = (size_t)m->config.hidden;

    n->m = m;
    n->max_rows = max_rows;
    n->ops = R(policy_cpu_ops)();
    take_layers(n, &a, train);
    n->last = take(&a, rows * hidden, sizeof(real));
    n->last_n = take(&a, rows * hidden, sizeof(real));
    n->out = take(&a, rows * hidden, sizeof(real));
    n->taps = take(&a, 3 * (size_t)m->kda_width * (size_t)m->config.conv_kernel, sizeof(real));
    n->gathered = take(&a, rows * (size_t)m->config.experts_per_token * hidden, sizeof(real));
    n->tokens = take(&a, rows, sizeof *n->tokens);
    n->seqs = take(&a, rows, sizeof *n->seqs);
    if (train)
        take_gradients(n, &a);
    return a.used;
}

struct kda_shape R(net_kda_shape)(const struct policy_model *m)
{
    return (struct kda_shape){m->config.kda_heads, m->config.kda_head_dim, m->config.conv_kernel};
}

struct mla_shape R(net_mla_shape)(const struct policy_model *m)
{
    const struct policy_config *c = &m->config;

    return (struct mla_shape){c->heads, c->qk_nope, c->qk_rope, c->v_head, c->kv_lora};
}

struct R(kda_rows) R(net_kda_rows)(const struct policy_model *m, const struct R(acts) * a, int row)
{
    ptrdiff_t at = (ptrdiff_t)row * m->kda_width;

    return (struct R(kda_rows)){.conv = a->conv + 3 * at,
                                .qkv = a->qkv + 3 * at,
                                .z = a->z + at,
                                .g = a->g + at,
                                .alpha = a->alpha + at,
                                .beta = a->beta + (ptrdiff_t)row * m->config.kda_heads,
                                .o = a->o + at};
}

size_t R(net_expert)(const struct policy_model *m, int layer, int e)
{
    return m->layers[layer].experts +
           3 * (size_t)e * (size_t)m->config.moe_ffn * (size_t)m->config.hidden;
}

/* to[place] = x[token] for every choice of every token. */
void R(net_gather)(const struct R(net) * n, const struct R(acts) * a, const real *x, real *to)
{
    int hidden = n->m->config.hidden, top = n->m->config.experts_per_token;

    for (int i = 0; i < n->rows * top; i++)
        memcpy(to + (ptrdiff_t)a->place[i] * hidden, x + (ptrdiff_t)(i / top) * hidden,
               (size_t)hidden * sizeof *to);
}

/* Memory of a net, and the small things forward and backward share. */
#include "trainer/policy/net.h"

#include <stdlib.h>

#include "trainer/policy/backend.h"

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

#define POLICY_ACT_WIDTH(type, name) size_t name;
struct widths {
    POLICY_ACTS(POLICY_ACT_WIDTH)
};

static struct widths attention_widths(const struct policy_model *m, enum policy_layer type)
{
    size_t kda = (size_t)m->kda_width, heads = (size_t)m->config.heads;

    if (type == POLICY_KDA)
        return (struct widths){.proj = (size_t)m->kda_in,
                               .conv = 3 * kda,
                               .qkv = 3 * kda,
                               .z = kda,
                               .g = kda,
                               .alpha = kda,
                               .beta = (size_t)m->config.kda_heads,
                               .o = kda,
                               .gate = kda,
                               .y = kda};
    return (struct widths){.proj = (size_t)m->mla_in,
                           .qn = (size_t)m->config.q_lora,
                           .q = m->config.q_lora ? (size_t)m->q_width : 0,
                           .qabs = heads * (size_t)m->latent,
                           .lse = heads,
                           .olat = heads * (size_t)m->config.kv_lora,
                           .y = (size_t)m->v_width};
}

static struct widths layer_widths(const struct policy_model *m, int layer)
{
    struct widths w = attention_widths(m, m->config.layer_type[layer]);
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

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static struct widths all_widths(const struct policy_model *m)
{
    struct widths most = {.x = 0};

    for (int l = 0; l < m->config.layers; l++) {
        struct widths w = layer_widths(m, l);

#define POLICY_ACT_LARGER(type, name) most.name = larger(most.name, w.name);
        POLICY_ACTS(POLICY_ACT_LARGER)
#undef POLICY_ACT_LARGER
    }
    return most;
}

static struct R(acts)
    take_acts(struct arena *a, const struct policy_model *m, struct widths w, size_t rows)
{
    size_t top = (size_t)m->config.experts_per_token;
    struct R(acts) acts = {.snaps = NULL};

#define POLICY_ACT_TAKE(type, name) acts.name = take(a, rows * w.name, sizeof(type));
    POLICY_ACTS(POLICY_ACT_TAKE)
#undef POLICY_ACT_TAKE
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

    n->layers = a->base ? calloc((size_t)m->config.layers, sizeof *n->layers) : NULL;
    if (!train)
        shared = take_acts(a, m, all_widths(m), rows);
    for (int l = 0; l < m->config.layers; l++) {
        struct R(acts) acts = train ? take_acts(a, m, layer_widths(m, l), rows) : shared;

        if (train && m->config.layer_type[l] == POLICY_KDA)
            acts.snaps = take(a, spans * state, sizeof(wide));
        if (n->layers)
            n->layers[l] = acts;
    }
}

static void take_gradients(struct R(net) * n, struct arena *a)
{
    const struct policy_model *m = n->m;
    size_t rows = (size_t)n->max_rows, hidden = (size_t)m->config.hidden;
    struct kda_shape k = R(net_kda_shape)(m);
    struct mla_shape s = R(net_mla_shape)(m);
    struct widths w = all_widths(m);

    w.dscores = w.scores;
    n->d = take_acts(a, m, w, rows);
    n->dx = take(a, rows * hidden, sizeof(real));
    n->dlogprobs = take(a, rows, sizeof(wide));
    n->dlogits = take(a, POLICY_LOGIT_ROWS * (size_t)m->config.vocab, sizeof(real));
    n->dtaps = take(a, 3 * (size_t)m->kda_width * (size_t)m->config.conv_kernel, sizeof(wide));
    n->dlatents = take(a, rows * (size_t)m->latent, sizeof(real));
    n->dgathered = take(a, rows * (size_t)m->config.experts_per_token * hidden, sizeof(real));
    n->work = take(a, n->ops->work(&k, &s, n->max_rows), sizeof(wide));
}

size_t R(net_lay_out)(struct R(net) * n, const struct policy_model *m, int max_rows, int train,
                      void *base)
{
    struct arena a = {.base = base};
    size_t rows = (size_t)max_rows, hidden = (size_t)m->config.hidden;

    n->m = m;
    n->max_rows = max_rows;
    n->ops = R(policy_ops_of)(m);
    n->batch.rows = 0;
    take_layers(n, &a, train);
    n->last = take(&a, rows * hidden, sizeof(real));
    n->last_n = take(&a, rows * hidden, sizeof(real));
    n->out = take(&a, rows * hidden, sizeof(real));
    n->taps = take(&a, 3 * (size_t)m->kda_width * (size_t)m->config.conv_kernel, sizeof(real));
    n->gathered = take(&a, rows * (size_t)m->config.experts_per_token * hidden, sizeof(real));
    n->tokens = take(&a, rows, sizeof *n->tokens);
    n->wanted = take(&a, rows, sizeof *n->wanted);
    n->seqs = take(&a, rows, sizeof *n->seqs);
    if (train)
        take_gradients(n, &a);
    return a.used;
}

void R(net_finish)(struct R(net) * n)
{
    free(n->layers);
    n->layers = NULL;
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

struct R(kda_rows) R(net_kda_rows)(const struct R(acts) * a)
{
    return (struct R(kda_rows)){a->conv, a->qkv, a->z, a->g, a->alpha, a->beta, a->o};
}

size_t R(net_expert_stride)(const struct policy_model *m)
{
    return 3 * (size_t)m->config.moe_ffn * (size_t)m->config.hidden;
}

size_t R(net_expert_down)(const struct policy_model *m)
{
    return 2 * (size_t)m->config.moe_ffn * (size_t)m->config.hidden;
}

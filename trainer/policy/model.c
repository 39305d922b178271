/* Lays the parameters out.  A table per kind of block names them; dimensions are symbols that the
 * config gives values to. */
#include "trainer/policy/model.h"

#include <limits.h>
#include <string.h>
#include <xxhash.h>

#include "proto/file.h"
#include "trainer/policy/backend.h"

enum dim {
    NONE,
    ONE,
    VOCAB,
    HIDDEN,
    KDA_WIDTH,
    KDA_HEADS,
    KDA_DIM,
    KERNEL,
    Q_WIDTH,
    Q_LORA,
    KV_A,
    KV_LORA,
    KV_B,
    V_WIDTH,
    FFN,
    MOE_FFN,
    SHARED_FFN,
    EXPERTS,
};

static int64_t dim_value(const struct policy_model *m, enum dim d)
{
    const struct policy_config *c = &m->config;
    const int64_t value[] = {
        [ONE] = 1,
        [VOCAB] = c->vocab,
        [HIDDEN] = c->hidden,
        [KDA_WIDTH] = m->kda_width,
        [KDA_HEADS] = c->kda_heads,
        [KDA_DIM] = c->kda_head_dim,
        [KERNEL] = c->conv_kernel,
        [Q_WIDTH] = m->q_width,
        [Q_LORA] = c->q_lora,
        [KV_A] = m->latent,
        [KV_LORA] = c->kv_lora,
        [KV_B] = (int64_t)c->heads * (c->qk_nope + c->v_head),
        [V_WIDTH] = m->v_width,
        [FFN] = c->ffn,
        [MOE_FFN] = c->moe_ffn,
        [SHARED_FFN] = m->shared_ffn,
        [EXPERTS] = c->experts,
    };

    return value[d];
}

struct row {
    const char *name;
    enum dim dims[4];
    int at; /* of the offset in struct policy_layer_at; -1: found from the row before */
    enum policy_start start;
};

#define AT(field) (int)offsetof(struct policy_layer_at, field)
#define MOE       "block_sparse_moe."
#define ATT       "self_attn."

static const struct row norm_row = {"input_layernorm.weight", {HIDDEN}, AT(norm), START_ONE};
static const struct row ffn_norm_row = {
    "post_attention_layernorm.weight", {HIDDEN}, AT(ffn_norm), START_ONE};

static const struct row kda_rows[] = {
    {ATT "q_proj.weight", {KDA_WIDTH, HIDDEN}, AT(in), START_MATRIX},
    {ATT "k_proj.weight", {KDA_WIDTH, HIDDEN}, -1, START_MATRIX},
    {ATT "v_proj.weight", {KDA_WIDTH, HIDDEN}, -1, START_MATRIX},
    {ATT "f_a_proj.weight", {KDA_DIM, HIDDEN}, -1, START_MATRIX},
    {ATT "g_a_proj.weight", {KDA_DIM, HIDDEN}, -1, START_MATRIX},
    {ATT "b_proj.weight", {KDA_HEADS, HIDDEN}, -1, START_MATRIX},
    {ATT "q_conv1d.weight", {KDA_WIDTH, ONE, KERNEL}, AT(conv), START_MATRIX},
    {ATT "k_conv1d.weight", {KDA_WIDTH, ONE, KERNEL}, -1, START_MATRIX},
    {ATT "v_conv1d.weight", {KDA_WIDTH, ONE, KERNEL}, -1, START_MATRIX},
    {ATT "f_b_proj.weight", {KDA_WIDTH, KDA_DIM}, AT(f_b), START_MATRIX},
    {ATT "g_b_proj.weight", {KDA_WIDTH, KDA_DIM}, AT(g_b), START_MATRIX},
    {ATT "A_log", {ONE, ONE, KDA_HEADS, ONE}, AT(a_log), START_A_LOG},
    {ATT "dt_bias", {KDA_WIDTH}, AT(dt_bias), START_DT},
    {ATT "o_norm.weight", {KDA_DIM}, AT(o_norm), START_ONE},
    {ATT "o_proj.weight", {HIDDEN, KDA_WIDTH}, AT(o), START_OUT},
};

static const struct row mla_q_rows[] = {
    {ATT "q_proj.weight", {Q_WIDTH, HIDDEN}, AT(in), START_MATRIX},
};

static const struct row mla_q_lora_rows[] = {
    {ATT "q_a_proj.weight", {Q_LORA, HIDDEN}, AT(in), START_MATRIX},
};

static const struct row mla_rows[] = {
    {ATT "kv_a_proj_with_mqa.weight", {KV_A, HIDDEN}, -1, START_MATRIX},
    {ATT "kv_a_layernorm.weight", {KV_LORA}, AT(kv_norm), START_ONE},
    {ATT "kv_b_proj.weight", {KV_B, KV_LORA}, AT(kv_b), START_MATRIX},
    {ATT "o_proj.weight", {HIDDEN, V_WIDTH}, AT(o), START_OUT},
};

static const struct row mla_q_b_rows[] = {
    {ATT "q_a_layernorm.weight", {Q_LORA}, AT(q_norm), START_ONE},
    {ATT "q_b_proj.weight", {Q_WIDTH, Q_LORA}, AT(q_b), START_MATRIX},
};

static const struct row dense_rows[] = {
    {MOE "gate_proj.weight", {FFN, HIDDEN}, AT(gate_up), START_MATRIX},
    {MOE "up_proj.weight", {FFN, HIDDEN}, -1, START_MATRIX},
    {MOE "down_proj.weight", {HIDDEN, FFN}, AT(down), START_OUT},
};

static const struct row router_rows[] = {
    {MOE "gate.weight", {EXPERTS, HIDDEN}, AT(router), START_MATRIX},
    {MOE "gate.e_score_correction_bias", {EXPERTS}, AT(router_bias), START_ZERO},
};

static const struct row shared_rows[] = {
    {MOE "shared_experts.gate_proj.weight", {SHARED_FFN, HIDDEN}, AT(gate_up), START_MATRIX},
    {MOE "shared_experts.up_proj.weight", {SHARED_FFN, HIDDEN}, -1, START_MATRIX},
    {MOE "shared_experts.down_proj.weight", {HIDDEN, SHARED_FFN}, AT(down), START_OUT},
};

static const struct row expert_rows[] = {
    {"w1.weight", {MOE_FFN, HIDDEN}, -1, START_MATRIX}, /* gate */
    {"w3.weight", {MOE_FFN, HIDDEN}, -1, START_MATRIX}, /* up */
    {"w2.weight", {HIDDEN, MOE_FFN}, -1, START_OUT},    /* down */
};

static const struct row embed_row = {"model.embed_tokens.weight", {VOCAB, HIDDEN}, -1, START_EMBED};
static const struct row last_norm_row = {"model.norm.weight", {HIDDEN}, -1, START_ONE};
static const struct row head_row = {"lm_head.weight", {VOCAB, HIDDEN}, -1, START_MATRIX};

static int grow(struct policy_model *m, struct lh_error *err)
{
    size_t room = m->room ? 2 * m->room : 64;
    struct policy_param *p = realloc(m->params, room * sizeof *p);
    enum policy_start *s;

    if (p)
        m->params = p;
    s = p ? realloc(m->start, room * sizeof *s) : NULL;
    if (!s)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "table of parameters: out of memory");
    m->start = s;
    m->room = room;
    return 0;
}

/* Appends one parameter called prefix + row->name; its offset goes to *at unless NULL. */
static int add(struct policy_model *m, const struct row *row, const char *prefix, size_t *at,
               struct lh_error *err)
{
    struct policy_param p = {.offset = m->floats, .count = 1};

    if (m->n_params == m->room && grow(m, err))
        return err ? err->code : LH_RESOURCE_EXHAUSTED;
    for (; p.dims < 4 && row->dims[p.dims] != NONE; p.dims++) {
        p.shape[p.dims] = dim_value(m, row->dims[p.dims]);
        if (__builtin_mul_overflow(p.count, (size_t)p.shape[p.dims], &p.count))
            p.count = SIZE_MAX;
    }
    if (p.count > ((size_t)1 << 44) - m->floats)
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s%s: the model has more than 2^44 parameters",
                       prefix, row->name);
    p.name = lh_format("%s%s", prefix, row->name);
    if (!p.name)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "table of parameters: out of memory");
    if (at) { /* else it must follow the one before */
        m->floats = (m->floats + m->align - 1) / m->align * m->align;
        p.offset = m->floats;
        *at = m->floats;
    }
    m->start[m->n_params] = row->start;
    m->params[m->n_params++] = p;
    m->floats += p.count;
    return 0;
}

static int add_rows(struct policy_model *m, int layer, const struct row *rows, size_t n,
                    struct lh_error *err)
{
    lh_autofree char *prefix = lh_format("model.layers.%d.", layer);

    if (!prefix)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "table of parameters: out of memory");
    for (size_t i = 0; i < n; i++) {
        char *at = (char *)&m->layers[layer] + rows[i].at;
        int rc = add(m, &rows[i], prefix, rows[i].at < 0 ? NULL : (size_t *)(void *)at, err);

        if (rc)
            return rc;
    }
    return 0;
}

#define ADD_ROWS(m, layer, rows, err) add_rows(m, layer, rows, LH_ARRAY_SIZE(rows), err)

static int add_attention(struct policy_model *m, int layer, struct lh_error *err)
{
    int rc;

    if (m->config.layer_type[layer] == POLICY_KDA)
        return ADD_ROWS(m, layer, kda_rows, err);
    if (m->config.q_lora)
        rc = ADD_ROWS(m, layer, mla_q_lora_rows, err);
    else
        rc = ADD_ROWS(m, layer, mla_q_rows, err);
    if (!rc)
        rc = ADD_ROWS(m, layer, mla_rows, err);
    if (!rc && m->config.q_lora)
        rc = ADD_ROWS(m, layer, mla_q_b_rows, err);
    return rc;
}

static int add_experts(struct policy_model *m, int layer, struct lh_error *err)
{
    m->floats = (m->floats + m->align - 1) / m->align * m->align;
    m->layers[layer].experts = m->floats;
    for (int e = 0; e < m->config.experts; e++) {
        lh_autofree char *prefix = lh_format("model.layers.%d." MOE "experts.%d.", layer, e);

        for (size_t i = 0; i < LH_ARRAY_SIZE(expert_rows); i++) {
            int rc = prefix ? add(m, &expert_rows[i], prefix, NULL, err)
                            : lh_fail(err, LH_RESOURCE_EXHAUSTED, "experts: out of memory");

            if (rc)
                return rc;
        }
    }
    return 0;
}

static int add_ffn(struct policy_model *m, int layer, struct lh_error *err)
{
    int rc;

    if (!m->config.moe[layer])
        return ADD_ROWS(m, layer, dense_rows, err);
    rc = ADD_ROWS(m, layer, router_rows, err);
    if (!rc && m->shared_ffn)
        rc = ADD_ROWS(m, layer, shared_rows, err);
    return rc ? rc : add_experts(m, layer, err);
}

static int add_layer(struct policy_model *m, int layer, struct lh_error *err)
{
    int rc = add_rows(m, layer, &norm_row, 1, err);

    if (!rc)
        rc = add_attention(m, layer, err);
    if (!rc)
        rc = add_rows(m, layer, &ffn_norm_row, 1, err);
    return rc ? rc : add_ffn(m, layer, err);
}

static void derive(struct policy_model *m)
{
    const struct policy_config *c = &m->config;

    m->kda_width = c->kda_heads * c->kda_head_dim;
    m->kda_in = 3 * m->kda_width + 2 * c->kda_head_dim + c->kda_heads;
    m->q_width = c->heads * (c->qk_nope + c->qk_rope);
    m->q_in = c->q_lora ? c->q_lora : m->q_width;
    m->latent = c->kv_lora + c->qk_rope;
    m->mla_in = m->q_in + m->latent;
    m->v_width = c->heads * c->v_head;
    m->shared_ffn = c->shared_experts * c->moe_ffn;
    for (int i = 0; i < c->layers; i++)
        m->place[i] = c->layer_type[i] == POLICY_KDA ? m->n_kda++ : m->n_mla++;
}

static int add_all(struct policy_model *m, struct lh_error *err)
{
    int layers = m->config.layers, rc;

    rc = add(m, &embed_row, "", &m->embed, err);
    for (int i = 0; !rc && i < layers; i++)
        rc = add_layer(m, i, err);
    if (!rc)
        rc = add(m, &last_norm_row, "", &m->norm, err);
    if (!rc && !m->config.tie_embeddings)
        rc = add(m, &head_row, "", &m->head, err);
    else if (!rc)
        m->head = m->embed;
    return rc;
}

static int lay_out(struct policy_model *m, struct lh_error *err)
{
    size_t layers = (size_t)m->config.layers;

    m->align = 1;
    m->layers = calloc(layers, sizeof *m->layers);
    m->place = calloc(layers, sizeof *m->place);
    if (!m->layers || !m->place)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%zu layers: out of memory", layers);
    derive(m);
    return add_all(m, err);
}

int policy_model_align(struct policy_model *m, size_t align, struct lh_error *err)
{
    for (size_t i = 0; i < m->n_params; i++)
        free((char *)m->params[i].name);
    m->n_params = m->floats = 0;
    m->align = align;
    return add_all(m, err);
}

/* The config's canonical text stands for shapes and options; the rest is what this code adds. */
static int take_fingerprint(struct policy_model *m, struct lh_error *err)
{
    lh_autofree char *config = policy_config_print(&m->config);
    lh_autofree char *all =
        config ? lh_format("%s\nfloat32, layout 1, tokenizer: 8 specials and 256 bytes", config)
               : NULL;
    XXH128_canonical_t c;

    if (!all)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "fingerprint: out of memory");
    XXH128_canonicalFromHash(&c, XXH3_128bits(all, strlen(all)));
    memcpy(m->fingerprint, c.digest, sizeof m->fingerprint);
    return 0;
}

struct policy_model *policy_model_parse(const char *json, size_t len, const char *name,
                                        struct lh_error *err)
{
    lh_auto(policy_model) m = calloc(1, sizeof *m);

    if (!m) {
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "%s: out of memory", name);
        return NULL;
    }
    m->backend = &policy_cpu_backend;
    if (policy_config_parse(&m->config, json, len, name, err))
        return NULL;
    if (lay_out(m, err) || take_fingerprint(m, err)) {
        lh_wrap(err, "%s", name);
        return NULL;
    }
    return lh_steal(&m);
}

struct policy_model *policy_model_open(const char *dir, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/config.json", dir);
    lh_autofree char *text = NULL;
    size_t len;

    if (!path) {
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "model %s: out of memory", dir);
        return NULL;
    }
    text = lh_read_file(path, CONFIG_MAX_BYTES, &len, err);
    return text ? policy_model_parse(text, len, path, err) : NULL;
}

void policy_model_destroy(struct policy_model *m)
{
    if (!m)
        return;
    for (size_t i = 0; i < m->n_params; i++)
        free((char *)m->params[i].name);
    free(m->params);
    free(m->start);
    free(m->layers);
    free(m->place);
    policy_config_finish(&m->config);
    free(m);
}

const struct policy_config *policy_model_config(const struct policy_model *m)
{
    return &m->config;
}

const struct policy_param *policy_model_params(const struct policy_model *m, size_t *n)
{
    *n = m->n_params;
    return m->params;
}

size_t policy_model_floats(const struct policy_model *m)
{
    return m->floats;
}

size_t policy_kv_floats(const struct policy_model *m)
{
    return (size_t)m->n_mla * (size_t)m->latent;
}

size_t policy_state_floats(const struct policy_model *m)
{
    size_t width = (size_t)m->kda_width;

    return (size_t)m->n_kda * width *
           ((size_t)m->config.kda_head_dim + 3 * (size_t)(m->config.conv_kernel - 1));
}

void policy_model_fingerprint(const struct policy_model *m, uint8_t out[16])
{
    memcpy(out, m->fingerprint, sizeof m->fingerprint);
}

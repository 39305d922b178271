/* One table of numbers drives reading, checking and writing.  Keys that this file does not know are
 * left alone, as every reader of such files does, but the few that would change the computation and
 * that the code does not implement are refused by name. */
#include "trainer/policy/config.h"

#include <jansson.h>
#include <string.h>

#include "trainer/policy/config_published.h"

struct number {
    const char *key;
    size_t at; /* in struct policy_config */
    int64_t min, max;
    int64_t absent; /* value when the key is missing; -1 = it must be there */
};

#define NUMBER(key, field, ...)                                                                    \
    {                                                                                              \
        key, offsetof(struct policy_config, field), __VA_ARGS__                                    \
    }

static const struct number numbers[] = {
    NUMBER("vocab_size", vocab, 2, 1 << 24, -1),
    NUMBER("hidden_size", hidden, 8, 1 << 16, -1),
    NUMBER("num_hidden_layers", layers, 1, CONFIG_MAX_LAYERS, -1),
    NUMBER("num_attention_heads", heads, 1, 256, -1),
    NUMBER("linear_num_heads", kda_heads, 1, 256, -1),
    NUMBER("linear_head_dim", kda_head_dim, 8, CONFIG_MAX_HEAD_DIM, -1),
    NUMBER("linear_conv_kernel_dim", conv_kernel, 1, 16, 4),
    NUMBER("kv_lora_rank", kv_lora, 1, 1 << 14, -1),
    NUMBER("q_lora_rank", q_lora, 0, 1 << 14, 0),
    NUMBER("qk_nope_head_dim", qk_nope, 1, 1 << 12, -1),
    NUMBER("qk_rope_head_dim", qk_rope, 0, 1 << 12, 0),
    NUMBER("v_head_dim", v_head, 1, 1 << 12, -1),
    NUMBER("intermediate_size", ffn, 1, 1 << 20, -1),
    NUMBER("moe_intermediate_size", moe_ffn, 1, 1 << 20, 1),
    NUMBER("num_experts", experts, 0, 1 << 14, 0),
    NUMBER("num_experts_per_token", experts_per_token, 1, 256, 1),
    NUMBER("num_shared_experts", shared_experts, 0, 256, 0),
};

/* Settings of the family that have one value here. */
struct fixed {
    const char *key, *value; /* as JSON */
};
static const struct fixed fixed[] = {
    {"model_type", "\"kimi_linear\""}, {"hidden_act", "\"silu\""}, {"attention_bias", "false"},
    {"num_expert_group", "1"},         {"topk_group", "1"},
};

/* The same of what is read and not written. */
static const struct fixed fixed_if_there[] = {
    {"mla_use_nope", "true"},
    {"moe_router_activation_func", "\"sigmoid\""},
    {"num_nextn_predict_layers", "0"},
};

static const char *const attention_names[] = {[POLICY_KDA] = CONFIG_KDA, [POLICY_MLA] = CONFIG_MLA};
static const char *const ffn_names[] = {CONFIG_DENSE, CONFIG_SPARSE};

static int *number_in(struct policy_config *c, const struct number *n)
{
    return (int *)((char *)c + n->at);
}

static int read_numbers(struct policy_config *c, const json_t *root, const char *name,
                        struct lh_error *err)
{
    for (size_t i = 0; i < LH_ARRAY_SIZE(numbers); i++) {
        const struct number *n = &numbers[i];
        const json_t *v = json_object_get(root, n->key);
        int64_t x = n->absent;

        if (v && !json_is_null(v)) {
            if (!json_is_integer(v))
                return lh_fail(err, LH_INVALID_ARGUMENT, "%s: %s must be an integer", name, n->key);
            x = json_integer_value(v);
        } else if (x < 0) {
            return lh_fail(err, LH_INVALID_ARGUMENT, "%s: %s is missing", name, n->key);
        }
        if (x < n->min || x > n->max)
            return lh_fail(err, LH_INVALID_ARGUMENT, "%s: %s is %lld, must be %lld to %lld", name,
                           n->key, (long long)x, (long long)n->min, (long long)n->max);
        *number_in(c, n) = (int)x;
    }
    return 0;
}

static int read_float(const json_t *root, const char *key, double min, double max, double absent,
                      float *to, const char *name, struct lh_error *err)
{
    const json_t *v = json_object_get(root, key);
    double x = v ? json_number_value(v) : absent;

    if (v && !json_is_number(v))
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s: %s must be a number", name, key);
    if (!(x >= min && x <= max))
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s: %s is %g, must be %g to %g", name, key, x,
                       min, max);
    *to = (float)x;
    return 0;
}

static int read_bool(const json_t *root, const char *key, bool absent, bool *to, const char *name,
                     struct lh_error *err)
{
    const json_t *v = json_object_get(root, key);

    if (v && !json_is_boolean(v))
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s: %s must be true or false", name, key);
    *to = v ? json_is_true(v) : absent;
    return 0;
}

static int check_table(const json_t *root, const struct fixed *table, size_t n, const char *name,
                       struct lh_error *err)
{
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_object_get(root, table[i].key);
        json_t *want;
        int same;

        if (!v)
            continue;
        want = json_loads(table[i].value, JSON_DECODE_ANY, NULL);
        same = want && json_equal(v, want);
        json_decref(want);
        if (!same)
            return lh_fail(err, LH_UNIMPLEMENTED, "%s: %s must be %s here", name, table[i].key,
                           table[i].value);
    }
    return 0;
}

static int check_fixed(const json_t *root, const char *name, struct lh_error *err)
{
    int r = check_table(root, fixed, LH_ARRAY_SIZE(fixed), name, err);

    return r < 0 ? r : check_table(root, fixed_if_there, LH_ARRAY_SIZE(fixed_if_there), name, err);
}

/* Which of two names entry i of the list `key` is; negative on error. */
static int read_kind(const json_t *list, int i, const char *const names[2], const char *key,
                     const char *name, struct lh_error *err)
{
    const char *s = json_string_value(json_array_get(list, (size_t)i));

    for (int k = 0; s && k < 2; k++)
        if (!strcmp(s, names[k]))
            return k;
    return lh_fail(err, LH_INVALID_ARGUMENT, "%s: %s[%d] must be \"%s\" or \"%s\"", name, key, i,
                   names[0], names[1]);
}

static int read_layers(struct policy_config *c, const json_t *root, const char *name,
                       struct lh_error *err)
{
    const json_t *attention = json_object_get(root, "layer_types");
    const json_t *ffn = json_object_get(root, "mlp_layer_types");

    if (json_array_size(attention) != (size_t)c->layers ||
        json_array_size(ffn) != (size_t)c->layers)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "%s: layer_types and mlp_layer_types must be lists of %d names", name,
                       c->layers);
    c->layer_type = calloc((size_t)c->layers, sizeof *c->layer_type);
    c->moe = calloc((size_t)c->layers, sizeof *c->moe);
    if (!c->layer_type || !c->moe)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%s: out of memory", name);
    for (int i = 0; i < c->layers; i++) {
        int a = read_kind(attention, i, attention_names, "layer_types", name, err);
        int f = a < 0 ? a : read_kind(ffn, i, ffn_names, "mlp_layer_types", name, err);

        if (f < 0)
            return f;
        c->layer_type[i] = (enum policy_layer)a;
        c->moe[i] = f == 1;
    }
    return 0;
}

static int check_together(const struct policy_config *c, const char *name, struct lh_error *err)
{
    for (int i = 0; i < c->layers; i++)
        if (c->moe[i] && c->experts_per_token > c->experts)
            return lh_fail(err, LH_INVALID_ARGUMENT,
                           "%s: num_experts_per_token %d exceeds num_experts %d", name,
                           c->experts_per_token, c->experts);
    if (c->kda_head_dim % 8)
        return lh_fail(err, LH_UNIMPLEMENTED, "%s: linear_head_dim %d must be a multiple of 8",
                       name, c->kda_head_dim);
    return 0;
}

static int read_all(struct policy_config *c, json_t *root, const char *name, struct lh_error *err)
{
    int rc = config_flatten(root, name, err);

    if (!rc)
        rc = check_fixed(root, name, err);
    if (!rc)
        rc = read_numbers(c, root, name, err);
    if (!rc)
        rc = read_float(root, "rms_norm_eps", 1e-12, 1e-2, 1e-5, &c->rms_eps, name, err);
    if (!rc)
        rc = read_float(root, "routed_scaling_factor", 1e-3, 1e3, 1, &c->routed_scale, name, err);
    if (!rc)
        rc = read_bool(root, "moe_renormalize", true, &c->renormalize, name, err);
    if (!rc)
        rc = read_bool(root, "tie_word_embeddings", false, &c->tie_embeddings, name, err);
    if (!rc)
        rc = read_layers(c, root, name, err);
    return rc ? rc : check_together(c, name, err);
}

int policy_config_parse(struct policy_config *c, const char *json, size_t len, const char *name,
                        struct lh_error *err)
{
    json_error_t at;
    json_t *root = json_loadb(json, len, JSON_REJECT_DUPLICATES, &at);
    int rc;

    memset(c, 0, sizeof *c);
    if (!json_is_object(root))
        rc = lh_fail(err, LH_INVALID_ARGUMENT, "%s:%d: not a JSON object: %s", name,
                     root ? 1 : at.line, root ? "another type" : at.text);
    else
        rc = read_all(c, root, name, err);
    json_decref(root);
    if (rc)
        policy_config_finish(c);
    return rc;
}

void policy_config_finish(struct policy_config *c)
{
    free(c->layer_type);
    free(c->moe);
    memset(c, 0, sizeof *c);
}

/* The shortest decimal that reads back as the same float: 1e-05, not 9.99999975e-06. */
static json_t *shortest(float x)
{
    char s[32];

    for (int digits = 1; digits <= 9; digits++) {
        snprintf(s, sizeof s, "%.*g", digits, (double)x);
        if (strtof(s, NULL) == x)
            break;
    }
    return json_real(strtod(s, NULL));
}

static json_t *print_layers(const struct policy_config *c, int ffn)
{
    json_t *list = json_array();

    for (int i = 0; i < c->layers; i++)
        json_array_append_new(
            list, json_string(ffn ? ffn_names[c->moe[i]] : attention_names[c->layer_type[i]]));
    return list;
}

static json_t *print_number(const struct policy_config *c, const struct number *n)
{
    int x = *(const int *)((const char *)c + n->at);

    /* The family writes null for "full-rank queries". */
    return n->at == offsetof(struct policy_config, q_lora) && !x ? json_null() : json_integer(x);
}

char *policy_config_print(const struct policy_config *c)
{
    json_t *root = json_object();
    char *text;

    json_object_set_new(root, "architectures", json_pack("[s]", "KimiLinearForCausalLM"));
    json_object_set_new(root, "dtype", json_string("float32"));
    json_object_set_new(root, "qk_head_dim", json_integer(c->qk_nope + c->qk_rope));
    json_object_set_new(root, "num_key_value_heads", json_integer(c->heads));
    for (size_t i = 0; i < LH_ARRAY_SIZE(fixed); i++)
        json_object_set_new(root, fixed[i].key, json_loads(fixed[i].value, JSON_DECODE_ANY, NULL));
    for (size_t i = 0; i < LH_ARRAY_SIZE(numbers); i++)
        json_object_set_new(root, numbers[i].key, print_number(c, &numbers[i]));
    json_object_set_new(root, "rms_norm_eps", shortest(c->rms_eps));
    json_object_set_new(root, "routed_scaling_factor", shortest(c->routed_scale));
    json_object_set_new(root, "moe_renormalize", json_boolean(c->renormalize));
    json_object_set_new(root, "tie_word_embeddings", json_boolean(c->tie_embeddings));
    json_object_set_new(root, "layer_types", print_layers(c, 0));
    json_object_set_new(root, "mlp_layer_types", print_layers(c, 1));
    text = json_dumps(root, JSON_INDENT(2) | JSON_SORT_KEYS);
    json_decref(root);
    return text;
}

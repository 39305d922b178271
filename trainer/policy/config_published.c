/* The form in which Kimi-Linear's own config.json describes its layers:
 *
 *     "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 32,
 *                            "head_dim": 128, "short_conv_kernel_size": 4},
 *     "first_k_dense_replace": 1, "moe_layer_freq": 1
 *
 * with layers counted from 1, and a layer sparse when there are experts, it is not among the first
 * K, and its index from 0 is a multiple of the frequency.  It is rewritten into the flat keys that
 * this project writes (config.c), and read as these. */
#include "trainer/policy/config_published.h"

#include "trainer/policy/config.h"

static const struct {
    const char *nested, *flat;
} renamed[] = {
    {"num_heads", "linear_num_heads"},
    {"head_dim", "linear_head_dim"},
    {"short_conv_kernel_size", "linear_conv_kernel_dim"},
};

static void rename_numbers(json_t *root, json_t *nested)
{
    for (size_t i = 0; i < LH_ARRAY_SIZE(renamed); i++) {
        json_t *v = json_object_get(nested, renamed[i].nested);
        if (v && !json_object_get(root, renamed[i].flat))
            json_object_set(root, renamed[i].flat, v);
    }
}

/* Sets the entries of `types` that `nested[key]` lists to `type`; each may be set once. */
static int set_types(json_t *types, const json_t *nested, const char *key, const char *type,
                     const char *name, struct lh_error *err)
{
    const json_t *list = json_object_get(nested, key), *v;
    size_t i;

    if (!json_is_array(list))
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s: linear_attn_config.%s must be a list", name,
                       key);
    json_array_foreach(list, i, v)
    {
        json_int_t layer = json_is_integer(v) ? json_integer_value(v) : 0;
        if (layer < 1 || layer > (json_int_t)json_array_size(types))
            return lh_fail(err, LH_INVALID_ARGUMENT,
                           "%s: linear_attn_config.%s[%zu] must be a layer, 1 to %zu", name, key, i,
                           json_array_size(types));
        if (!json_is_null(json_array_get(types, (size_t)layer - 1)))
            return lh_fail(err, LH_INVALID_ARGUMENT,
                           "%s: linear_attn_config lists layer %lld twice", name, (long long)layer);
        json_array_set_new(types, (size_t)layer - 1, json_string(type));
    }
    return 0;
}

static int name_layers(json_t *root, const json_t *nested, json_int_t layers, const char *name,
                       struct lh_error *err)
{
    json_t *types = json_array();

    for (json_int_t i = 0; i < layers; i++)
        json_array_append_new(types, json_null());
    json_object_set_new(root, "layer_types", types);
    int r = set_types(types, nested, "kda_layers", CONFIG_KDA, name, err);
    if (r == 0)
        r = set_types(types, nested, "full_attn_layers", CONFIG_MLA, name, err);
    for (size_t i = 0; r == 0 && i < json_array_size(types); i++)
        if (json_is_null(json_array_get(types, i)))
            r = lh_fail(err, LH_INVALID_ARGUMENT, "%s: linear_attn_config leaves layer %zu out",
                        name, i + 1);
    return r;
}

static json_int_t integer(const json_t *root, const char *key, json_int_t absent)
{
    const json_t *v = json_object_get(root, key);

    return json_is_integer(v) ? json_integer_value(v) : absent;
}

static void name_ffns(json_t *root, json_int_t layers)
{
    bool any = integer(root, "num_experts", 0) > 0;
    json_int_t dense = integer(root, "first_k_dense_replace", 0);
    json_int_t every = integer(root, "moe_layer_freq", 1);
    json_t *types = json_array();

    for (json_int_t i = 0; i < layers; i++) {
        bool sparse = any && i >= dense && every > 0 && i % every == 0;
        json_array_append_new(types, json_string(sparse ? CONFIG_SPARSE : CONFIG_DENSE));
    }
    json_object_set_new(root, "mlp_layer_types", types);
}

int config_flatten(json_t *root, const char *name, struct lh_error *err)
{
    json_t *nested = json_object_get(root, "linear_attn_config");
    json_int_t layers = integer(root, "num_hidden_layers", 0);

    if (!json_is_object(nested))
        return 0;
    if (layers < 1 || layers > CONFIG_MAX_LAYERS)
        return 0; /* the table of numbers says so */
    rename_numbers(root, nested);
    if (!json_object_get(root, "mlp_layer_types"))
        name_ffns(root, layers);
    return json_object_get(root, "layer_types") ? 0 : name_layers(root, nested, layers, name, err);
}

/* Model directories in and out, and what is refused with which words. */
#include "tests/unit/trainer/policy_configs.h"
#include "tests/unit/trainer/policy_util.h"

#include <math.h>

#include "trainer/policy/config.h"
#include "trainer/policy/safetensors.h"

static char *slurp(const char *dir, const char *name, size_t *len)
{
    struct lh_error err = {0};
    lh_autofree char *path = lh_format("%s/%s", dir, name);
    char *text = lh_read_file(path, 1 << 26, len, &err);

    cr_assert(text, "%s", err.message);
    return text;
}

static void same_file(const char *a, const char *b, const char *name)
{
    size_t len_a, len_b;
    lh_autofree char *in_a = slurp(a, name, &len_a), *in_b = slurp(b, name, &len_b);

    cr_assert(len_a == len_b && !memcmp(in_a, in_b, len_a), "%s differs", name);
}

static char *temporary(void)
{
    char *dir = strdup("/tmp/policy-test-XXXXXX");

    cr_assert(mkdtemp(dir));
    return dir;
}

static void save(const struct policy_model *m, const char *dir, const float *w)
{
    struct lh_error err = {0};

    cr_assert(!policy_save(m, dir, w, &err), "%s", err.message);
}

Test(policy_files, save_load_save_is_the_same_bytes)
{
    struct lh_error err = {0};
    lh_autofree char *a = temporary(), *b = temporary();
    lh_auto(policy_model) golden = util_open(GOLDEN);
    lh_auto(policy_model) again = NULL;
    lh_autofree float *w = util_weights(golden, 1);
    lh_autofree float *v = util_weights(golden, 2);
    uint8_t one[16], two[16];

    cr_assert(!policy_load(golden, GOLDEN, w, &err), "%s", err.message);
    save(golden, a, w);
    again = util_open(a);
    cr_assert(!policy_load(again, a, v, &err), "%s", err.message);
    cr_assert(!memcmp(w, v, policy_model_floats(golden) * sizeof *w));
    save(again, b, v);
    same_file(a, b, "model.safetensors");
    same_file(a, b, "config.json");
    same_file(a, GOLDEN, "model.safetensors"); /* also what the family's own writer makes */
    policy_model_fingerprint(golden, one);
    policy_model_fingerprint(again, two);
    cr_assert(!memcmp(one, two, 16));
    lh_remove_tree(a, NULL);
    lh_remove_tree(b, NULL);
}

Test(policy_files, same_seed_same_weights_another_seed_others)
{
    lh_auto(policy_model) m = util_open(QUICKSTART_MODEL);
    lh_autofree float *a = util_weights(m, 1), *b = util_weights(m, 1), *c = util_weights(m, 2);
    size_t size = policy_model_floats(m) * sizeof *a;

    cr_assert(!memcmp(a, b, size));
    cr_assert(memcmp(a, c, size));
    cr_assert(policy_model_floats(m) > 550000 && policy_model_floats(m) < 570000);
    cr_assert(policy_model_config(m)->vocab == POLICY_BYTE_VOCAB);
}

Test(policy_files, fingerprint_follows_the_config)
{
    lh_auto(policy_model) a = util_open(QUICKSTART_MODEL);
    lh_auto(policy_model) b = util_open(GOLDEN);
    uint8_t one[16], two[16];

    policy_model_fingerprint(a, one);
    policy_model_fingerprint(b, two);
    cr_assert(memcmp(one, two, 16));
}

/* A file of one header and some bytes behind it. */
static char *file_of(const char *header, size_t data, size_t *len)
{
    uint64_t n = strlen(header);
    char *bytes = calloc(1, 8 + n + data);

    memcpy(bytes, &n, 8);
    memcpy(bytes + 8, header, n);
    *len = 8 + n + data;
    return bytes;
}

static void refused(const char *header, size_t data, const char *words)
{
    struct lh_error err = {0};
    size_t len;
    lh_autofree char *bytes = file_of(header, data, &len);
    lh_auto(safetensors) s = safetensors_parse(bytes, len, "x.safetensors", &err);

    cr_expect(!s, "accepted: %s", header);
    cr_expect(err.code == LH_INVALID_ARGUMENT && strstr(err.message, words),
              "%s: message '%s' lacks '%s'", header, err.message, words);
}

#define TENSOR(name, dtype, shape, offsets)                                                        \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

Test(policy_files, hostile_safetensors_name_the_tensor)
{
    refused("[]", 0, "not a JSON object");
    refused("{", 0, "not a JSON object");
    refused("{\"a\":{},\"a\":{}}", 0, "duplicate");
    refused("{\"a\":1}", 0, "tensor a: dtype");
    refused("{" TENSOR("a", "Q9", "[1]", "[0,4]") "}", 4, "tensor a: dtype");
    refused("{" TENSOR("a", "F32", "[-1]", "[0,4]") "}", 4, "tensor a: shape");
    refused("{" TENSOR("a", "F32", "[1.5]", "[0,4]") "}", 4, "tensor a: shape");
    refused("{" TENSOR("a", "F32", "[4294967296,4294967296,16]", "[0,4]") "}", 4,
            "tensor a: shape");
    refused("{" TENSOR("a", "F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, "tensor a: shape");
    refused("{" TENSOR("a", "F32", "[4611686018427387905]", "[0,4]") "}", 4, "tensor a: 4 bytes");
    refused("{" TENSOR("a", "F32", "[1]", "[0,8]") "}", 4, "tensor a: data_offsets");
    refused("{" TENSOR("a", "F32", "[1]", "[4,0]") "}", 4, "tensor a: data_offsets");
    refused("{" TENSOR("a", "F32", "[1]", "[-4,0]") "}", 4, "tensor a: data_offsets");
    refused("{" TENSOR("a", "F32", "[1]", "[0]") "}", 4, "tensor a: data_offsets");
    refused("{" TENSOR("a", "F32", "[2]", "[0,4]") "}", 4, "tensor a: 4 bytes");
    refused("{" TENSOR("a", "F32", "[2]", "[0,8]") "," TENSOR("b", "F32", "[1]", "[4,8]") "}", 8,
            "tensors a and b overlap");
}

Test(policy_files, truncated_safetensors_never_open)
{
    struct lh_error err = {0};
    size_t len;
    lh_autofree char *bytes =
        file_of("{" TENSOR("a", "F32", "[2]", "[0,8]") "," TENSOR("b", "BF16", "[3]", "[8,14]") "}",
                14, &len);

    for (size_t cut = 0; cut < len; cut++) {
        lh_auto(safetensors) s = safetensors_parse(bytes, cut, "x", &err);

        cr_assert(!s, "%zu of %zu bytes were enough", cut, len);
    }
    memset(bytes, 0xff, 8);
    cr_assert(!safetensors_parse(bytes, len, "x", &err));
    cr_assert(strstr(err.message, "100 MB"), "%s", err.message);
}

Test(policy_files, half_precision_is_read)
{
    static const uint16_t f16[] = {0x3c00, 0xc000, 0x0001, 0x7bff, 0x8000},
                          bf16[] = {0x3f80, 0xc040};
    static const float want16[] = {1, -2, 0x1p-24f, 65504, -0.0f}, want_b[] = {1, -3};
    struct lh_error err = {0};
    size_t len;
    lh_autofree char *bytes = file_of(
        "{" TENSOR("h", "F16", "[5]", "[0,10]") "," TENSOR("b", "BF16", "[2]", "[10,14]") "}", 14,
        &len);
    lh_auto(safetensors) s = NULL;
    float got[5];

    memcpy(bytes + len - 14, f16, sizeof f16);
    memcpy(bytes + len - 4, bf16, sizeof bf16);
    s = safetensors_parse(bytes, len, "x", &err);
    cr_assert(s, "%s", err.message);
    cr_assert(!safetensor_floats(safetensors_find(s, "h"), got, &err));
    cr_assert(!memcmp(got, want16, sizeof want16));
    cr_assert(!safetensor_floats(safetensors_find(s, "b"), got, &err));
    cr_assert(!memcmp(got, want_b, sizeof want_b));
}

/* Writes one tensor of the golden model under another name or shape, the rest as it is. */
static void load_altered(const char *name, const char *rename, int64_t rows, const char *words)
{
    struct lh_error err = {0};
    lh_autofree char *dir = temporary();
    lh_autofree char *path = lh_format("%s/model.safetensors", dir);
    lh_auto(policy_model) m = util_open(GOLDEN);
    lh_autofree float *w = util_weights(m, 1);
    size_t n;
    const struct policy_param *p = policy_model_params(m, &n);
    lh_autofree struct safetensor *t = calloc(n, sizeof *t);
    int rc;

    for (size_t i = 0; i < n; i++) {
        t[i] = (struct safetensor){
            .name = p[i].name, .dims = p[i].dims, .count = p[i].count, .data = w + p[i].offset};
        memcpy(t[i].shape, p[i].shape, sizeof p[i].shape);
        if (strcmp(p[i].name, name))
            continue;
        t[i].name = rename;
        t[i].count = t[i].count / (size_t)t[i].shape[0] * (size_t)rows;
        t[i].shape[0] = rows;
    }
    cr_assert(!safetensors_write(path, t, n, &err), "%s", err.message);
    rc = policy_load(m, dir, w, &err);
    if (words)
        cr_expect(rc && strstr(err.message, name) && strstr(err.message, words), "%s", err.message);
    else
        cr_expect(!rc, "%s", err.message);
    lh_remove_tree(dir, NULL);
}

Test(policy_files, weights_must_fit_the_config)
{
    load_altered("lm_head.weight", "lm_head.weight", 258, "shape");
    load_altered("lm_head.weight", "head.weight", 259, "missing");
    load_altered("model.layers.0.block_sparse_moe.up_proj.weight",
                 "model.layers.0.mlp.up_proj.weight", 96, NULL); /* the other spelling */
}

static void config_refused(const char *json, const char *words)
{
    struct lh_error err = {0};
    lh_autofree char *dir = util_config_dir(json);

    cr_expect(!policy_model_open(dir, &err), "accepted: %s", json);
    cr_expect(strstr(err.message, words), "message '%s' lacks '%s'", err.message, words);
    lh_remove_tree(dir, NULL);
}

#define LAYERS                                                                                     \
    "\"linear_head_dim\": 8, \"num_hidden_layers\": 1, \"layer_types\": [\"full_attention\"],"     \
    "\"mlp_layer_types\": [\"dense\"]"

Test(policy_files, config_numbers_are_bounded)
{
    config_refused("", "not a JSON object");
    config_refused("{\"vocab_size\": 1,\n \"vocab_size\": 2}", "duplicate");
    config_refused("{}", "vocab_size is missing");
    config_refused("{" CONFIG_SIZES LAYERS ", \"hidden_act\": \"gelu\"}",
                   "hidden_act must be \"silu\"");
    config_refused("{" CONFIG_SIZES LAYERS ", \"num_expert_group\": 2}", "num_expert_group");
    config_refused("{" CONFIG_SIZES LAYERS ", \"linear_conv_kernel_dim\": 17}", "must be 1 to 16");
    config_refused("{" CONFIG_SIZES LAYERS ", \"linear_conv_kernel_dim\": \"4\"}",
                   "must be an integer");
    config_refused("{" CONFIG_SIZES LAYERS ", \"routed_scaling_factor\": -1}",
                   "routed_scaling_factor");
    config_refused("{" CONFIG_SIZES LAYERS ", \"moe_renormalize\": 1}", "true or false");
    config_refused("{" CONFIG_SIZES "\"linear_head_dim\": 12, \"num_hidden_layers\": 1,"
                   "\"layer_types\": [\"full_attention\"], \"mlp_layer_types\": [\"dense\"]}",
                   "multiple of 8");
    config_refused("{" CONFIG_SIZES "\"linear_head_dim\": 8, \"num_hidden_layers\": 2,"
                   "\"layer_types\": [\"full_attention\"], \"mlp_layer_types\": [\"dense\"]}",
                   "lists of 2 names");
    config_refused("{" CONFIG_SIZES "\"linear_head_dim\": 8, \"num_hidden_layers\": 1,"
                   "\"layer_types\": [\"half_attention\"], \"mlp_layer_types\": [\"dense\"]}",
                   "layer_types[0]");
}

/* Kimi-Linear-48B-A3B's own, but for what is not read, with the layers of the first block of four
 * and the last one. */
#define PUBLISHED(layers, rest)                                                                    \
    "{\"architectures\": [\"KimiLinearForCausalLM\"], \"first_k_dense_replace\": 1,"               \
    "\"head_dim\": 72, \"hidden_act\": \"silu\", \"hidden_size\": 2304,"                           \
    "\"intermediate_size\": 9216, \"kv_lora_rank\": 512, \"linear_attn_config\": {" layers         \
    ", \"head_dim\": 128, \"num_heads\": 32, \"short_conv_kernel_size\": 4},"                      \
    "\"mla_use_nope\": true, \"model_type\": \"kimi_linear\", \"moe_intermediate_size\": 1024,"    \
    "\"moe_layer_freq\": 1, \"moe_renormalize\": true, \"moe_router_activation_func\": "           \
    "\"sigmoid\","                                                                                 \
    "\"num_attention_heads\": 32, \"num_expert_group\": 1, \"num_experts\": 256,"                  \
    "\"num_experts_per_token\": 8, \"num_hidden_layers\": 5, \"num_key_value_heads\": 32,"         \
    "\"num_nextn_predict_layers\": 0, \"num_shared_experts\": 1, \"q_lora_rank\": null,"           \
    "\"qk_nope_head_dim\": 128, \"qk_rope_head_dim\": 64, \"rms_norm_eps\": 1e-05,"                \
    "\"routed_scaling_factor\": 2.446, \"tie_word_embeddings\": false, \"topk_group\": 1,"         \
    "\"v_head_dim\": 128, \"vocab_size\": 163840" rest "}"

static int parse(struct policy_config *c, const char *text, struct lh_error *err)
{
    return policy_config_parse(c, text, strlen(text), "config.json", err);
}

Test(policy_files, config_as_published_is_read)
{
    static const char text[] =
        PUBLISHED("\"kda_layers\": [1, 2, 3], \"full_attn_layers\": [4, 5]", "");
    struct lh_error err = {0};
    struct policy_config c, again;

    cr_assert(!parse(&c, text, &err), "%s", err.message);
    cr_assert(c.kda_heads == 32 && c.kda_head_dim == 128 && c.conv_kernel == 4);
    cr_assert(c.q_lora == 0 && c.experts == 256 && c.shared_experts == 1);
    for (int i = 0; i < 5; i++) {
        cr_assert(c.layer_type[i] == (i < 3 ? POLICY_KDA : POLICY_MLA), "layer %d", i);
        cr_assert(c.moe[i] == (i > 0), "layer %d", i);
    }
    lh_autofree char *flat = policy_config_print(&c);
    cr_assert(!parse(&again, flat, &err), "%s", err.message);
    lh_autofree char *flat_again = policy_config_print(&again);
    cr_assert(!strcmp(flat, flat_again), "as it is written, it is the same");
    policy_config_finish(&c);
    policy_config_finish(&again);
}

Test(policy_files, layers_of_the_published_form_must_add_up)
{
    static const struct {
        const char *text, *word;
    } bad[] = {
        {PUBLISHED("\"kda_layers\": [1, 2, 3], \"full_attn_layers\": [5]", ""), "leaves layer 4"},
        {PUBLISHED("\"kda_layers\": [1, 2, 3], \"full_attn_layers\": [3, 4, 5]", ""), "twice"},
        {PUBLISHED("\"kda_layers\": [0, 1, 2, 3], \"full_attn_layers\": [4]", ""), "1 to 5"},
        {PUBLISHED("\"kda_layers\": [1, 2, 3, 4, 6], \"full_attn_layers\": [5]", ""), "1 to 5"},
        {PUBLISHED("\"kda_layers\": 3, \"full_attn_layers\": [4, 5]", ""), "must be a list"},
        {PUBLISHED("\"kda_layers\": [\"1\"], \"full_attn_layers\": [4, 5]", ""), "1 to 5"},
    };
    struct policy_config c;

    for (size_t i = 0; i < LH_ARRAY_SIZE(bad); i++) {
        struct lh_error err = {0};
        cr_assert(parse(&c, bad[i].text, &err) == LH_INVALID_ARGUMENT, "%s", bad[i].word);
        cr_assert(strstr(err.message, bad[i].word), "%s", err.message);
    }
}

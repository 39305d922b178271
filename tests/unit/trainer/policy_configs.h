/* Small models that between them have every kind of parameter. */
#ifndef TESTS_UNIT_TRAINER_POLICY_CONFIGS_H
#define TESTS_UNIT_TRAINER_POLICY_CONFIGS_H

#define CONFIG_SIZES                                                                               \
    "\"model_type\": \"kimi_linear\", \"vocab_size\": 41, \"hidden_size\": 26,"                    \
    "\"linear_num_heads\": 2, \"num_attention_heads\": 3,"                                         \
    "\"kv_lora_rank\": 11, \"qk_nope_head_dim\": 7, \"qk_rope_head_dim\": 5, \"v_head_dim\": 6,"   \
    "\"intermediate_size\": 19, \"moe_intermediate_size\": 9, \"num_experts\": 5,"                 \
    "\"num_experts_per_token\": 2, \"rms_norm_eps\": 1e-5, "

/* KDA and MLA, full-rank queries; dense, MoE with shared experts. */
#define CONFIG_PLAIN                                                                               \
    "{" CONFIG_SIZES "\"linear_head_dim\": 8, \"num_hidden_layers\": 3, \"num_shared_experts\": "  \
    "2, \"q_lora_rank\": null,"                                                                    \
    "\"routed_scaling_factor\": 2.5, \"moe_renormalize\": true,"                                   \
    "\"layer_types\": [\"linear_attention\", \"full_attention\", \"linear_attention\"],"           \
    "\"mlp_layer_types\": [\"dense\", \"sparse\", \"sparse\"]}"

/* Low-rank queries, tied embeddings, router without renormalisation, no shared expert, kernel 3,
 * KDA heads of 40 (a column block and a rest). */
#define CONFIG_OTHER                                                                               \
    "{" CONFIG_SIZES "\"linear_head_dim\": 40, \"num_hidden_layers\": 2, \"q_lora_rank\": 10, "    \
    "\"linear_conv_kernel_dim\": 3,"                                                               \
    "\"routed_scaling_factor\": 0.7, \"moe_renormalize\": false, \"tie_word_embeddings\": true,"   \
    "\"layer_types\": [\"full_attention\", \"linear_attention\"],"                                 \
    "\"mlp_layer_types\": [\"sparse\", \"dense\"]}"

#endif

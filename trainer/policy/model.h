/* The model description: where each parameter lies in the flat array of weights. */
#ifndef TRAINER_POLICY_MODEL_H
#define TRAINER_POLICY_MODEL_H

#include "trainer/policy/config.h"

struct policy_backend;

/* Offsets of a layer's parameters, in floats.  Projections of the same input are neighbours, so one
 * matrix product makes them all; `in` is the first of
 *   KDA: q k v f_a g_a b        MLA: q (or q_a), kv_a
 * Likewise gate and up of a feed-forward, and the three convolutions. */
struct policy_layer_at {
    size_t norm, in, o, ffn_norm;
    size_t conv, f_b, g_b, a_log, dt_bias, o_norm; /* KDA */
    size_t q_norm, q_b, kv_norm, kv_b;             /* MLA */
    size_t gate_up, down;                          /* dense, or the shared experts */
    size_t router, router_bias, experts;           /* MoE; an expert: gate, up, down */
};

/* How a parameter starts (policy_init). */
enum policy_start {
    START_MATRIX,
    START_OUT,
    START_EMBED,
    START_ONE,
    START_ZERO,
    START_A_LOG,
    START_DT
};

struct policy_model {
    struct policy_config config;
    const struct policy_backend *backend;
    struct policy_param *params; /* names owned */
    enum policy_start *start;    /* [n_params] */
    size_t n_params, room, floats;
    size_t align; /* of the first parameter of a product, in floats */
    size_t embed, norm, head;
    struct policy_layer_at *layers;
    /* Derived sizes. */
    int kda_width, kda_in;           /* heads*dim; rows of `in` */
    int q_width, q_in, mla_in;       /* heads*(nope+rope); q_lora or q_width; rows of `in` */
    int latent, v_width, shared_ffn; /* lora+rope; heads*v; of all shared experts */
    int n_kda, n_mla;
    uint8_t fingerprint[16];
    int *place; /* [layers] number of the layer among those of its kind */
};

/* From the text of a config.json; `name` is for messages. */
/* Lays the parameters out again, each start on a multiple of `align`; between them are zeros. */
int policy_model_align(struct policy_model *m, size_t align, struct lh_error *err);

struct policy_model *policy_model_parse(const char *json, size_t len, const char *name,
                                        struct lh_error *err);

#endif

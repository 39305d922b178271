/* Kimi-Linear's config.json as published, read as the flat form of config.c. */
#ifndef TRAINER_POLICY_CONFIG_PUBLISHED_H
#define TRAINER_POLICY_CONFIG_PUBLISHED_H

#include <jansson.h>

#include "proto/error.h"

/* Names of the kinds in layer_types and mlp_layer_types. */
#define CONFIG_KDA    "linear_attention"
#define CONFIG_MLA    "full_attention"
#define CONFIG_DENSE  "dense"
#define CONFIG_SPARSE "sparse"

/* Adds the flat keys that "linear_attn_config" stands for, where they are not there already;
 * without it nothing happens. */
int config_flatten(json_t *root, const char *name, struct lh_error *err);

#endif

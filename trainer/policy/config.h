/* config.json of the Kimi-Linear family, as Hugging Face writes it. */
#ifndef TRAINER_POLICY_CONFIG_H
#define TRAINER_POLICY_CONFIG_H

#include "trainer/policy.h"

/* Bounds of the format; the ops' stack arrays and index types rest on them (ops.h). */
enum { CONFIG_MAX_LAYERS = 512, CONFIG_MAX_HEAD_DIM = 1024, CONFIG_MAX_BYTES = 1 << 20 };

/* Reads and checks everything; `name` is for messages.  Free with policy_config_finish(). */
int policy_config_parse(struct policy_config *c, const char *json, size_t len, const char *name,
                        struct lh_error *err);
void policy_config_finish(struct policy_config *c);

/* The canonical text: same config, same bytes.  NULL when memory is out. */
char *policy_config_print(const struct policy_config *c);

#endif

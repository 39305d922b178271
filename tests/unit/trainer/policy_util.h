/* What the policy's tests share: the golden model, small models made on the spot, sequences. */
#ifndef TESTS_UNIT_TRAINER_POLICY_UTIL_H
#define TESTS_UNIT_TRAINER_POLICY_UTIL_H

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "proto/file.h"
#include "trainer/policy.h"

#define GOLDEN GOLDEN_DIR "/kimi_linear_tiny"

enum { UTIL_PAGE = 16 };

/* The pages and state of one sequence. */
struct util_seq {
    float *memory, *state, **pages;
};

void *util_alloc(size_t bytes); /* zeroed, aligned to 64 */
struct policy_model *util_open(const char *dir);
/* A model directory with this config.json in a new temporary directory; the caller removes it. */
char *util_config_dir(const char *json);
float *util_weights(const struct policy_model *m, uint64_t seed);
struct policy_exec *util_exec(const struct policy_model *m, const float *w, int max_tokens,
                              void **arena);
struct policy_trainer *util_trainer(const struct policy_model *m, const float *w, int max_tokens,
                                    void **arena);
void util_seq_init(struct util_seq *s, const struct policy_model *m, int tokens);
void util_seq_finish(struct util_seq *s);
void util_tokens(const struct policy_model *m, uint64_t seed, int32_t *to, int n);
/* Number i of a repeatable series, in [0, below). */
int util_pick(uint64_t seed, uint64_t i, int below);

#endif

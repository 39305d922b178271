/* Rollout's and the trainer's end of the network, for one kind of number; kinds.c puts them behind
 * policy.h, which says what the functions do. */
#ifndef TRAINER_POLICY_EXEC_H
#define TRAINER_POLICY_EXEC_H

#include "trainer/policy.h"
#include "trainer/policy/kind.h"

struct R(exec);
size_t R(exec_bytes)(const struct policy_model *m, int max_tokens);
struct R(exec) * R(exec_create)(const struct policy_model *m, const real *weights, void *arena,
                                size_t bytes, int max_tokens, int page_tokens,
                                struct lh_error *err);
void R(exec_destroy)(struct R(exec) * x);
int R(exec_forward)(struct R(exec) * x, const struct policy_chunk *chunks, int n_chunks,
                    float *logits, struct lh_error *err);

struct R(sequence_trainer);
size_t R(train_bytes)(const struct policy_model *m, int max_tokens);
struct R(sequence_trainer) * R(train_create)(const struct policy_model *m, const real *weights,
                                             void *arena, size_t bytes, int max_tokens,
                                             struct lh_error *err);
void R(train_destroy)(struct R(sequence_trainer) * p);
int R(train_forward)(struct R(sequence_trainer) * p, const int32_t *tokens, int n,
                     float temperature, float *logprobs, struct lh_error *err);
int R(train_backward)(struct R(sequence_trainer) * p, const float *dlogprobs, float *grads,
                      struct lh_error *err);

#endif

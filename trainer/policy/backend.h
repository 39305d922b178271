/* Where a policy is computed: the ops, and the memory that its arrays lie in. */
#ifndef TRAINER_POLICY_BACKEND_H
#define TRAINER_POLICY_BACKEND_H

#include <stddef.h>

#include "proto/error.h"
#include "trainer/policy/ops.h"

struct policy_ops_f32;
struct policy_ops_f64;
struct policy_ops_bf16;
struct policy_model;

/* put and get wait for the copy, and for everything launched before it; what went wrong on the way
 * there is reported here or by check(). */
struct policy_backend {
    const char *name;
    size_t number_bytes; /* 4, or 2 for bf16 */
    size_t align;        /* of a parameter in the flat array, in numbers */
    const struct policy_ops_f32 *(*ops_f32)(void); /* the one of number_bytes is not NULL */
    const struct policy_ops_bf16 *(*ops_bf16)(void);
    void *(*alloc)(size_t bytes, struct lh_error *err); /* aligned to 64, not cleared */
    void (*free)(void *p);
    int (*put)(void *to, const void *from, size_t bytes, struct lh_error *err);
    int (*get)(void *to, const void *from, size_t bytes, struct lh_error *err);
    int (*check)(struct lh_error *err); /* of the launches so far, without waiting */
    /* Whether the ops can do heads of these shapes; NULL: any that the config allows. */
    int (*fits)(const struct kda_shape *k, const struct mla_shape *a, struct lh_error *err);
};

extern const struct policy_backend policy_cpu_backend;
/* The best table for this machine's CPU. */
const struct policy_ops_f32 *policy_cpu_ops_f32(void);

/* The ops of the model's backend; for double, which is for tests, the CPU's. */
const struct R(policy_ops) * R(policy_ops_of)(const struct policy_model *m);

#endif

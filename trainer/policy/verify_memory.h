/* Backend memory for the comparison of verify.c: what a scope takes it gives back. */
#ifndef TRAINER_POLICY_VERIFY_MEMORY_H
#define TRAINER_POLICY_VERIFY_MEMORY_H

#include "trainer/policy.h"

enum { VERIFY_PAGE_TOKENS = 16 };

struct memory {
    const struct policy_model *m;
    void *at;
};

void memory_release(struct memory *x);
#define AUTO_MEMORY __attribute__((cleanup(memory_release))) struct memory

/* Of `bytes`, zero unless `dirty`. */
int memory_take(struct memory *x, size_t bytes, bool dirty, struct lh_error *err);

/* One sequence's pages, the table of them, and state. */
struct verify_sequence {
    struct memory memory;
    float **pages, *state;
};

int verify_sequence_init(struct verify_sequence *s, const struct policy_model *m, int tokens,
                         struct lh_error *err);
void verify_sequence_finish(struct verify_sequence *s);

#endif

/* Forward and backward over a batch, in parallel, with bytes that do not depend on it.
 *
 * Float addition is not associative, so who adds what when must be fixed.  Sequence i belongs to
 * shard i mod GRADIENT_SHARDS; a shard is worked off in order by one thread into its own gradient
 * buffer, and the buffers are added in shard order.  The number of threads only decides how many
 * shards run at a time.  The price is GRADIENT_SHARDS gradient buffers.  Rejected: a buffer a
 * thread (result depends on the count), atomics (depends on timing), a sum tree over sequences (a
 * buffer a sequence). */
#ifndef TRAINER_LEARN_GRADIENT_H
#define TRAINER_LEARN_GRADIENT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/error.h"
#include "trainer/learn/objective.h"
#include "trainer/policy.h"

enum { GRADIENT_SHARDS = 4 };

struct gradient_sequence {
    const int32_t *tokens;
    const float *behaviour; /* [n], of tokens where mask is 1; NULL = clone it */
    const uint8_t *mask;    /* [n] */
    const uint8_t *current; /* [n], 1 = sampled by the version being trained; NULL = none */
    uint32_t n;
    float temperature;
    double advantage;
};

struct gradient_memory {
    float *shards; /* GRADIENT_SHARDS * floats */
    void *arena;   /* gradient_arena_bytes() */
    size_t arena_bytes;
};

struct gradient_result {
    double loss;
    double logprob_gap; /* largest |recorded - recomputed| of current tokens */
    uint64_t current_tokens;
    double norm; /* of the sum */
};

size_t gradient_arena_bytes(const struct policy_model *m, unsigned threads, uint32_t max_tokens);

/* The sum ends in memory->shards[0..floats).  CANCELLED when *stop turns true (may be NULL). */
int gradient_compute(const struct policy_model *m, const float *weights, const struct objective *o,
                     const struct gradient_sequence *seq, size_t n, unsigned threads,
                     uint32_t max_tokens, const struct gradient_memory *memory,
                     const atomic_bool *stop, struct gradient_result *out, struct lh_error *err);

#endif

/* What a trajectory is made of: token ids, behaviour log-probabilities, loss mask and the policy
 * version of every sampled token, recorded when sampled and never recomputed (docs/DESIGN.md 3.5).
 *
 * Belongs to one thread at a time: to the engine while a turn is sampled, to the harness otherwise.
 */
#ifndef ROLLOUT_TRANSCRIPT_H
#define ROLLOUT_TRANSCRIPT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/cleanup.h"
#include "proto/error.h"

struct policy_version {
    uint64_t step; /* optimizer steps since the initial weights */
    uint8_t id[16];
};

struct version_span {
    uint32_t first; /* holds from this token to the next span's first */
    struct policy_version version;
};

struct transcript {
    int32_t *tokens;
    float *logprobs;
    uint8_t *mask; /* 1 = sampled by the policy, trained on */
    size_t n, capacity;
    size_t sampled; /* of them with mask 1 */
    struct version_span *spans;
    size_t n_spans;
    bool carried; /* a token was sampled on KV that an older version may have computed (`carry`) */
};

void transcript_finish(struct transcript *t); /* of a zeroed or filled one */

/* Context: mask 0, log-probability 0. */
int transcript_add(struct transcript *t, const int32_t *tokens, size_t n, struct lh_error *err);
int transcript_add_text(struct transcript *t, int32_t role, const char *text, size_t len,
                        struct lh_error *err);
/* A token of the policy's; version may be NULL for demonstrations. */
int transcript_sampled(struct transcript *t, int32_t token, float logprob,
                       const struct policy_version *version, struct lh_error *err);
/* Committed tokens of an earlier attempt. */
int transcript_restore(struct transcript *t, const int32_t *tokens, const float *logprobs,
                       const uint8_t *mask, size_t n, struct lh_error *err);
int transcript_span(struct transcript *t, const struct version_span *span, struct lh_error *err);

#endif

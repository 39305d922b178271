/* Names of policy versions (docs/DESIGN.md 3.7): the id is a hash of how the weights came to be, so
 * equal ids mean equal weights, after a rollback and between equal runs too. */
#ifndef TRAINER_LEARN_VERSION_H
#define TRAINER_LEARN_VERSION_H

#include <stddef.h>
#include <stdint.h>

struct version {
    uint64_t step; /* optimizer steps since the initial weights; warm start counts */
    uint8_t id[16];
};

enum { VERSION_TEXT = 33 };

/* The first version: XXH3-128 over model fingerprint and weights. */
struct version version_initial(const uint8_t fingerprint[16], const float *weights, size_t floats);

/* Digest of a batch, fed piece by piece; then the next version. */
struct version_digest;
struct version_digest *version_digest_create(void); /* NULL = out of memory */
void version_digest_add(struct version_digest *d, const void *data, size_t len);
/* What a reinforcement step learns from one trajectory, in (group, member) order. */
void version_digest_trajectory(struct version_digest *d, const int32_t *tokens,
                               const float *logprobs, const uint8_t *mask, uint32_t n,
                               double reward);
void version_digest_destroy(struct version_digest *d);
/* XXH3-128(parent id, step, digest); frees d. */
struct version version_next(const struct version *parent, struct version_digest *d,
                            uint8_t batch[16]);

void version_print(const struct version *v, char text[VERSION_TEXT]);

#endif

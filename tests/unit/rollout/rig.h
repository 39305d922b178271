/* What the engine's tests share: a small model with random weights, an engine over it, and a driver
 * that plays conversations: a turn is sampled, an observation comes after a while, and so on. */
#ifndef TESTS_UNIT_ROLLOUT_RIG_H
#define TESTS_UNIT_ROLLOUT_RIG_H

#include "../trainer/policy_util.h"
#include "rollout/scheduler/scheduler.h"

enum { RIG_UNIT = 16, RIG_PAGE = 32, RIG_CONTEXT = 512, RIG_RUNNING = 16 };

struct rig {
    struct policy_model *model;
    float *weights;
    void *kv, *scratch;
    struct engine_options o;
    struct engine *engine;
    struct scheduler scheduler;
    struct policy_version version;
    unsigned narrowest; /* the smallest window after any step */
};

/* kv_bytes 0 = ample. */
void rig_init(struct rig *r, size_t kv_bytes, struct kv_client *store);
void rig_finish(struct rig *r);
/* Bytes that one sequence of n tokens needs: pages, state, checkpoint. */
size_t rig_sequence_bytes(const struct rig *r, size_t tokens);
size_t rig_used(struct rig *r);
void rig_new_version(struct rig *r, uint64_t step); /* other weights too */

struct talk {
    struct transcript transcript;
    struct engine_sequence *sequence;
    uint64_t seed;
    int turns_left, idle_for, turn_tokens;
};
/* n prompt tokens that depend on prompt_seed alone. */
void talk_init(struct talk *t, uint64_t prompt_seed, int n, uint64_t seed, int turns);
void talk_finish(struct talk *t);
void talk_open(struct rig *r, struct talk *t); /* and asks for the first turn */
/* One more turn, behind an observation. */
void talk_once_more(struct rig *r, struct talk *t);
/* Plays open ones to the end. */
void talk_go_on(struct rig *r, struct talk *t, int n, int idle);
/* Opens the sequences, plays all to the end with `idle` steps between turns, leaves them open. */
void talk_play(struct rig *r, struct talk *t, int n, int idle);
void talk_close(struct rig *r, struct talk *t, int n);
/* Same tokens, same log-probabilities to the bit. */
bool talk_equal(const struct talk *a, const struct talk *b);

#endif

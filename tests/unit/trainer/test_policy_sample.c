/* Sampling, the tokenizer, random numbers, and calls that make no sense. */
#include "tests/unit/trainer/policy_util.h"

#include <math.h>

#include "trainer/policy/random.h"
#include "trainer/policy/real.h"

/* Counter 0, key 0, in the vectors published with Random123. */
Test(policy_sample, philox_known_answer)
{
    cr_assert(policy_random(0, 0) == 0xe169c58d6627e8d5ull, "%llx",
              (unsigned long long)policy_random(0, 0));
}

Test(policy_sample, exponential_within_1e_7)
{
    double worst = 0;

    for (int i = -870000; i <= 880000; i++) {
        float x = (float)i * 1e-4f;

        worst = fmax(worst, fabs((double)rexp(x) / exp((double)x) - 1));
    }
    cr_assert(worst <= 1.2e-7, "relative error %g", worst);
    cr_assert(rexp(0) == 1);
    cr_assert(isnan(rexp(NAN)));
}

Test(policy_sample, frequencies_follow_the_logprobs)
{
    enum { VOCAB = 7, DRAWS = 200000 };
    static const float logits[VOCAB] = {0.3f, -1, 2, 0.3f, -40, 1.1f, 0};
    int count[VOCAB] = {0};
    double sum = 0;

    for (uint64_t i = 0; i < DRAWS; i++)
        count[policy_sample(logits, VOCAB, 0.7f, 42, i)]++;
    for (int t = 0; t < VOCAB; t++) {
        double p = exp((double)policy_logprob(logits, VOCAB, 0.7f, t));

        sum += p;
        cr_expect(fabs(count[t] - p * DRAWS) <= 5 * sqrt(p * DRAWS) + 1,
                  "token %d: %d draws, %g wanted", t, count[t], p * DRAWS);
    }
    cr_assert(fabs(sum - 1) < 1e-6);
}

Test(policy_sample, same_seed_and_index_same_token_greedy_takes_the_lowest)
{
    static const float logits[4] = {1, 3, 3, 2};

    for (uint64_t i = 0; i < 100; i++)
        cr_assert(policy_sample(logits, 4, 1, 9, i) == policy_sample(logits, 4, 1, 9, i));
    cr_assert(policy_sample(logits, 4, 0, 9, 0) == 1);
    cr_assert(policy_logprob(logits, 4, 0, 1) == policy_logprob(logits, 4, 1, 1));
}

Test(policy_sample, bytes_round_trip_specials_vanish)
{
    char bytes[256], back[256];
    int32_t ids[258] = {TOKEN_BOS};

    for (int i = 0; i < 256; i++)
        bytes[i] = (char)i;
    cr_assert(policy_encode(bytes, 256, ids + 1) == 256);
    ids[257] = TOKEN_EOS;
    cr_assert(policy_decode(ids, 258, back) == 256);
    cr_assert(!memcmp(bytes, back, 256));
}

Test(policy_sample, impossible_calls_are_refused)
{
    struct lh_error err = {0};
    lh_auto(policy_model) m = util_open(QUICKSTART_MODEL);
    lh_autofree float *w = util_weights(m, 1);
    lh_autofree float *logits = util_alloc(64 * POLICY_BYTE_VOCAB * sizeof *logits);
    void *arena, *other;
    struct policy_exec *x = util_exec(m, w, 8, &arena);
    struct policy_trainer *t = util_trainer(m, w, 8, &other);
    struct util_seq s;
    int32_t ids[9] = {1, 2, 3, 4, 5, 6, 7, 8, 264};
    float out[9];

    util_seq_init(&s, m, 16);
    cr_expect(
        policy_forward(x, &(struct policy_chunk){ids, 9, 0, s.pages, s.state, 0}, 1, logits, &err));
    cr_expect(
        policy_forward(x, &(struct policy_chunk){ids, 0, 0, s.pages, s.state, 0}, 1, logits, &err));
    cr_expect(
        policy_forward(x, &(struct policy_chunk){ids, 2, 0, s.pages, s.state, 3}, 1, logits, &err));
    cr_expect(policy_forward(x, &(struct policy_chunk){ids + 8, 1, 0, s.pages, s.state, 0}, 1,
                             logits, &err));
    cr_expect(strstr(err.message, "token 264"), "%s", err.message);
    cr_expect(policy_train_backward(t, out, w, &err) == LH_FAILED_PRECONDITION);
    cr_expect(policy_train_forward(t, ids, 9, 1, out, &err));
    cr_expect(policy_train_forward(t, ids, 1, 1, out, &err));
    cr_expect(policy_train_forward(t, ids + 7, 2, 1, out, &err));
    cr_expect(!policy_exec_create(m, w, arena, 64, 8, 16, &err));
    cr_expect(!policy_exec_create(m, w, arena, policy_exec_bytes(m, 8), 8, 17, &err));
    cr_expect(!policy_trainer_create(m, w, other, 64, 8, &err));
    util_seq_finish(&s);
    policy_exec_destroy(x);
    policy_trainer_destroy(t);
    free(arena);
    free(other);
}

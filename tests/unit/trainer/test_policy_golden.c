/* The published architecture, as an independent implementation computes it (tests/golden). */
#include "tests/unit/trainer/policy_util.h"

#include "trainer/policy/verify.h"

Test(policy_golden, everything_within_bounds)
{
    struct lh_error err = {0};
    struct policy_report r;
    FILE *out = fopen("/dev/null", "w");

    cr_assert(!policy_verify(GOLDEN, GOLDEN "/reference.safetensors", out, &r, &err), "%s",
              err.message);
    fclose(out);
    cr_assert(r.logits <= 1e-4, "logits %g", r.logits);
    cr_assert(r.logprobs <= 1e-4, "log-probabilities %g", r.logprobs);
    cr_assert(r.loss <= 1e-4, "loss %g", r.loss);
    cr_assert(r.gradients <= 1e-3, "gradients %g", r.gradients);
    cr_assert(r.greedy);
    cr_assert(policy_report_passes(&r));
}

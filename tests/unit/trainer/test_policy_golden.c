/* The published architecture, as an independent implementation computes it (tests/golden). */
#include "tests/unit/trainer/policy_util.h"

#include <math.h>

#include "trainer/policy/safetensors.h"
#include "trainer/policy/train.h"
#include "trainer/policy/verify.h"

extern const struct policy_ops_f32 policy_cpu_f32;

Test(policy_golden, everything_within_bounds)
{
    struct lh_error err = {0};
    struct policy_report r;
    FILE *out = fopen("/dev/null", "w");

    cr_assert(!policy_verify(GOLDEN, GOLDEN "/reference.safetensors", "cpu", out, &r, &err), "%s",
              err.message);
    fclose(out);
    cr_assert(r.logits <= 1e-4, "logits %g", r.logits);
    cr_assert(r.logprobs <= 1e-4, "log-probabilities %g", r.logprobs);
    cr_assert(r.loss <= 1e-4, "loss %g", r.loss);
    cr_assert(r.gradients <= 1e-3, "gradients %g", r.gradients);
    cr_assert(r.greedy);
    cr_assert(policy_report_passes(&r));
}

/* The build of the ops for machines without AVX2, which policy_cpu_ops() seldom chooses. */
Test(policy_golden, plain_build_of_the_ops)
{
    enum { N = 97, VOCAB = 259 };
    struct lh_error err = {0};
    lh_auto(policy_model) m = util_open(GOLDEN);
    lh_auto(safetensors) ref = safetensors_open(GOLDEN "/reference.safetensors", &err);
    lh_autofree float *w = util_weights(m, 1);
    lh_autofree void *arena = util_alloc(policy_trainer_bytes(m, N));
    struct R(trainer) t;
    int32_t ids[N];
    float want[N - 1];

    cr_assert(ref && !policy_load(m, GOLDEN, w, &err), "%s", err.message);
    memcpy(ids, safetensors_find(ref, "input_ids")->data, sizeof ids);
    memcpy(want, safetensors_find(ref, "logprobs")->data, sizeof want);
    R(trainer_lay_out)(&t, m, N, arena);
    t.net.w = w;
    t.net.ops = &policy_cpu_f32;
    cr_assert(t.net.layers);
    cr_assert(!R(trainer_forward)(&t, ids, N, &err), "%s", err.message);
    for (int i = 0; i < N - 1; i++) {
        float got = policy_logprob(t.logits + i * VOCAB, VOCAB, 1, ids[i + 1]);

        cr_assert(fabsf(got - want[i]) <= 1e-4f, "%d: %g, reference %g", i, (double)got,
                  (double)want[i]);
    }
    R(net_finish)(&t.net);
}

Test(policy_golden, a_wrong_weight_does_not_pass)
{
    struct lh_error err = {0};
    char dir[] = "/tmp/policy-test-XXXXXX";
    lh_auto(policy_model) m = util_open(GOLDEN);
    lh_autofree float *w = util_weights(m, 1);
    struct policy_report r;
    FILE *out = fopen("/dev/null", "w");
    size_t n;
    const struct policy_param *p = policy_model_params(m, &n);

    cr_assert(mkdtemp(dir) && !policy_load(m, GOLDEN, w, &err), "%s", err.message);
    w[p[n / 2].offset] += 0.1f;
    cr_assert(!policy_save(m, dir, w, &err), "%s", err.message);
    cr_assert(!policy_verify(dir, GOLDEN "/reference.safetensors", "cpu", out, &r, &err), "%s",
              err.message);
    cr_assert(!policy_report_passes(&r));
    cr_assert(policy_verify(dir, GOLDEN "/model.safetensors", "cpu", out, &r, &err));
    cr_assert(strstr(err.message, "input_ids"), "%s", err.message);
    fclose(out);
    lh_remove_tree(dir, NULL);
}

#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/learn/adamw.h"
#include "trainer/learn/objective.h"
#include "trainer/learn/version.h"

static const struct objective defaults = {
    .log_min = -0.28768207f, .log_max = 0.30010459f, .tau = 0.08f, .tokens = 5};

/* J of docs/DESIGN.md 3.11 for one token, in double, written from the formula. */
static double loss_of(double theta, double behaviour, double advantage)
{
    double l = theta - behaviour;
    double gain = l >= defaults.log_min && l <= defaults.log_max ? exp(l) * advantage : 0;

    return -(gain - defaults.tau * l * l) / defaults.tokens;
}

Test(objective, gradient_is_the_derivative_of_the_loss)
{
    const float behaviour[] = {-1, -1, -1, -1, -2, -0.5f};
    const float theta[] = {-1, -1.2f, -0.8f, -1.9f, -1.2f, -0.5f};
    const uint8_t mask[] = {1, 1, 1, 1, 1, 0};
    float d[6];

    for (double advantage = -0.75; advantage <= 0.75; advantage += 0.5) {
        double loss = objective_policy_gradient(&defaults, advantage, theta, behaviour, mask, 6, d);
        double expected = 0, h = 1e-5;
        for (int i = 0; i < 5; i++) {
            expected += loss_of(theta[i], behaviour[i], advantage);
            double slope = (loss_of((double)theta[i] + h, behaviour[i], advantage) -
                            loss_of((double)theta[i] - h, behaviour[i], advantage)) /
                           (2 * h);
            cr_assert(fabs(slope - d[i]) < 1e-6, "token %d: %g, finite difference %g", i,
                      (double)d[i], slope);
        }
        cr_assert(fabs(loss - expected) < 1e-9);
        cr_assert(d[5] == 0, "an observation has no gradient");
    }
}

Test(objective, outside_of_the_window_only_the_regulariser_pulls)
{
    const float behaviour[] = {-2}, theta[] = {-1};
    const uint8_t mask[] = {1};
    float d[1];

    objective_policy_gradient(&defaults, 100, theta, behaviour, mask, 1, d);
    cr_assert(fabs(d[0] - 2 * 0.08 * 1 / 5) < 1e-6);
}

Test(objective, equal_rewards_teach_nothing)
{
    const double same[] = {0.1, 0.1, 0.1}, mixed[] = {1, 0, 0, 1};
    double a[4];

    cr_assert(eq(int, objective_advantages(same, 3, a), 0));
    cr_assert(a[0] == 0 && a[1] == 0 && a[2] == 0);
    cr_assert(eq(int, objective_advantages(mixed, 4, a), 1));
    cr_assert(a[0] == 0.5 && a[1] == -0.5);
    const float lp[] = {-1, -3};
    const uint8_t mask[] = {1, 1};
    float d[2];
    cr_assert(objective_policy_gradient(&defaults, 0, lp, lp, mask, 2, d) == 0);
    cr_assert(d[0] == 0 && d[1] == 0, "exactly nothing on tokens of the current version");
}

Test(objective, cloning_is_the_mean_negative_log_likelihood)
{
    const float theta[] = {-1, -2, -3, -4};
    const uint8_t mask[] = {1, 0, 1, 0};
    const struct objective o = {.tokens = 2};
    float d[4];

    cr_assert(fabs(objective_cloning(&o, theta, mask, 4, d) - 2) < 1e-12);
    cr_assert(d[0] == -0.5f && d[1] == 0 && d[2] == -0.5f && d[3] == 0);
}

Test(objective, shuffle_permutes_by_the_seed_alone)
{
    double a[64], b[64], c[64], sum = 0;

    for (int i = 0; i < 64; i++)
        a[i] = b[i] = c[i] = i;
    objective_shuffle(a, 64, 7);
    objective_shuffle(b, 64, 7);
    objective_shuffle(c, 64, 8);
    cr_assert(memcmp(a, b, sizeof a) == 0);
    cr_assert(memcmp(a, c, sizeof a) != 0);
    int moved = 0;
    for (int i = 0; i < 64; i++) {
        sum += a[i];
        moved += a[i] != i;
    }
    cr_assert(sum == 63 * 32, "nothing is lost");
    cr_assert(gt(int, moved, 48));
}

Test(adamw, follows_a_float64_reference)
{
    enum { N = 32, STEPS = 50 };
    float w[N], m[N] = {0}, v[N] = {0}, g[N];
    double rw[N], rm[N] = {0}, rv[N] = {0};
    struct adamw a = {
        .learning_rate = 3e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .decay = 0.1f};

    for (int i = 0; i < N; i++)
        rw[i] = w[i] = (float)cos(i);
    for (a.t = 1; a.t <= STEPS; a.t++) {
        for (int i = 0; i < N; i++)
            g[i] = (float)sin(i * 1.7 + (double)a.t);
        adamw_update(&a, &(struct adamw_state){w, m, v, g}, 0, N / 2, 1, 0.5f);
        adamw_update(&a, &(struct adamw_state){w, m, v, g}, N / 2, N, 0, 0.5f);
        for (int i = 0; i < N; i++) {
            double x = g[i] * 0.5, b1 = a.beta1, b2 = a.beta2;
            rm[i] = b1 * rm[i] + (1 - b1) * x;
            rv[i] = b2 * rv[i] + (1 - b2) * x * x;
            double hat = rm[i] / (1 - pow(b1, (double)a.t)) /
                         (sqrt(rv[i] / (1 - pow(b2, (double)a.t))) + a.eps);
            rw[i] -= a.learning_rate * (hat + (i < N / 2 ? a.decay : 0) * rw[i]);
        }
    }
    for (int i = 0; i < N; i++)
        cr_assert(fabs(rw[i] - w[i]) < 2e-6, "element %d: %g, reference %g", i, (double)w[i],
                  rw[i]);
}

Test(adamw, clip_scales_the_global_norm)
{
    const float g[] = {3, 4};

    cr_assert(adamw_norm(g, 2) == 5);
    cr_assert(adamw_clip(5, 1) == 0.2f);
    cr_assert(adamw_clip(0.5, 1) == 1);
    cr_assert(adamw_clip(1e9, 0) == 1, "0 is off");
}

Test(version, id_names_the_lineage)
{
    const uint8_t fingerprint[16] = {1};
    const float weights[] = {1, 2, 3}, other[] = {1, 2, 4};
    struct version a = version_initial(fingerprint, weights, 3), b;
    uint8_t batch[16];

    b = version_initial(fingerprint, other, 3);
    cr_assert(memcmp(a.id, b.id, 16) != 0);
    struct version next[3];
    const char *content[] = {"abc", "abc", "abd"};
    for (int i = 0; i < 3; i++) {
        struct version_digest *d = version_digest_create();
        version_digest_add(d, content[i], 3);
        next[i] = version_next(&a, d, batch);
    }
    cr_assert(eq(u64, next[0].step, 1));
    cr_assert(memcmp(next[0].id, next[1].id, 16) == 0, "same past, same name");
    cr_assert(memcmp(next[0].id, next[2].id, 16) != 0);
}

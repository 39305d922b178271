#include "trainer/learn/objective.h"

#include <math.h>
#include <string.h>

#include "trainer/intake/random.h"

int objective_advantages(const double *rewards, size_t n, double *advantages)
{
    double sum = 0;
    int any = 0;

    for (size_t i = 0; i < n; i++)
        sum += rewards[i];
    for (size_t i = 0; i < n; i++) {
        advantages[i] = rewards[i] - sum / (double)n;
        /* Equal rewards whose mean rounds (0.1, K = 3) must still count as nothing learned. */
        if (fabs(advantages[i]) < 1e-12)
            advantages[i] = 0;
        any |= advantages[i] != 0;
    }
    return any;
}

double objective_policy_gradient(const struct objective *o, double advantage, const float *theta,
                                 const float *behaviour, const uint8_t *mask, size_t n,
                                 float *dlogprob)
{
    double loss = 0;

    memset(dlogprob, 0, n * sizeof *dlogprob);
    for (size_t i = 0; i < n; i++) {
        if (!mask[i])
            continue;
        double l = (double)theta[i] - behaviour[i];
        int inside = l >= o->log_min && l <= o->log_max;
        double gain = inside ? exp(l) * advantage : 0;
        loss += (o->tau * l * l - gain) / o->tokens;
        dlogprob[i] = (float)((2 * o->tau * l - gain) / o->tokens);
    }
    return loss;
}

double objective_cloning(const struct objective *o, const float *theta, const uint8_t *mask,
                         size_t n, float *dlogprob)
{
    double loss = 0;

    memset(dlogprob, 0, n * sizeof *dlogprob);
    for (size_t i = 0; i < n; i++) {
        if (!mask[i])
            continue;
        loss -= theta[i] / o->tokens;
        dlogprob[i] = (float)(-1 / o->tokens);
    }
    return loss;
}

/* Fisher-Yates. */
void objective_shuffle(double *rewards, size_t n, uint64_t seed)
{
    for (size_t i = n; i > 1; i--) {
        size_t j = random_below(seed, i, i);
        double t = rewards[i - 1];
        rewards[i - 1] = rewards[j];
        rewards[j] = t;
    }
}

/* What training maximises, as the derivative of the loss with respect to each log-probability.
 *
 * The policy's backward pass takes dL/d log p per token (trainer/policy.h), so an objective is a
 * function of numbers, testable against finite differences without any model.
 *
 * Policy gradient (docs/DESIGN.md 3.11; the form published for Kimi K2.5 and K3, where the clip
 * acts as a mask on the log-ratio).  Token t of member j, with l = log pi_theta - log pi_behaviour
 * and rho = exp(l), N = sampled tokens of the batch:
 *
 *     J = 1/N  sum_{j,t}  [ alpha <= l <= beta ] rho A_j  -  tau l^2        A_j = r_j - mean(group)
 *     dL/d log pi = -dJ/d log pi = ( 2 tau l  -  [ alpha <= l <= beta ] rho A_j ) / N
 *
 * A group whose members all earned the same has A = 0 throughout: on tokens of the current version
 * it contributes exactly nothing, but its tokens count in N, so that an easy batch is not a larger
 * step.
 *
 * Behaviour cloning: L = -1/N sum_t log pi, over sampled tokens of demonstrations. */
#ifndef TRAINER_LEARN_OBJECTIVE_H
#define TRAINER_LEARN_OBJECTIVE_H

#include <stddef.h>
#include <stdint.h>

struct objective {
    float log_min, log_max; /* alpha, beta */
    float tau;
    double tokens; /* N */
};

/* A_j = rewards[j] - mean; returns 1 when any differs from 0. */
int objective_advantages(const double *rewards, size_t n, double *advantages);

/* For n tokens: theta and behaviour log-probabilities, mask 1 = sampled.  Fills dlogprob and
 * returns the loss summed over the tokens (already divided by N). */
double objective_policy_gradient(const struct objective *o, double advantage, const float *theta,
                                 const float *behaviour, const uint8_t *mask, size_t n,
                                 float *dlogprob);
double objective_cloning(const struct objective *o, const float *theta, const uint8_t *mask,
                         size_t n, float *dlogprob);

/* The control: rewards change places within the batch, by the seed alone, so that learning from
 * them must vanish. */
void objective_shuffle(double *rewards, size_t n, uint64_t seed);

#endif

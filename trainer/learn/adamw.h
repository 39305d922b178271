/* AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 2):
 *
 *     m = b1 m + (1-b1) g      v = b2 v + (1-b2) g^2
 *     w -= lr ( m / (1-b1^t) / ( sqrt(v / (1-b2^t)) + eps ) + decay w )
 *
 * Moments are float32 in memory the caller owns, in the layout of the weights.  Decay is for
 * matrices: norms, biases and other one-dimensional parameters are left alone.  Every element is
 * computed by itself, so the result does not depend on how the range is cut among threads. */
#ifndef TRAINER_LEARN_ADAMW_H
#define TRAINER_LEARN_ADAMW_H

#include <stddef.h>
#include <stdint.h>

struct adamw {
    float learning_rate, beta1, beta2, eps, decay;
    uint64_t t; /* steps taken */
};

struct adamw_state {
    float *weights, *m, *v;
    const float *grads;
};

/* Elements from..to, as part of step a->t (1 for the first).  decay applies when `matrix`. */
void adamw_update(const struct adamw *a, const struct adamw_state *s, size_t from, size_t to,
                  int matrix, float grad_scale);

/* Euclidean norm, summed in double and in order. */
double adamw_norm(const float *grads, size_t n);
/* Factor that brings `norm` down to `clip`; 1 when it is below, or clip is 0 (off). */
float adamw_clip(double norm, float clip);

#endif

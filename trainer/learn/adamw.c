#include "trainer/learn/adamw.h"

#include <math.h>

void adamw_update(const struct adamw *a, const struct adamw_state *s, size_t from, size_t to,
                  int matrix, float grad_scale)
{
    float correct1 = (float)(1 - pow(a->beta1, (double)a->t));
    float correct2 = (float)(1 - pow(a->beta2, (double)a->t));
    float decay = matrix ? a->decay : 0;

    for (size_t i = from; i < to; i++) {
        float g = s->grads[i] * grad_scale;
        float m = a->beta1 * s->m[i] + (1 - a->beta1) * g;
        float v = a->beta2 * s->v[i] + (1 - a->beta2) * g * g;
        float step = m / correct1 / (sqrtf(v / correct2) + a->eps);

        s->m[i] = m;
        s->v[i] = v;
        s->weights[i] -= a->learning_rate * (step + decay * s->weights[i]);
    }
}

double adamw_norm(const float *grads, size_t n)
{
    double sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += (double)grads[i] * grads[i];
    return sqrt(sum);
}

float adamw_clip(double norm, float clip)
{
    return clip > 0 && norm > clip ? (float)(clip / norm) : 1;
}

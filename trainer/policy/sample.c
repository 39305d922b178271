/* From logits to tokens: one function for the log-probability, one for the draw. */
#include <math.h>

#include "trainer/policy.h"
#include "trainer/policy/random.h"
#include "trainer/policy/real.h"

enum { BLOCK = 64 };

static float largest(const float *x, int n)
{
    float top = x[0];

    for (int i = 1; i < n; i++)
        top = x[i] > top ? x[i] : top;
    return top;
}

/* e^((x - top) / temperature) of a block. */
static int weigh(const float *x, int n, float top, float temperature, float *w)
{
    n = n < BLOCK ? n : BLOCK;
    for (int i = 0; i < n; i++)
        w[i] = rexp((x[i] - top) / temperature);
    return n;
}

static double total(const float *logits, int vocab, float top, float temperature)
{
    double sum[4] = {0}; /* four chains of additions, for speed */
    float w[BLOCK];

    for (int at = 0; at < vocab; at += BLOCK) {
        int n = weigh(logits + at, vocab - at, top, temperature, w);

        for (int i = 0; i < n; i++)
            sum[i % 4] += (double)w[i];
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

float policy_logprob(const float *logits, int vocab, float temperature, int32_t token)
{
    float top = largest(logits, vocab);

    temperature = temperature > 0 ? temperature : 1;
    return (float)((double)((logits[token] - top) / temperature) -
                   log(total(logits, vocab, top, temperature)));
}

static int32_t argmax(const float *logits, int vocab)
{
    int32_t best = 0;

    for (int32_t i = 1; i < vocab; i++)
        best = logits[i] > logits[best] ? i : best;
    return best;
}

int32_t policy_sample(const float *logits, int vocab, float temperature, uint64_t seed,
                      uint64_t index)
{
    float top, w[BLOCK];
    double left;

    if (!(temperature > 0))
        return argmax(logits, vocab);
    top = largest(logits, vocab);
    left = policy_uniform(seed, index) * total(logits, vocab, top, temperature);
    for (int at = 0; at < vocab; at += BLOCK) {
        int n = weigh(logits + at, vocab - at, top, temperature, w);

        for (int i = 0; i < n; i++) {
            left -= (double)w[i];
            if (left < 0)
                return at + i;
        }
    }
    return argmax(logits, vocab); /* rounding ate the last sliver */
}

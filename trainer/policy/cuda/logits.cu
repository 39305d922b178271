/* From logits to log-probabilities and back; a block a row.  Nothing as long as the vocabulary is
 * written on the way forward. */
#include "trainer/policy/cuda/common.cuh"

enum { BLOCK = 512 };

/* Largest logit and the sum of e^((x - largest) / temperature). */
static __device__ void normalizer(int n, const wide *x, float temperature, float *top, float *sum)
{
    float most = -INFINITY, total = 0;

    for (int i = threadIdx.x; i < n; i += BLOCK)
        most = fmaxf(most, x[i]);
    most = block_max(most);
    for (int i = threadIdx.x; i < n; i += BLOCK)
        total += expf((x[i] - most) / temperature);
    *sum = block_sum(total);
    *top = most;
}

static __global__ void logprobs(int n, const wide *logits, float temperature, const int32_t *tokens,
                                wide *y)
{
    const wide *x = logits + (size_t)blockIdx.x * n;
    float top, sum;

    normalizer(n, x, temperature, &top, &sum);
    if (threadIdx.x == 0)
        y[blockIdx.x] = (x[tokens[blockIdx.x]] - top) / temperature - logf(sum);
}

static __global__ void back_logprob(int n, const wide *logits, float temperature,
                                    const int32_t *tokens, const wide *d, real *dlogits)
{
    const wide *x = logits + (size_t)blockIdx.x * n;
    float top, sum, dt = d[blockIdx.x] / temperature;
    int token = tokens[blockIdx.x];

    normalizer(n, x, temperature, &top, &sum);
    for (int i = threadIdx.x; i < n; i += BLOCK)
        store(dlogits + (size_t)blockIdx.x * n + i,
              (i == token ? dt : 0.0f) - dt / sum * expf((x[i] - top) / temperature));
}

void R(cuda_logprobs)(int m, int n, const wide *logits, wide temperature, const int32_t *tokens,
                      wide *y)
{
    logprobs<<<m, BLOCK, 0, policy_cuda.stream>>>(n, logits, temperature, tokens, y);
}

void R(cuda_back_logprob)(int m, int n, const wide *logits, wide temperature, const int32_t *tokens,
                          const wide *d, real *dlogits)
{
    back_logprob<<<m, BLOCK, 0, policy_cuda.stream>>>(n, logits, temperature, tokens, d, dlogits);
}

/* Mixture of experts: the router, the order of rows by expert, and the way back.  The products are
 * in experts.cu.
 *
 * Router (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): s = sigmoid(logits); the bias takes part
 * in choosing only; weight = scale s / sum of the chosen s. */
#include "trainer/policy/cuda/common.cuh"

enum { BLOCK = 256 };

static __device__ float factor(int top, int renormalize, float scale, const wide *scores,
                               const int32_t *choice)
{
    float sum = 0;

    if (!renormalize || top == 1)
        return scale;
    for (int i = 0; i < top; i++)
        sum += scores[choice[i]];
    return scale / (sum + 1e-20f);
}

/* A warp a token; the lowest number wins a tie. */
static __global__ void route(int m, int experts, int top, int renormalize, float scale,
                             const real *bias, wide *scores, int32_t *choice, wide *weight)
{
    int t = blockIdx.x * (BLOCK / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;

    if (t >= m)
        return;
    scores += (size_t)t * experts;
    choice += (size_t)t * top;
    weight += (size_t)t * top;
    for (int e = lane; e < experts; e += WARP)
        scores[e] = 1.0f / (1.0f + expf(-scores[e]));
    __syncwarp();
    for (int i = 0; i < top; i++) {
        float best = -INFINITY;
        int at = experts;

        for (int e = lane; e < experts; e += WARP) {
            bool taken = false;

            for (int j = 0; j < i; j++)
                taken |= choice[j] == e;
            if (!taken && scores[e] + load(bias + e) > best) {
                best = scores[e] + load(bias + e);
                at = e;
            }
        }
        for (int d = WARP / 2; d; d /= 2) {
            float other = __shfl_xor_sync(0xffffffffu, best, d);
            int other_at = __shfl_xor_sync(0xffffffffu, at, d);

            if (other > best || (other == best && other_at < at)) {
                best = other;
                at = other_at;
            }
        }
        if (lane == 0)
            choice[i] = at;
        __syncwarp();
    }
    for (int i = lane; i < top; i += WARP)
        weight[i] = scores[choice[i]] * factor(top, renormalize, scale, scores, choice);
}

/* weight_i = f s_i:  ds_i = f (dw_i - sum_j dw_j s_j / sum s). */
static __global__ void back_route(int m, int experts, int top, int renormalize, float scale,
                                  const wide *scores, const int32_t *choice, const wide *dweight,
                                  real *dlogits)
{
    int t = blockIdx.x * BLOCK + threadIdx.x;
    float f, mean = 0;

    if (t >= m)
        return;
    scores += (size_t)t * experts;
    choice += (size_t)t * top;
    dweight += (size_t)t * top;
    dlogits += (size_t)t * experts;
    f = factor(top, renormalize, scale, scores, choice);
    if (renormalize && top > 1)
        for (int i = 0; i < top; i++)
            mean += dweight[i] * scores[choice[i]] * f / scale;
    for (int e = 0; e < experts; e++)
        store(dlogits + e, 0.0f);
    for (int i = 0; i < top; i++) {
        float s = scores[choice[i]];

        store(dlogits + choice[i], f * (dweight[i] - mean) * s * (1 - s));
    }
}

/* Stable counting sort by one block: a warp an expert walks the choices twice, once to count and
 * once to place. */
static __global__ void dispatch(int choices, int experts, const int32_t *choice, int32_t *place,
                                int32_t *first)
{
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;

    for (int e = warp; e < experts; e += warps) {
        int count = 0;

        for (int i = lane; i < choices; i += WARP)
            count += choice[i] == e;
        for (int d = WARP / 2; d; d /= 2)
            count += __shfl_xor_sync(0xffffffffu, count, d);
        if (lane == 0)
            first[e + 1] = count;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        first[0] = 0;
        for (int e = 0; e < experts; e++)
            first[e + 1] += first[e];
    }
    __syncthreads();
    for (int e = warp; e < experts; e += warps) {
        int at = first[e];

        for (int from = 0; from < choices; from += WARP) {
            int i = from + lane;
            bool mine = i < choices && choice[i] == e;
            unsigned all = __ballot_sync(0xffffffffu, mine);

            if (mine)
                place[i] = at + __popc(all & ((1u << lane) - 1));
            at += __popc(all);
        }
    }
}

static __global__ void gather(int n, int top, const int32_t *place, const real *x, real *y)
{
    const real *from = x + (size_t)(blockIdx.x / top) * n;
    real *to = y + (size_t)place[blockIdx.x] * n;

    for (int i = threadIdx.x; i < n; i += BLOCK)
        to[i] = from[i];
}

/* A block a token: in its own order of choice. */
static __global__ void mix(int n, int top, const int32_t *place, const wide *weight, const real *y,
                           real *out)
{
    size_t t = blockIdx.x;

    for (int i = threadIdx.x; i < n; i += BLOCK) {
        float sum = load(out + t * n + i);

        for (int j = 0; j < top; j++)
            sum = fmaf(weight ? weight[t * top + j] : 1.0f,
                       load(y + (size_t)place[t * top + j] * n + i), sum);
        store(out + t * n + i, sum);
    }
}

static __global__ void back_mix(int n, int top, const int32_t *place, const wide *weight,
                                const real *y, const real *dout, real *dy, wide *dweight)
{
    const real *d = dout + (size_t)(blockIdx.x / top) * n;
    size_t at = (size_t)place[blockIdx.x] * n;
    float dot = 0, w = weight[blockIdx.x];

    for (int i = threadIdx.x; i < n; i += BLOCK) {
        dot += load(d + i) * load(y + at + i);
        store(dy + at + i, w * load(d + i));
    }
    dot = block_sum(dot);
    if (threadIdx.x == 0)
        dweight[blockIdx.x] = dot;
}

void R(cuda_route)(int m, int experts, int top, int renormalize, wide scale, const real *bias,
                   wide *scores, int32_t *choice, wide *weight)
{
    route<<<blocks(m, BLOCK / WARP), BLOCK, 0, policy_cuda.stream>>>(
        m, experts, top, renormalize, scale, bias, scores, choice, weight);
}

void R(cuda_back_route)(int m, int experts, int top, int renormalize, wide scale,
                        const wide *scores, const int32_t *choice, const wide *dweight,
                        real *dlogits)
{
    back_route<<<blocks(m, BLOCK), BLOCK, 0, policy_cuda.stream>>>(
        m, experts, top, renormalize, scale, scores, choice, dweight, dlogits);
}

void R(cuda_dispatch)(int choices, int experts, const int32_t *choice, int32_t *place,
                      int32_t *first)
{
    dispatch<<<1, 1024, 0, policy_cuda.stream>>>(choices, experts, choice, place, first);
}

void R(cuda_gather)(int m, int n, int top, const int32_t *place, const real *x, real *y)
{
    gather<<<m * top, BLOCK, 0, policy_cuda.stream>>>(n, top, place, x, y);
}

void R(cuda_mix)(int m, int n, int top, const int32_t *place, const wide *weight, const real *y,
                 real *out)
{
    mix<<<m, BLOCK, 0, policy_cuda.stream>>>(n, top, place, weight, y, out);
}

void R(cuda_back_gather)(int m, int n, int top, const int32_t *place, const real *dy, real *dx)
{
    mix<<<m, BLOCK, 0, policy_cuda.stream>>>(n, top, place, NULL, dy, dx);
}

void R(cuda_back_mix)(int m, int n, int top, const int32_t *place, const wide *weight,
                      const real *y, const real *dout, real *dy, wide *dweight)
{
    back_mix<<<m * top, BLOCK, 0, policy_cuda.stream>>>(n, top, place, weight, y, dout, dy,
                                                        dweight);
}

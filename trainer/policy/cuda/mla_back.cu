/* Gradient of attention over latents (mla.cu), in the manner of FlashAttention-2: probabilities are
 * made again from the kept log-sum-exp, never stored.  With delta = o . do of a query:
 *
 *     p = e^(scale q.c - lse)    ds = p (do . c_lora - delta) scale
 *     dq = sum_keys ds c         dc = sum_queries ds q + p do (the lora part)
 *
 * One launch takes tiles of queries over their keys and makes dq, a second takes tiles of keys over
 * the queries that see them and makes dc; scores are computed in both, and no sum needs an atomic.
 */
#include "trainer/policy/cuda/mla_tile.cuh"

#ifndef POLICY_BF16 /* mla_mma_back.cu */
/* delta[query] = o . do; a warp a query. */
static __global__ void query_delta(size_t queries, int lora, const real *o, const real *do_,
                                   wide *delta)
{
    size_t i = blockIdx.x * (size_t)(MLA_THREADS / WARP) + threadIdx.x / WARP;
    float sum = 0;

    if (i >= queries)
        return;
    for (int c = threadIdx.x % WARP; c < lora; c += WARP)
        sum += load(o + i * lora + c) * load(do_ + i * lora + c);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0)
        delta[i] = sum;
}

/* Rows of do, kept at the distance of the rows of q. */
static __device__ void load_do(float *to, const real *from, int n, int rows, int lora, int ld)
{
    for (int x = threadIdx.x; x < rows * lora; x += MLA_THREADS)
        to[x / lora * ld + x % lora] = x / lora < n ? load(from + x) : 0.0f;
}

/* Grid: tiles of queries; query j is head j % heads of token j / heads. */
static __global__ void __launch_bounds__(MLA_THREADS)
    back_queries(struct mla_shape s, int m, const real *c, const real *q, const wide *lse,
                 const wide *delta, const real *do_, real *dq)
{
    extern __shared__ float memory[];
    __shared__ float scores[TILE][STEP];
    int width = s.lora + s.rope, first = blockIdx.x * TILE;
    int n = min(m * s.heads - first, (int)TILE), last = (first + n - 1) / s.heads;
    int mine = threadIdx.x / LANES, lane = threadIdx.x % LANES, query = first + min(mine, n - 1);
    int seen = query / s.heads;
    struct mla_shared b = mla_share(memory, width);
    float *d = memory + (size_t)(TILE + STEP) * (width + 1); /* do of the queries */
    struct mla_shared with_do = {d, b.k, width + 1};
    float out[MLA_PER] = {}, scale = rsqrtf((float)(s.nope + s.rope));

    mla_load_rows(b.q, q + (size_t)first * width, n, TILE, width, width);
    load_do(d, do_ + (size_t)first * s.lora, n, TILE, s.lora, width + 1);
    for (int t = 0; t <= last; t += STEP) {
        float p[STEP], ds[STEP];

        __syncthreads();
        mla_load_rows(b.k, c + (size_t)t * width, min(m - t, (int)STEP), STEP, width, width);
        __syncthreads();
        mla_scores(&b, width, mine, lane, p);
        mla_scores(&with_do, s.lora, mine, lane, ds);
        for (int j = 0; j < STEP; j++)
            if (lane == 0)
                scores[mine][j] =
                    t + j <= seen ? expf(p[j] * scale - lse[query]) * (ds[j] - delta[query]) * scale
                                  : 0.0f;
        mla_weigh(&b, width, lane, scores[mine], out);
    }
    for (int i = 0; i < MLA_PER; i++)
        if (mine < n && lane + i * LANES < width)
            store(dq + (size_t)query * width + lane + i * LANES, out[i]);
}

/* Grid: tiles of TILE keys.  The roles change: the block's own rows are keys, the steps queries. */
static __global__ void __launch_bounds__(MLA_THREADS)
    back_keys(struct mla_shape s, int m, const real *c, const real *q, const wide *lse,
              const wide *delta, const real *do_, real *dc)
{
    extern __shared__ float memory[];
    __shared__ float scores[TILE][STEP], weights[TILE][STEP];
    int width = s.lora + s.rope, first = blockIdx.x * TILE, queries = m * s.heads;
    int n = min(m - first, (int)TILE), mine = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    int key = first + min(mine, n - 1);
    struct mla_shared k = mla_share(memory, width);          /* k.q: keys, k.k: queries of a step */
    float *d = memory + (size_t)(TILE + STEP) * (width + 1); /* do of them, rows of width + 1 */
    struct mla_shared with_do = {k.q, d, width + 1};
    float out[MLA_PER] = {}, scale = rsqrtf((float)(s.nope + s.rope));

    mla_load_rows(k.q, c + (size_t)first * width, n, TILE, width, width);
    for (int t = first * s.heads / STEP * STEP; t < queries; t += STEP) {
        int some = min(queries - t, (int)STEP);
        float p[STEP], ds[STEP];

        __syncthreads();
        mla_load_rows(k.k, q + (size_t)t * width, some, STEP, width, width);
        load_do(d, do_ + (size_t)t * s.lora, some, STEP, s.lora, width + 1);
        __syncthreads();
        mla_scores(&k, width, mine, lane, p);
        mla_scores(&with_do, s.lora, mine, lane, ds);
        for (int j = 0; j < STEP; j++) {
            bool sees = j < some && (t + j) / s.heads >= key;

            p[j] = sees ? expf(p[j] * scale - lse[t + j]) : 0.0f;
            if (lane == 0) {
                weights[mine][j] = p[j];
                scores[mine][j] = sees ? p[j] * (ds[j] - delta[t + j]) * scale : 0.0f;
            }
        }
        mla_weigh(&k, width, lane, scores[mine], out);
        mla_weigh(&with_do, s.lora, lane, weights[mine], out);
    }
    for (int i = 0; i < MLA_PER; i++)
        if (mine < n && lane + i * LANES < width)
            store(dc + (size_t)key * width + lane + i * LANES, out[i]);
}

void R(cuda_back_mla_attend)(const struct mla_shape *s, int m, const real *c, const real *q,
                             const real *o, const wide *lse, const real *do_, real *dq, real *dc,
                             wide *work)
{
    size_t queries = (size_t)m * s->heads, row = s->lora + s->rope + 1;
    int for_queries = (int)((2 * TILE + STEP) * row * sizeof(float));
    int for_keys = (int)((TILE + 2 * STEP) * row * sizeof(float));

    cudaFuncSetAttribute(back_queries, cudaFuncAttributeMaxDynamicSharedMemorySize, for_queries);
    cudaFuncSetAttribute(back_keys, cudaFuncAttributeMaxDynamicSharedMemorySize, for_keys);
    query_delta<<<blocks(queries, MLA_THREADS / WARP), MLA_THREADS, 0, policy_cuda.stream>>>(
        queries, s->lora, o, do_, work);
    back_queries<<<blocks(queries, TILE), MLA_THREADS, for_queries, policy_cuda.stream>>>(
        *s, m, c, q, lse, work, do_, dq);
    back_keys<<<blocks(m, TILE), MLA_THREADS, for_keys, policy_cuda.stream>>>(*s, m, c, q, lse,
                                                                              work, do_, dc);
}
#endif

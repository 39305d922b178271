/* Gradient of attention in bf16, on the tensor cores: mla_back.cu's formulas, with mla_mma.cuh's
 * tiles. The two launches differ in whose rows a block owns. */
#include "trainer/policy/cuda/mla_mma.cuh"

#ifdef POLICY_BF16
struct back_shared {
    float S[OWN][S_ROW], D[OWN][S_ROW]; /* q . c, do . c */
    __nv_bfloat16 P[OWN * P_ROW], dS[OWN * P_ROW];
    __nv_bfloat16 rows[]; /* owned rows, step rows, then do of whichever are queries */
};

static size_t back_bytes(int width, int lora, int do_rows)
{
    return sizeof(struct back_shared) +
           ((size_t)(OWN + STEP) * mma_row(width) + (size_t)do_rows * mma_row(lora)) * 2;
}

/* delta[query] = o . do; a warp a query. */
static __global__ void query_delta(size_t queries, int lora, const real *o, const real *do_,
                                   wide *delta)
{
    size_t i = blockIdx.x * (size_t)(MMA_THREADS / WARP) + threadIdx.x / WARP;
    float sum = 0;

    if (i >= queries)
        return;
    for (int c = threadIdx.x % WARP; c < lora; c += WARP)
        sum += load(o + i * lora + c) * load(do_ + i * lora + c);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0)
        delta[i] = sum;
}

/* One score: p and ds of a query and a key. */
static __device__ __forceinline__ void gradient(struct back_shared *x, int row, int j, bool sees,
                                                float scale, float lse, float delta)
{
    float p = sees ? __expf(x->S[row][j] * scale - lse) : 0.0f;

    store(&x->P[row * P_ROW + j], p);
    store(&x->dS[row * P_ROW + j], sees ? p * (x->D[row][j] - delta) * scale : 0.0f);
}

/* Grid: tiles of queries, those with most keys first. */
static __global__ void __launch_bounds__(MMA_THREADS)
    back_queries(struct mla_shape s, int m, const real *c, const real *q, const wide *lse,
                 const wide *delta, const real *do_, real *dq)
{
    extern __shared__ __align__(16) char memory[];
    struct back_shared *x = (struct back_shared *)memory;
    int width = s.lora + s.rope, ld = mma_row(width), lo = mma_row(s.lora),
        first = (gridDim.x - 1 - blockIdx.x) * OWN;
    int n = min(m * s.heads - first, (int)OWN), last = (first + n - 1) / s.heads;
    int row = threadIdx.x / 4, query = first + min(row, n - 1), seen = query / s.heads;
    __nv_bfloat16 *keys = x->rows + OWN * ld, *d = keys + STEP * ld;
    float acc[HALF_TILES][4] = {}, scale = rsqrtf((float)(s.nope + s.rope));

    mma_load(x->rows, q + (size_t)first * width, n, OWN, width, ld);
    mma_load(d, do_ + (size_t)first * s.lora, n, OWN, s.lora, lo);
    for (int t = 0; t <= last; t += STEP) {
        __syncthreads();
        mma_load(keys, c + (size_t)t * width, min(m - t, (int)STEP), STEP, width, ld);
        __syncthreads();
        mma_scores(x->rows, ld, keys, ld, ld - PAD, x->S);
        /* behind lora the rows of do are zero, so what the keys have there does not count */
        mma_scores(d, lo, keys, ld, lo - PAD, x->D);
        __syncthreads();
        for (int j = threadIdx.x % 4; j < STEP; j += 4)
            gradient(x, row, j, t + j <= seen, scale, lse[query], delta[query]);
        __syncthreads();
        mma_accumulate(x->dS, keys, ld, width, width, acc);
    }
    mma_store(acc, width, n, NULL, dq + (size_t)first * width);
}

/* Grid: tiles of keys, splits.  Steps are queries; a split takes each CUDA_SPLITS-th, so that all
 * have about as many.  part: [split][m][width]. */
static __global__ void __launch_bounds__(MMA_THREADS)
    back_keys(struct mla_shape s, int m, const real *c, const real *q, const wide *lse,
              const wide *delta, const real *do_, wide *part)
{
    extern __shared__ __align__(16) char memory[];
    struct back_shared *x = (struct back_shared *)memory;
    int width = s.lora + s.rope, ld = mma_row(width), first = blockIdx.x * OWN;
    int n = min(m - first, (int)OWN), queries = m * s.heads, row = threadIdx.x / 4;
    int key = first + min(row, n - 1);
    __nv_bfloat16 *step = x->rows + OWN * ld, *d = step + STEP * ld; /* do at the same distance */
    float acc[HALF_TILES][4] = {}, scale = rsqrtf((float)(s.nope + s.rope));

    mma_load(x->rows, c + (size_t)first * width, n, OWN, width, ld);
    for (int t = (first * s.heads / STEP + blockIdx.y) * STEP; t < queries;
         t += CUDA_SPLITS * STEP) {
        int some = min(queries - t, (int)STEP);

        __syncthreads();
        mma_load(step, q + (size_t)t * width, some, STEP, width, ld);
        mma_load(d, do_ + (size_t)t * s.lora, some, STEP, s.lora, mma_row(s.lora));
        __syncthreads();
        mma_scores(x->rows, ld, step, ld, ld - PAD, x->S);
        mma_scores(x->rows, ld, d, mma_row(s.lora), mma_row(s.lora) - PAD, x->D);
        __syncthreads();
        for (int j = threadIdx.x % 4; j < STEP; j += 4) {
            int query = t + min(j, some - 1);

            gradient(x, row, j, j < some && query / s.heads >= key, scale, lse[query],
                     delta[query]);
        }
        __syncthreads();
        mma_accumulate(x->dS, step, ld, width, width, acc);
        mma_accumulate(x->P, d, mma_row(s.lora), s.lora, width, acc);
    }
    mma_store(acc, width, n, NULL, part + ((size_t)blockIdx.y * m + first) * width);
}

static __global__ void add_splits(size_t size, const wide *part, real *dc)
{
    size_t i = blockIdx.x * (size_t)MMA_THREADS + threadIdx.x;
    float sum = 0;

    if (i >= size)
        return;
    for (int k = 0; k < CUDA_SPLITS; k++)
        sum += part[k * size + i];
    store(dc + i, sum);
}

void R(cuda_back_mla_attend)(const struct mla_shape *s, int m, const real *c, const real *q,
                             const real *o, const wide *lse, const real *do_, real *dq, real *dc,
                             wide *work)
{
    size_t queries = (size_t)m * s->heads, size = (size_t)m * (s->lora + s->rope);
    wide *part = work + queries;
    dim3 keys(blocks(m, OWN), CUDA_SPLITS);
    int for_queries = (int)back_bytes(s->lora + s->rope, s->lora, OWN);
    int for_keys = (int)back_bytes(s->lora + s->rope, s->lora, STEP);

    cudaFuncSetAttribute(back_queries, cudaFuncAttributeMaxDynamicSharedMemorySize, for_queries);
    cudaFuncSetAttribute(back_keys, cudaFuncAttributeMaxDynamicSharedMemorySize, for_keys);
    query_delta<<<blocks(queries, MMA_THREADS / WARP), MMA_THREADS, 0, policy_cuda.stream>>>(
        queries, s->lora, o, do_, work);
    back_queries<<<blocks(queries, OWN), MMA_THREADS, for_queries, policy_cuda.stream>>>(
        *s, m, c, q, lse, work, do_, dq);
    back_keys<<<keys, MMA_THREADS, for_keys, policy_cuda.stream>>>(*s, m, c, q, lse, work, do_,
                                                                   part);
    add_splits<<<blocks(size, MMA_THREADS), MMA_THREADS, 0, policy_cuda.stream>>>(size, part, dc);
}
#endif

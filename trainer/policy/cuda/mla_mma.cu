/* Attention over paged latents in bf16, on the tensor cores: mla.cu's algorithm, with mla_mma.cuh's
 * tiles. Scores and sums stay in float32; probabilities are rounded to bf16 for the second product,
 * as the tensor cores want them. */
#include "trainer/policy/cuda/mla_mma.cuh"

#ifdef POLICY_BF16
struct forward_shared {
    float S[OWN][S_ROW];
    __nv_bfloat16 P[OWN * P_ROW];
    float top[OWN], sum[OWN], factor[OWN];
    __nv_bfloat16 rows[]; /* queries, then keys */
};

static size_t forward_bytes(int width)
{
    return sizeof(struct forward_shared) + (size_t)(OWN + STEP) * mma_row(width) * 2;
}

/* Four threads a row: scores become probabilities over a new top; factor is what the old ones lose.
 */
static __device__ void soften(struct forward_shared *x, float scale, int64_t t, int keys,
                              int64_t seen)
{
    int row = threadIdx.x / 4, part = threadIdx.x % 4;
    float *S = x->S[row], was = x->top[row], top = was, sum = 0, factor;

    for (int j = part; j < STEP; j += 4) {
        S[j] = j < keys && t + j <= seen ? S[j] * scale : -INFINITY;
        top = fmaxf(top, S[j]);
    }
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    for (int j = part; j < STEP; j += 4) {
        float p = __expf(S[j] - top);

        sum += p;
        store(&x->P[row * P_ROW + j], p);
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    factor = __expf(was - top);
    __syncwarp(); /* all have read the old top */
    if (part == 0) {
        x->top[row] = top;
        x->sum[row] = x->sum[row] * factor + sum;
        x->factor[row] = factor;
    }
}

static __device__ __forceinline__ void rescale(const float *factor, float acc[HALF_TILES][4])
{
    int r = threadIdx.x / 64 * 16 + threadIdx.x % 32 / 4;
    float low = factor[r], high = factor[r + 8];

#pragma unroll
    for (int i = 0; i < HALF_TILES; i++) {
        acc[i][0] *= low;
        acc[i][1] *= low;
        acc[i][2] *= high;
        acc[i][3] *= high;
    }
}

/* Grid: tiles of queries, those with most keys first; sequences.  Query j of a sequence: head j %
 * heads of its token j / heads.
 */
static __global__ void __launch_bounds__(MMA_THREADS)
    mla_attend(struct mla_shape s, struct R(batch) b, struct mla_layout l, const real *q, real *o,
               wide *lse)
{
    extern __shared__ __align__(16) char memory[];
    struct forward_shared *x = (struct forward_shared *)memory;
    const struct R(seq) *seq = b.seqs + blockIdx.y;
    int width = s.lora + s.rope, ld = mma_row(width), first = (gridDim.x - 1 - blockIdx.x) * OWN;
    int n = min(seq->n * s.heads - first, (int)OWN), mine = threadIdx.x / 4;
    __nv_bfloat16 *keys_at = x->rows + OWN * ld;
    float acc[HALF_TILES][4] = {}, scale = rsqrtf((float)(s.nope + s.rope));
    size_t row = (size_t)seq->row * s.heads + first;
    int64_t last, seen;

    if (n <= 0)
        return;
    last = seq->start + (first + n - 1) / s.heads;
    seen = seq->start + (first + min(mine, n - 1)) / s.heads;
    mma_load(x->rows, q + row * width, n, OWN, width, ld);
    if (threadIdx.x < OWN) {
        x->top[threadIdx.x] = -INFINITY;
        x->sum[threadIdx.x] = 0;
    }
    for (int64_t t = 0; t <= last; t += STEP) {
        int keys = (int)min((int64_t)STEP, last - t + 1);

        __syncthreads();
        for (int k = 0; k < STEP; k += MLA_BLOCK) /* of which a page holds a multiple */
            mma_load(keys_at + k * ld,
                     k < keys ? seq->pages[(t + k) / l.page_tokens] + l.offset +
                                    (t + k) % l.page_tokens * width
                              : q,
                     min(keys - k, (int)MLA_BLOCK), MLA_BLOCK, width, ld);
        __syncthreads();
        mma_scores(x->rows, ld, keys_at, ld, ld - PAD, x->S);
        __syncthreads();
        soften(x, scale, t, keys, seen);
        __syncthreads();
        rescale(x->factor, acc);
        mma_accumulate(x->P, keys_at, ld, s.lora, s.lora, acc);
    }
    __syncthreads();
    if (threadIdx.x < n) {
        lse[row + threadIdx.x] = x->top[threadIdx.x] + logf(x->sum[threadIdx.x]);
        x->factor[threadIdx.x] = 1 / x->sum[threadIdx.x];
    }
    __syncthreads();
    mma_store(acc, s.lora, n, x->factor, o + row * s.lora);
}

void R(cuda_mla_attend)(const struct mla_shape *s, const struct R(batch) * b,
                        const struct mla_layout *l, const real *q, real *o, wide *lse)
{
    dim3 grid(blocks((size_t)b->longest * s->heads, OWN), b->n_seqs);
    size_t shared = forward_bytes(s->lora + s->rope);

    cudaFuncSetAttribute(mla_attend, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    mla_attend<<<grid, MMA_THREADS, shared, policy_cuda.stream>>>(*s, *b, *l, q, o, lse);
}
#endif

/* Multi-head latent attention over paged latents (DeepSeek-V2, arXiv 2405.04434), absorbed, without
 * positions: all heads of a token read the same keys, which are lora + rope numbers, and the values
 * are the first lora of them.
 *
 * So a (token, head) pair is a query like any other, and a block takes TILE of them, of one
 * sequence, over all its keys, STEP at a time: scores, running softmax, weighted sum, with the keys
 * in shared memory once for all of the tile's queries (the tiling of FlashAttention-2, arXiv
 * 2307.08691).  Decode is the same kernel with heads queries.  Each thread keeps its share of one
 * query's output in registers. */
#include "trainer/policy/cuda/mla_tile.cuh"

enum { STORE_BLOCK = 256 };

/* A block a token: its lora part normed, its rope part as it is. */
static __global__ void mla_store(struct mla_shape s, struct R(batch) b, struct mla_layout l,
                                 float eps, const real *w, const real *kv, int ldkv)
{
    const struct R(seq) *seq = b.seqs + blockIdx.y;
    int64_t t = seq->start + blockIdx.x;
    int width = s.lora + s.rope;
    const real *from;
    real *to;
    float square = 0;

    if (blockIdx.x >= seq->n)
        return;
    from = kv + (size_t)(seq->row + blockIdx.x) * ldkv;
    to = seq->pages[t / l.page_tokens] + l.offset + t % l.page_tokens * width;
    for (int i = threadIdx.x; i < s.lora; i += STORE_BLOCK)
        square += load(from + i) * load(from + i);
    square = rsqrtf(block_sum(square) / s.lora + eps);
    for (int i = threadIdx.x; i < width; i += STORE_BLOCK)
        store(to + i, i < s.lora ? load(from + i) * square * load(w + i) : load(from + i));
}

#ifndef POLICY_BF16 /* mla_mma.cu */
/* Grid: tiles of queries, sequences.  Query j of a sequence: head j % heads of its token j / heads.
 */
static __global__ void __launch_bounds__(MLA_THREADS)
    mla_attend(struct mla_shape s, struct R(batch) b, struct mla_layout l, const real *q, real *o,
               wide *lse)
{
    extern __shared__ float memory[];
    __shared__ float weights[TILE][STEP];
    const struct R(seq) *seq = b.seqs + blockIdx.y;
    int width = s.lora + s.rope, first = blockIdx.x * TILE, queries = seq->n * s.heads;
    int n = min(queries - first, (int)TILE), mine = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    struct mla_shared m = mla_share(memory, width);
    float out[MLA_PER] = {}, top = -INFINITY, sum = 0;
    float scale = rsqrtf((float)(s.nope + s.rope));
    size_t row = (size_t)seq->row * s.heads + first;
    int64_t last, seen;

    if (n <= 0)
        return;
    last = seq->start + (first + n - 1) / s.heads;
    seen = seq->start + (first + min(mine, n - 1)) / s.heads;
    mla_load_rows(m.q, q + row * width, n, TILE, width, width);
    for (int64_t t = 0; t <= last; t += STEP) {
        int keys = (int)min((int64_t)STEP, last - t + 1);
        float p[STEP], was = top, factor;

        __syncthreads();
        mla_load_keys(m.k, seq->pages, l, t, keys, width);
        __syncthreads();
        mla_scores(&m, width, mine, lane, p);
        for (int j = 0; j < STEP; j++) {
            p[j] = j < keys && t + j <= seen ? p[j] * scale : -INFINITY;
            top = fmaxf(top, p[j]);
        }
        factor = expf(was - top);
        sum *= factor;
        for (int j = 0; j < STEP; j++) {
            p[j] = expf(p[j] - top);
            sum += p[j];
            if (lane == 0)
                weights[mine][j] = p[j];
        }
        for (int i = 0; i < MLA_PER; i++)
            out[i] *= factor;
        mla_weigh(&m, s.lora, lane, weights[mine], out);
    }
    if (mine >= n)
        return;
    for (int i = 0; i < MLA_PER; i++)
        if (lane + i * LANES < s.lora)
            store(o + (row + mine) * s.lora + lane + i * LANES, out[i] / sum);
    if (lane == 0)
        lse[row + mine] = top + logf(sum);
}

void R(cuda_mla_attend)(const struct mla_shape *s, const struct R(batch) * b,
                        const struct mla_layout *l, const real *q, real *o, wide *lse)
{
    dim3 grid(blocks((size_t)b->longest * s->heads, TILE), b->n_seqs);
    size_t shared = mla_shared_bytes(s->lora + s->rope);

    cudaFuncSetAttribute(mla_attend, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    mla_attend<<<grid, MLA_THREADS, shared, policy_cuda.stream>>>(*s, *b, *l, q, o, lse);
}
#endif

void R(cuda_mla_store)(const struct mla_shape *s, const struct R(batch) * b,
                       const struct mla_layout *l, wide eps, const real *w, const real *kv,
                       int ldkv)
{
    dim3 grid(b->longest, b->n_seqs);

    mla_store<<<grid, STORE_BLOCK, 0, policy_cuda.stream>>>(*s, *b, *l, eps, w, kv, ldkv);
}

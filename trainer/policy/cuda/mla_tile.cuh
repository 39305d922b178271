/* A tile of queries against a step of keys, for attention and its gradients.
 *
 * LANES threads share a query; they are neighbours in a warp, so that their sums are shuffles. Rows
 * in shared memory are padded by one number, so that the queries of a warp do not meet in one bank.
 */
#ifndef TRAINER_POLICY_CUDA_MLA_TILE_CUH
#define TRAINER_POLICY_CUDA_MLA_TILE_CUH

#include "trainer/policy/cuda/common.cuh"

enum {
    TILE = 32, /* queries of a block */
    STEP = 16, /* keys at a time */
    LANES = 8, /* threads of a query */
    MLA_THREADS = TILE * LANES,
    MLA_MAX_WIDTH = 576,             /* lora + rope: the family's 512 + 64 */
    MLA_PER = MLA_MAX_WIDTH / LANES, /* numbers of a row that a thread owns */
};

struct mla_shared {
    float *q, *k; /* [TILE][ld], [STEP][ld] */
    int ld;
};

static inline __host__ __device__ size_t mla_shared_bytes(int width)
{
    return (size_t)(TILE + STEP) * (width + 1) * sizeof(float);
}

static __device__ struct mla_shared mla_share(float *memory, int width)
{
    return {memory, memory + (size_t)TILE * (width + 1), width + 1};
}

/* Rows at from + i ld; those behind n are zero. */
static __device__ void mla_load_rows(float *to, const real *from, int n, int rows, int width,
                                     size_t ld)
{
    for (int x = threadIdx.x; x < rows * width; x += MLA_THREADS) {
        int i = x / width, c = x % width;

        to[i * (width + 1) + c] = i < n ? load(from + i * ld + c) : 0.0f;
    }
}

static __device__ void mla_load_keys(float *to, real *const *pages, struct mla_layout l, int64_t t,
                                     int n, int width)
{
    /* a step lies in one page: pages are multiples of it */
    const real *from = pages[t / l.page_tokens] + l.offset + t % l.page_tokens * width;

    mla_load_rows(to, from, n, STEP, width, width);
}

/* p[j] = row `mine` of q . row j of k, in all LANES threads. */
static __device__ void mla_scores(const struct mla_shared *m, int width, int mine, int lane,
                                  float p[STEP])
{
    const float *q = m->q + mine * m->ld;

#pragma unroll
    for (int j = 0; j < STEP; j++)
        p[j] = 0;
    for (int c = lane; c < width; c += LANES) {
        float x = q[c];

#pragma unroll
        for (int j = 0; j < STEP; j++)
            p[j] = fmaf(x, m->k[j * m->ld + c], p[j]);
    }
#pragma unroll
    for (int j = 0; j < STEP; j++)
        for (int d = LANES / 2; d; d /= 2)
            p[j] += __shfl_xor_sync(0xffffffffu, p[j], d);
}

/* out += sum_j p[j] k[j], the thread's numbers of the first `n`.  p is the query's row in shared
 * memory, written by its own LANES threads: with p in registers the loops would unroll to thousands
 * of instructions. */
static __device__ void mla_weigh(const struct mla_shared *m, int n, int lane, const float *p,
                                 float out[MLA_PER])
{
    __syncwarp();
#pragma unroll 1
    for (int j = 0; j < STEP; j++) {
        const float *k = m->k + j * m->ld + lane;
        float x = p[j];

#pragma unroll
        for (int i = 0; i < MLA_PER; i++)
            if (lane + i * LANES < n)
                out[i] = fmaf(x, k[i * LANES], out[i]);
    }
    __syncwarp();
}

#endif

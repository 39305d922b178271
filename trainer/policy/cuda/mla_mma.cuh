/* Attention tiles on the tensor cores, for bf16 (mla_mma.cu, mla_mma_back.cu).
 *
 * A block owns OWN rows and goes over other rows, STEP at a time: queries over keys, or in backward
 * keys over queries.  Two products do all the work, with mma.sync m16n8k16 (PTX ISA 9.7.14):
 *
 *     scores      S[OWN][STEP]   = own[OWN][k] step[STEP][k]'
 *     accumulate  acc[OWN][cols] += P[OWN][STEP] step[STEP][cols]
 *
 * Eight warps: warp / 2 is a band of 16 own rows, warp % 2 half of the columns.  Rows in shared
 * memory are 8 numbers longer than they need to be, which spreads a warp's loads over all banks. */
#ifndef TRAINER_POLICY_CUDA_MLA_MMA_CUH
#define TRAINER_POLICY_CUDA_MLA_MMA_CUH

#include "trainer/policy/cuda/mma.cuh"

enum {
    OWN = 64,
    STEP = 32,
    MMA_THREADS = 256,
    MAX_WIDTH = 576,                /* lora + rope: the family's 512 + 64 */
    HALF_TILES = MAX_WIDTH / 8 / 2, /* 8-column tiles of a warp */
    PAD = 8,
    P_ROW = STEP + PAD,
    S_ROW = STEP + 1,
};

/* Numbers of a row in shared memory that holds `width`: whole steps of 16, and the padding. */
static inline __host__ __device__ int mma_row(int width)
{
    return (width + 15) / 16 * 16 + PAD;
}

/* Rows at from + i ld; what is behind n rows or `width` numbers is zero. */
static __device__ void mma_load(__nv_bfloat16 *to, const __nv_bfloat16 *from, int n, int rows,
                                int width, int row)
{
    int wide = row - PAD;

    if (width % 8 == 0 && (uintptr_t)from % 16 == 0) {
        for (int x = threadIdx.x; x < rows * wide / 8; x += MMA_THREADS) {
            int i = x / (wide / 8), c = x % (wide / 8) * 8;

            *(uint4 *)(to + i * row + c) = i < n && c < width
                                               ? *(const uint4 *)(from + (size_t)i * width + c)
                                               : make_uint4(0, 0, 0, 0);
        }
        return;
    }
    for (int x = threadIdx.x; x < rows * wide; x += MMA_THREADS) {
        int i = x / wide, c = x % wide;

        to[i * row + c] = i < n && c < width ? from[(size_t)i * width + c] : __float2bfloat16(0.0f);
    }
}

/* S = own step' over the first `wide` numbers (a multiple of 16); each warp its 16 x 16. */
static __device__ void mma_scores(const __nv_bfloat16 *own, int own_row, const __nv_bfloat16 *step,
                                  int step_row, int wide, float S[OWN][S_ROW])
{
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4 * 2;
    int r0 = warp / 2 * 16, c0 = warp % 2 * 16;
    float c[2][4] = {};

    for (int k = 0; k < wide; k += 16) {
        uint32_t a[4];

        left(a, own, own_row, r0, k);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const __nv_bfloat16 *b = step + (c0 + 8 * i + g) * step_row + k + t;

            mma(c[i], a, pair(b), pair(b + 8));
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        S[r0 + g][c0 + 8 * i + t] = c[i][0];
        S[r0 + g][c0 + 8 * i + t + 1] = c[i][1];
        S[r0 + g + 8][c0 + 8 * i + t] = c[i][2];
        S[r0 + g + 8][c0 + 8 * i + t + 1] = c[i][3];
    }
}

/* acc += P step, the warp's band and half of acc's `columns`; step has the first `given` of them.
 */
static __device__ __forceinline__ void mma_accumulate(const __nv_bfloat16 *P,
                                                      const __nv_bfloat16 *step, int step_row,
                                                      int given, int columns,
                                                      float acc[HALF_TILES][4])
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = (columns + 15) / 16 * 8;
    int c0 = warp % 2 * half;

#pragma unroll
    for (int k = 0; k < STEP; k += 16) {
        uint32_t a[4];

        left(a, P, P_ROW, warp / 2 * 16, k);
#pragma unroll
        for (int i = 0; i < HALF_TILES; i++) {
            uint32_t b0, b1;
            unsigned at;

            if (i * 8 >= half || c0 + i * 8 >= given)
                continue;
            at = (unsigned)__cvta_generic_to_shared(step + (k + lane % 16) * step_row + c0 + i * 8);
            asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                         : "=r"(b0), "=r"(b1)
                         : "r"(at));
            mma(acc[i], a, b0, b1);
        }
    }
}

/* The warp's numbers to rows of `columns`, each times scale[its row]. */
template <typename T>
static __device__ __forceinline__ void mma_store(const float acc[HALF_TILES][4], int columns, int n,
                                                 const float *scale, T *to)
{
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4 * 2;
    int half = (columns + 15) / 16 * 8, r = warp / 2 * 16 + g, c0 = warp % 2 * half;

#pragma unroll
    for (int i = 0; i < HALF_TILES; i++)
        for (int j = 0; j < 4; j++) {
            int row = r + j / 2 * 8, c = c0 + i * 8 + t + j % 2;

            if (i * 8 < half && c < columns && row < n)
                store(to + (size_t)row * columns + c, acc[i][j] * (scale ? scale[row] : 1.0f));
        }
}

#endif

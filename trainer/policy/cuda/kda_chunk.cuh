/* A chunk of the KDA recurrence as matrices (after the chunked form of Kimi Linear, arXiv
 * 2510.26692, section 3 and appendix; here without factored decays, so that nothing can overflow).
 *
 * With S0 the state before the chunk, G_r the sum of g up to token r, and per channel decays
 * inside:
 *
 *     A_ri = k_r . (e^(G_r - G_i) k_i),  i < r        B_ri = q_r . (e^(G_r - G_i) k_i),  i <= r
 *     U = V - Kt S0                                   Kt_r = e^G_r k_r,  Qt_r = e^G_r q_r
 *     D_r = beta_r (U_r - sum_{i<r} A_ri D_i)         what token r writes
 *     O = Qt S0 + B D
 *     S = diag(e^G_C) S0 + Kh' D                      Kh_i = e^(G_C - G_i) k_i
 *
 * Every exponent is a sum of log decays, so at most 0.  A chunk is KDA_SPAN tokens. */
#ifndef TRAINER_POLICY_CUDA_KDA_CHUNK_CUH
#define TRAINER_POLICY_CUDA_KDA_CHUNK_CUH

#include "trainer/policy/cuda/common.cuh"

enum { CHUNK = KDA_SPAN, KDA_BLOCK = 256, COLUMNS = 32 /* of the state, that a block takes */ };

/* One chunk of one head in shared memory; rows past its end are zero. */
template <int DIM> struct chunk {
    float q[CHUNK][DIM], k[CHUNK][DIM], G[CHUNK][DIM]; /* after chunk_decay(): Qt, Kt, Kh */
    float A[CHUNK][CHUNK + 1], B[CHUNK][CHUNK + 1];
    float total[DIM], decay[DIM]; /* G_C and e^G_C */
    float beta[CHUNK];
};

/* Rows first.. of the head: q, k, G and beta. */
template <int DIM>
static __device__ void chunk_load(struct chunk<DIM> *c, const struct kda_shape &s,
                                  const struct R(kda_rows) & r, size_t first, int n, int h)
{
    int width = s.heads * DIM;

#pragma unroll
    for (int y = 0; y < CHUNK * DIM / KDA_BLOCK; y++) { /* all loads in flight at once */
        int x = threadIdx.x + y * KDA_BLOCK, t = x / DIM, i = x % DIM;
        size_t row = first + t;

        c->q[t][i] = t < n ? load(r.qkv + row * 3 * width + h * DIM + i) : 0.0f;
        c->k[t][i] = t < n ? load(r.qkv + row * 3 * width + width + h * DIM + i) : 0.0f;
        c->G[t][i] = t < n ? r.g[row * width + h * DIM + i] : 0.0f;
    }
    for (int t = threadIdx.x; t < CHUNK; t += KDA_BLOCK)
        c->beta[t] = t < n ? r.beta[(first + t) * s.heads + h] : 0.0f;
    __syncthreads();
    for (int i = threadIdx.x; i < DIM; i += KDA_BLOCK) {
        for (int t = 1; t < CHUNK; t++)
            c->G[t][i] += c->G[t - 1][i];
        c->total[i] = c->G[CHUNK - 1][i];
        c->decay[i] = expf(c->total[i]);
    }
    __syncthreads();
}

/* A and B; a warp takes a pair. */
template <int DIM> static __device__ void chunk_pairs(struct chunk<DIM> *c)
{
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    for (int x = warp; x < CHUNK * CHUNK; x += KDA_BLOCK / WARP) {
        int r = x / CHUNK, i = x % CHUNK;
        float a = 0, b = 0;

        if (i <= r) {
            for (int j = lane; j < DIM; j += WARP) {
                float ki = c->k[i][j] * expf(c->G[r][j] - c->G[i][j]);

                a = fmaf(c->k[r][j], ki, a);
                b = fmaf(c->q[r][j], ki, b);
            }
            a = warp_sum(a);
            b = warp_sum(b);
        }
        if (lane == 0) {
            c->A[r][i] = i < r ? a : 0.0f;
            c->B[r][i] = b;
        }
    }
    __syncthreads();
}

/* q, k, G become Qt, Kt, Kh. */
template <int DIM> static __device__ void chunk_decay(struct chunk<DIM> *c)
{
#pragma unroll
    for (int y = 0; y < CHUNK * DIM / KDA_BLOCK; y++) {
        int x = threadIdx.x + y * KDA_BLOCK, t = x / DIM, i = x % DIM;
        float e = expf(c->G[t][i]), k = c->k[t][i];

        c->q[t][i] *= e;
        c->k[t][i] = k * e;
        c->G[t][i] = k * expf(c->total[i] - c->G[t][i]);
    }
    __syncthreads();
}

/* Runs kernel<DIM> for the head's size; policy_cuda_open has checked that it is one of these. */
#define KDA_LAUNCH(dim, kernel, ...)                                                               \
    do {                                                                                           \
        if ((dim) == 128)                                                                          \
            kernel<128> __VA_ARGS__;                                                               \
        else if ((dim) == 64)                                                                      \
            kernel<64> __VA_ARGS__;                                                                \
        else                                                                                       \
            kernel<32> __VA_ARGS__;                                                                \
    } while (0)

#endif

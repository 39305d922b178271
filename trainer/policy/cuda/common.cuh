/* What every kernel file shares.
 *
 * One source, two kinds (trainer/policy/kind.h): float32, which checks against the CPU backend, and
 * bf16 storage.  Arithmetic is float32 in both; load() and store() are the only places that know.
 *
 * All work goes to one stream, in order.  A launch that fails is remembered by the runtime and
 * reported by the backend's check(), put() or get(); cuBLASLt's failures are remembered in
 * struct cuda_state. */
#ifndef TRAINER_POLICY_CUDA_COMMON_CUH
#define TRAINER_POLICY_CUDA_COMMON_CUH

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "trainer/policy/ops.h"

struct cuda_state {
    cudaStream_t stream;
    cublasLtHandle_t lt;
    void *workspace;    /* of whichever product or sum is next in the stream */
    const char *failed; /* what failed first; NULL = nothing */
    int status;         /* of it, a cublasStatus_t */
};

enum {
    CUDA_WORKSPACE = 32 << 20,
    CUDA_CHUNKS = 64, /* of rows, for sums over them */
    CUDA_SPLITS = 8,  /* of the queries that a tile of keys goes over in backward */
    WARP = 32,
};

extern struct cuda_state policy_cuda;

static __device__ __forceinline__ float load(const float *p)
{
    return *p;
}

static __device__ __forceinline__ float load(const __nv_bfloat16 *p)
{
    return __bfloat162float(*p);
}

static __device__ __forceinline__ void store(float *p, float x)
{
    *p = x;
}

static __device__ __forceinline__ void store(__nv_bfloat16 *p, float x)
{
    *p = __float2bfloat16(x);
}

static __device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + __expf(-x));
}

static __device__ __forceinline__ float warp_sum(float x)
{
    for (int d = WARP / 2; d; d /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

static __device__ __forceinline__ float warp_max(float x)
{
    for (int d = WARP / 2; d; d /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}

/* Of a block of up to 1024 threads, a multiple of WARP; every thread gets it. */
static __device__ __forceinline__ float block_sum(float x)
{
    __shared__ float part[WARP];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    x = warp_sum(x);
    __syncthreads(); /* the last use of `part` */
    if (lane == 0)
        part[warp] = x;
    __syncthreads();
    return warp_sum(lane < blockDim.x / WARP ? part[lane] : 0.0f);
}

static __device__ __forceinline__ float block_max(float x)
{
    __shared__ float part[WARP];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    x = warp_max(x);
    __syncthreads();
    if (lane == 0)
        part[warp] = x;
    __syncthreads();
    return warp_max(lane < blockDim.x / WARP ? part[lane] : -INFINITY);
}

/* Blocks of `size` that cover n, within what a grid's x may be. */
static inline unsigned blocks(size_t n, int size)
{
    size_t b = (n + (size_t)size - 1) / (size_t)size;

    return (unsigned)(b < 1u << 30 ? b : 1u << 30);
}

/* Threads for a head of d channels: whole warps, at most 128. */
static inline int head_block(int d)
{
    return d >= 128 ? 128 : (d + WARP - 1) / WARP * WARP;
}

#define POLICY_CUDA_PROTOTYPE(name, args) void R(cuda_##name) args;
extern "C" {
POLICY_OPS(POLICY_CUDA_PROTOTYPE)
size_t R(cuda_work)(const struct kda_shape *k, const struct mla_shape *a, int m);
}
#undef POLICY_CUDA_PROTOTYPE

/* to[c] += sum of part[i][c] over CUDA_CHUNKS, in order. */
void R(cuda_add_parts)(int n, const float *part, wide *to);

#endif

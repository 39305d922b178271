/* The tensor cores' m16n8k16 product in bf16 with float32 sums (PTX ISA, "mma.m16n8k16").
 *
 * Lane g = lane / 4, t = 2 (lane % 4) holds of the result rows g and g + 8, columns t and t + 1; of
 * the right operand, column g, rows t, t + 1 and t + 8, t + 9. */
#ifndef TRAINER_POLICY_CUDA_MMA_CUH
#define TRAINER_POLICY_CUDA_MMA_CUH

#include "trainer/policy/cuda/common.cuh"

static __device__ __forceinline__ void mma(float c[4], const uint32_t a[4], uint32_t b0,
                                           uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Two neighbours of a row. */
static __device__ __forceinline__ uint32_t pair(const __nv_bfloat16 *p)
{
    return *(const uint32_t *)p;
}

/* The 16 x 16 of rows r0.. and columns k0.. as the left operand. */
static __device__ __forceinline__ void left(uint32_t a[4], const __nv_bfloat16 *rows, int ld,
                                            int r0, int k0)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4 * 2;
    const __nv_bfloat16 *at = rows + (r0 + g) * ld + k0 + t;

    a[0] = pair(at);
    a[1] = pair(at + 8 * ld);
    a[2] = pair(at + 8);
    a[3] = pair(at + 8 * ld + 8);
}

#endif

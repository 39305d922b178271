/* One source, several kinds of number.  The network is compiled for float, for double (finite
 * differences) and, where CUDA is, for bf16; meson.build sets POLICY_F64 or POLICY_BF16.
 *
 * `real` is what weights and activations are stored in, `wide` what is summed or kept over many
 * tokens: KDA states and decays, router scores, logits, gradients of weights.  They differ for bf16
 * alone.  The network itself does no arithmetic, so to C a bf16 may be opaque. */
#ifndef TRAINER_POLICY_KIND_H
#define TRAINER_POLICY_KIND_H

#include <stddef.h>
#include <stdint.h>

#define POLICY_CAT_(a, b) a##b
#define POLICY_CAT(a, b)  POLICY_CAT_(a, b)

#if defined(POLICY_F64)
typedef double real;
typedef double wide;
#define R(name) name##_f64
#elif defined(POLICY_BF16)
#ifdef __CUDACC__
#include <cuda_bf16.h>
typedef __nv_bfloat16 real;
#else
typedef struct policy_bf16 {
    uint16_t bits;
} real;
#endif
typedef float wide;
#define R(name) name##_bf16
#else
typedef float real;
typedef float wide;
#define R(name) name##_f32
#endif

#endif

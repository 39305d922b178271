/* Arithmetic of the CPU's ops.  They are compiled for float, for float with AVX2 and FMA, and for
 * double; meson.build sets POLICY_ISA.
 *
 * Results are equal bit for bit whichever loop shape the compiler picks, because nothing here is
 * left to it: no -ffast-math, no contraction (-ffp-contract=off, fused multiply-add is written
 * out), and every reduction has one written order, rdot() or a loop.  IEEE arithmetic does the
 * rest. */
#ifndef TRAINER_POLICY_REAL_H
#define TRAINER_POLICY_REAL_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __FMA__
#include <immintrin.h>
#endif

#include "trainer/policy/kind.h"

#ifdef POLICY_F64
#define RM(name) name /* of libm */
#else
#define RM(name) name##f
#endif
#define OP(name) POLICY_CAT(name, POLICY_ISA)

enum { LANES = 8 };
typedef real vec
    __attribute__((vector_size(LANES * sizeof(real)), aligned(sizeof(real)), may_alias));
typedef real vec4 __attribute__((vector_size(4 * sizeof(real)), aligned(sizeof(real)), may_alias));

static inline vec vec_load(const real *p)
{
    return *(const vec *)p;
}

/* The first n lanes, zeros behind. */
static inline vec vec_load_part(const real *p, int n)
{
    vec v = {0};

    memcpy(&v, p, (size_t)n * sizeof *p);
    return v;
}

static inline vec vec_all(real a)
{
    return (vec){a, a, a, a, a, a, a, a};
}

static inline vec vec_fma(vec a, vec b, vec c)
{
#if defined(__FMA__) && !defined(POLICY_F64)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static inline real rfma(real a, real b, real c)
{
#ifdef __FMA__
    return RM(__builtin_fma)(a, b, c);
#else
    return a * b + c;
#endif
}

static inline vec4 vec_fold(vec a)
{
    return __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
}

/* Sums of the lanes of four vectors; the order of additions is the same for each. */
static inline vec4 vec_sum4(vec a, vec b, vec c, vec d)
{
    vec4 fa = vec_fold(a), fb = vec_fold(b), fc = vec_fold(c), fd = vec_fold(d);
    vec4 ab =
        __builtin_shufflevector(fa, fb, 0, 4, 1, 5) + __builtin_shufflevector(fa, fb, 2, 6, 3, 7);
    vec4 cd =
        __builtin_shufflevector(fc, fd, 0, 4, 1, 5) + __builtin_shufflevector(fc, fd, 2, 6, 3, 7);

    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) +
           __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

static inline real vec_sum(vec a)
{
    vec4 f = vec_fold(a);

    return (f[0] + f[2]) + (f[1] + f[3]);
}

static inline real rdot(const real *a, const real *b, int n)
{
    vec s = {0};
    int i = 0;

    for (; i + LANES <= n; i += LANES)
        s = vec_fma(vec_load(a + i), vec_load(b + i), s);
    if (i < n)
        s = vec_fma(vec_load_part(a + i, n - i), vec_load_part(b + i, n - i), s);
    return vec_sum(s);
}

static inline real rdot3(const real *a, const real *b, const real *c, int n)
{
    vec s = {0};
    int i = 0;

    for (; i + LANES <= n; i += LANES)
        s = vec_fma(vec_load(a + i) * vec_load(b + i), vec_load(c + i), s);
    if (i < n)
        s = vec_fma(vec_load_part(a + i, n - i) * vec_load_part(b + i, n - i),
                    vec_load_part(c + i, n - i), s);
    return vec_sum(s);
}

static inline real rsum(const real *a, int n)
{
    vec s = {0};
    int i = 0;

    for (; i + LANES <= n; i += LANES)
        s += vec_load(a + i);
    if (i < n)
        s += vec_load_part(a + i, n - i);
    return vec_sum(s);
}

/* e^x.  Float: 2^n times a Taylor polynomial of degree 7 on |r| <= ln2/2, within 1e-7 relative,
 * branch-free so that loops over it vectorise; e^-87.3 below that.  Double: libm. */
static inline real rexp(real x)
{
#ifdef POLICY_F64
    return exp(x);
#else
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    float t, n, r, p, scale;
    uint32_t bits;

    x = x < -87.3f ? -87.3f : x;
    x = x > 88.3f ? 88.3f : x;
    t = rfma(x, 1.44269504f, magic);
    n = t - magic;
    r = rfma(n, -0.693145752f, x);
    r = rfma(n, -1.42860677e-6f, r);
    p = rfma(r, 1.0f / 5040, 1.0f / 720);
    p = rfma(r, p, 1.0f / 120);
    p = rfma(r, p, 1.0f / 24);
    p = rfma(r, p, 1.0f / 6);
    p = rfma(r, p, 0.5f);
    p = rfma(r, p, 1.0f);
    p = rfma(r, p, 1.0f);
    memcpy(&bits, &t, sizeof bits);
    bits = (bits + 127u) << 23;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
#endif
}

static inline real rsigmoid(real x)
{
    return 1 / (1 + rexp(-x));
}

#endif

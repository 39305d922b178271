/* The CPU backend's functions, one set for each build of its sources (real.h). */
#ifndef TRAINER_POLICY_CPU_H
#define TRAINER_POLICY_CPU_H

#include "trainer/policy/ops.h"
#include "trainer/policy/real.h"

#define POLICY_CPU_PROTOTYPE(name, args) void OP(cpu_##name) args;
POLICY_OPS(POLICY_CPU_PROTOTYPE)
#undef POLICY_CPU_PROTOTYPE

size_t OP(cpu_work)(const struct kda_shape *k, const struct mla_shape *a, int m);
/* y[m,n] (+)= x[m,k] w[k,n] */
void OP(cpu_linear_t)(int m, int n, int k, const real *x, int ldx, const real *w, int ldw, real *y,
                      int ldy, int add);

#endif

/* The CPU backend's functions, one set for each build of its sources (real.h). */
#ifndef TRAINER_POLICY_CPU_H
#define TRAINER_POLICY_CPU_H

#include "trainer/policy/ops.h"

#define POLICY_CPU_PROTOTYPE(name, args) void OP(cpu_##name) args;
POLICY_OPS(POLICY_CPU_PROTOTYPE)
#undef POLICY_CPU_PROTOTYPE

#endif

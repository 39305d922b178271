#include "trainer/policy/cpu.h"

extern const struct R(policy_ops) OP(policy_cpu);

#define POLICY_CPU_ENTRY(name, args) .name = OP(cpu_##name),
const struct R(policy_ops) OP(policy_cpu) = {
    POLICY_OPS(POLICY_CPU_ENTRY).work = OP(cpu_work),
};

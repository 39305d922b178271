#include "trainer/policy/backend.h"
#include "trainer/policy/model.h"

#ifdef POLICY_F64
extern const struct policy_ops_f64 policy_cpu_f64;

const struct policy_ops_f64 *policy_ops_of_f64(const struct policy_model *m)
{
    (void)m;
    return &policy_cpu_f64;
}
#elif defined(POLICY_BF16)
const struct policy_ops_bf16 *policy_ops_of_bf16(const struct policy_model *m)
{
    return m->backend->ops_bf16();
}
#else
extern const struct policy_ops_f32 policy_cpu_f32;
#ifdef __x86_64__
extern const struct policy_ops_f32 policy_cpu_f32v3;
#endif

const struct policy_ops_f32 *policy_cpu_ops_f32(void)
{
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &policy_cpu_f32v3;
#endif
    return &policy_cpu_f32;
}

const struct policy_ops_f32 *policy_ops_of_f32(const struct policy_model *m)
{
    return m->backend->ops_f32();
}
#endif

#include "trainer/policy/cuda/common.cuh"

#define POLICY_CUDA_ENTRY(name, args) R(cuda_##name),
static const struct R(policy_ops) ops = {POLICY_OPS(POLICY_CUDA_ENTRY) R(cuda_work)};

extern "C" const struct R(policy_ops) * R(policy_cuda_ops)(void)
{
    return &ops;
}

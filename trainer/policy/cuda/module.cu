/* The CUDA module: its memory and its errors. */
#include <string.h>

#include "trainer/policy/cuda/common.cuh"

extern "C" {
#include "trainer/policy/backend.h"
#include "trainer/policy/cuda/module.h"
}

extern "C" const struct policy_ops_f32 *policy_cuda_ops_f32(void);
extern "C" const struct policy_ops_bf16 *policy_cuda_ops_bf16(void);

struct cuda_state policy_cuda;

/* The last error of the runtime, or cuBLASLt's. */
static int report(cudaError_t e, const char *doing, struct lh_error *err)
{
    if (policy_cuda.failed)
        return lh_fail(err, LH_INTERNAL, "cuda: %s: %s", policy_cuda.failed,
                       cublasLtGetStatusName((cublasStatus_t)policy_cuda.status));
    if (e == cudaErrorMemoryAllocation)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "cuda: %s: out of device memory", doing);
    return e ? lh_fail(err, LH_INTERNAL, "cuda: %s: %s", doing, cudaGetErrorString(e)) : 0;
}

static void *cuda_alloc(size_t bytes, struct lh_error *err)
{
    void *p = NULL;
    cudaError_t e = cudaMalloc(&p, bytes ? bytes : 1);

    if (e) {
        (void)cudaGetLastError();
        report(e, "allocating", err);
        return NULL;
    }
    return p;
}

static void cuda_free(void *p)
{
    cudaFree(p);
}

static int copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                const char *doing, struct lh_error *err)
{
    cudaError_t e = cudaMemcpyAsync(to, from, bytes, kind, policy_cuda.stream);

    if (!e)
        e = cudaStreamSynchronize(policy_cuda.stream);
    return report(e, doing, err);
}

static int cuda_put(void *to, const void *from, size_t bytes, struct lh_error *err)
{
    return copy(to, from, bytes, cudaMemcpyHostToDevice, "copying to the device", err);
}

static int cuda_get(void *to, const void *from, size_t bytes, struct lh_error *err)
{
    return copy(to, from, bytes, cudaMemcpyDeviceToHost, "copying from the device", err);
}

static int cuda_check(struct lh_error *err)
{
    return report(cudaGetLastError(), "starting a kernel", err);
}

/* What these kernels were written for; other shapes are for the CPU. */
static int cuda_fits(const struct kda_shape *k, const struct mla_shape *a, struct lh_error *err)
{
    if (k->heads && k->dim != 32 && k->dim != 64 && k->dim != 128)
        return lh_fail(err, LH_UNIMPLEMENTED, "cuda: KDA heads of %d channels; 32, 64 or 128",
                       k->dim);
    if (a->heads && a->lora + a->rope > 576)
        return lh_fail(err, LH_UNIMPLEMENTED, "cuda: latents of %d numbers; at most 576",
                       a->lora + a->rope);
    return 0;
}

/* Numbers between the starts of parameters: what cuBLASLt wants for its fastest kernels. */
enum { ALIGN = 64 };

static const struct policy_backend backends[] = {
    {"cuda", 4, ALIGN, policy_cuda_ops_f32, NULL, cuda_alloc, cuda_free, cuda_put, cuda_get,
     cuda_check, cuda_fits},
    {"cuda-bf16", 2, ALIGN, NULL, policy_cuda_ops_bf16, cuda_alloc, cuda_free, cuda_put, cuda_get,
     cuda_check, cuda_fits},
};

static const struct policy_backend *named(const char *name, struct lh_error *err)
{
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++)
        if (!strcmp(backends[i].name, name))
            return &backends[i];
    lh_fail(err, LH_INVALID_ARGUMENT, "backend '%s': there are cpu, cuda and cuda-bf16", name);
    return NULL;
}

const struct policy_backend *policy_cuda_open(const char *name, struct lh_error *err)
{
    cudaError_t e;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;

    if (policy_cuda.lt)
        return named(name, err);
    e = cudaSetDevice(0);
    if (!e)
        e = cudaStreamCreateWithFlags(&policy_cuda.stream, cudaStreamNonBlocking);
    if (!e)
        e = cudaMalloc(&policy_cuda.workspace, CUDA_WORKSPACE);
    if (!e)
        status = cublasLtCreate(&policy_cuda.lt);
    if (!e && !status)
        return named(name, err);
    (void)cudaGetLastError();
    lh_fail(err, LH_UNAVAILABLE, "cuda: %s",
            e ? cudaGetErrorString(e) : cublasLtGetStatusName(status));
    return NULL;
}

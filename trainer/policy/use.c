/* Choosing a backend.  CUDA's is a module that is opened when somebody asks for it: a program
 * starts on a machine that has neither a driver nor CUDA's libraries, and never loads half a
 * gigabyte of cuBLASLt to compute on the CPU. */
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/file.h"
#include "proto/process.h"
#include "trainer/policy/backend.h"
#include "trainer/policy/cuda/module.h"
#include "trainer/policy/net.h"

#ifdef POLICY_CUDA_MODULE
/* Installed: ../lib/longhaul from the program.  Else where the build put it. */
static void *open_module(void)
{
    lh_autofree char *dir = lh_program_dir();
    lh_autofree char *installed = lh_format("%s/../lib/longhaul/longhaul-cuda.so", dir ? dir : "");
    bool there = installed && !access(installed, F_OK);

    return dlopen(there ? installed : POLICY_CUDA_MODULE, RTLD_NOW | RTLD_LOCAL);
}

/* Never closed: a process that has used CUDA keeps its context to the end. */
static const struct policy_backend *cuda_backend(const char *name, struct lh_error *err)
{
    void *module = open_module();
    policy_cuda_open_fn *open = NULL;

    if (module)
        *(void **)(void *)&open = dlsym(module, POLICY_CUDA_OPEN);
    if (!open) {
        lh_fail(err, LH_UNAVAILABLE, "cuda: %s", dlerror());
        return NULL;
    }
    return open(name, err);
}
#else
static const struct policy_backend *cuda_backend(const char *name, struct lh_error *err)
{
    lh_fail(err, LH_UNAVAILABLE, "cuda: this build was made without; configure with nvcc in PATH");
    (void)name;
    return NULL;
}
#endif

static const struct policy_backend *find_backend(const char *name, struct lh_error *err)
{
    if (!strcmp(name, "cpu"))
        return &policy_cpu_backend;
    if (!strncmp(name, "cuda", 4))
        return cuda_backend(name, err);
    lh_fail(err, LH_INVALID_ARGUMENT, "backend '%s': there are cpu, cuda and cuda-bf16", name);
    return NULL;
}

int policy_model_use(struct policy_model *m, const char *backend, struct lh_error *err)
{
    struct lh_error local;
    const struct policy_backend *b;
    struct kda_shape k = net_kda_shape_f32(m);
    struct mla_shape a = net_mla_shape_f32(m);

    err = err ? err : &local;
    b = find_backend(backend, err);
    if (!b)
        return err->code;
    if (b->fits && b->fits(&k, &a, err))
        return err->code;
    m->backend = b;
    return policy_model_align(m, b->align, err);
}

const char *policy_model_backend(const struct policy_model *m)
{
    return m->backend->name;
}

#include "proto/cuda_driver.h"

#ifndef LONGHAUL_CUDA
const struct cuda_driver *cuda_driver(struct lh_error *err)
{
    lh_fail(err, LH_UNAVAILABLE, "cuda: this build was made without; configure with nvcc in PATH");
    return NULL;
}

int cuda_driver_use(const struct cuda_driver *d, struct lh_error *err)
{
    (void)d;
    return lh_fail(err, LH_UNAVAILABLE, "cuda: this build was made without");
}

unsigned long long cuda_driver_used_bytes(void)
{
    return 0;
}
#else
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>

static struct cuda_driver driver;
static struct lh_error missing; /* why there is none; code 0 = there is one */
static CUcontext context;
static pthread_once_t opened = PTHREAD_ONCE_INIT, retained = PTHREAD_ONCE_INIT;
static pthread_once_t counted = PTHREAD_ONCE_INIT;

int cuda_driver_check(const struct cuda_driver *d, CUresult r, const char *doing,
                      struct lh_error *err)
{
    const char *text = NULL;

    if (r == CUDA_SUCCESS)
        return 0;
    d->cuGetErrorString(r, &text);
    return lh_fail(err, r == CUDA_ERROR_OUT_OF_MEMORY ? LH_RESOURCE_EXHAUSTED : LH_INTERNAL,
                   "cuda: %s: %s", doing, text ? text : "unknown error");
}

static bool find(void *library, const char *symbol, void *slot)
{
    *(void **)slot = dlsym(library, symbol);
    if (!*(void **)slot)
        lh_fail(&missing, LH_UNAVAILABLE, "cuda: the driver has no %s: it is too old", symbol);
    return *(void **)slot;
}

static void open_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CUresult r;

    if (!library) {
        lh_fail(&missing, LH_UNAVAILABLE, "cuda: no driver on this machine: %s", dlerror());
        return;
    }
#define CUDA_DRIVER_FIND(name, symbol)                                                             \
    if (!find(library, #symbol, &driver.name))                                                     \
        return;
    CUDA_DRIVER_FUNCTIONS(CUDA_DRIVER_FIND)
#undef CUDA_DRIVER_FIND
    r = driver.cuInit(0);
    if (r == CUDA_SUCCESS)
        r = driver.cuDeviceGet(&driver.device, 0);
    if (cuda_driver_check(&driver, r, "looking for a GPU", &missing) < 0)
        missing.code = LH_UNAVAILABLE;
}

const struct cuda_driver *cuda_driver(struct lh_error *err)
{
    pthread_once(&opened, open_driver);
    if (!missing.code)
        return &driver;
    lh_fail(err, missing.code, "%s", missing.message);
    return NULL;
}

static void retain(void)
{
    if (driver.cuDevicePrimaryCtxRetain(&context, driver.device) != CUDA_SUCCESS)
        context = NULL;
}

int cuda_driver_use(const struct cuda_driver *d, struct lh_error *err)
{
    pthread_once(&retained, retain);
    if (!context)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "cuda: no context on the GPU");
    return cuda_driver_check(d, d->cuCtxSetCurrent(context), "taking the context", err);
}

/* Of NVML, which has no header here: the first version of its memory counters. */
struct nvml_memory {
    unsigned long long total, free, used;
};

static int (*nvml_memory)(void *device, struct nvml_memory *to);
static void *nvml_device;

static void open_nvml(void)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*init)(void) = NULL, (*handle)(unsigned, void **) = NULL;

    if (!library)
        return;
    *(void **)(void *)&init = dlsym(library, "nvmlInit_v2");
    *(void **)(void *)&handle = dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    if (init && handle && init() == 0 && handle(0, &nvml_device) == 0)
        *(void **)(void *)&nvml_memory = dlsym(library, "nvmlDeviceGetMemoryInfo");
}

unsigned long long cuda_driver_used_bytes(void)
{
    struct nvml_memory m = {0};

    pthread_once(&counted, open_nvml);
    return nvml_memory && nvml_memory(nvml_device, &m) == 0 ? m.used : 0;
}
#endif

/* The CUDA driver, found at run time: nothing links libcuda, so that a CUDA build starts on a
 * machine without a GPU and says so (docs/DESIGN.md 3.9).
 *
 * cuda_driver() opens it once; the table lives as long as the process.  Thread-safe.  In a build
 * without CUDA it is always UNAVAILABLE, and the handles have no other use than to be passed. */
#ifndef PROTO_CUDA_DRIVER_H
#define PROTO_CUDA_DRIVER_H

#include <stddef.h>

#include "proto/error.h"

#ifdef LONGHAUL_CUDA
#include <cuda.h>
#else
typedef unsigned long long CUdeviceptr, CUmemGenericAllocationHandle;
typedef void *CUcontext, *CUstream;
#endif

#ifdef LONGHAUL_CUDA
/* Symbol in the library, and the function's type. */
#define CUDA_DRIVER_FUNCTIONS(X)                                                                   \
    X(cuInit, cuInit)                                                                              \
    X(cuDeviceGet, cuDeviceGet)                                                                    \
    X(cuGetErrorString, cuGetErrorString)                                                          \
    X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain)                                          \
    X(cuCtxSetCurrent, cuCtxSetCurrent)                                                            \
    X(cuCtxSynchronize, cuCtxSynchronize)                                                          \
    X(cuMemCreate, cuMemCreate)                                                                    \
    X(cuMemRelease, cuMemRelease)                                                                  \
    X(cuMemExportToShareableHandle, cuMemExportToShareableHandle)                                  \
    X(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle)                              \
    X(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity)                                \
    X(cuMemAddressReserve, cuMemAddressReserve)                                                    \
    X(cuMemAddressFree, cuMemAddressFree)                                                          \
    X(cuMemMap, cuMemMap)                                                                          \
    X(cuMemUnmap, cuMemUnmap)                                                                      \
    X(cuMemSetAccess, cuMemSetAccess)                                                              \
    X(cuMemHostAlloc, cuMemHostAlloc)                                                              \
    X(cuMemFreeHost, cuMemFreeHost)                                                                \
    X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2)                                                     \
    X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2)                                                     \
    X(cuMemsetD32Async, cuMemsetD32Async)                                                          \
    X(cuStreamCreate, cuStreamCreate)                                                              \
    X(cuStreamSynchronize, cuStreamSynchronize)

struct cuda_driver {
    CUdevice device; /* the first */
#define CUDA_DRIVER_MEMBER(name, symbol) __typeof__(&name) name;
    CUDA_DRIVER_FUNCTIONS(CUDA_DRIVER_MEMBER)
#undef CUDA_DRIVER_MEMBER
};

/* 0, or INTERNAL (RESOURCE_EXHAUSTED when memory is out) with the driver's words after `doing`. */
int cuda_driver_check(const struct cuda_driver *d, CUresult r, const char *doing,
                      struct lh_error *err);
#endif

struct cuda_driver;

/* UNAVAILABLE, in one line, without a driver or a GPU. */
const struct cuda_driver *cuda_driver(struct lh_error *err);

/* The first GPU's primary context, which the runtime library shares; current on this thread from
 * now. */
int cuda_driver_use(const struct cuda_driver *d, struct lh_error *err);

/* Bytes in use on the first GPU, by anybody, as the driver's management library counts them; 0 when
 * it does not say. */
unsigned long long cuda_driver_used_bytes(void);

#endif

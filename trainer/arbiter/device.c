/* Memory of the GPU by the driver's virtual memory management: made here, mapped by clients.
 *
 * The handle is released as soon as it is exported: the fd keeps the memory.  So a chunk here is
 * what a chunk of host memory is, one fd. */
#include "proto/cleanup.h"
#include "proto/cuda_driver.h"
#include "trainer/arbiter/pool.h"

#ifndef LONGHAUL_CUDA
int device_segment(size_t *bytes, struct lh_error *err)
{
    (void)bytes;
    return cuda_driver_use(NULL, err);
}
#else
int device_segment(size_t *bytes, struct lh_error *err)
{
    const struct cuda_driver *d = cuda_driver(err);
    CUmemGenericAllocationHandle handle;
    size_t unit = 0;
    int fd = -1;

    if (!d)
        return LH_UNAVAILABLE;
    CUmemAllocationProp what = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, d->device}};
    CUresult r =
        d->cuMemGetAllocationGranularity(&unit, &what, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (r == CUDA_SUCCESS) {
        *bytes = (*bytes + unit - 1) / unit * unit;
        r = d->cuMemCreate(&handle, *bytes, &what, 0);
    }
    if (r != CUDA_SUCCESS)
        return cuda_driver_check(d, r, "memory of the GPU", err);
    r = d->cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    d->cuMemRelease(handle);
    return r == CUDA_SUCCESS ? fd : cuda_driver_check(d, r, "exporting memory of the GPU", err);
}
#endif

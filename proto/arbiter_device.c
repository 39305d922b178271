/* Re-lending on the GPU.
 *
 * Importing a chunk's fd makes a handle that keeps the chunk alive, but maps nothing; arbiterd
 * never gives a chunk back to the driver, so handles are kept and a switch is only cuMemUnmap here
 * and cuMemMap there.  Addresses stay, so CUDA graphs and pointers outlive a switch.
 *
 * Parking copies in pieces on two streams, so that one piece's end overlaps the next one's start,
 * to pinned memory that is allocated once: allocating it each time costs more than the copy. */
#include "proto/arbiter_device.h"

#include <errno.h>
#include <stdlib.h>

#ifndef LONGHAUL_CUDA
int arbiter_device_map(struct arbiter_device *r, struct arbiter_imports *known, size_t total,
                       const uint64_t *bytes, const uint64_t *ids, const int *fds, size_t n,
                       struct lh_error *err)
{
    (void)r, (void)known, (void)total, (void)bytes, (void)ids, (void)fds, (void)n;
    return cuda_driver_use(NULL, err);
}

int arbiter_device_unmap(struct arbiter_device *r, bool keep, struct lh_error *err)
{
    (void)keep;
    return r->mapped ? cuda_driver_use(NULL, err) : 0;
}

void arbiter_device_finish(struct arbiter_device *r)
{
    (void)r;
}

void arbiter_imports_finish(struct arbiter_imports *known)
{
    free(known->list);
}
#else

enum { PIECE = 64 << 20 };

static const struct cuda_driver *ready(struct lh_error *err)
{
    const struct cuda_driver *d = cuda_driver(err);

    return d && !cuda_driver_use(d, err) ? d : NULL;
}

static int import(const struct cuda_driver *d, struct arbiter_imports *known, uint64_t id, int fd,
                  CUmemGenericAllocationHandle *handle, struct lh_error *err)
{
    for (size_t i = 0; i < known->n; i++)
        if (known->list[i].id == id) {
            *handle = known->list[i].handle;
            return 0;
        }
    if (known->n == known->room) {
        size_t room = known->room ? 2 * known->room : 64;
        struct arbiter_import *grown = realloc(known->list, room * sizeof *grown);

        if (!grown)
            return lh_fail_errno(err, ENOMEM, "table of %zu device chunks", room);
        known->list = grown;
        known->room = room;
    }
    CUresult r = d->cuMemImportFromShareableHandle(handle, (void *)(uintptr_t)fd,
                                                   CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (r != CUDA_SUCCESS)
        return cuda_driver_check(d, r, "importing a chunk", err);
    known->list[known->n++] = (struct arbiter_import){id, *handle};
    return 0;
}

static int reserve(const struct cuda_driver *d, struct arbiter_device *r, size_t total,
                   struct lh_error *err)
{
    CUresult e = d->cuMemAddressReserve(&r->addr, total, 0, 0, 0);

    for (int i = 0; i < 2 && e == CUDA_SUCCESS; i++)
        e = d->cuStreamCreate(&r->streams[i], CU_STREAM_NON_BLOCKING);
    r->bytes = total;
    return cuda_driver_check(d, e, "reserving device addresses", err);
}

static int allow(const struct cuda_driver *d, const struct arbiter_device *r, size_t from,
                 struct lh_error *err)
{
    CUmemAccessDesc access = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, d->device},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

    return cuda_driver_check(d, d->cuMemSetAccess(r->addr + from, r->mapped - from, &access, 1),
                             "opening device memory for access", err);
}

static int copy(const struct cuda_driver *d, struct arbiter_device *r, bool out,
                struct lh_error *err)
{
    CUresult e = CUDA_SUCCESS;
    int turn = 0;

    for (size_t at = 0; at < r->bytes && e == CUDA_SUCCESS; at += PIECE, turn ^= 1) {
        size_t n = r->bytes - at < PIECE ? r->bytes - at : PIECE;

        e = out ? d->cuMemcpyDtoHAsync((char *)r->pinned + at, r->addr + at, n, r->streams[turn])
                : d->cuMemcpyHtoDAsync(r->addr + at, (char *)r->pinned + at, n, r->streams[turn]);
    }
    for (int i = 0; i < 2 && e == CUDA_SUCCESS; i++)
        e = d->cuStreamSynchronize(r->streams[i]);
    return cuda_driver_check(d, e, out ? "parking device memory" : "restoring device memory", err);
}

int arbiter_device_map(struct arbiter_device *r, struct arbiter_imports *known, size_t total,
                       const uint64_t *bytes, const uint64_t *ids, const int *fds, size_t n,
                       struct lh_error *err)
{
    const struct cuda_driver *d = ready(err);
    size_t from = r->mapped;
    int rc = d ? 0 : LH_UNAVAILABLE;

    if (!rc && !r->addr)
        rc = reserve(d, r, total, err);
    for (size_t i = 0; !rc && i < n; i++) {
        CUmemGenericAllocationHandle handle;

        if (bytes[i] > r->bytes - r->mapped)
            return lh_fail(err, LH_INTERNAL, "more was granted than the region holds");
        rc = import(d, known, ids[i], fds[i], &handle, err);
        if (!rc)
            rc = cuda_driver_check(d, d->cuMemMap(r->addr + r->mapped, bytes[i], 0, handle, 0),
                                   "mapping a chunk", err);
        if (!rc)
            r->mapped += bytes[i];
    }
    if (!rc && r->mapped > from)
        rc = allow(d, r, from, err);
    if (!rc && r->parked && r->mapped == r->bytes) {
        rc = copy(d, r, false, err);
        r->parked = rc != 0;
    }
    return rc;
}

static int park(const struct cuda_driver *d, struct arbiter_device *r, struct lh_error *err)
{
    int rc = r->pinned ? 0
                       : cuda_driver_check(d, d->cuMemHostAlloc(&r->pinned, r->bytes, 0),
                                           "pinned memory to park in", err);

    if (!rc)
        rc = copy(d, r, true, err);
    r->parked = !rc;
    return rc;
}

int arbiter_device_unmap(struct arbiter_device *r, bool keep, struct lh_error *err)
{
    const struct cuda_driver *d;
    int rc;

    if (!r->mapped)
        return 0;
    d = ready(err);
    if (!d)
        return LH_UNAVAILABLE;
    rc = cuda_driver_check(d, d->cuCtxSynchronize(), "waiting for the GPU", err);
    if (!rc && keep)
        rc = park(d, r, err);
    if (!rc)
        rc = cuda_driver_check(d, d->cuMemUnmap(r->addr, r->mapped), "unmapping chunks", err);
    if (!rc)
        r->mapped = 0;
    return rc;
}

void arbiter_device_finish(struct arbiter_device *r)
{
    struct lh_error err;
    const struct cuda_driver *d = r->addr ? ready(&err) : NULL;

    if (!d)
        return;
    arbiter_device_unmap(r, false, &err);
    d->cuMemAddressFree(r->addr, r->bytes);
    if (r->pinned)
        d->cuMemFreeHost(r->pinned);
    *r = (struct arbiter_device){0};
}

void arbiter_imports_finish(struct arbiter_imports *known)
{
    const struct cuda_driver *d = known->n ? cuda_driver(NULL) : NULL;

    for (size_t i = 0; d && i < known->n; i++)
        d->cuMemRelease(known->list[i].handle);
    free(known->list);
    *known = (struct arbiter_imports){0};
}
#endif

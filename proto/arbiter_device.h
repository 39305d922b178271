/* The device side of a client's region: address space of the GPU reserved once, chunks imported
 * once and mapped while the region's phase lasts, parked in pinned memory between.  Private to the
 * arbiter's client; called under its lock. */
#ifndef PROTO_ARBITER_DEVICE_H
#define PROTO_ARBITER_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/cuda_driver.h"
#include "proto/error.h"

/* A chunk of arbiterd's as this process knows it. */
struct arbiter_import {
    uint64_t id;
    CUmemGenericAllocationHandle handle;
};

/* Of the process: one chunk may back one region now and another later. */
struct arbiter_imports {
    struct arbiter_import *list;
    size_t n, room;
};

struct arbiter_device {
    CUdeviceptr addr; /* never changes once it is known; 0 = not reserved */
    size_t bytes, mapped;
    void *pinned; /* retained from the first parking on */
    bool parked;
    CUstream streams[2];
};

/* Maps the next chunks behind what is mapped already.  When all is mapped, parked content returns.
 */
int arbiter_device_map(struct arbiter_device *r, struct arbiter_imports *known, size_t total,
                       const uint64_t *bytes, const uint64_t *ids, const int *fds, size_t n,
                       struct lh_error *err);
/* Waits for the GPU, copies out when `keep`, and unmaps. */
int arbiter_device_unmap(struct arbiter_device *r, bool keep, struct lh_error *err);
void arbiter_device_finish(struct arbiter_device *r);
void arbiter_imports_finish(struct arbiter_imports *known);

#endif

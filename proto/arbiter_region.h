/* One region of a client's address space: reserved once, mapped while its phase lasts, parked
 * between. Private to the arbiter's client. */
#ifndef PROTO_ARBITER_REGION_H
#define PROTO_ARBITER_REGION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "longhaul/arbiter/v1/arbiter.pb-c.h"
#include "proto/arbiter_device.h"
#include "proto/error.h"

struct arbiter_region {
    struct arbiter_region *next;
    char name[64];
    unsigned phases;
    Longhaul__Arbiter__V1__Park park;
    void *addr; /* never changes once it is known */
    size_t bytes, mapped;
    bool on_device;
    struct arbiter_device device; /* in the place of addr and what follows */
    int park_fd;                  /* unnamed file with the parked content, -1 = none */
    bool parked;
    bool own_file; /* not mapped here; file_fd is its file from the grant on */
    int file_fd;
};

/* On the device KEEP alone means every phase: HOST is copied there. */
struct arbiter_region *arbiter_region_create(const char *name, unsigned phases,
                                             Longhaul__Arbiter__V1__Park park, bool on_device,
                                             struct lh_error *err);
void arbiter_region_destroy(struct arbiter_region *r);

/* Maps the next chunks behind what is mapped already; the first grant reserves `total` bytes.  When
 * all of it is mapped, parked content is read back.  n_fds = 0 only reserves. */
int arbiter_region_map(struct arbiter_region *r, size_t total, const uint64_t *bytes,
                       const int *fds, size_t n_fds, bool writable, struct lh_error *err);
/* Of one with a file of its own: keeps another descriptor of it. */
int arbiter_region_take_file(struct arbiter_region *r, int fd, struct lh_error *err);
/* Parks by the region's rule, then leaves only the reservation. */
int arbiter_region_unmap(struct arbiter_region *r, struct lh_error *err);

#endif

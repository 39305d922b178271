#include "proto/arbiter_region.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/arbiter.h"

struct arbiter_region *arbiter_region_create(const char *name, unsigned phases,
                                             Longhaul__Arbiter__V1__Park park, bool on_device,
                                             struct lh_error *err)
{
    struct arbiter_region *r = calloc(1, sizeof *r);

    if (!r || strlen(name) >= sizeof r->name) {
        free(r);
        lh_fail(err, LH_INVALID_ARGUMENT, "region %s: no memory, or a name of more than %zu bytes",
                name, sizeof r->name - 1);
        return NULL;
    }
    strcpy(r->name, name);
    r->park = park;
    r->park_fd = r->file_fd = -1;
    r->phases = phases;
    r->on_device = on_device;
    if (park == LONGHAUL__ARBITER__V1__PARK__PARK_KEEP ||
        (park == LONGHAUL__ARBITER__V1__PARK__PARK_HOST && !on_device)) /* as arbiterd has it */
        r->phases = ARBITER_ALL_PHASES;
    return r;
}

void arbiter_region_destroy(struct arbiter_region *r)
{
    if (!r)
        return;
    arbiter_device_finish(&r->device);
    if (r->addr)
        munmap(r->addr, r->bytes);
    if (r->park_fd >= 0)
        close(r->park_fd);
    if (r->file_fd >= 0)
        close(r->file_fd);
    free(r);
}

static int reserve(struct arbiter_region *r, size_t total, struct lh_error *err)
{
    void *p = mmap(NULL, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (p == MAP_FAILED)
        return lh_fail_errno(err, errno, "reserving %zu bytes for region %s", total, r->name);
    r->addr = p;
    r->bytes = total;
    return 0;
}

static int transfer(int fd, char *p, size_t bytes, bool out)
{
    for (size_t at = 0; at < bytes;) {
        ssize_t n = out ? pwrite(fd, p + at, bytes - at, (off_t)at)
                        : pread(fd, p + at, bytes - at, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? errno : EIO;
        at += (size_t)n;
    }
    return 0;
}

static int read_back(struct arbiter_region *r, struct lh_error *err)
{
    int e = transfer(r->park_fd, r->addr, r->bytes, false);

    if (e)
        return lh_fail_errno(err, e, "reading region %s back from disk", r->name);
    r->parked = false;
    return 0;
}

/* The file has no name: nothing is left when the process dies. */
static int park_to_disk(struct arbiter_region *r, struct lh_error *err)
{
    if (r->park_fd < 0)
        r->park_fd = open(".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    int e = r->park_fd < 0 ? errno : transfer(r->park_fd, r->addr, r->bytes, true);
    if (e)
        return lh_fail_errno(err, e,
                             "parking region %s, %zu bytes, on the disk of the working directory",
                             r->name, r->bytes);
    r->parked = true;
    return 0;
}

int arbiter_region_map(struct arbiter_region *r, size_t total, const uint64_t *bytes,
                       const int *fds, size_t n_fds, bool writable, struct lh_error *err)
{
    int prot = PROT_READ | (writable ? PROT_WRITE : 0);

    if (!r->addr && reserve(r, total, err) < 0)
        return err ? err->code : LH_RESOURCE_EXHAUSTED;
    for (size_t i = 0; i < n_fds; i++) {
        char *at = (char *)r->addr + r->mapped;
        if (bytes[i] > r->bytes - r->mapped)
            return lh_fail(err, LH_INTERNAL, "more was granted to region %s than it holds",
                           r->name);
        if (mmap(at, bytes[i], prot, MAP_SHARED | MAP_FIXED | MAP_POPULATE, fds[i], 0) ==
            MAP_FAILED)
            return lh_fail_errno(err, errno, "mapping region %s", r->name);
        r->mapped += bytes[i];
    }
    return r->parked && r->mapped == r->bytes ? read_back(r, err) : 0;
}

int arbiter_region_take_file(struct arbiter_region *r, int fd, struct lh_error *err)
{
    r->file_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    return r->file_fd < 0 ? lh_fail_errno(err, errno, "region %s", r->name) : 0;
}

int arbiter_region_unmap(struct arbiter_region *r, struct lh_error *err)
{
    if (r->park == LONGHAUL__ARBITER__V1__PARK__PARK_DISK && park_to_disk(r, err) < 0)
        return err ? err->code : LH_DATA_LOSS;
    if (mmap(r->addr, r->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
             -1, 0) == MAP_FAILED)
        return lh_fail_errno(err, errno, "unmapping region %s", r->name);
    r->mapped = 0;
    return 0;
}

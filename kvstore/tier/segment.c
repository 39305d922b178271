#include "kvstore/tier/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/cleanup.h"

enum { HUGE_PAGE = 2 << 20 };

/* At most KV_MAX_PAGES pages bound the index; a page is at most half of one in 2^20 of the store,
 * so what rounding up wastes does not matter. */
static uint32_t page_bytes_for(uint64_t bytes)
{
    uint64_t page = KV_PAGE_MIN;

    while (bytes / page > KV_MAX_PAGES)
        page *= 2;
    return (uint32_t)page;
}

/* Pages of the hugetlb pool are reserved here or not at all: a later shortage would be SIGBUS. */
static int create_huge(uint64_t bytes)
{
    lh_autoclose int fd =
        memfd_create("longhaul-kv", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);

    if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0 || fallocate(fd, 0, 0, (off_t)bytes) < 0)
        return -1;
    return lh_steal_fd(&fd);
}

static int create_plain(uint64_t bytes, struct lh_error *err)
{
    lh_autoclose int fd = memfd_create("longhaul-kv", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0)
        return lh_fail_errno(err, errno, "shared memory of %llu bytes", (unsigned long long)bytes);
    return lh_steal_fd(&fd);
}

int kv_segment_create(struct kv_segment *s, uint64_t bytes, struct lh_error *err)
{
    uint32_t page = page_bytes_for(bytes);

    if (bytes < KV_SEGMENT_MIN || bytes > INT64_MAX / 2)
        return lh_fail(err, LH_INVALID_ARGUMENT, "kvstore.memory_bytes is %llu; the least is %d",
                       (unsigned long long)bytes, KV_SEGMENT_MIN);
    bytes -= bytes % page;
    lh_autoclose int fd = bytes % HUGE_PAGE ? -1 : create_huge(bytes);
    bool huge = fd >= 0;
    if (fd < 0)
        fd = create_plain(bytes, err);
    if (fd < 0)
        return err ? err->code : LH_RESOURCE_EXHAUSTED;
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        return lh_fail_errno(err, errno, "sealing shared memory");
    *s = (struct kv_segment){
        .fd = lh_steal_fd(&fd), .huge = huge, .bytes = bytes, .page_bytes = page};
    return 0;
}

int kv_segment_adopt(struct kv_segment *s, int fd, uint64_t bytes, struct lh_error *err)
{
    uint32_t page = page_bytes_for(bytes);

    if (bytes < KV_SEGMENT_MIN)
        return lh_fail(err, LH_INVALID_ARGUMENT, "kvstore.memory_bytes is %llu; the least is %d",
                       (unsigned long long)bytes, KV_SEGMENT_MIN);
    *s = (struct kv_segment){
        .fd = fcntl(fd, F_DUPFD_CLOEXEC, 0), .bytes = bytes - bytes % page, .page_bytes = page};
    return s->fd < 0 ? lh_fail_errno(err, errno, "shared memory") : 0;
}

uint64_t kv_segment_resident(const struct kv_segment *s)
{
    struct stat st;

    return fstat(s->fd, &st) == 0 ? (uint64_t)st.st_blocks * 512 : 0;
}

void kv_segment_finish(struct kv_segment *s)
{
    close(s->fd);
    s->fd = -1;
}

#include "kvstore/tier/disk.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/crc.h"

enum { FORMAT = 1, BYTE_ORDER_MARK = 0x01020304, WORD = 64, LOCK_MS = 5000, LOCK_POLL_US = 2000 };

static const uint8_t MAGIC[8] = "LHKVDISK";

_Static_assert(sizeof(struct kv_disk_super) == KV_SLOT, "the file's format");
_Static_assert(sizeof(struct kv_disk_root) == KV_SLOT, "the file's format");
_Static_assert(sizeof(struct kv_disk_slot) == KV_SLOT, "the file's format");

static uint32_t super_crc(const struct kv_disk_super *s)
{
    return lh_crc32c(0, s, offsetof(struct kv_disk_super, crc32c));
}

/* Sets page size, number of pages and where they begin.  Index and data share `bytes`. */
static void lay_out(struct kv_disk *d, uint64_t bytes)
{
    uint64_t fixed = KV_SECTOR + (uint64_t)KV_ROOT_SECTORS * KV_SECTOR, page = KV_SECTOR, n;

    while ((n = (bytes - fixed - page) / (page + KV_SLOT)) > KV_DISK_MAX_PAGES)
        page *= 2;
    n -= n % KV_SLOTS_A_SECTOR;
    d->page_bytes = (uint32_t)page;
    d->pages.n = (uint32_t)n;
    d->sectors = KV_ROOT_SECTORS + (uint32_t)n / KV_SLOTS_A_SECTOR;
    d->data_at = (kv_disk_sector_at(d->sectors) + page - 1) / page * page;
    d->file_bytes = bytes;
}

static struct kv_disk_super super_of(const struct kv_disk *d)
{
    struct kv_disk_super s = {.format = FORMAT,
                              .page_bytes = d->page_bytes,
                              .pages = d->pages.n,
                              .byte_order = BYTE_ORDER_MARK,
                              .file_bytes = d->file_bytes};

    memcpy(s.magic, MAGIC, sizeof s.magic);
    s.crc32c = super_crc(&s);
    return s;
}

/* I/O of a kvstored that has been killed may hold the file for a moment longer. */
static bool lock_file(int fd)
{
    int64_t deadline = lh_now_ms() + LOCK_MS;

    while (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        if (!lh_ms_left(deadline))
            return false;
        usleep(LOCK_POLL_US);
    }
    return true;
}

/* O_DIRECT where the file system has it. */
static int open_file(const char *path, struct lh_error *err)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600);

    if (fd < 0 && errno == EINVAL)
        fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return lh_fail_errno(err, errno, "kvstore.disk_path %s", path);
    if (lock_file(fd))
        return fd;
    close(fd);
    return lh_fail(err, LH_UNAVAILABLE, "%s is in use by another kvstored", path);
}

static void *sectors_alloc(size_t n)
{
    void *p = aligned_alloc(KV_SECTOR, n * KV_SECTOR);

    if (p)
        memset(p, 0, n * KV_SECTOR);
    return p;
}

static bool fits(const struct kv_disk *d)
{
    struct kv_disk_super want = super_of(d);
    lh_autofree void *sector = sectors_alloc(1);
    struct stat st;

    return sector && fstat(d->fd, &st) == 0 && (uint64_t)st.st_size == d->file_bytes &&
           pread(d->fd, sector, KV_SECTOR, 0) == KV_SECTOR && !memcmp(sector, &want, sizeof want);
}

/* Empty of content but of full length: space that is missing is found out now. */
static int make_file(struct kv_disk *d, const char *path, struct lh_error *err)
{
    struct kv_disk_super super = super_of(d);
    lh_autofree void *sector = sectors_alloc(1);

    if (!sector)
        return lh_fail_errno(err, ENOMEM, "making %s", path);
    memcpy(sector, &super, sizeof super);
    if (ftruncate(d->fd, 0) < 0 || fallocate(d->fd, 0, 0, (off_t)d->file_bytes) < 0)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED,
                       "%s of %llu bytes: %s; lower kvstore.disk_bytes or make room", path,
                       (unsigned long long)d->file_bytes, strerror(errno));
    if (pwrite(d->fd, sector, KV_SECTOR, 0) != KV_SECTOR)
        return lh_fail_errno(err, errno, "writing %s", path);
    return 0;
}

static int make_tables(struct kv_disk *d, struct lh_error *err)
{
    uint32_t n = d->pages.n, words = d->sectors / WORD + 1;
    int r = kv_pages_init(&d->pages, n, err);

    if (r < 0)
        return r;
    d->owner = calloc(n, sizeof *d->owner);
    d->stale = calloc(words, sizeof *d->stale);
    d->writing = calloc(words, sizeof *d->writing);
    d->run_buffers = sectors_alloc((size_t)KV_DISK_RUNS * KV_DISK_RUN);
    if (!d->owner || !d->stale || !d->writing || !d->run_buffers)
        return lh_fail_errno(err, ENOMEM, "tables of a disk of %u pages", n);
    return 0;
}

int kv_disk_open(struct kv_disk *d, const char *path, uint64_t bytes, struct lh_error *err)
{
    *d = (struct kv_disk){.fd = -1, .event_fd = -1, .ring.ring_fd = -1};
    if (bytes < KV_DISK_MIN || bytes > INT64_MAX / 2)
        return lh_fail(err, LH_INVALID_ARGUMENT, "kvstore.disk_bytes is %llu; the least is %d",
                       (unsigned long long)bytes, KV_DISK_MIN);
    lay_out(d, bytes);
    d->path = strdup(path);
    if (!d->path)
        return lh_fail_errno(err, ENOMEM, "opening %s", path);
    d->fd = open_file(path, err);
    int r = d->fd < 0 ? d->fd : 0;
    if (r == 0) {
        d->recovered = fits(d);
        r = d->recovered ? 0 : make_file(d, path, err);
    }
    if (r == 0)
        r = make_tables(d, err);
    if (r == 0)
        r = kv_requests_init(d, err);
    if (r < 0)
        kv_disk_close(d);
    return r;
}

void kv_disk_close(struct kv_disk *d)
{
    kv_requests_finish(d);
    if (d->fd >= 0)
        close(d->fd);
    kv_pages_finish(&d->pages);
    free(d->path);
    free(d->run_buffers);
    free(d->writing);
    free(d->stale);
    free(d->owner);
    *d = (struct kv_disk){.fd = -1, .event_fd = -1, .ring.ring_fd = -1};
}

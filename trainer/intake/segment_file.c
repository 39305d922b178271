#include "trainer/intake/segment_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/crc.h"
#include "proto/file.h"
#include "proto/log.h"

LH_LOG_COMPONENT("ledger");

static char *path_of(const char *dir, uint32_t number)
{
    return lh_format("%s/%06u.seg", dir, number);
}

static int open_file(struct segment_files *f, uint32_t number, struct lh_error *err)
{
    lh_autofree char *path = path_of(f->dir, number);

    if (!path)
        return lh_fail_errno(err, ENOMEM, "opening segment file %u", number);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return lh_fail_errno(err, errno, "cannot open %s", path);
    if (f->fd >= 0)
        close(f->fd);
    f->fd = fd;
    f->number = number;
    f->end = 0;
    return lh_sync_dir(f->dir, err);
}

/* A crash may leave files that no row points at: those after the last row's. */
static int remove_files_after(const char *dir, uint32_t number, struct lh_error *err)
{
    lh_autoclosedir DIR *d = opendir(dir);
    unsigned n;

    if (!d)
        return lh_fail_errno(err, errno, "cannot read %s", dir);
    for (struct dirent *e; (e = readdir(d));) {
        if (sscanf(e->d_name, "%06u.seg", &n) != 1 || n <= number)
            continue;
        if (unlinkat(dirfd(d), e->d_name, 0) < 0)
            return lh_fail_errno(err, errno, "removing %s/%s", dir, e->d_name);
        lh_info("removed", "file=%s reason=no-row", e->d_name);
    }
    return 0;
}

static int cut_tail(struct segment_files *f, uint64_t end, struct lh_error *err)
{
    off_t size = lseek(f->fd, 0, SEEK_END);

    if (size < 0)
        return lh_fail_errno(err, errno, "size of segment file %u", f->number);
    if ((uint64_t)size < end)
        return lh_fail(err, LH_DATA_LOSS,
                       "%s/%06u.seg has %lld bytes, the ledger has acknowledged %llu; restore the "
                       "file, or start the job in a new directory",
                       f->dir, f->number, (long long)size, (unsigned long long)end);
    if ((uint64_t)size > end)
        lh_info("truncated", "file=%06u.seg bytes=%llu", f->number, (unsigned long long)size - end);
    if (ftruncate(f->fd, (off_t)end) < 0 || fdatasync(f->fd) < 0)
        return lh_fail_errno(err, errno, "truncating segment file %u", f->number);
    f->end = end;
    return 0;
}

int segment_files_open(struct segment_files *f, const char *dir, uint32_t number, uint64_t end,
                       struct lh_error *err)
{
    *f = (struct segment_files){.dir = strdup(dir), .fd = -1};
    if (!f->dir)
        return lh_fail_errno(err, ENOMEM, "opening %s", dir);
    if (lh_make_dirs(dir, 0700, err) < 0 || remove_files_after(dir, number, err) < 0 ||
        open_file(f, number ? number : 1, err) < 0 || cut_tail(f, end, err) < 0) {
        segment_files_close(f);
        return err ? err->code : LH_INTERNAL;
    }
    segment_files_committed(f);
    return 0;
}

void segment_files_close(struct segment_files *f)
{
    if (f->fd >= 0)
        close(f->fd);
    free(f->dir);
    *f = (struct segment_files){.fd = -1};
}

static int write_at(int fd, const void *data, size_t len, uint64_t offset, struct lh_error *err)
{
    const char *p = data;

    while (len) {
        ssize_t n = pwrite(fd, p, len, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return lh_fail_errno(err, errno, "writing a segment; free space, then resume the job");
        p += n;
        len -= (size_t)n;
        offset += (uint64_t)n;
    }
    return 0;
}

int segment_files_append(struct segment_files *f, const struct iovec *parts, int n,
                         struct segment_place *at, struct lh_error *err)
{
    if (f->end >= SEGMENT_FILE_BYTES) {
        int r = segment_files_sync(f, err);
        if (r == 0)
            r = open_file(f, f->number + 1, err);
        if (r < 0)
            return r;
    }
    *at = (struct segment_place){.file = f->number, .offset = f->end};
    for (int i = 0; i < n; i++) {
        int r = write_at(f->fd, parts[i].iov_base, parts[i].iov_len, f->end + at->length, err);
        if (r < 0)
            return r;
        at->length += parts[i].iov_len;
        at->crc = lh_crc32c(at->crc, parts[i].iov_base, parts[i].iov_len);
    }
    f->end += at->length;
    f->dirty = true;
    return 0;
}

int segment_files_sync(struct segment_files *f, struct lh_error *err)
{
    if (f->dirty && fdatasync(f->fd) < 0)
        return lh_fail_errno(err, errno, "sync of segment file %u", f->number);
    f->dirty = false;
    return 0;
}

void segment_files_committed(struct segment_files *f)
{
    f->committed_number = f->number;
    f->committed_end = f->end;
}

/* The bytes stay and are overwritten by the next append, or cut off by the next open. */
void segment_files_rollback(struct segment_files *f)
{
    struct lh_error err = {0};

    if (f->number != f->committed_number && open_file(f, f->committed_number, &err) < 0)
        lh_warn("rollback", "%s", err.message);
    f->end = f->committed_end;
    f->dirty = false;
}

int segment_files_read(const char *dir, const struct segment_place *at, void *to,
                       struct lh_error *err)
{
    lh_autofree char *path = path_of(dir, at->file);

    if (!path)
        return lh_fail_errno(err, ENOMEM, "reading segment file %u", at->file);
    lh_autoclose int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return lh_fail(err, LH_DATA_LOSS, "%s is missing: %s", path, strerror(errno));
    for (uint64_t got = 0; got < at->length;) {
        ssize_t n = pread(fd, (char *)to + got, at->length - got, (off_t)(at->offset + got));
        if (n < 0 && errno != EINTR)
            return lh_fail_errno(err, errno, "reading %s", path);
        if (n == 0)
            return lh_fail(err, LH_DATA_LOSS, "%s ends at %llu, a segment reaches to %llu", path,
                           (unsigned long long)(at->offset + got),
                           (unsigned long long)(at->offset + at->length));
        got += n > 0 ? (uint64_t)n : 0;
    }
    if (lh_crc32c(0, to, at->length) != at->crc)
        return lh_fail(err, LH_DATA_LOSS, "%s: wrong checksum at offset %llu", path,
                       (unsigned long long)at->offset);
    return 0;
}

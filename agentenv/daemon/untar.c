#include <archive.h>
#include <archive_entry.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "agentenv/daemon/tar.h"
#include "proto/cleanup.h"

enum { MAX_DEPTH = 256 };
static const int64_t MAX_FILE = INT64_C(1) << 36; /* a sparse entry costs nothing to claim */

struct unpack {
    const struct inroot *root;
    int dir;
    struct archive *archive;
    uint64_t bytes;
    tar_source_fn *source;
    void *ctx;
    struct lh_error *err; /* of the source, which libarchive cannot carry */
    int source_status;
};

static la_ssize_t on_read(struct archive *a, void *ctx, const void **data)
{
    struct unpack *u = ctx;
    ssize_t n = u->source(u->ctx, data, u->err);

    (void)a;
    u->source_status = n < 0 ? (int)n : 0;
    return n < 0 ? -1 : n;
}

static int archive_error(struct unpack *u, const char *what, struct lh_error *err)
{
    const char *why = archive_error_string(u->archive);

    if (u->source_status < 0)
        return u->source_status;
    return lh_fail(err, LH_INVALID_ARGUMENT, "%s: %s", what, why ? why : "damaged archive");
}

/* Opens the directory of `name` below u->dir, one component at a time, and leaves the last
 * component in `last` ("" for u->dir itself).  "..", which could leave, is refused wherever it
 * stands. */
static int walk(const struct unpack *u, const char *name, bool create, char last[256],
                struct lh_error *err)
{
    lh_autoclose int at = fcntl(u->dir, F_DUPFD_CLOEXEC, 0);
    int depth = 0;

    last[0] = 0;
    if (at < 0)
        return lh_fail_errno(err, errno, "unpacking %s", name);
    for (const char *p = name; *p;) {
        size_t len = strcspn(p, "/");
        bool skip = len == 0 || (len == 1 && *p == '.');
        if (len > 255 || (len == 2 && p[0] == '.' && p[1] == '.') || depth > MAX_DEPTH)
            return lh_fail(err, LH_INVALID_ARGUMENT, "archive entry \"%.200s\" is refused", name);
        if (!skip && last[0]) {
            int next = inroot_step(u->root, at, last, create, err);
            if (next < 0)
                return lh_wrap(err, "unpacking %.200s", name);
            close(at);
            at = next;
            depth++;
        }
        if (!skip) {
            memcpy(last, p, len);
            last[len] = 0;
        }
        p += len + (p[len] == '/');
    }
    return lh_steal_fd(&at);
}

static int set_times(int dir, const char *name, struct archive_entry *e)
{
    struct timespec t[2] = {{.tv_nsec = UTIME_OMIT},
                            {archive_entry_mtime(e), archive_entry_mtime_nsec(e)}};

    return archive_entry_mtime_is_set(e) ? utimensat(dir, name, t, AT_SYMLINK_NOFOLLOW) : 0;
}

static int set_owner(const struct unpack *u, int dir, const char *name, struct archive_entry *e)
{
    return fchownat(dir, name, inroot_to_host(u->root, archive_entry_uid(e)),
                    inroot_to_host(u->root, archive_entry_gid(e)), AT_SYMLINK_NOFOLLOW);
}

static int copy_data(struct unpack *u, int fd, struct lh_error *err)
{
    const void *data;
    size_t len;
    la_int64_t offset;
    int rc;

    while ((rc = archive_read_data_block(u->archive, &data, &len, &offset)) == ARCHIVE_OK) {
        for (size_t done = 0; done < len;) {
            ssize_t n = pwrite(fd, (const char *)data + done, len - done, offset + (off_t)done);
            if (n < 0 && errno != EINTR)
                return lh_fail_errno(err, errno, "writing into the sandbox");
            done += n > 0 ? (size_t)n : 0;
        }
        u->bytes += len;
    }
    return rc == ARCHIVE_EOF ? 0 : archive_error(u, "upload", err);
}

static int make_file(struct unpack *u, int dir, const char *name, struct archive_entry *e,
                     struct lh_error *err)
{
    int64_t size = archive_entry_size(e);

    if (size < 0 || size > MAX_FILE)
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s claims %lld bytes", name, (long long)size);
    lh_autoclose int fd = inroot_create(u->root, dir, name, 0600, err);
    if (fd < 0)
        return fd;
    int r = copy_data(u, fd, err);
    if (r < 0)
        return r;
    if (ftruncate(fd, size) < 0 || set_owner(u, dir, name, e) < 0 ||
        fchmod(fd, archive_entry_perm(e) & 07777) < 0 || set_times(dir, name, e) < 0)
        return lh_fail_errno(err, errno, "attributes of %s", name);
    return 0;
}

static int make_dir(struct unpack *u, int dir, const char *name, struct archive_entry *e,
                    struct lh_error *err)
{
    if (!*name) /* "./": the destination itself keeps what it has */
        return 0;
    lh_autoclose int fd = inroot_step(u->root, dir, name, true, err);
    if (fd < 0)
        return fd;
    lh_autoclose int real = inroot_reopen(fd, err);
    if (real < 0)
        return real;
    if (fchown(real, inroot_to_host(u->root, archive_entry_uid(e)),
               inroot_to_host(u->root, archive_entry_gid(e))) < 0 ||
        fchmod(real, archive_entry_perm(e) & 07777) < 0)
        return lh_fail_errno(err, errno, "attributes of %s", name);
    return 0;
}

static int make_symlink(struct unpack *u, int dir, const char *name, struct archive_entry *e,
                        struct lh_error *err)
{
    const char *target = archive_entry_symlink(e);

    if (!*name || !target)
        return lh_fail(err, LH_INVALID_ARGUMENT, "symbolic link without a name or target");
    if (unlinkat(dir, name, 0) < 0 && errno != ENOENT)
        return lh_fail_errno(err, errno, "replacing %s in the sandbox", name);
    if (symlinkat(target, dir, name) < 0 || set_owner(u, dir, name, e) < 0 ||
        set_times(dir, name, e) < 0)
        return lh_fail_errno(err, errno, "symbolic link %s", name);
    return 0;
}

static int make_hardlink(struct unpack *u, int dir, const char *name, const char *target,
                         struct lh_error *err)
{
    char last[256];

    lh_autoclose int from = walk(u, target, false, last, err);
    if (from < 0)
        return from;
    if (!*name || !last[0])
        return lh_fail(err, LH_INVALID_ARGUMENT, "hard link without a name or target");
    if (unlinkat(dir, name, 0) < 0 && errno != ENOENT)
        return lh_fail_errno(err, errno, "replacing %s in the sandbox", name);
    if (linkat(from, last, dir, name, 0) < 0) /* does not follow a symbolic link */
        return lh_fail_errno(err, errno, "hard link %s", name);
    return 0;
}

static int unpack_entry(struct unpack *u, struct archive_entry *e, struct lh_error *err)
{
    const char *name = archive_entry_pathname(e), *hardlink = archive_entry_hardlink(e);
    mode_t type = archive_entry_filetype(e);
    char last[256];

    if (!name)
        return lh_fail(err, LH_INVALID_ARGUMENT, "archive entry without a name");
    if (!hardlink && type != AE_IFREG && type != AE_IFDIR && type != AE_IFLNK)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "archive entry \"%.200s\" is a device, FIFO or socket: refused", name);
    lh_autoclose int dir = walk(u, name, true, last, err);
    if (dir < 0)
        return dir;
    if (hardlink)
        return make_hardlink(u, dir, last, hardlink, err);
    if (type == AE_IFDIR)
        return make_dir(u, dir, last, e, err);
    return type == AE_IFLNK ? make_symlink(u, dir, last, e, err) : make_file(u, dir, last, e, err);
}

static int unpack_all(struct unpack *u, struct lh_error *err)
{
    struct archive_entry *e;
    int rc;

    while ((rc = archive_read_next_header(u->archive, &e)) == ARCHIVE_OK || rc == ARCHIVE_WARN) {
        int r = unpack_entry(u, e, err);
        if (r < 0)
            return r;
    }
    return rc == ARCHIVE_EOF ? 0 : archive_error(u, "upload", err);
}

int tar_unpack(const struct inroot *r, int dir, tar_source_fn *source, void *ctx, uint64_t *bytes,
               struct lh_error *err)
{
    struct unpack u = {.root = r,
                       .dir = dir,
                       .archive = archive_read_new(),
                       .source = source,
                       .ctx = ctx,
                       .err = err};
    int rc;

    if (!u.archive)
        return lh_fail_errno(err, ENOMEM, "upload");
    archive_read_support_format_tar(u.archive);
    archive_read_support_format_empty(u.archive);
    if (archive_read_open(u.archive, &u, NULL, on_read, NULL) != ARCHIVE_OK)
        rc = archive_error(&u, "upload", err);
    else
        rc = unpack_all(&u, err);
    archive_read_free(u.archive);
    *bytes = u.bytes;
    return rc;
}

/* A directory as a store.  A file is written under a name of its own, ".incoming-ID", flushed and
 * renamed: readers on other hosts see it whole or not at all, and what a crash leaves is told by
 * its name.  Not O_TMPFILE, which NFS has not. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>

#include "agentenv/snapshot/blobs.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/id.h"

enum { PIECE = 8 << 20 };

static void *dir_open(const char *rest, struct lh_error *err)
{
    if (*rest != '/')
        return lh_fail(err, LH_INVALID_ARGUMENT, "file://%.200s is not absolute: file:///DIRECTORY",
                       rest),
               NULL;
    char *path = strdup(rest);
    if (!path)
        lh_fail_errno(err, ENOMEM, "%s", rest);
    return path;
}

static int copy(int from, int to, uint64_t max, int64_t deadline_ms, struct lh_error *err)
{
    off_t at = 0;
    ssize_t n;

    while ((n = sendfile(to, from, &at, PIECE)) > 0) { /* between file systems of any kind */
        if ((uint64_t)at > max)
            return lh_fail(err, LH_RESOURCE_EXHAUSTED, "more than %llu bytes",
                           (unsigned long long)max);
        if (!lh_ms_left(deadline_ms))
            return lh_fail(err, LH_DEADLINE_EXCEEDED, "copying took too long");
    }
    return n < 0 ? lh_fail_errno(err, errno, "copying") : 0;
}

static int dir_has(void *self, const char *name, int64_t deadline_ms, bool *has,
                   struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/%s", (const char *)self, name);

    (void)deadline_ms;
    if (!path)
        return lh_fail_errno(err, ENOMEM, "%s", name);
    *has = access(path, R_OK) == 0;
    return *has || errno == ENOENT || errno == ENOTDIR ? 0 : lh_fail_errno(err, errno, "%s", path);
}

static int fill(int fd, const char *incoming, int64_t deadline_ms, struct lh_error *err)
{
    lh_autoclose int to = open(incoming, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);

    if (to < 0)
        return lh_fail_errno(err, errno, "%s", incoming);
    int r = copy(fd, to, UINT64_MAX, deadline_ms, err);
    return r == 0 && fsync(to) < 0 ? lh_fail_errno(err, errno, "flushing %s", incoming) : r;
}

static int dir_put(void *self, const char *name, int fd, int64_t deadline_ms, struct lh_error *err)
{
    char id[LH_ID_SIZE];
    lh_id_new_text(id);
    lh_autofree char *path = lh_format("%s/%s", (const char *)self, name);
    lh_autofree char *incoming = lh_format("%s/.incoming-%s", (const char *)self, id);
    lh_autofree char *parent = path ? strndup(path, (size_t)(strrchr(path, '/') - path)) : NULL;

    if (!path || !incoming || !parent)
        return lh_fail_errno(err, ENOMEM, "%s", name);
    int r = lh_make_dirs(parent, 0755, err);
    if (r == 0)
        r = fill(fd, incoming, deadline_ms, err);
    if (r == 0 && rename(incoming, path) < 0)
        r = lh_fail_errno(err, errno, "%s", path);
    if (r < 0)
        unlink(incoming);
    return r < 0 ? lh_wrap(err, "storing %s", name) : lh_sync_dir_of(path, err);
}

static int dir_get(void *self, const char *name, int fd, uint64_t max, int64_t deadline_ms,
                   struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/%s", (const char *)self, name);
    lh_autoclose int from = path ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    struct stat st;

    if (from < 0 || fstat(from, &st) < 0)
        return lh_fail_errno(err, path ? errno : ENOMEM, "%s/%s", (const char *)self, name);
    if (!S_ISREG(st.st_mode))
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s is no file", path);
    int r = copy(from, fd, max, deadline_ms, err);
    return r < 0 ? lh_wrap(err, "%s", path) : 0;
}

const struct blobs_kind blobs_dir = {
    .scheme = "file://",
    .open = dir_open,
    .close = free,
    .has = dir_has,
    .put = dir_put,
    .get = dir_get,
};

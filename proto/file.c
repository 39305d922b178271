#include "proto/file.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <libgen.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "proto/cleanup.h"

char *lh_format(const char *fmt, ...)
{
    char *s = NULL;
    va_list ap;

    va_start(ap, fmt);
    int n = vasprintf(&s, fmt, ap);
    va_end(ap);
    return n < 0 ? NULL : s;
}

static int read_exactly(int fd, char *buf, size_t len, size_t *got)
{
    for (*got = 0; *got < len;) {
        ssize_t n = read(fd, buf + *got, len - *got);
        if (n == 0)
            return 0;
        if (n > 0)
            *got += (size_t)n;
        else if (errno != EINTR)
            return -errno;
    }
    return 0;
}

/* Files of /proc say that they have no bytes: they are read to their end, `max` at most. */
static char *read_unsized(int fd, const char *path, size_t max, size_t *len, struct lh_error *err)
{
    lh_autofree char *buf = NULL;
    size_t room = 0, got = 0, n;

    do {
        room = room ? 2 * room : 4096;
        room = room < max ? room : max;
        char *more = realloc(buf, room + 2); /* one to see that there is more, one for the NUL */
        if (!more)
            return lh_fail_errno(err, ENOMEM, "reading %s", path), NULL;
        buf = more;
        int r = read_exactly(fd, buf + got, room + 1 - got, &n);
        if (r < 0)
            return lh_fail_errno(err, -r, "reading %s", path), NULL;
        got += n;
        if (got > max)
            return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%s has more bytes than the limit of %zu",
                           path, max),
                   NULL;
    } while (got > room);
    buf[got] = 0;
    if (len)
        *len = got;
    return lh_steal(&buf);
}

char *lh_read_file(const char *path, size_t max, size_t *len, struct lh_error *err)
{
    lh_autoclose int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;

    if (fd < 0 || fstat(fd, &st) < 0)
        return lh_fail_errno(err, errno, "cannot read %s", path), NULL;
    if (!S_ISREG(st.st_mode))
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s is not a regular file", path), NULL;
    if ((uint64_t)st.st_size > max) {
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "%s has %lld bytes, the limit is %zu", path,
                (long long)st.st_size, max);
        return NULL;
    }
    if (!st.st_size)
        return read_unsized(fd, path, max, len, err);
    lh_autofree char *buf = malloc((size_t)st.st_size + 1);
    if (!buf)
        return lh_fail_errno(err, ENOMEM, "reading %s", path), NULL;
    size_t got;
    int r = read_exactly(fd, buf, (size_t)st.st_size, &got);
    if (r < 0)
        return lh_fail_errno(err, -r, "reading %s", path), NULL;
    buf[got] = 0;
    if (len)
        *len = got;
    return lh_steal(&buf);
}

int lh_write_all(int fd, const void *data, size_t len, struct lh_error *err)
{
    const char *p = data;

    while (len) {
        ssize_t n = write(fd, p, len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return lh_fail_errno(err, errno, "write");
        p += n;
        len -= (size_t)n;
    }
    return 0;
}

int lh_sync_dir(const char *path, struct lh_error *err)
{
    lh_autoclose int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    return fd < 0 || fsync(fd) < 0 ? lh_fail_errno(err, errno, "sync of directory %s", path) : 0;
}

int lh_sync_dir_of(const char *path, struct lh_error *err)
{
    lh_autofree char *copy = strdup(path);

    return copy ? lh_sync_dir(dirname(copy), err)
                : lh_fail_errno(err, ENOMEM, "sync of the directory of %s", path);
}

int lh_write_file(const char *path, const void *data, size_t len, mode_t mode, struct lh_error *err)
{
    lh_autofree char *tmp = lh_format("%s.tmp.%d.XXXXXX", path, getpid());

    if (!tmp)
        return lh_fail_errno(err, ENOMEM, "writing %s", path);
    lh_autoclose int fd = mkostemp(tmp, O_CLOEXEC);
    if (fd < 0)
        return lh_fail_errno(err, errno, "cannot create a file beside %s", path);
    if (lh_write_all(fd, data, len, err) < 0) {
        unlink(tmp);
        return lh_wrap(err, "writing %s", path);
    }
    if (fchmod(fd, mode) < 0 || fdatasync(fd) < 0 || rename(tmp, path) < 0) {
        int saved = errno;
        unlink(tmp);
        return lh_fail_errno(err, saved, "writing %s", path);
    }
    return lh_sync_dir_of(path, err);
}

int lh_make_dirs(const char *path, mode_t mode, struct lh_error *err)
{
    lh_autofree char *p = strdup(path);

    if (!p)
        return lh_fail_errno(err, ENOMEM, "mkdir %s", path);
    for (char *s = p + 1;; s++) {
        if (*s && *s != '/')
            continue;
        char c = *s;
        *s = 0;
        if (mkdir(p, mode) < 0 && errno != EEXIST)
            return lh_fail_errno(err, errno, "mkdir %s", p);
        *s = c;
        if (!c)
            return 0;
    }
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st;
    (void)type;
    (void)at;
    return remove(path) < 0 && errno != ENOENT ? -1 : 0; /* somebody else may have been faster */
}

int lh_remove_tree(const char *path, struct lh_error *err)
{
    if (nftw(path, remove_one, 32, FTW_DEPTH | FTW_PHYS | FTW_MOUNT) < 0 && errno != ENOENT)
        return lh_fail_errno(err, errno, "removing %s", path);
    return 0;
}

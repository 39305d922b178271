/* A copy of an overlay's upper directory that serves as a layer: file contents with their holes,
 * owners, modes, times, hard links, and every extended attribute, since overlay keeps opaque
 * directories there (trusted.overlay.*); whiteouts are character devices 0:0.  Reflinks where the
 * file system has them.
 *
 * cp -a and libarchive were rejected: the one is a process of its own, the other drops holes or
 * trusted attributes depending on version and flags. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include "agentenv/sandbox/box_private.h"
#include "proto/file.h"

struct seen {
    ino_t inode;
    char *path; /* relative to the root of the copy */
};

/* Relative paths are only for hard links and messages; the walk goes by descriptors. */
struct copy {
    int to_root;
    struct seen *seen; /* files with several links, in the order met */
    size_t n_seen, size;
    char path[4096];
    size_t path_len;
    struct lh_error *err;
};

static int fail(struct copy *c, const char *what)
{
    return lh_fail_errno(c->err, errno, "copying a layer, %s of %s", what,
                         c->path_len ? c->path : ".");
}

/* ---- attributes ---------------------------------------------------------------------------- */

/* Through /proc/self/fd, so that O_PATH descriptors of any kind of file work and no link is
 * followed. */
static int copy_xattrs(struct copy *c, int from, int to)
{
    char from_path[32], to_path[32], names[4096], value[65536];

    snprintf(from_path, sizeof from_path, "/proc/self/fd/%d", from);
    snprintf(to_path, sizeof to_path, "/proc/self/fd/%d", to);
    ssize_t len = listxattr(from_path, names, sizeof names);
    if (len < 0)
        return errno == ENOTSUP ? 0 : fail(c, "attributes");
    for (const char *name = names; name < names + len; name += strlen(name) + 1) {
        ssize_t n = getxattr(from_path, name, value, sizeof value);
        if (n < 0 || setxattr(to_path, name, value, (size_t)n, 0) < 0)
            return fail(c, name);
    }
    return 0;
}

static int copy_metadata(struct copy *c, int from, int to, const struct stat *st)
{
    const struct timespec times[2] = {st->st_atim, st->st_mtim};
    char path[32];

    snprintf(path, sizeof path, "/proc/self/fd/%d", to);
    if (fchownat(to, "", st->st_uid, st->st_gid, AT_EMPTY_PATH) < 0)
        return fail(c, "owner");
    if (chmod(path, st->st_mode & 07777) < 0)
        return fail(c, "mode");
    if (copy_xattrs(c, from, to) < 0)
        return c->err->code;
    return utimensat(AT_FDCWD, path, times, 0) < 0 ? fail(c, "times") : 0;
}

/* ---- contents ------------------------------------------------------------------------------ */

/* By sendfile: copy_file_range refuses to leave a file system, and a transient sandbox's files lie
 * in a tmpfs. */
static int copy_range(struct copy *c, int from, int to, off_t at, off_t end)
{
    if (lseek(to, at, SEEK_SET) < 0)
        return fail(c, "content");
    while (at < end) {
        ssize_t n = sendfile(to, from, &at, (size_t)(end - at));
        if (n <= 0)
            return n < 0 ? fail(c, "content")
                         : 0; /* shorter than it was: cannot be, it is frozen */
    }
    return 0;
}

static int copy_content(struct copy *c, int from, int to, off_t size)
{
    if (ioctl(to, FICLONE, from) == 0)
        return 0;
    if (ftruncate(to, size) < 0)
        return fail(c, "size");
    for (off_t data, hole = 0; (data = lseek(from, hole, SEEK_DATA)) >= 0;) {
        hole = lseek(from, data, SEEK_HOLE);
        if (hole < 0 || copy_range(c, from, to, data, hole) < 0)
            return c->err->code ? c->err->code : fail(c, "holes");
    }
    return 0;
}

/* ---- hard links ---------------------------------------------------------------------------- */

/* 1 = linked to what was copied before. */
static int link_seen(struct copy *c, int to_dir, const char *name, const struct stat *st)
{
    if (S_ISDIR(st->st_mode) || st->st_nlink < 2)
        return 0;
    for (size_t i = 0; i < c->n_seen; i++)
        if (c->seen[i].inode == st->st_ino)
            return linkat(c->to_root, c->seen[i].path, to_dir, name, 0) < 0 ? fail(c, "link") : 1;
    if (c->n_seen == c->size) {
        size_t size = c->size ? c->size * 2 : 64;
        struct seen *seen = realloc(c->seen, size * sizeof *seen);
        if (!seen)
            return lh_fail_errno(c->err, ENOMEM, "copying a layer");
        c->seen = seen;
        c->size = size;
    }
    char *path = strdup(c->path);
    if (!path)
        return lh_fail_errno(c->err, ENOMEM, "copying a layer");
    c->seen[c->n_seen++] = (struct seen){st->st_ino, path};
    return 0;
}

/* ---- the walk ------------------------------------------------------------------------------ */

static int copy_dir(struct copy *c, int from, int to, const struct stat *st);

static int copy_file(struct copy *c, int from_dir, int to_dir, const char *name,
                     const struct stat *st)
{
    lh_autoclose int from = openat(from_dir, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    lh_autoclose int to =
        openat(to_dir, name, O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0600);

    if (from < 0 || to < 0)
        return fail(c, "open");
    if (copy_content(c, from, to, st->st_size) < 0)
        return c->err->code;
    return copy_metadata(c, from, to, st);
}

static int copy_subdir(struct copy *c, int from_dir, int to_dir, const char *name,
                       const struct stat *st)
{
    lh_autoclose int from = openat(from_dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);

    if (from < 0 || mkdirat(to_dir, name, 0700) < 0)
        return fail(c, "directory");
    lh_autoclose int to = openat(to_dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return to < 0 ? fail(c, "directory") : copy_dir(c, from, to, st);
}

/* Attributes of links cannot be reached through a descriptor; overlay keeps none on them. */
static int copy_link(struct copy *c, int from_dir, int to_dir, const char *name,
                     const struct stat *st)
{
    const struct timespec times[2] = {st->st_atim, st->st_mtim};
    char target[4096];
    ssize_t n = readlinkat(from_dir, name, target, sizeof target - 1);

    target[n > 0 ? n : 0] = 0;
    if (n < 0 || symlinkat(target, to_dir, name) < 0 ||
        fchownat(to_dir, name, st->st_uid, st->st_gid, AT_SYMLINK_NOFOLLOW) < 0 ||
        utimensat(to_dir, name, times, AT_SYMLINK_NOFOLLOW) < 0)
        return fail(c, "symbolic link");
    return 0;
}

/* FIFOs, sockets (their names at least) and whiteouts. */
static int copy_node(struct copy *c, int from_dir, int to_dir, const char *name,
                     const struct stat *st)
{
    if (mknodat(to_dir, name, st->st_mode & S_IFMT, st->st_rdev) < 0)
        return fail(c, "special file");
    lh_autoclose int from = openat(from_dir, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    lh_autoclose int to = openat(to_dir, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    return from < 0 || to < 0 ? fail(c, "special file") : copy_metadata(c, from, to, st);
}

static int copy_entry(struct copy *c, int from_dir, int to_dir, const char *name)
{
    struct stat st;

    if (fstatat(from_dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return fail(c, "status");
    int r = link_seen(c, to_dir, name, &st);
    if (r != 0)
        return r < 0 ? r : 0;
    switch (st.st_mode & S_IFMT) {
    case S_IFREG:
        return copy_file(c, from_dir, to_dir, name, &st);
    case S_IFDIR:
        return copy_subdir(c, from_dir, to_dir, name, &st);
    case S_IFLNK:
        return copy_link(c, from_dir, to_dir, name, &st);
    default:
        return copy_node(c, from_dir, to_dir, name, &st);
    }
}

static int copy_named(struct copy *c, int from, int to, const char *name)
{
    size_t len = c->path_len, n = strlen(name);

    if (len + n + 2 > sizeof c->path) {
        errno = ENAMETOOLONG;
        return fail(c, "a directory below");
    }
    c->path_len +=
        (size_t)snprintf(c->path + len, sizeof c->path - len, "%s%s", len ? "/" : "", name);
    int r = copy_entry(c, from, to, name);
    c->path[c->path_len = len] = 0;
    return r;
}

/* Last the directory's own times, which its entries have changed. */
static int copy_dir(struct copy *c, int from, int to, const struct stat *st)
{
    lh_autoclosedir DIR *d = fdopendir(openat(from, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    int r = 0;

    if (!d)
        return fail(c, "list");
    for (const struct dirent *e; r == 0 && (e = readdir(d));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            r = copy_named(c, from, to, e->d_name);
    return r < 0 ? r : copy_metadata(c, from, to, st);
}

int box_copy_tree(const char *from_path, const char *to_path, struct lh_error *err)
{
    lh_autoclose int from = open(from_path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct copy c = {.err = err};
    struct stat st;

    if (from < 0 || fstat(from, &st) < 0)
        return lh_fail_errno(err, errno, "%s", from_path);
    if (mkdir(to_path, 0700) < 0)
        return lh_fail_errno(err, errno, "%s", to_path);
    lh_autoclose int to = open(to_path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (to < 0)
        return lh_fail_errno(err, errno, "%s", to_path);
    c.to_root = to;
    int r = copy_dir(&c, from, to, &st);
    for (size_t i = 0; i < c.n_seen; i++)
        free(c.seen[i].path);
    free(c.seen);
    return r;
}

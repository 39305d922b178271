/* Merging a chain of layers into one with the same effect.
 *
 * A trajectory that is snapshot every turn would stand on hundreds of layers: overlayfs takes 500
 * at most, and each lookup of an absent name asks all of them.  So a long chain is merged, bottom
 * up, as overlayfs itself would read it: a whiteout (character device 0:0) removes what is below
 * and stays, since it may hide a name of the image; an opaque directory removes what is below and
 * stays opaque; directories merge; anything else replaces.
 *
 * Files are hard links into the old layers, which never change, so merging copies no data and its
 * cost is the number of names.  Rejected: mounting the chain and copying from it, which loses the
 * whiteouts, and copying the data. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "agentenv/snapshot/layerwalk.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/file.h"

enum { MAX_DEPTH = 256 };

static bool is_whiteout(const struct stat *st)
{
    return S_ISCHR(st->st_mode) && st->st_rdev == makedev(0, 0);
}

static int remove_name(int dir, const char *name, struct lh_error *err);

static int remove_children(int fd, struct lh_error *err)
{
    int copy = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    lh_autoclosedir DIR *dir = copy < 0 ? NULL : fdopendir(copy);
    int r = 0;

    if (!dir) {
        int saved = errno;
        if (copy >= 0)
            close(copy);
        return lh_fail_errno(err, saved, "listing a layer");
    }
    for (struct dirent *e; r == 0 && (e = readdir(dir));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            r = remove_name(fd, e->d_name, err);
    return r;
}

/* Whatever has the name; absent is fine. */
static int remove_name(int dir, const char *name, struct lh_error *err)
{
    if (unlinkat(dir, name, 0) == 0 || errno == ENOENT)
        return 0;
    if (errno != EISDIR)
        return lh_fail_errno(err, errno, "removing %s from a layer", name);
    lh_autoclose int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return lh_fail_errno(err, errno, "removing %s from a layer", name);
    int r = remove_children(fd, err);
    if (r == 0 && unlinkat(dir, name, AT_REMOVEDIR) < 0)
        r = lh_fail_errno(err, errno, "removing %s from a layer", name);
    return r;
}

/* Owner, mode, times and extended attributes of a directory; they include the opaque mark. */
static int copy_attributes(int from, int to, const struct stat *st, struct lh_error *err)
{
    const struct timespec times[2] = {st->st_atim, st->st_mtim};
    char names[4096], value[4096];
    ssize_t len = flistxattr(from, names, sizeof names);

    for (const char *n = names; len > 0 && n < names + len; n += strlen(n) + 1) {
        ssize_t size = fgetxattr(from, n, value, sizeof value);
        if (size < 0 || fsetxattr(to, n, value, (size_t)size, 0) < 0)
            return lh_fail_errno(err, errno, "attribute %s of a layer", n);
    }
    if (len < 0 || fchown(to, st->st_uid, st->st_gid) < 0 || fchmod(to, st->st_mode & 07777) < 0 ||
        futimens(to, times) < 0)
        return lh_fail_errno(err, errno, "attributes of a layer");
    return 0;
}

static bool is_opaque(int fd)
{
    char value[2];

    return fgetxattr(fd, layer_opaque(), value, sizeof value) == 1 && value[0] == 'y';
}

static int merge_dir(int from, int to, int depth, struct lh_error *err);

static int merge_subdir(int from, int to, const char *name, int depth, struct lh_error *err)
{
    struct stat st;
    /* A file or whiteout ends overlayfs' search below the directory that stands above it. */
    bool covers = fstatat(to, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISDIR(st.st_mode);

    if (covers) {
        int r = remove_name(to, name, err);
        if (r < 0)
            return r;
    }
    if (mkdirat(to, name, 0700) < 0 && errno != EEXIST)
        return lh_fail_errno(err, errno, "directory %s of a layer", name);
    lh_autoclose int a = openat(from, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    lh_autoclose int b = openat(to, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (a < 0 || b < 0 || (covers && fsetxattr(b, layer_opaque(), "y", 1, 0) < 0))
        return lh_fail_errno(err, errno, "directory %s of a layer", name);
    return merge_dir(a, b, depth + 1, err);
}

static int merge_name(int from, int to, const char *name, int depth, struct lh_error *err)
{
    struct stat st;

    if (fstatat(from, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return lh_fail_errno(err, errno, "%s of a layer", name);
    if (S_ISDIR(st.st_mode))
        return merge_subdir(from, to, name, depth, err);
    int r = remove_name(to, name, err);
    if (r < 0)
        return r;
    /* Overlayfs links all whiteouts to one inode, which reaches its limit of links some day. */
    if (is_whiteout(&st) ? mknodat(to, name, S_IFCHR, makedev(0, 0)) < 0
                         : linkat(from, name, to, name, 0) < 0)
        return lh_fail_errno(err, errno, "%s into a merged layer", name);
    return 0;
}

/* Takes no descriptor. */
static int merge_dir(int from, int to, int depth, struct lh_error *err)
{
    int copy = openat(from, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    lh_autoclosedir DIR *dir = copy < 0 ? NULL : fdopendir(copy);
    struct stat st;
    int r = 0;

    if (!dir || fstat(from, &st) < 0) {
        int saved = errno;
        if (!dir && copy >= 0)
            close(copy);
        return lh_fail_errno(err, saved, "listing a layer");
    }
    if (depth > MAX_DEPTH)
        return lh_fail(err, LH_FAILED_PRECONDITION, "directories deeper than %d", MAX_DEPTH);
    if (is_opaque(from))
        r = remove_children(to, err);
    for (struct dirent *e; r == 0 && (e = readdir(dir));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            r = merge_name(from, to, e->d_name, depth, err);
    return r < 0 ? r : copy_attributes(from, to, &st, err);
}

int layers_merge(char *const *paths, size_t n, const char *target, struct lh_error *err)
{
    int r = 0;

    if (mkdir(target, 0700) < 0)
        return lh_fail_errno(err, errno, "%s", target);
    lh_autoclose int to = open(target, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (to < 0)
        return lh_fail_errno(err, errno, "%s", target);
    for (size_t i = n; r == 0 && i-- > 0;) {
        lh_autoclose int from = open(paths[i], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        r = from < 0 ? lh_fail_errno(err, errno, "%s", paths[i]) : merge_dir(from, to, 0, err);
    }
    return r < 0 ? lh_wrap(err, "merging %zu layers", n) : 0;
}

/* Trees made by an agent: deeper than a path can name and than descriptors last, and changing while
 * they are walked.  So everything goes by descriptors, at most DEPTH of them at a time. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include "agentenv/sandbox/box_private.h"
#include "agentenv/sandbox/facts.h"
#include "proto/file.h"

enum { DEPTH = 100, BLOCK = 512 };

static int open_dir(int dir, const char *name)
{
    return openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

static bool is_dot(const char *name)
{
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

/* Takes over dir_fd. What disappears meanwhile is not counted. */
static uint64_t sum_dir(int dir_fd, int depth)
{
    lh_autoclosedir DIR *d = fdopendir(dir_fd);
    uint64_t sum = 0;
    struct stat st;

    if (!d)
        close(dir_fd);
    for (const struct dirent *e; d && (e = readdir(d));) {
        if (is_dot(e->d_name) || fstatat(dir_fd, e->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
            continue;
        if (!S_ISDIR(st.st_mode)) {
            sum += (uint64_t)st.st_blocks * BLOCK / st.st_nlink;
            continue;
        }
        int sub = open_dir(dir_fd, e->d_name);
        sum += (uint64_t)st.st_blocks * BLOCK;
        if (sub >= 0 && depth == DEPTH)
            close(sub); /* deeper ones are missed: who hides there gains little, see below */
        else if (sub >= 0)
            sum += sum_dir(sub, depth + 1);
    }
    return sum;
}

/* An agent can hide bytes below DEPTH levels from the disk limit. RLIMIT_FSIZE still bounds each
 * file; a project quota is the answer where a host has one. */
uint64_t box_tree_bytes(int dir_fd)
{
    int fd = open_dir(dir_fd, ".");

    return fd < 0 ? 0 : sum_dir(fd, 1);
}

/* One removal: `top` is where directories that are too deep are moved to, to be removed in the
 * next round. */
struct removal {
    int top;
    unsigned moved; /* names are never used twice */
    dev_t device;
    struct lh_error *err;
};

static int remove_below(struct removal *r, int dir_fd, int depth);

static int remove_dir(struct removal *r, int dir, const char *name, int depth)
{
    char deep[32];
    struct stat st;

    if (unlinkat(dir, name, AT_REMOVEDIR) == 0 || errno == ENOENT)
        return 0;
    if (depth == DEPTH) {
        snprintf(deep, sizeof deep, ".deep.%u", r->moved++);
        return renameat(dir, name, r->top, deep) < 0
                   ? lh_fail_errno(r->err, errno, "moving a deep directory %s", name)
                   : 0;
    }
    int sub = open_dir(dir, name);
    if (sub < 0 || fstat(sub, &st) < 0 || st.st_dev != r->device) {
        int e = sub < 0 ? errno : EXDEV;
        if (sub >= 0)
            close(sub);
        return lh_fail_errno(r->err, e, "directory %s", name);
    }
    int rc = remove_below(r, sub, depth + 1);
    if (rc == 0 && unlinkat(dir, name, AT_REMOVEDIR) < 0 && errno != ENOENT)
        rc = lh_fail_errno(r->err, errno, "directory %s", name);
    return rc;
}

/* Takes over dir_fd. */
static int remove_below(struct removal *r, int dir_fd, int depth)
{
    lh_autoclosedir DIR *d = fdopendir(dir_fd);
    int rc = 0;

    if (!d) {
        close(dir_fd);
        return lh_fail_errno(r->err, errno, "list of a directory");
    }
    for (const struct dirent *e; rc == 0 && (e = readdir(d));) {
        if (is_dot(e->d_name) || unlinkat(dir_fd, e->d_name, 0) == 0)
            continue;
        if (errno == EISDIR || errno == EPERM) /* POSIX allows either for a directory */
            rc = remove_dir(r, dir_fd, e->d_name, depth);
        else if (errno != ENOENT)
            rc = lh_fail_errno(r->err, errno, "file %s", e->d_name);
    }
    return rc;
}

/* Everything in it, but not the directory. */
static int empty_dir(int top, struct lh_error *err)
{
    struct removal r = {.top = top, .err = err};
    struct stat st;
    int rc = 0;

    if (fstat(top, &st) < 0)
        return lh_fail_errno(err, errno, "a directory");
    r.device = st.st_dev;
    for (unsigned before = ~0U; rc == 0 && r.moved != before;) { /* DEPTH levels of each a round */
        before = r.moved;
        rc = remove_below(&r, open_dir(top, "."), 1);
    }
    return rc;
}

int box_remove_tree(const char *path, struct lh_error *err)
{
    lh_autoclose int top = open_dir(AT_FDCWD, path);
    int rc = 0;

    if (top < 0)
        return errno == ENOENT ? 0 : lh_fail_errno(err, errno, "%s", path);
    rc = empty_dir(top, err);
    if (rc == 0 && rmdir(path) < 0 && errno != ENOENT)
        rc = lh_fail_errno(err, errno, "%s", path);
    return rc < 0 ? lh_wrap(err, "removing %s", path) : 0;
}

/* ---- owners ---- */

int box_own_tree(const char *path, struct lh_error *err)
{
    const struct box_facts *f = box_facts();
    char *const roots[] = {(char *)path, NULL};
    int r = 0;

    if (f->idmap || f->uid_base == 0)
        return 0;
    FTS *walk = fts_open(roots, FTS_PHYSICAL | FTS_NOCHDIR | FTS_XDEV, NULL);
    if (!walk)
        return lh_fail_errno(err, errno, "%s", path);
    for (const FTSENT *e; r == 0 && (e = fts_read(walk));)
        if (e->fts_info != FTS_DP && e->fts_statp->st_uid == geteuid() &&
            lchown(e->fts_accpath, f->uid_base, f->uid_base) < 0)
            r = lh_fail_errno(err, errno, "the owner of %s", e->fts_path);
    fts_close(walk);
    return r;
}

/* ---- a directory for the next box ---- */

/* What overlay notes on its upper directory; false when something else is there. */
static bool remove_notes(int fd)
{
    const char *ours = box_facts()->overlay_xattr;
    char names[1024];
    ssize_t n = flistxattr(fd, names, sizeof names);

    for (const char *x = names; n >= 0 && x < names + n; x += strlen(x) + 1)
        if (strncmp(x, ours, strlen(ours)) != 0 || fremovexattr(fd, x) < 0)
            return false;
    return n >= 0;
}

/* The upper directory is the root of the sandbox, whose owner could change what belongs to it; the
 * work directory was out of reach. */
static bool is_as_made(int upper, int work)
{
    struct stat u, w;
    int u_flags = 0, w_flags = 0;

    if (fstat(upper, &u) < 0 || fstat(work, &w) < 0)
        return false;
    ioctl(upper, FS_IOC_GETFLAGS, &u_flags); /* some file systems have none */
    ioctl(work, FS_IOC_GETFLAGS, &w_flags);
    return u.st_uid == w.st_uid && u.st_gid == w.st_gid && u.st_mode == w.st_mode &&
           u.st_size == w.st_size && u.st_nlink == w.st_nlink && u_flags == w_flags;
}

static bool holds_only(int dir, const char *a, const char *b)
{
    lh_autoclosedir DIR *d = fdopendir(open_dir(dir, "."));
    bool only = d;

    for (const struct dirent *e; only && (e = readdir(d));)
        only = is_dot(e->d_name) || strcmp(e->d_name, a) == 0 || strcmp(e->d_name, b) == 0;
    return only;
}

bool box_reset_dir(const char *path)
{
    char names[2][32];

    box_upper_names(0, names[0], names[1]);
    lh_autoclose int dir = open_dir(AT_FDCWD, path);
    lh_autoclose int upper = dir < 0 ? -1 : open_dir(dir, names[0]);
    lh_autoclose int work = upper < 0 ? -1 : open_dir(dir, names[1]);

    return work >= 0 && holds_only(dir, names[0], names[1]) && remove_notes(upper) &&
           empty_dir(upper, NULL) == 0 && empty_dir(work, NULL) == 0 && is_as_made(upper, work);
}

#include "agentenv/task/whiteout.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/file.h"

#define MARK        ".wh."
#define MARK_OPAQUE ".wh..wh..opq"

/* The directory that holds `path`; -1 with errno. */
static int open_parent(int root, const char *path)
{
    struct open_how how = {.flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC,
                           .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS};
    const char *slash = strrchr(path, '/');
    lh_autofree char *parent = slash ? strndup(path, (size_t)(slash - path)) : strdup(".");

    return parent ? (int)syscall(SYS_openat2, root, parent, &how, sizeof how) : -1;
}

static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash ? slash + 1 : path;
}

/* rm -r of a name in a directory that is open. */
static int remove_at(int dir, const char *name, struct lh_error *err)
{
    lh_autofree char *path = lh_format("/proc/self/fd/%d/%s", dir, name);

    if (!path)
        return lh_fail_errno(err, ENOMEM, "%s", name);
    if (unlinkat(dir, name, 0) == 0 || errno == ENOENT)
        return 0;
    return lh_remove_tree(path, err);
}

static int remove_all(int dir, struct lh_error *err)
{
    int copy = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), r = 0;
    lh_autoclosedir DIR *d = copy < 0 ? NULL : fdopendir(copy);

    if (!d)
        return lh_fail_errno(err, errno, "a directory of the image");
    for (const struct dirent *e; r == 0 && (e = readdir(d));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            r = remove_at(dir, e->d_name, err);
    return r;
}

int whiteout_make_way(int root, const char *path, bool directory, struct lh_error *err)
{
    lh_autoclose int dir = open_parent(root, path);
    struct stat st;

    if (dir < 0 || fstatat(dir, last_part(path), &st, AT_SYMLINK_NOFOLLOW) < 0)
        return 0; /* nothing there; what makes the entry judges its name */
    return S_ISDIR(st.st_mode) && directory ? 0 : remove_at(dir, last_part(path), err);
}

int whiteout_apply(int root, const char *path, bool *was, struct lh_error *err)
{
    const char *name = last_part(path);

    *was = !strncmp(name, MARK, sizeof MARK - 1);
    if (!*was)
        return 0;
    lh_autoclose int dir = open_parent(root, path);
    if (dir < 0)
        return errno == ENOENT ? 0 : lh_fail_errno(err, errno, "%.200s", path);
    if (!strcmp(name, MARK_OPAQUE))
        return remove_all(dir, err);
    name += sizeof MARK - 1;
    if (!*name || !strcmp(name, ".") || !strcmp(name, ".."))
        return lh_fail(err, LH_INVALID_ARGUMENT, "\"%.200s\" removes nothing", path);
    return remove_at(dir, name, err);
}

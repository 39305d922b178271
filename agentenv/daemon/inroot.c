#include "agentenv/daemon/inroot.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "proto/cleanup.h"

enum { NOBODY = 65534 };

/* openat2 answers EAGAIN when a rename raced with "..": the caller of a hostile sandbox retries a
 * few times and then gives up. */
static int open_in_root(int root, const char *path, uint64_t flags)
{
    struct open_how how = {.flags = flags | O_CLOEXEC,
                           .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    long fd = -1;

    for (int i = 0; i < 16; i++) {
        fd = syscall(SYS_openat2, root, path, &how, sizeof how);
        if (fd >= 0 || errno != EAGAIN)
            break;
    }
    return (int)fd;
}

static int check_file_system(int fd, const char *path, struct lh_error *err)
{
    struct statfs fs;

    if (fstatfs(fd, &fs) < 0)
        return lh_fail_errno(err, errno, "statfs of %s", path);
    if (fs.f_type != OVERLAYFS_SUPER_MAGIC && fs.f_type != TMPFS_MAGIC)
        return lh_fail(err, LH_PERMISSION_DENIED, "%s is not on a file system of the sandbox",
                       path);
    return 0;
}

static int check_path(const char *path, struct lh_error *err)
{
    if (path[0] != '/')
        return lh_fail(err, LH_INVALID_ARGUMENT, "\"%s\" is not an absolute path in the sandbox",
                       path);
    return 0;
}

int inroot_find(const struct inroot *r, const char *path, struct lh_error *err)
{
    if (check_path(path, err) < 0)
        return LH_INVALID_ARGUMENT;
    lh_autoclose int fd = open_in_root(r->fd, path, O_PATH);
    if (fd < 0)
        return lh_fail_errno(err, errno, "%s in the sandbox", path);
    int rc = check_file_system(fd, path, err);
    return rc < 0 ? rc : lh_steal_fd(&fd);
}

int inroot_find_parent(const struct inroot *r, const char *path, bool create, const char **name,
                       struct lh_error *err)
{
    char parent[4096];
    size_t len = strlen(path);

    if (check_path(path, err) < 0)
        return LH_INVALID_ARGUMENT;
    while (len > 1 && path[len - 1] == '/')
        len--;
    size_t cut = len;
    while (path[cut - 1] != '/')
        cut--;
    *name = path + cut;
    if (cut >= sizeof parent || len == 1 || path[len] || !strcmp(*name, ".") ||
        !strcmp(*name, ".."))
        return lh_fail(err, LH_INVALID_ARGUMENT, "\"%s\" does not name a file", path);
    memcpy(parent, path, cut);
    parent[cut] = 0;
    return inroot_find_dir(r, parent, create, err);
}

/* Parents first: how deep a path may nest is bounded by its length of 4095. */
int inroot_find_dir(const struct inroot *r, const char *path, bool create, struct lh_error *err)
{
    char trimmed[4096];
    const char *name;
    size_t len = strlen(path);

    if (check_path(path, err) < 0)
        return LH_INVALID_ARGUMENT;
    if (len >= sizeof trimmed)
        return lh_fail(err, LH_INVALID_ARGUMENT, "path of %zu bytes: the limit is 4095", len);
    lh_autoclose int fd = open_in_root(r->fd, path, O_PATH | O_DIRECTORY);
    if (fd >= 0) {
        int rc = check_file_system(fd, path, err);
        return rc < 0 ? rc : lh_steal_fd(&fd);
    }
    if (errno != ENOENT || !create)
        return lh_fail_errno(err, errno, "%s in the sandbox", path);
    memcpy(trimmed, path, len + 1);
    while (len > 1 && trimmed[len - 1] == '/')
        trimmed[--len] = 0;
    lh_autoclose int parent = inroot_find_parent(r, trimmed, true, &name, err);
    return parent < 0 ? parent : inroot_step(r, parent, name, true, err);
}

int inroot_step(const struct inroot *r, int dir, const char *name, bool create,
                struct lh_error *err)
{
    int how = O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;

    if (!*name || strchr(name, '/') || !strcmp(name, ".."))
        return lh_fail(err, LH_INVALID_ARGUMENT, "\"%s\" cannot be the name of a directory", name);
    lh_autoclose int fd = openat(dir, name, how);
    if (fd < 0 && errno == ENOENT && create) {
        if (mkdirat(dir, name, 0755) < 0 && errno != EEXIST)
            return lh_fail_errno(err, errno, "creating directory %s in the sandbox", name);
        if (fchownat(dir, name, r->uid_base, r->uid_base, AT_SYMLINK_NOFOLLOW) < 0)
            return lh_fail_errno(err, errno, "owner of %s in the sandbox", name);
        fd = openat(dir, name, how);
    }
    if (fd < 0)
        return lh_fail_errno(err, errno, "directory %s in the sandbox", name);
    int rc = check_file_system(fd, name, err);
    return rc < 0 ? rc : lh_steal_fd(&fd);
}

int inroot_create(const struct inroot *r, int dir, const char *name, mode_t mode,
                  struct lh_error *err)
{
    if (!*name || strchr(name, '/') || !strcmp(name, ".") || !strcmp(name, ".."))
        return lh_fail(err, LH_INVALID_ARGUMENT, "\"%s\" cannot be the name of a file", name);
    if (unlinkat(dir, name, 0) < 0 && errno != ENOENT)
        return lh_fail_errno(err, errno, "replacing %s in the sandbox", name);
    lh_autoclose int fd =
        openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0 || fchown(fd, r->uid_base, r->uid_base) < 0 || fchmod(fd, mode & 07777) < 0)
        return lh_fail_errno(err, errno, "creating %s in the sandbox", name);
    return lh_steal_fd(&fd);
}

int inroot_reopen(int path_fd, struct lh_error *err)
{
    char self[64];
    struct stat st;

    if (fstat(path_fd, &st) < 0)
        return lh_fail_errno(err, errno, "stat in the sandbox");
    if (!S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode))
        return lh_fail(err, LH_INVALID_ARGUMENT, "neither a regular file nor a directory");
    int rc = check_file_system(path_fd, "the file", err);
    if (rc < 0)
        return rc;
    snprintf(self, sizeof self, "/proc/self/fd/%d", path_fd);
    int fd = open(self, O_RDONLY | O_CLOEXEC | (S_ISDIR(st.st_mode) ? O_DIRECTORY : 0));
    return fd < 0 ? lh_fail_errno(err, errno, "opening a file of the sandbox") : fd;
}

uid_t inroot_to_host(const struct inroot *r, int64_t id)
{
    return id < 0 || id >= (int64_t)r->uid_count ? r->uid_base : r->uid_base + (uid_t)id;
}

uid_t inroot_from_host(const struct inroot *r, uid_t id)
{
    return id < r->uid_base || id - r->uid_base >= r->uid_count ? NOBODY : id - r->uid_base;
}

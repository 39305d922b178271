/* A sandbox start that finds these in the image writes nothing: two dozen inodes fewer to make and
 * to delete, which on a file system without journal (ext4 then avoids what was deleted lately, by
 * looking at each) is most of the cost of a start.  Names are taken below an open directory and
 * never through a symbolic link; an image with a link for /dev is left as it is. */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include "agentenv/task/tree.h"
#include "proto/cleanup.h"

static const struct entry {
    const char *directory, *name; /* "." = the root */
    mode_t mode;                  /* of a directory or, without type, of an empty file */
    const char *target;           /* of a symbolic link */
} skeleton[] = {
    {".", "dev", S_IFDIR | 0755},
    {".", "proc", S_IFDIR | 0555},
    {".", "tmp", S_IFDIR | 01777},
    {".", "work", S_IFDIR | 0755},
    {"dev", "null", S_IFREG | 0666},
    {"dev", "zero", S_IFREG | 0666},
    {"dev", "full", S_IFREG | 0666},
    {"dev", "random", S_IFREG | 0666},
    {"dev", "urandom", S_IFREG | 0666},
    {"dev", "tty", S_IFREG | 0666},
    {"dev", "pts", S_IFDIR | 0755},
    {"dev", "shm", S_IFDIR | 01777},
    {"dev", "ptmx", S_IFLNK, "pts/ptmx"},
    {"dev", "fd", S_IFLNK, "/proc/self/fd"},
    {"dev", "stdin", S_IFLNK, "/proc/self/fd/0"},
    {"dev", "stdout", S_IFLNK, "/proc/self/fd/1"},
    {"dev", "stderr", S_IFLNK, "/proc/self/fd/2"},
};

static int make_directory(int dir, const struct entry *e)
{
    mode_t mode = e->mode & 07777;

    /* The umask is the process's, so the mode is set afterwards. */
    return mkdirat(dir, e->name, mode) < 0 ? -1 : fchmodat(dir, e->name, mode, 0);
}

static int make_file(int dir, const struct entry *e)
{
    lh_autoclose int fd =
        openat(dir, e->name, O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0600);

    return fd < 0 ? -1 : fchmod(fd, e->mode & 07777);
}

static int make(int dir, const struct entry *e)
{
    if (S_ISDIR(e->mode))
        return make_directory(dir, e);
    return S_ISREG(e->mode) ? make_file(dir, e) : symlinkat(e->target, dir, e->name);
}

int tree_add_skeleton(const char *tree, struct lh_error *err)
{
    lh_autoclose int root = open(tree, O_DIRECTORY | O_RDONLY | O_CLOEXEC);

    if (root < 0)
        return lh_fail_errno(err, errno, "opening %s", tree);
    for (size_t i = 0; i < LH_ARRAY_SIZE(skeleton); i++) {
        const struct entry *e = &skeleton[i];
        lh_autoclose int dir =
            openat(root, e->directory, O_DIRECTORY | O_RDONLY | O_NOFOLLOW | O_CLOEXEC);

        if (dir < 0 && (errno == ENOTDIR || errno == ELOOP))
            continue;
        if (dir < 0 || (make(dir, e) < 0 && errno != EEXIST))
            return lh_fail_errno(err, errno, "adding %s/%s to %s", e->directory, e->name, tree);
    }
    return 0;
}

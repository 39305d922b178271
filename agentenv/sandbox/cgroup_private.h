/* What cgroup_layout.c and cgroup.c share: the files of a cgroup, by its directory. */
#ifndef AGENTENV_SANDBOX_CGROUP_PRIVATE_H
#define AGENTENV_SANDBOX_CGROUP_PRIVATE_H

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "agentenv/sandbox/cgroup.h"

extern const char *const cgroup_controllers[CGROUP_CONTROLLERS];

/* cgroup_layout.c, for cgroup_rootless.c too. */
int cgroup_open_v2_base(void);
int cgroup_open_parent(int base, const char *name, struct lh_error *err);
bool cgroup_has_controllers(int dir); /* all that limits need */
int cgroup_delegate(int dir, const char *what, struct lh_error *err);
int cgroup_open_rootless(struct cgroup_root *r, struct lh_error *err);

/* cgroup_each() in one directory. */
int cgroup_each_in(int dir, int (*each)(void *ctx, const char *id), void *ctx);

/* cgroup_plain.c: without cgroups.  `fd` is the directory that stands for a sandbox's. */
pid_t plain_init(int fd); /* of a process that runs; -1 */
int plain_kill(int fd, int64_t deadline_ms, struct lh_error *err);
int plain_count(pid_t init, struct cgroup_counts *out, struct lh_error *err);
void plain_remove(int root_fd, const char *id);
int plain_nothing(void); /* what stands for an exec's cgroup, in init's eyes */

static inline int cgroup_write_at(int dir, const char *file, const char *text)
{
    lh_autoclose int fd = openat(dir, file, O_WRONLY | O_CLOEXEC);

    if (fd < 0)
        return -errno;
    return write(fd, text, strlen(text)) < 0 ? -errno : 0;
}

static inline int cgroup_read_at(int dir, const char *file, char *buf, size_t size)
{
    lh_autoclose int fd = openat(dir, file, O_RDONLY | O_CLOEXEC);

    buf[0] = 0;
    if (fd < 0)
        return -errno;
    ssize_t n = read(fd, buf, size - 1);
    buf[n > 0 ? n : 0] = 0;
    return n < 0 ? -errno : 0;
}

static inline int cgroup_open_dir(int dir, const char *name)
{
    return openat(dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

#endif

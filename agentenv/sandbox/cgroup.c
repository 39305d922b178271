#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/sandbox/cgroup_private.h"
#include "agentenv/sandbox/facts.h"
#include "proto/clock.h"

/* ---- one sandbox --------------------------------------------------------------------------- */

enum { CPU_PERIOD_US = 100000 };

struct setting {
    int controller;
    const char *v2, *v1;
};

/* In the order of limit_texts(). */
static const struct setting settings[] = {
    {CGROUP_MEMORY, "memory.max", "memory.limit_in_bytes"},
    {CGROUP_MEMORY, "memory.swap.max", "memory.swappiness"},
    {CGROUP_PIDS, "pids.max", "pids.max"},
    {CGROUP_CPU, "cpu.max", "cpu.cfs_quota_us"},
};

enum { SETTINGS = LH_ARRAY_SIZE(settings) };

static void limit_texts(const struct box_limits *l, bool v2, char text[SETTINGS][48])
{
    uint64_t quota = (uint64_t)l->cpu_millis * CPU_PERIOD_US / 1000;

    quota = quota < 1000 ? 1000 : quota;
    snprintf(text[0], 48, "%llu", (unsigned long long)l->memory_bytes);
    snprintf(text[1], 48, "0");
    snprintf(text[2], 48, "%u", l->pids);
    snprintf(text[3], 48, v2 ? "%llu 100000" : "%llu", (unsigned long long)quota);
}

int cgroup_limit(const struct cgroup_root *r, int box_fd, const char *id,
                 const struct box_limits *limits, struct lh_error *err)
{
    char text[SETTINGS][48];
    int v1[CGROUP_CONTROLLERS] = {-1, -1, -1}, rc = 0;

    if (!box_facts()->limits) /* rlimits do, as far as they can: confine_self.c */
        return 0;

    limit_texts(limits, r->v2_limits, text);
    for (int i = 0; i < CGROUP_CONTROLLERS && !r->v2_limits; i++)
        if ((mkdirat(r->v1[i], id, 0755) < 0 && errno != EEXIST) ||
            (v1[i] = cgroup_open_dir(r->v1[i], id)) < 0)
            rc = lh_fail_errno(err, errno, "%s cgroup of %s", cgroup_controllers[i], id);
    for (size_t i = 0; i < SETTINGS && rc == 0; i++) {
        const struct setting *s = &settings[i];
        const char *file = r->v2_limits ? s->v2 : s->v1;
        int e = cgroup_write_at(r->v2_limits ? box_fd : v1[s->controller], file, text[i]);
        if (e < 0 && !(i == 1 && e == -ENOENT)) /* a kernel without swap */
            rc = lh_fail_errno(err, -e, "limit %s = %s of %s", file, text[i], id);
    }
    for (int i = 0; i < CGROUP_CONTROLLERS; i++)
        if (v1[i] >= 0)
            close(v1[i]);
    return rc;
}

/* Init forks into cgroups below its own, for which it must be allowed to write cgroup.procs of
 * both. */
static int let_init_in(int fd)
{
    uid_t uid = box_facts()->uid_base + box_facts()->init_uid;

    return box_facts()->cgroups ? fchownat(fd, "cgroup.procs", uid, uid, 0) : 0;
}

int cgroup_create(const struct cgroup_root *r, const char *id, const struct box_limits *limits,
                  struct lh_error *err)
{
    if (mkdirat(r->v2, id, 0755) < 0)
        return lh_fail_errno(err, errno, "cgroup %s/%s", r->parent, id);
    lh_autoclose int fd = cgroup_open_dir(r->v2, id);
    int rc = fd < 0 || let_init_in(fd) < 0
                 ? lh_fail_errno(err, errno, "cgroup %s/%s", r->parent, id)
                 : cgroup_limit(r, fd, id, limits, err);
    if (rc == 0)
        return lh_steal_fd(&fd);
    cgroup_remove(r, id, lh_now_ms(), NULL);
    return rc;
}

static void exec_name(char name[80], const char *exec_id)
{
    snprintf(name, 80, "x-%s", exec_id); /* no file of the kernel's begins so */
}

int cgroup_exec_create(int box_fd, const char *exec_id, int *dir, int *kill, struct lh_error *err)
{
    char name[80];

    exec_name(name, exec_id);
    if (mkdirat(box_fd, name, 0755) < 0)
        return lh_fail_errno(err, errno, "cgroup of exec %s", exec_id);
    *dir = box_facts()->cgroups ? cgroup_open_dir(box_fd, name) : plain_nothing();
    *kill = *dir < 0 ? -1 : cgroup_exec_kill_fd(box_fd, exec_id);
    if (*kill >= 0 && let_init_in(*dir) == 0)
        return 0;
    int rc = lh_fail_errno(err, errno, "cgroup of exec %s", exec_id);
    cgroup_exec_remove(box_fd, exec_id);
    return rc;
}

int cgroup_exec_kill_fd(int box_fd, const char *exec_id)
{
    char name[80], path[100];

    if (!box_facts()->cgroups)
        return plain_nothing();
    exec_name(name, exec_id);
    snprintf(path, sizeof path, "%s/cgroup.kill", name);
    return openat(box_fd, path, O_WRONLY | O_CLOEXEC);
}

bool cgroup_exec_remove(int box_fd, const char *exec_id)
{
    char name[80];

    exec_name(name, exec_id);
    return unlinkat(box_fd, name, AT_REMOVEDIR) == 0 || errno != EBUSY;
}

/* ---- freeze and kill ----------------------------------------------------------------------- */

/* A change of cgroup.events raises POLLPRI, but at most once in 10 ms: with poll alone every second
 * freeze takes 12 ms.  So look often at first. */
static int wait_event(int dir, const char *line, int64_t deadline_ms, struct lh_error *err)
{
    lh_autoclose int fd = openat(dir, "cgroup.events", O_RDONLY | O_CLOEXEC);
    int64_t start = lh_now_us();
    char buf[256];

    if (fd < 0)
        return lh_fail_errno(err, errno, "cgroup.events");
    for (;;) {
        ssize_t n = pread(fd, buf, sizeof buf - 1, 0);
        buf[n > 0 ? n : 0] = 0;
        if (strstr(buf, line))
            return 0;
        if (lh_ms_left(deadline_ms) == 0)
            return lh_fail(err, LH_DEADLINE_EXCEEDED, "a cgroup does not reach \"%s\"", line);
        struct pollfd p = {fd, POLLPRI, 0};
        if (lh_now_us() - start < 2000)
            usleep(20);
        else
            poll(&p, 1, 20);
    }
}

int cgroup_freeze_soon(int fd)
{
    return !box_facts()->cgroups ? -EOPNOTSUPP : cgroup_write_at(fd, "cgroup.freeze", "1");
}

int cgroup_set_frozen(int fd, bool frozen, int64_t deadline_ms, struct lh_error *err)
{
    if (!box_facts()->cgroups)
        return frozen ? cgroup_no_freezer(err) : 0;
    int e = cgroup_write_at(fd, "cgroup.freeze", frozen ? "1" : "0");

    if (e < 0)
        return lh_fail_errno(err, -e, "cgroup.freeze");
    return wait_event(fd, frozen ? "frozen 1" : "frozen 0", deadline_ms, err);
}

bool cgroup_is_frozen(int fd)
{
    char buf[16];

    return cgroup_read_at(fd, "cgroup.freeze", buf, sizeof buf) == 0 && buf[0] == '1';
}

int cgroup_kill(int fd, int pidfd, int64_t deadline_ms, struct lh_error *err)
{
    struct pollfd dead = {pidfd, POLLIN, 0};

    if (!box_facts()->cgroups)
        return plain_kill(fd, deadline_ms, err);
    int e = cgroup_write_at(fd, "cgroup.kill", "1");

    if (e == -ENODEV || e == -ENOENT) /* removed meanwhile */
        return 0;
    if (e < 0)
        return lh_fail_errno(err, -e, "cgroup.kill");
    if (pidfd >= 0)
        poll(&dead, 1, lh_ms_left(deadline_ms)); /* PID 1 goes last: then the next wait is none */
    return wait_event(fd, "populated 0", deadline_ms, err);
}

/* ---- removal ------------------------------------------------------------------------------- */

/* A cgroup stays busy for a moment after its last process has been reaped. */
static int remove_dir(int parent, const char *name, int64_t deadline_ms)
{
    for (useconds_t pause = 50;; pause = pause < 5000 ? pause * 2 : pause) {
        if (unlinkat(parent, name, AT_REMOVEDIR) == 0 || errno == ENOENT)
            return 0;
        if (errno != EBUSY || lh_ms_left(deadline_ms) == 0)
            return -errno;
        usleep(pause);
    }
}

static int remove_execs(int box_fd, int64_t deadline_ms)
{
    lh_autoclosedir DIR *d = fdopendir(cgroup_open_dir(box_fd, "."));
    int r = 0;

    for (const struct dirent *e; d && r == 0 && (e = readdir(d));)
        if (e->d_type == DT_DIR && strncmp(e->d_name, "x-", 2) == 0)
            r = remove_dir(box_fd, e->d_name, deadline_ms);
    return r;
}

int cgroup_remove(const struct cgroup_root *r, const char *id, int64_t deadline_ms,
                  struct lh_error *err)
{
    int e = 0;

    if (!box_facts()->cgroups)
        plain_remove(r->v2, id);
    if (unlinkat(r->v2, id, AT_REMOVEDIR) < 0 && errno != ENOENT) { /* seldom: see tidy() */
        lh_autoclose int fd = cgroup_open(r, id);
        e = fd < 0 ? 0 : remove_execs(fd, deadline_ms);
        if (e == 0)
            e = remove_dir(r->v2, id, deadline_ms);
    }
    for (int i = 0; i < CGROUP_CONTROLLERS; i++)
        if (e == 0 && r->v1[i] >= 0)
            e = remove_dir(r->v1[i], id, deadline_ms);
    return e < 0 ? lh_fail_errno(err, -e, "removing cgroup %s/%s", r->parent, id) : 0;
}

/* ---- counts -------------------------------------------------------------------------------- */

static uint64_t number_after(const char *text, const char *key)
{
    const char *p = strstr(text, key);

    return p ? strtoull(p + strlen(key), NULL, 10) : 0;
}

uint64_t cgroup_oom_kills(const struct cgroup_root *r, const char *id)
{
    char path[160], text[512];

    if (!box_facts()->limits)
        return 0;
    snprintf(path, sizeof path, "%s/%s", id, r->v2_limits ? "memory.events" : "memory.oom_control");
    cgroup_read_at(r->v2_limits ? r->v2 : r->v1[CGROUP_MEMORY], path, text, sizeof text);
    return number_after(text, "oom_kill ");
}

int cgroup_count(const struct cgroup_root *r, const char *id, struct cgroup_counts *out,
                 struct lh_error *err)
{
    const char *files[] = {r->v2_limits ? "memory.current" : "memory.usage_in_bytes",
                           "pids.current"};
    const int dirs[] = {r->v1[CGROUP_MEMORY], r->v1[CGROUP_PIDS]};
    char path[160], text[2][64];

    if (!box_facts()->limits)
        return plain_count(cgroup_init(r, id), out, err);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", id, files[i]);
        int e = cgroup_read_at(r->v2_limits ? r->v2 : dirs[i], path, text[i], sizeof text[i]);
        if (e < 0)
            return lh_fail_errno(err, -e, "cgroup %s", path);
    }
    out->memory_bytes = strtoull(text[0], NULL, 10);
    out->oom_kills = cgroup_oom_kills(r, id);
    out->processes = (uint32_t)strtoul(text[1], NULL, 10);
    return 0;
}

pid_t cgroup_init(const struct cgroup_root *r, const char *id)
{
    lh_autoclose int fd = cgroup_open(r, id);
    char text[16] = "";

    if (fd < 0 || !box_facts()->cgroups)
        return fd < 0 ? -1 : plain_init(fd);
    cgroup_read_at(fd, "cgroup.procs", text, sizeof text);
    return *text ? atoi(text) : -1;
}

int cgroup_each_in(int dir, int (*each)(void *ctx, const char *id), void *ctx)
{
    lh_autoclosedir DIR *d = fdopendir(cgroup_open_dir(dir, "."));
    int r = 0;

    for (const struct dirent *e; d && r == 0 && (e = readdir(d));)
        if (e->d_type == DT_DIR && e->d_name[0] != '.')
            r = each(ctx, e->d_name);
    return r;
}

int cgroup_each(const struct cgroup_root *r, int (*each)(void *ctx, const char *id), void *ctx)
{
    int rc = cgroup_each_in(r->v2, each, ctx);

    for (int i = 0; i < CGROUP_CONTROLLERS && rc == 0; i++)
        if (r->v1[i] >= 0)
            rc = cgroup_each_in(r->v1[i], each, ctx);
    return rc;
}

#include "agentenv/sandbox/cgroup.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "agentenv/sandbox/overlay.h"
#include "proto/clock.h"
#include "proto/file.h"

static const char *const controllers[CGROUP_CONTROLLERS] = {"memory", "pids", "cpu"};

/* ---- small files --------------------------------------------------------------------------- */

static int write_at(int dir, const char *file, const char *text)
{
    lh_autoclose int fd = openat(dir, file, O_WRONLY | O_CLOEXEC);

    if (fd < 0)
        return -errno;
    return write(fd, text, strlen(text)) < 0 ? -errno : 0;
}

static int read_at(int dir, const char *file, char *buf, size_t size)
{
    lh_autoclose int fd = openat(dir, file, O_RDONLY | O_CLOEXEC);

    buf[0] = 0;
    if (fd < 0)
        return -errno;
    ssize_t n = read(fd, buf, size - 1);
    buf[n > 0 ? n : 0] = 0;
    return n < 0 ? -errno : 0;
}

static int open_dir(int dir, const char *name)
{
    return openat(dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

/* ---- the layout of the host ---------------------------------------------------------------- */

static bool is_v2(const char *path)
{
    struct statfs f;

    return statfs(path, &f) == 0 && f.f_type == CGROUP2_SUPER_MAGIC;
}

static int open_v2_base(void)
{
    static const char *const places[] = {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"};

    for (size_t i = 0; i < LH_ARRAY_SIZE(places); i++)
        if (is_v2(places[i]))
            return open_dir(AT_FDCWD, places[i]);
    lh_autoclose int mnt = overlay_new_fs("cgroup2", NULL, 0);
    return mnt < 0 ? -1 : open_dir(mnt, ".");
}

static bool has_word(const char *list, const char *word)
{
    size_t n = strlen(word);

    for (const char *w = list; (w = strstr(w, word)); w += n)
        if ((w == list || strchr(" ,", w[-1])) && strchr(" ,\n", w[n]))
            return true;
    return false;
}

/* The mount of a v1 controller, from /proc/self/mounts: its options name it. */
static int open_v1_base(const char *controller)
{
    lh_autofclose FILE *f = fopen("/proc/self/mounts", "re");
    char line[1024], dir[256], type[32], options[256];

    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "%*s %255s %31s %255s", dir, type, options) == 3 &&
            strcmp(type, "cgroup") == 0 && has_word(options, controller))
            return open_dir(AT_FDCWD, dir);
    return -1;
}

static int open_parent(int base, const char *name, struct lh_error *err)
{
    if (mkdirat(base, name, 0755) < 0 && errno != EEXIST)
        return lh_fail_errno(err, errno, "cgroup %s", name);
    int fd = open_dir(base, name);
    return fd < 0 ? lh_fail_errno(err, errno, "cgroup %s", name) : fd;
}

static int delegate(int dir, const char *what, struct lh_error *err)
{
    int r = write_at(dir, "cgroup.subtree_control", "+memory +pids +cpu");

    if (r == -EBUSY)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "%s has processes of its own, so that its cgroups cannot have limits; move "
                       "them: mkdir /sys/fs/cgroup/host && for p in $(cat "
                       "/sys/fs/cgroup/cgroup.procs); do echo $p > "
                       "/sys/fs/cgroup/host/cgroup.procs; done",
                       what);
    return r < 0 ? lh_fail_errno(err, -r, "enabling memory, pids and cpu in %s", what) : 0;
}

static int open_v2(struct cgroup_root *r, struct lh_error *err)
{
    char list[256];

    read_at(r->base, "cgroup.controllers", list, sizeof list);
    r->v2_limits = true;
    for (int i = 0; i < CGROUP_CONTROLLERS; i++)
        r->v2_limits &= has_word(list, controllers[i]);
    if (r->v2_limits && delegate(r->base, "the root cgroup", err) < 0)
        return err ? err->code : LH_FAILED_PRECONDITION;
    r->v2 = open_parent(r->base, r->parent, err);
    if (r->v2 < 0)
        return r->v2;
    return r->v2_limits ? delegate(r->v2, r->parent, err) : 0;
}

static int open_v1(struct cgroup_root *r, struct lh_error *err)
{
    for (int i = 0; i < CGROUP_CONTROLLERS; i++) {
        r->v1_base[i] = open_v1_base(controllers[i]);
        if (r->v1_base[i] < 0)
            return lh_fail(err, LH_FAILED_PRECONDITION,
                           "no cgroup hierarchy has the %s controller: mount cgroup2 on "
                           "/sys/fs/cgroup, or that controller as v1",
                           controllers[i]);
        r->v1[i] = open_parent(r->v1_base[i], r->parent, err);
        if (r->v1[i] < 0)
            return r->v1[i];
    }
    return 0;
}

int cgroup_root_open(struct cgroup_root *r, const char *parent, struct lh_error *err)
{
    *r = (struct cgroup_root){.base = -1, .v2 = -1, .v1_base = {-1, -1, -1}, .v1 = {-1, -1, -1}};
    snprintf(r->parent, sizeof r->parent, "%s", parent);
    r->base = open_v2_base();
    int rc = r->base < 0 ? lh_fail(err, LH_FAILED_PRECONDITION, "the kernel has no cgroup v2")
                         : open_v2(r, err);
    if (rc == 0 && !r->v2_limits)
        rc = open_v1(r, err);
    if (rc < 0)
        cgroup_root_close(r);
    return rc;
}

static void close_and_remove(int *fd, int *base, const char *name)
{
    if (*fd >= 0) {
        close(*fd);
        unlinkat(*base, name, AT_REMOVEDIR); /* EBUSY: sandboxes are left, as they may */
    }
    if (*base >= 0)
        close(*base);
    *fd = *base = -1;
}

void cgroup_root_close(struct cgroup_root *r)
{
    close_and_remove(&r->v2, &r->base, r->parent);
    for (int i = 0; i < CGROUP_CONTROLLERS; i++)
        close_and_remove(&r->v1[i], &r->v1_base[i], r->parent);
}

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

static int set_limits(const struct cgroup_root *r, int box_fd, const char *id,
                      const struct box_limits *limits, struct lh_error *err)
{
    char text[SETTINGS][48];
    int v1[CGROUP_CONTROLLERS] = {-1, -1, -1}, rc = 0;

    limit_texts(limits, r->v2_limits, text);
    for (int i = 0; i < CGROUP_CONTROLLERS && !r->v2_limits; i++)
        if ((mkdirat(r->v1[i], id, 0755) < 0 && errno != EEXIST) ||
            (v1[i] = open_dir(r->v1[i], id)) < 0)
            rc = lh_fail_errno(err, errno, "%s cgroup of %s", controllers[i], id);
    for (size_t i = 0; i < SETTINGS && rc == 0; i++) {
        const struct setting *s = &settings[i];
        const char *file = r->v2_limits ? s->v2 : s->v1;
        int e = write_at(r->v2_limits ? box_fd : v1[s->controller], file, text[i]);
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
    enum { UID = BOX_UID_BASE + BOX_INIT_UID };

    return fchownat(fd, "cgroup.procs", UID, UID, 0);
}

int cgroup_create(const struct cgroup_root *r, const char *id, const struct box_limits *limits,
                  struct lh_error *err)
{
    if (mkdirat(r->v2, id, 0755) < 0)
        return lh_fail_errno(err, errno, "cgroup %s/%s", r->parent, id);
    lh_autoclose int fd = open_dir(r->v2, id);
    int rc = fd < 0 || let_init_in(fd) < 0
                 ? lh_fail_errno(err, errno, "cgroup %s/%s", r->parent, id)
                 : set_limits(r, fd, id, limits, err);
    if (rc == 0)
        return lh_steal_fd(&fd);
    cgroup_remove(r, id, lh_now_ms(), NULL);
    return rc;
}

int cgroup_open(const struct cgroup_root *r, const char *id)
{
    return open_dir(r->v2, id);
}

int cgroup_attach(const struct cgroup_root *r, const char *id, pid_t pid)
{
    char file[128], text[16];

    snprintf(file, sizeof file, "%s/cgroup.procs", id);
    snprintf(text, sizeof text, "%d", pid);
    for (int i = 0; i < CGROUP_CONTROLLERS; i++) {
        int e = r->v1[i] < 0 ? 0 : write_at(r->v1[i], file, text);
        if (e < 0)
            return e;
    }
    return 0;
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
    *dir = open_dir(box_fd, name);
    *kill = *dir < 0 ? -1 : openat(*dir, "cgroup.kill", O_WRONLY | O_CLOEXEC);
    if (*kill >= 0 && let_init_in(*dir) == 0)
        return 0;
    int rc = lh_fail_errno(err, errno, "cgroup of exec %s", exec_id);
    cgroup_exec_remove(box_fd, exec_id);
    return rc;
}

int cgroup_exec_kill_fd(int box_fd, const char *exec_id)
{
    char name[80], path[100];

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

int cgroup_set_frozen(int fd, bool frozen, int64_t deadline_ms, struct lh_error *err)
{
    int e = write_at(fd, "cgroup.freeze", frozen ? "1" : "0");

    if (e < 0)
        return lh_fail_errno(err, -e, "cgroup.freeze");
    return wait_event(fd, frozen ? "frozen 1" : "frozen 0", deadline_ms, err);
}

bool cgroup_is_frozen(int fd)
{
    char buf[16];

    return read_at(fd, "cgroup.freeze", buf, sizeof buf) == 0 && buf[0] == '1';
}

int cgroup_kill(int fd, int64_t deadline_ms, struct lh_error *err)
{
    int e = write_at(fd, "cgroup.kill", "1");

    if (e == -ENODEV || e == -ENOENT) /* removed meanwhile */
        return 0;
    if (e < 0)
        return lh_fail_errno(err, -e, "cgroup.kill");
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
    lh_autoclosedir DIR *d = fdopendir(open_dir(box_fd, "."));
    int r = 0;

    for (const struct dirent *e; d && r == 0 && (e = readdir(d));)
        if (e->d_type == DT_DIR && strncmp(e->d_name, "x-", 2) == 0)
            r = remove_dir(box_fd, e->d_name, deadline_ms);
    return r;
}

int cgroup_remove(const struct cgroup_root *r, const char *id, int64_t deadline_ms,
                  struct lh_error *err)
{
    lh_autoclose int fd = cgroup_open(r, id);
    int e = fd < 0 ? 0 : remove_execs(fd, deadline_ms);

    if (e == 0)
        e = remove_dir(r->v2, id, deadline_ms);
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

int cgroup_count(const struct cgroup_root *r, const char *id, struct cgroup_counts *out,
                 struct lh_error *err)
{
    const char *files[] = {r->v2_limits ? "memory.current" : "memory.usage_in_bytes",
                           r->v2_limits ? "memory.events" : "memory.oom_control", "pids.current"};
    const int dirs[] = {r->v1[CGROUP_MEMORY], r->v1[CGROUP_MEMORY], r->v1[CGROUP_PIDS]};
    char path[160], text[3][512];

    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", id, files[i]);
        int e = read_at(r->v2_limits ? r->v2 : dirs[i], path, text[i], sizeof text[i]);
        if (e < 0)
            return lh_fail_errno(err, -e, "cgroup %s", path);
    }
    out->memory_bytes = strtoull(text[0], NULL, 10);
    out->oom_kills = number_after(text[1], "oom_kill ");
    out->processes = (uint32_t)strtoul(text[2], NULL, 10);
    return 0;
}

static int each_in(int dir, int (*each)(void *ctx, const char *id), void *ctx)
{
    lh_autoclosedir DIR *d = fdopendir(open_dir(dir, "."));
    int r = 0;

    for (const struct dirent *e; d && r == 0 && (e = readdir(d));)
        if (e->d_type == DT_DIR && e->d_name[0] != '.')
            r = each(ctx, e->d_name);
    return r;
}

int cgroup_each(const struct cgroup_root *r, int (*each)(void *ctx, const char *id), void *ctx)
{
    int rc = each_in(r->v2, each, ctx);

    for (int i = 0; i < CGROUP_CONTROLLERS && rc == 0; i++)
        if (r->v1[i] >= 0)
            rc = each_in(r->v1[i], each, ctx);
    return rc;
}

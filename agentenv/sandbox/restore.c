/* Images into processes: a box that is asleep wakes.
 *
 * CRIU runs inside the sandbox's cgroups, with limits a little wider until it has gone, and in a
 * mount namespace where the sandbox's new root is attached (spawner_criu.c).  The tasks stand still
 * when they are complete; then each is put into its exec's cgroup, and they go on.  Whatever fails:
 * all processes are killed, the directories made here removed, and the box still sleeps. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "agentenv/sandbox/box_private.h"
#include "agentenv/sandbox/overlay.h"
#include "agentenv/sandbox/spawner.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"

LH_LOG_COMPONENT("sandbox");

enum { RESTORE_MS = 120000 };

/* What CRIU itself needs. */
static const uint64_t MORE_MEMORY = 64 << 20;
enum { MORE_PIDS = 16 };

struct box *box_asleep(struct box_host *h, const struct box_spec *spec, struct lh_error *err)
{
    struct box *b = box_new(h, spec, err);

    if (!b)
        return NULL;
    b->life = BOX_ASLEEP;
    b->asleep_ms = lh_now_ms();
    return b;
}

/* ---- the root ------------------------------------------------------------------------------ */

static bool is_working_dir(const char *name, unsigned *n)
{
    return sscanf(name, "upper.%u", n) == 1 || sscanf(name, "work.%u", n) == 1;
}

/* Removes upper and work directories of earlier lives; *next receives the number after theirs. */
static int clear_dir(const struct box *b, unsigned *next, struct lh_error *err)
{
    lh_autoclosedir DIR *d = opendir(b->dir);
    unsigned n;

    if (!d)
        return lh_fail_errno(err, errno, "directory %s", b->dir);
    for (const struct dirent *e; (e = readdir(d));) {
        if (!is_working_dir(e->d_name, &n))
            continue;
        *next = n >= *next ? n + 1 : *next;
        lh_autofree char *path = lh_format("%s/%s", b->dir, e->d_name);
        int r = path ? box_remove_tree(path, err) : lh_fail_errno(err, ENOMEM, "%s", b->dir);
        if (r < 0)
            return r;
    }
    return 0;
}

/* What PID 1 has for an executable: see criu/images.c. */
static int make_executable(int dir, const char *upper, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/" BOX_EXECUTABLE, upper);
    enum { UID = BOX_UID_BASE + BOX_INIT_UID };

    if (!path)
        return lh_fail_errno(err, ENOMEM, "%s", upper);
    lh_autoclose int fd = openat(dir, path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0111);
    if (fd < 0 || fchown(fd, UID, UID) < 0 || fchmod(fd, 0111) < 0)
        return lh_fail_errno(err, errno, "making %s", path);
    return 0;
}

static int make_root(struct box *b, struct lh_error *err)
{
    lh_autoclose int dir = open(b->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    char upper[32], work[32];
    int r;

    if (dir < 0)
        return lh_fail_errno(err, errno, "directory %s", b->dir);
    if ((r = clear_dir(b, &b->upper, err)) < 0 || (r = box_make_upper(dir, b->upper, err)) < 0)
        return r;
    box_upper_names(b->upper, upper, work);
    if ((r = make_executable(dir, upper, err)) < 0)
        return r;
    return box_mount(b, NULL, dir, err);
}

/* ---- stations ------------------------------------------------------------------------------ */

struct restoring {
    struct box *box;
    int images;
};

static int bring_lo_up(const struct box *b, pid_t root, struct lh_error *err)
{
    struct spawner_request req = {.op = SPAWNER_LOOPBACK};
    struct wire_report report;
    char path[64];
    int p[2], none;

    snprintf(path, sizeof path, "/proc/%d/ns/net", root);
    lh_autoclose int net = open(path, O_RDONLY | O_CLOEXEC);
    if (net < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, p) < 0)
        return lh_fail_errno(err, errno, "%s", path);
    int r = spawner_send(b->host->spawner, &req, (int[]){p[1], net}, 2, err);
    close(p[1]);
    if (r == 0)
        r = box_receive_report(p[0], lh_now_ms() + BOX_START_MS, &report, &none, err);
    close(p[0]);
    return r;
}

static int at_station(void *ctx, const char *name, pid_t root, struct lh_error *err)
{
    const struct restoring *r = ctx;

    if (!strcmp(name, "setup-namespaces") && r->box->network == BOX_NET_LOOPBACK)
        return bring_lo_up(r->box, root, err);
    if (strcmp(name, "post-restore"))
        return 0;
    int rc = box_identify(r->box, root, err);
    return rc < 0 ? rc : placement_restore(r->box, r->images, err);
}

/* ---- the whole ----------------------------------------------------------------------------- */

static int run_criu(struct box *b, int images, int root, struct lh_error *err)
{
    lh_autoclose int work = open(b->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct criu_bind binds[BOX_MAX_BINDS];
    struct restoring ctx = {b, images};
    struct box_criu criu;

    if (work < 0)
        return lh_fail_errno(err, errno, "directory %s", b->dir);
    int r = box_start_criu(b, root, &criu, err);
    if (r == 0) {
        struct criu_call call = {.socket = criu.socket,
                                 .pidfd = criu.pidfd,
                                 .deadline_ms = lh_now_ms() + RESTORE_MS,
                                 .binds = binds,
                                 .n_binds = box_binds(binds),
                                 .station = at_station,
                                 .ctx = &ctx};
        r = criu_restore(&call, images, work, BOX_CRIU_ROOT, err);
    }
    box_end_criu(&criu, r < 0);
    return r;
}

static int restore(struct box *b, const char *path, struct lh_error *err)
{
    lh_autoclose int images = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct box_limits wide = b->limits;

    if (images < 0)
        return lh_fail_errno(err, errno, "images %s", path);
    wide.memory_bytes += MORE_MEMORY;
    wide.pids += MORE_PIDS;
    b->cgroup = cgroup_create(&b->host->cgroups, b->id, &wide, err);
    lh_autoclose int root = b->cgroup < 0 ? -1 : make_root(b, err);
    if (root < 0)
        return err->code;
    int r = run_criu(b, images, root, err);
    if (r == 0)
        r = cgroup_limit(&b->host->cgroups, b->cgroup, b->id, &b->limits, err);
    return r == 0 ? box_connect(b, err) : r;
}

static void undo(struct box *b)
{
    struct lh_error err = {0};
    unsigned ignored = 0;

    pthread_mutex_lock(&b->life_lock);
    int pidfd = b->pidfd, cgroup = b->cgroup;
    b->pidfd = b->cgroup = -1;
    pthread_mutex_unlock(&b->life_lock);
    if (pidfd >= 0)
        close(pidfd);
    if (cgroup >= 0)
        close(cgroup);
    if (box_destroy_named(b->host, b->id, NULL, &err) < 0 || clear_dir(b, &ignored, &err) < 0)
        lh_warn("a failed restore left something", "sandbox=%s error=%s", b->id, err.message);
}

int box_restore(struct box *b, const char *path, struct lh_error *err)
{
    LH_LOCKED(&b->state);
    struct lh_error local = {0};

    err = err ? err : &local;
    if (b->life != BOX_ASLEEP || b->cgroup >= 0)
        return lh_fail(err, LH_FAILED_PRECONDITION, "sandbox %s is not asleep", b->id);
    int r = restore(b, path, err);
    if (r < 0)
        undo(b);
    return r < 0 ? lh_wrap(err, "restoring sandbox %s", b->id) : 0;
}

/* Processes into images.
 *
 * In order: init gives up what leads outside (connection.c); CRIU stops all tasks and writes its
 * images; while they still stand the cgroup is frozen, so that nobody runs when CRIU lets them go.
 * What follows is the caller's: the files, which cannot change now, the records; then either
 * box_go_on() or box_put_away().  It is never CRIU that kills: until the caller has recorded the
 * checkpoint, the sandbox lives, and thaws when somebody adopts it.
 *
 * A box that was frozen is thawed for the moment before CRIU stops it: a frozen task runs none of
 * the code with which CRIU asks it about itself, and init must answer. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "agentenv/sandbox/box_private.h"
#include "agentenv/sandbox/enter.h"
#include "agentenv/sandbox/spawner.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"

LH_LOG_COMPONENT("sandbox");

enum { DUMP_MS = 120000, CRIU_END_MS = 5000 };

/* ---- CRIU as a process --------------------------------------------------------------------- */

int box_start_criu(struct box *b, int root, struct box_criu *c, struct lh_error *err)
{
    struct spawner_request req = {.op = SPAWNER_CRIU};
    struct wire_report report;
    int talk[2], reply[2];

    *c = (struct box_criu){.socket = -1, .pidfd = -1};
    if (b->host->criu < 0)
        return lh_fail(err, LH_FAILED_PRECONDITION, "there is no criu here: run deploy/setup");
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, talk) < 0)
        return lh_fail_errno(err, errno, "a socket for criu");
    c->socket = talk[0];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, reply) < 0) {
        close(talk[1]);
        return lh_fail_errno(err, errno, "a socket for criu");
    }
    if (root >= 0)
        memcpy(req.id, b->id, sizeof req.id);
    const int fds[] = {reply[1], b->host->criu, talk[1], root};
    int r = spawner_send(b->host->spawner, &req, fds, root >= 0 ? 4 : 3, err);
    close(reply[1]);
    close(talk[1]);
    if (r == 0)
        r = box_receive_report(reply[0], lh_now_ms() + BOX_START_MS, &report, &c->pidfd, err);
    c->pid = report.value;
    close(reply[0]);
    return r;
}

void box_end_criu(const struct box_criu *c, bool failed)
{
    struct pollfd p = {c->pidfd, POLLIN, 0};

    if (c->socket >= 0)
        close(c->socket); /* it ends by that */
    if (c->pidfd < 0)
        return;
    if (poll(&p, 1, CRIU_END_MS) <= 0 &&
        syscall(SYS_pidfd_send_signal, c->pidfd, SIGKILL, NULL, 0) == 0)
        poll(&p, 1, CRIU_END_MS);
    if (failed) /* helpers of its session, which nobody tells that it was killed */
        kill(-c->pid, SIGKILL);
    close(c->pidfd);
}

size_t box_binds(struct criu_bind binds[BOX_MAX_BINDS])
{
    size_t n = 0;

    while (n < BOX_MAX_BINDS && enter_bind(n, binds[n].inside, binds[n].outside))
        n++;
    return n;
}

/* ---- the dump ------------------------------------------------------------------------------ */

struct dumping {
    struct box *box;
    int images;
};

static int at_station(void *ctx, const char *name, pid_t root, struct lh_error *err)
{
    const struct dumping *d = ctx;

    (void)root;
    if (strcmp(name, "post-dump"))
        return 0;
    int e = cgroup_freeze_soon(d->box->cgroup);
    return e < 0 ? lh_fail_errno(err, -e, "cgroup.freeze") : placement_save(d->box, d->images, err);
}

/* The mount of "/" in init's namespace, as the kernel numbers it. */
static int root_mount_id(const struct box *b, int *id, struct lh_error *err)
{
    lh_autofree char *path = lh_format("/proc/%d/mountinfo", b->identity.init_pid), *line = NULL;
    lh_autofclose FILE *f = path ? fopen(path, "re") : NULL;
    char mount_point[8];
    size_t room = 0;

    while (f && getline(&line, &room, f) > 0)
        if (sscanf(line, "%d %*d %*s %*s %7s", id, mount_point) == 2 && !strcmp(mount_point, "/"))
            return 0;
    return lh_fail(err, LH_UNAVAILABLE, "sandbox %s has no root mount", b->id);
}

static int dump(struct box *b, int images, struct lh_error *err)
{
    struct criu_bind binds[BOX_MAX_BINDS];
    struct dumping d = {b, images};
    struct box_criu criu;
    int mount_id, r = box_start_criu(b, -1, &criu, err);

    if (r == 0) {
        struct criu_call call = {.socket = criu.socket,
                                 .pidfd = criu.pidfd,
                                 .deadline_ms = lh_now_ms() + DUMP_MS,
                                 .binds = binds,
                                 .n_binds = box_binds(binds),
                                 .station = at_station,
                                 .ctx = &d};
        r = criu_dump(&call, b->identity.init_pid, images, err);
    }
    box_end_criu(&criu, r < 0);
    if (r == 0)
        r = cgroup_set_frozen(b->cgroup, true, lh_now_ms() + BOX_FREEZE_MS, err);
    if (r == 0)
        r = root_mount_id(b, &mount_id, err);
    return r == 0 ? criu_set_executable(images, "/" BOX_EXECUTABLE, mount_id, err) : r;
}

static int checkpoint(struct box *b, const char *path, struct lh_error *err)
{
    int64_t deadline_ms = lh_now_ms() + BOX_FREEZE_MS;
    lh_autoclose int images = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int r = 0;

    if (images < 0)
        return lh_fail_errno(err, errno, "directory %s", path);
    /* A restored task opens its images when it already has the sandbox's ids; the files are 0644.
     */
    if (fchown(images, 0, BOX_UID_BASE) < 0 || fchmod(images, 0710) < 0)
        return lh_fail_errno(err, errno, "directory %s", path);
    if (b->was_frozen)
        r = cgroup_set_frozen(b->cgroup, false, deadline_ms, err);
    if (r == 0)
        r = box_quiesce(b, err);
    return r == 0 ? dump(b, images, err) : r;
}

static int go_on(struct box *b, struct lh_error *err)
{
    int r = box_connect(b, err);

    if (r == 0)
        r = cgroup_set_frozen(b->cgroup, b->was_frozen, lh_now_ms() + BOX_FREEZE_MS, err);
    return r < 0 ? lh_wrap(err, "sandbox %s does not go on", b->id) : 0;
}

int box_checkpoint(struct box *b, const char *path, struct lh_error *err)
{
    LH_LOCKED(&b->state);
    struct lh_error local = {0}, undo = {0};

    err = err ? err : &local;
    b->was_frozen = cgroup_is_frozen(b->cgroup);
    int r = checkpoint(b, path, err);
    if (r < 0 && go_on(b, &undo) < 0)
        lh_warn("after a failed checkpoint", "sandbox=%s why=%s", b->id, undo.message);
    return r < 0 ? lh_wrap(err, "checkpoint of sandbox %s", b->id) : 0;
}

int box_go_on(struct box *b, struct lh_error *err)
{
    LH_LOCKED(&b->state);
    return go_on(b, err);
}

/* ---- putting away -------------------------------------------------------------------------- */

static void close_processes(struct box *b)
{
    pthread_mutex_lock(&b->life_lock);
    int *const fds[] = {&b->pidfd, &b->cgroup, &b->control, &b->files};
    for (size_t i = 0; i < LH_ARRAY_SIZE(fds); i++) {
        if (*fds[i] >= 0)
            close(*fds[i]);
        *fds[i] = -1;
    }
    pthread_mutex_unlock(&b->life_lock);
}

int box_take_upper(const char *dir, const char *sealed_path, struct lh_error *err)
{
    lh_autoclosedir DIR *d = opendir(dir);
    unsigned n;

    for (const struct dirent *e; d && (e = readdir(d));) {
        if (sscanf(e->d_name, "upper.%u", &n) != 1)
            continue;
        if (renameat2(dirfd(d), e->d_name, AT_FDCWD, sealed_path, RENAME_NOREPLACE) < 0)
            return lh_fail_errno(err, errno, "moving %s/%s to %s", dir, e->d_name, sealed_path);
        return 0;
    }
    return lh_fail(err, LH_NOT_FOUND, "%s has no upper directory", dir);
}

int box_put_away(struct box *b, struct lh_error *err)
{
    LH_LOCKED(&b->state);
    struct lh_error local = {0};
    int64_t deadline_ms = lh_now_ms() + BOX_KILL_MS;

    err = err ? err : &local;
    int r = cgroup_kill(b->cgroup, b->pidfd, deadline_ms, err);
    if (r == 0)
        r = cgroup_remove(&b->host->cgroups, b->id, deadline_ms, err);
    if (r == 0)
        close_processes(b);
    return r < 0 ? lh_wrap(err, "putting sandbox %s away", b->id) : 0;
}

/* ---- is it there --------------------------------------------------------------------------- */

int box_host_criu(struct box_host *h, int *version, struct lh_error *err)
{
    struct box nobody = {.host = h};
    struct box_criu criu;
    int r = box_start_criu(&nobody, -1, &criu, err);

    if (r == 0) {
        struct criu_call call = {
            .socket = criu.socket, .pidfd = criu.pidfd, .deadline_ms = lh_now_ms() + CRIU_END_MS};
        r = criu_version(&call, version, err);
    }
    box_end_criu(&criu, r < 0);
    return r;
}

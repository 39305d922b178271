/* Sealing: the files written so far become an immutable layer.
 *
 * Live, when init is alone: stop the box, make its overlay read-only (which fails with EBUSY while
 * any file is open for writing: an atomic test that costs nothing), move the upper directory to
 * where layers live, push a new overlay with it as a lower layer and a fresh upper under init, and
 * go on: about a millisecond.  A process with another working directory than the root would stay on
 * the old overlay, read-only for ever; that is why init must be alone.
 *
 * What needs no standstill is done before and after it: the directories of the next upper layer are
 * made ahead, under other names, and the old work directory is removed when the box goes on.
 *
 * A crash in the middle leaves a read-only root, or two upper directories: box_adopt() sees either.
 *
 * Otherwise, where the upper lies in memory, and after CRIU restored init, the box is stopped while
 * it is copied. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agentenv/sandbox/box_private.h"
#include "agentenv/sandbox/facts.h"
#include "agentenv/sandbox/overlay.h"
#include "agentenv/sandbox/spawner.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"

LH_LOG_COMPONENT("sandbox");

/* The box's layers with `path` on top. */
int box_push_layer(struct box *b, const char *path, struct lh_error *err)
{
    lh_autofree char *copy = strdup(path);
    struct box_layer *layers = copy ? realloc(b->layers, (b->n_layers + 1) * sizeof *layers) : NULL;

    if (!layers)
        return lh_fail_errno(err, ENOMEM, "layers of sandbox %s", b->id);
    memmove(layers + 1, layers, b->n_layers * sizeof *layers);
    layers[0] = (struct box_layer){lh_steal(&copy), false};
    b->layers = layers;
    b->n_layers++;
    return 0;
}

static int open_namespace(const struct box *b, const char *name, struct lh_error *err)
{
    char path[64];

    snprintf(path, sizeof path, "/proc/%d/ns/%s", b->identity.init_pid, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    return fd < 0 ? lh_fail_errno(err, errno, "%s", path) : fd;
}

static int switch_root(const struct box *b, int root, struct lh_error *err)
{
    struct spawner_request req = {.op = SPAWNER_SWITCH};
    lh_autoclose int user = open_namespace(b, "user", err);
    lh_autoclose int mnt = user < 0 ? -1 : open_namespace(b, "mnt", err);
    struct wire_report report;
    int p[2], none;

    if (user < 0 || mnt < 0)
        return LH_UNAVAILABLE;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, p) < 0)
        return lh_fail_errno(err, errno, "socket pair");
    int r = spawner_send(b->host->spawner, &req, (int[]){p[1], root, user, mnt}, 4, err);
    close(p[1]);
    if (r == 0)
        r = box_receive_report(p[0], lh_now_ms() + BOX_START_MS, &report, &none, err);
    close(p[0]);
    return r;
}

/* Restored by CRIU, init runs from a file of the overlay that it was restored on (restore.c): CRIU
 * could not put it away once that overlay has gone from its mounts. */
static bool init_runs_from_memory(const struct box *b)
{
    static const char memfd[] = "/memfd:";
    char path[64], exe[sizeof memfd] = "";

    snprintf(path, sizeof path, "/proc/%d/exe", b->identity.init_pid);
    return readlink(path, exe, sizeof exe - 1) > 0 && !strcmp(exe, memfd);
}

/* The condition of a live seal. */
static bool init_is_alone(const struct box *b)
{
    struct cgroup_counts c;

    return b->memory < 0 && cgroup_count(&b->host->cgroups, b->id, &c, NULL) == 0 &&
           c.processes == 1 && init_runs_from_memory(b);
}

static const char *const ahead[] = {"next", "next.work"};

/* Whether a live seal is likely; then its directories are made. */
static void make_ahead(const struct box *b)
{
    lh_autoclose int dir = open(b->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct lh_error err = {0};

    if (dir >= 0 && init_is_alone(b) && box_make_dirs(dir, ahead, &err) < 0)
        lh_warn("a seal will take longer", "sandbox=%s why=%s", b->id, err.message);
}

/* Those made ahead, or else new ones. */
static int make_next_upper(struct box *b, int dir, struct lh_error *err)
{
    char names[2][32];

    box_upper_names(b->upper + 1, names[0], names[1]);
    for (int i = 0; i < 2; i++)
        if (renameat2(dir, ahead[i], dir, names[i], RENAME_NOREPLACE) < 0 && errno != ENOENT)
            return lh_fail_errno(err, errno, "directory %s", names[i]);
    return box_make_upper(dir, b->upper + 1, err);
}

/* The overlay is read-only and the upper has moved: from here on a failure leaves the box unusable
 * for writing, and the caller says so. */
static int go_on_above(struct box *b, int dir, const char *sealed_path, struct lh_error *err)
{
    int r;

    if ((r = box_push_layer(b, sealed_path, err)) < 0 || (r = make_next_upper(b, dir, err)) < 0)
        return r;
    b->upper++;
    lh_autoclose int root = box_mount(b, NULL, dir, err);
    return root < 0 ? root : switch_root(b, root, err);
}

/* Of the overlay that a live seal has ended. */
static void remove_old_work(const struct box *b)
{
    char names[2][32];

    box_upper_names(b->upper - 1, names[0], names[1]);
    lh_autofree char *path = lh_format("%s/%s", b->dir, names[1]);
    if (!path || box_remove_tree(path, NULL) < 0)
        lh_warn("a work directory stays until the sandbox goes", "sandbox=%s", b->id);
}

/* 1 = sealed, 0 = somebody is writing. */
static int seal_live(struct box *b, const char *sealed_path, struct lh_error *err)
{
    lh_autoclose int root = box_root_fd(b, err);
    lh_autoclose int dir = open(b->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    char upper[32], work[32];

    if (root < 0 || dir < 0)
        return root < 0 ? root : lh_fail_errno(err, errno, "%s", b->dir);
    int r = overlay_set_readonly(root, err);
    if (r <= 0)
        return r;
    box_upper_names(b->upper, upper, work);
    if (renameat2(dir, upper, AT_FDCWD, sealed_path, RENAME_NOREPLACE) < 0)
        r = lh_fail_errno(err, errno, "moving the upper layer to %s", sealed_path);
    else if (go_on_above(b, dir, sealed_path, err) < 0)
        r = err->code;
    if (r < 0)
        lh_wrap(err, "sandbox %s can no longer write and must be removed", b->id);
    return r < 0 ? r : 1;
}

static int seal_by_copy(struct box *b, const char *sealed_path, struct lh_error *err)
{
    lh_autofree char *from = box_upper_path(b);

    if (!from)
        return lh_fail_errno(err, ENOMEM, "sealing");
    int r = box_copy_tree(from, sealed_path, err);
    struct lh_error ignored = {0};
    if (r < 0 && err->code != LH_ALREADY_EXISTS && box_remove_tree(sealed_path, &ignored) < 0)
        lh_warn("an incomplete layer stays", "path=%s error=%s", sealed_path, ignored.message);
    return r;
}

static int seal_stopped(struct box *b, const char *sealed_path, bool *live, struct lh_error *err)
{
    int r = init_is_alone(b) ? seal_live(b, sealed_path, err) : 0;

    *live = r == 1;
    return r == 0 ? seal_by_copy(b, sealed_path, err) : r < 0 ? r : 0;
}

/* Who leads an exec (init/leader.c) ends a moment after it has told the status. */
static int await_alone(struct box *b, struct lh_error *err)
{
    enum { ALONE_MS = 500, LOOK_MS = 2 };
    int64_t deadline_ms = lh_now_ms() + ALONE_MS;
    struct cgroup_counts c;

    for (;;) {
        int r = cgroup_count(&b->host->cgroups, b->id, &c, err);
        if (r < 0 || c.processes <= 1)
            return r;
        if (lh_ms_left(deadline_ms) == 0)
            break;
        usleep(LOOK_MS * 1000);
    }
    cgroup_no_freezer(err);
    return lh_wrap(err, "a command runs, or something that one has left");
}

/* Nothing that writes runs: stopped, or where that is not offered, with init alone, whose daemon
 * gives it nothing to do while it seals. */
static int stop(struct box *b, struct lh_error *err)
{
    return box_facts()->cgroups
               ? cgroup_set_frozen(b->cgroup, true, lh_now_ms() + BOX_FREEZE_MS, err)
               : await_alone(b, err);
}

int box_seal(struct box *b, const char *sealed_path, bool *live, struct lh_error *err)
{
    LH_LOCKED(&b->state);
    struct lh_error local = {0};
    struct stat st;
    bool was_frozen = cgroup_is_frozen(b->cgroup);

    err = err ? err : &local;
    *live = false;
    if (b->cgroup < 0) /* buried: it stands still already */
        return seal_by_copy(b, sealed_path, err);
    if (lstat(sealed_path, &st) == 0)
        return lh_fail(err, LH_ALREADY_EXISTS, "layer %s exists", sealed_path);
    make_ahead(b);
    int r = stop(b, err);
    if (r == 0)
        r = seal_stopped(b, sealed_path, live, err);
    if (!was_frozen) {
        struct lh_error thaw = {0};
        if (cgroup_set_frozen(b->cgroup, false, lh_now_ms() + BOX_FREEZE_MS, &thaw) < 0 && r == 0) {
            *err = thaw;
            r = thaw.code;
        }
    }
    if (*live)
        remove_old_work(b);
    return r < 0 ? lh_wrap(err, "sealing sandbox %s", b->id) : 0;
}

/* The life of the daemon's object: opened and recovered before anything is served, closed without
 * touching a sandbox. */
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <poll.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include "agentenv/daemon/core.h"
#include "agentenv/daemon/internal.h"
#include "agentenv/network/gate.h"
#include "agentenv/snapshot/contents.h"
#include "proto/clock.h"
#include "proto/file.h"

/* The spawner shares the lock and outlives a killed daemon by a moment. */
enum { LOCK_MS = 1000, LOCK_RETRY_MS = 5 };
#include "proto/log.h"

LH_LOG_COMPONENT("agentenvd");

struct db *daemon_db(struct daemon *d)
{
    return d->db;
}

const char *daemon_state_dir(const struct daemon *d)
{
    return d->state_dir;
}

/* ext4 puts a new directory near its parent, so all sandboxes would share one block group; and
 * without a journal it passes over inodes deleted in the last minutes one by one, which came to a
 * millisecond for each file made.  The top-directory flag (chattr +T) spreads them over the disk.
 * Other file systems need it not and may not know it. */
static void spread_children(const char *path)
{
    lh_autoclose int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int flags;

    if (fd < 0 || ioctl(fd, FS_IOC_GETFLAGS, &flags) < 0)
        return;
    flags |= FS_TOPDIR_FL;
    if (ioctl(fd, FS_IOC_SETFLAGS, &flags) < 0)
        lh_debug("directories stay together", "path=%s why=%s", path, strerror(errno));
}

static int make_dirs(struct daemon *d, struct lh_error *err)
{
    static const char *const names[] = {"boxes", "layers", "checkpoints", "sharing", "spare"};

    for (size_t i = 0; i < LH_ARRAY_SIZE(names); i++) {
        lh_autofree char *path = lh_format("%s/%s", d->state_dir, names[i]);
        if (!path)
            return lh_fail_errno(err, ENOMEM, "%s", d->state_dir);
        int r = lh_make_dirs(path, 0700, err);
        if (r < 0)
            return r;
        spread_children(path);
    }
    return 0;
}

int daemon_lock(const char *state_dir, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/lock", state_dir);
    int r = path ? lh_make_dirs(state_dir, 0700, err) : lh_fail_errno(err, ENOMEM, "%s", state_dir);

    if (r < 0)
        return r;
    lh_autoclose int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return lh_fail_errno(err, errno, "opening %s", path);
    int64_t deadline = lh_now_ms() + LOCK_MS;
    while (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        if (!lh_ms_left(deadline))
            return lh_fail(err, LH_ALREADY_EXISTS,
                           "another agentenvd uses %s; stop it, or give another --state",
                           state_dir);
        poll(NULL, 0, LOCK_RETRY_MS);
    }
    return lh_steal_fd(&fd);
}

static struct daemon *new_daemon(const struct daemon_hooks *hooks, struct box_host *host)
{
    struct daemon *d = calloc(1, sizeof *d);
    pthread_condattr_t attr;

    if (!d)
        return NULL;
    d->epoll_fd = d->stop_fd = -1;
    d->hooks = hooks;
    d->host = host;
    pthread_mutex_init(&d->lock, NULL);
    pthread_mutex_init(&d->spare_lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&d->janitor_wake, &attr);
    pthread_condattr_destroy(&attr);
    return d;
}

static int start(struct daemon *d, const char *state_dir, struct lh_error *err)
{
    int r = lh_make_dirs(state_dir, 0700, err);

    d->state_dir = r == 0 ? realpath(state_dir, NULL) : NULL;
    if (!d->state_dir)
        return r < 0 ? r : lh_fail_errno(err, errno, "state directory %s", state_dir);
    d->gate = gate_create(err);
    if (!d->gate)
        return err->code;
    if ((r = make_dirs(d, err)) < 0 || (r = spare_open(d, err)) < 0 ||
        (r = registry_open(d, err)) < 0 || (r = monitor_start(d, err)) < 0)
        return r;
    if (d->hooks->start && (r = d->hooks->start(d, err)) < 0)
        return r;
    if ((r = recover(d, err)) < 0)
        return r;
    if ((r = contents_start(d, err)) < 0 || (r = engines_start(d, err)) < 0)
        return r;
    return janitor_start(d, err);
}

struct daemon *daemon_open(const char *state_dir, const struct daemon_hooks *hooks,
                           struct box_host *host, struct lh_error *err)
{
    struct daemon *d = new_daemon(hooks, host);

    if (!d)
        return lh_fail_errno(err, ENOMEM, "agentenvd"), NULL;
    if (start(d, state_dir, err) < 0) {
        daemon_close(d);
        return NULL;
    }
    return d;
}

void daemon_close(struct daemon *d)
{
    if (!d)
        return;
    janitor_stop(d);
    engines_stop(d);
    contents_stop(d);
    monitor_stop(d);
    for (size_t i = 0; i < BUCKETS; i++)
        while (d->buckets[i]) {
            network_close(d, d->buckets[i]);
            sandbox_forget(d, d->buckets[i]);
        }
    gate_destroy(d->gate);
    db_close(d->db);
    int fds[] = {d->epoll_fd, d->stop_fd};
    for (size_t i = 0; i < LH_ARRAY_SIZE(fds); i++)
        if (fds[i] >= 0)
            close(fds[i]);
    pthread_cond_destroy(&d->janitor_wake);
    pthread_mutex_destroy(&d->lock);
    pthread_mutex_destroy(&d->spare_lock);
    free(d->boot);
    free(d->state_dir);
    free(d);
}

void daemon_limit_store(struct daemon *d, uint64_t bytes)
{
    d->store_limit = bytes;
}

int daemon_remove_all(struct daemon *d, struct lh_error *err)
{
    struct sandbox **list;
    size_t n = sandbox_list(d, "", true, &list, err);
    int first = 0;

    for (size_t i = 0; i < n; i++) {
        struct lh_error why = {0};
        int r = daemon_remove(d, list[i]->id, ANY_ATTEMPT, &why);
        if (r < 0 && r != LH_NOT_FOUND && first == 0)
            first = lh_fail(err, r, "%s", why.message);
        sandbox_unref(d, list[i]);
    }
    free(list);
    return first;
}

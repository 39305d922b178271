/* Hibernate, resume, rollback: the sandbox stays what it is, with its id, name and attempt; its
 * processes go and come.
 *
 * Each is recorded before it happens.  RESUMING in the registry means that the checkpoint is whole
 * and that whatever runs is not: a daemon that finds it ends that, and the sandbox is HIBERNATED
 * again.  So a rollback that is cut off has happened, as far as files and records go. */
#include <errno.h>
#include <string.h>

#include "agentenv/daemon/internal.h"
#include "agentenv/daemon/service.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"

LH_LOG_COMPONENT("agentenvd");

enum { ALIVE = SB_IN(SB_RUNNING) | SB_IN(SB_FROZEN), SMOOTHING = 8 };

/* What one took, into the mean that Engines reports.  Two at a time may lose one of them. */
void note_cost(atomic_ullong *mean_us, int64_t start_us)
{
    unsigned long long before = *mean_us, took = (unsigned long long)(lh_now_us() - start_us);

    *mean_us = before ? before - before / SMOOTHING + took / SMOOTHING : took;
}

int daemon_hibernate(struct daemon *d, const char *id, uint32_t attempt, int64_t deadline_ms,
                     struct lh_error *err)
{
    struct sandbox *s;
    int r = engines_need_criu(d, deadline_ms, err);

    if (r == 0)
        r = sandbox_begin(d, id, attempt, ALIVE | SB_IN(SB_HIBERNATED), HOLD_ALONE, deadline_ms, &s,
                          err);
    if (r < 0)
        return r;
    if (s->state != SB_HIBERNATED) {
        int64_t start_us = lh_now_us();
        r = snapshot_hibernate(d, s, err);
        if (r == 0)
            note_cost(&d->hibernate_us, start_us);
    }
    sandbox_end(d, s, HOLD_ALONE);
    return r < 0 ? lh_wrap(err, "hibernating sandbox %s", id) : 0;
}

/* ---- resume ---- */

static void forget_end(struct daemon *d, struct sandbox *s)
{
    LH_LOCKED(&d->lock);
    s->ending = false;
}

/* The handle is asleep, with threads that follow commands waiting on it. */
static int wake_box(struct daemon *d, struct sandbox *s, const char *images, struct lh_error *err)
{
    int r = images_restore(d, s->box, images, err);

    if (r < 0)
        return r;
    struct box_identity identity = box_identity(s->box);
    pthread_mutex_lock(&d->lock);
    s->init_pid = identity.init_pid;
    pthread_mutex_unlock(&d->lock);
    return registry_set_running(d, s, &identity, err);
}

/* Recorded as RESUMING.  After an error it is HIBERNATED. */
static int bring_back(struct daemon *d, struct sandbox *s, struct lh_error *err)
{
    char checkpoint[LH_ID_SIZE];
    lh_autofree char *images = NULL;
    int r = checkpoint_of(d, s->id, checkpoint, err);

    if (r == 0)
        r = checkpoint[0] ? snapshot_images(d, checkpoint, &images, err)
                          : lh_fail(err, LH_DATA_LOSS, "sandbox %s has no checkpoint", s->id);
    if (r == 0 && s->box)
        r = wake_box(d, s, images, err);
    else if (r == 0 && (r = sandbox_end_box(d, s, err)) == 0) /* what an earlier life left */
        r = sandbox_start_box(d, s, images, err);
    forget_end(d, s);
    if (r == 0)
        r = monitor_add(d, s, err);
    struct lh_error net = {0};
    if (r == 0 && network_open(d, s, &net) < 0) /* as after a restart of the daemon */
        lh_warn("the network stays closed", "sandbox=%s why=%s", s->id, net.message);
    if (r == 0) {
        sandbox_set_state(d, s, SB_RUNNING, 0);
        return 0;
    }
    struct lh_error record = {0};
    if (registry_set_state(d, s->id, SB_HIBERNATED, 0, &record) < 0)
        lh_warn("hibernation not recorded", "sandbox=%s why=%s", s->id, record.message);
    sandbox_set_state(d, s, SB_HIBERNATED, 0);
    return r;
}

int daemon_resume(struct daemon *d, const char *id, uint32_t attempt, int64_t deadline_ms,
                  struct lh_error *err)
{
    struct sandbox *s;
    int r = sandbox_begin(d, id, attempt, SB_IN(SB_HIBERNATED) | SB_IN(SB_RUNNING), HOLD_ALONE,
                          deadline_ms, &s, err);

    if (r < 0)
        return r;
    if (s->state == SB_HIBERNATED) {
        int64_t start_us = lh_now_us();
        r = registry_set_state(d, s->id, SB_RESUMING, 0, err);
        if (r == 0) {
            sandbox_set_state(d, s, SB_RESUMING, 0);
            r = bring_back(d, s, err);
        }
        if (r == 0)
            note_cost(&d->resume_us, start_us);
    }
    sandbox_end(d, s, HOLD_ALONE);
    return r < 0 ? lh_wrap(err, "resuming sandbox %s", id) : 0;
}

/* ---- rollback ---- */

/* The snapshot that is meant; it must stand on the sandbox's image. */
static int find_target(struct daemon *d, const struct sandbox *s, const char *asked,
                       char target[LH_ID_SIZE], struct lh_error *err)
{
    struct snapshot_origin from = {0};
    int r = 0;

    if (asked[0])
        snprintf(target, LH_ID_SIZE, "%s", asked);
    else
        r = checkpoint_of(d, s->id, target, err);
    if (r == 0 && !target[0])
        r = lh_fail(err, LH_FAILED_PRECONDITION, "sandbox %s has no checkpoint; name a snapshot",
                    s->id);
    if (r == 0)
        r = snapshot_origin(d, target, &from, err);
    if (r == 0 && strcmp(from.image_id, s->image_id))
        r = lh_fail(err, LH_INVALID_ARGUMENT, "snapshot %s is of another image than sandbox %s",
                    target, s->id);
    snapshot_origin_finish(&from);
    return r;
}

static int record_rollback(struct daemon *d, struct sandbox *s, const char *target,
                           struct lh_error *err)
{
    int r = db_begin(d->db, err);

    if (r < 0)
        return r;
    r = checkpoint_name(d, s->id, target, err);
    if (r == 0)
        r = snapshot_take_chain(d, s->id, target, true, err);
    if (r == 0)
        r = registry_set_state(d, s->id, SB_RESUMING, 0, err);
    return db_end(d->db, r, err);
}

static int roll_back(struct daemon *d, struct sandbox *s, const char *target, struct lh_error *err)
{
    char before[LH_ID_SIZE];
    struct lh_error drop = {0};
    int r = checkpoint_of(d, s->id, before, err);

    if (r == 0)
        r = record_rollback(d, s, target, err);
    if (r < 0)
        return r;
    sandbox_set_state(d, s, SB_RESUMING, 0);
    s->had_layers = true;
    r = sandbox_end_box(d, s, err); /* its commands end with it */
    if (r == 0)
        r = bring_back(d, s, err);
    if (before[0] && strcmp(before, target) && checkpoint_drop(d, before, &drop) < 0)
        lh_warn("the checkpoint before stays", "snapshot=%s why=%s", before, drop.message);
    if (layers_remove_condemned(d, NULL) < 0)
        lh_warn("layers left for gc", "sandbox=%s", s->id);
    return r;
}

int daemon_rollback(struct daemon *d, const V1(RollbackRequest) * req, int64_t deadline_ms,
                    struct lh_error *err)
{
    char target[LH_ID_SIZE];
    struct sandbox *s;
    int r = sandbox_begin(d, req->id, req->attempt, ALIVE | SB_IN(SB_HIBERNATED) | SB_IN(SB_DEAD),
                          HOLD_ALONE, deadline_ms, &s, err);

    if (r < 0)
        return r;
    r = find_target(d, s, req->snapshot, target, err);
    if (r == 0)
        r = roll_back(d, s, target, err);
    sandbox_end(d, s, HOLD_ALONE);
    return r < 0 ? lh_wrap(err, "rolling back sandbox %s", req->id) : 0;
}

/* ---- after a restart ---- */

int recover_hibernated(struct daemon *d, struct sandbox *s, bool this_boot, struct lh_error *err)
{
    char checkpoint[LH_ID_SIZE];
    int r = checkpoint_of(d, s->id, checkpoint, err);

    (void)this_boot;
    if (r == 0 && !checkpoint[0]) {
        s->state = SB_DEAD; /* it was not flushed when the host went down */
        s->cause = LONGHAUL__SANDBOX__V1__DEATH_CAUSE__DEATH_HOST_RESTART;
        return registry_set_state(d, s->id, s->state, s->cause, err);
    }
    if (r == 0)
        r = box_destroy_named(d->host, s->id, NULL, err); /* processes; files stay */
    if (r == 0)
        r = snapshot_settle_hibernated(d, s, err);
    if (r == 0 && s->state != SB_HIBERNATED)
        r = registry_set_state(d, s->id, SB_HIBERNATED, 0, err);
    s->state = SB_HIBERNATED;
    lh_info("sandbox is hibernated", "sandbox=%s checkpoint=%s", s->id, checkpoint);
    return r;
}

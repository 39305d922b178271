#include <string.h>

#include "agentenv/daemon/internal.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/log.h"

LH_LOG_COMPONENT("agentenvd");

enum { EXECS_END_MS = 30000, GC_EVERY_MS = 60000, GC_GRACE_MS = 600000 };

int sandbox_end_box(struct daemon *d, struct sandbox *s, struct lh_error *err)
{
    lh_autofree char *dir = sandbox_dir(d, s->id);

    pthread_mutex_lock(&d->lock);
    s->ending = true;
    pthread_mutex_unlock(&d->lock);
    network_close(d, s);
    int r = s->box ? box_kill(s->box, err) : 0;
    if (r == 0)
        r = sandbox_wait_execs(d, s, lh_now_ms() + EXECS_END_MS, err);
    if (r < 0)
        return r;
    pthread_mutex_lock(&d->lock);
    struct box *box = lh_steal(&s->box);
    pthread_mutex_unlock(&d->lock);
    if (!dir)
        r = lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory");
    else
        r = box_destroy_named(d->host, s->id, NULL, err);
    box_close(box); /* the last mount of its overlay: the directory is nobody's then */
    if (r < 0 || spare_give(d, dir))
        return r;
    return box_destroy_named(d->host, s->id, dir, err);
}

int sandbox_destroy_held(struct daemon *d, struct sandbox *s, bool key_too, struct lh_error *err)
{
    int r = registry_set_state(d, s->id, SB_DELETED, 0, err); /* recovery goes on from here */

    if (r == 0)
        r = sandbox_end_box(d, s, err);
    if (s->over)
        sandbox_end_over(d, lh_steal(&s->over));
    if (r == 0)
        r = checkpoint_set(d, s->id, NULL, err);
    if (r == 0)
        r = registry_delete(d, s->id, key_too, err);
    if (r < 0) {
        sandbox_set_state(d, s, SB_DEAD, LONGHAUL__SANDBOX__V1__DEATH_CAUSE__DEATH_ERROR);
        return lh_wrap(err, "removing sandbox %s", s->id);
    }
    sandbox_set_state(d, s, SB_DELETED, 0);
    sandbox_forget(d, s);
    if (s->had_layers && layers_remove_condemned(d, NULL) < 0)
        lh_warn("layers left for gc", "sandbox=%s", s->id);
    return 0;
}

static int remove_held(struct daemon *d, const char *id, uint32_t attempt, int64_t deadline_ms,
                       int cause, struct lh_error *err)
{
    struct sandbox *s;
    int r = sandbox_begin(d, id, attempt, SB_ANY, HOLD_ALONE, deadline_ms, &s, err);

    if (r < 0)
        return r;
    if (cause)
        sandbox_set_state(d, s, SB_DEAD, cause);
    r = sandbox_destroy_held(d, s, false, err);
    sandbox_end(d, s, HOLD_ALONE);
    return r;
}

int daemon_remove(struct daemon *d, const char *id, uint32_t attempt, struct lh_error *err)
{
    return remove_held(d, id, attempt, lh_now_ms() + WAIT_DEFAULT_MS, 0, err);
}

/* Id of one whose time is up, or "" and when the next one's will be. */
static void find_expired(struct daemon *d, char id[LH_ID_SIZE], int64_t *next_ms)
{
    int64_t now = lh_now_ms();

    id[0] = 0;
    for (size_t i = 0; i < BUCKETS; i++)
        for (struct sandbox *s = d->buckets[i]; s; s = s->next) {
            if (s->ttl_at_ms <= now && !s->ending)
                memcpy(id, s->id, LH_ID_SIZE);
            else if (s->ttl_at_ms < *next_ms && !s->ending)
                *next_ms = s->ttl_at_ms;
        }
}

static void expire(struct daemon *d, const char *id)
{
    struct lh_error err = {0};
    int r = remove_held(d, id, ANY_ATTEMPT, lh_now_ms() + WAIT_DEFAULT_MS,
                        LONGHAUL__SANDBOX__V1__DEATH_CAUSE__DEATH_TTL, &err);

    if (r < 0 && r != LH_NOT_FOUND)
        lh_warn("time to live is over, removal failed", "sandbox=%s why=%s", id, err.message);
    else
        lh_info("time to live is over", "sandbox=%s", id);
}

static void collect(struct daemon *d)
{
    struct gc_result done = {0};
    struct lh_error err = {0};

    if (checkpoints_flush(d, &err) < 0)
        lh_warn("checkpoints not flushed", "why=%s", err.message);
    if (snapshot_gc(d, GC_GRACE_MS, &done, &err) < 0)
        lh_warn("gc failed", "why=%s", err.message);
    else if (done.snapshots || done.layers)
        lh_info("gc", "snapshots=%u layers=%u bytes=%llu", done.snapshots, done.layers,
                (unsigned long long)done.bytes);
}

static void *janitor_main(void *arg)
{
    struct daemon *d = arg;
    int64_t gc_at_ms = lh_now_ms() + GC_EVERY_MS;

    pthread_mutex_lock(&d->lock);
    while (!d->stopping) {
        char id[LH_ID_SIZE];
        int64_t next_ms = gc_at_ms;
        find_expired(d, id, &next_ms);
        struct timespec until = {next_ms / 1000, next_ms % 1000 * 1000000};
        bool gc_due = !id[0] && lh_now_ms() >= gc_at_ms;
        if (!id[0] && !gc_due) {
            pthread_cond_timedwait(&d->janitor_wake, &d->lock, &until);
            continue;
        }
        pthread_mutex_unlock(&d->lock);
        if (gc_due) {
            collect(d);
            gc_at_ms = lh_now_ms() + GC_EVERY_MS;
        } else {
            expire(d, id);
        }
        pthread_mutex_lock(&d->lock);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

int janitor_start(struct daemon *d, struct lh_error *err)
{
    int e = pthread_create(&d->janitor, NULL, janitor_main, d);

    if (e)
        return lh_fail_errno(err, e, "starting the janitor");
    d->janitor_runs = true;
    return 0;
}

void janitor_wake(struct daemon *d)
{
    LH_LOCKED(&d->lock);

    pthread_cond_signal(&d->janitor_wake);
}

void janitor_stop(struct daemon *d)
{
    if (!d->janitor_runs)
        return;
    pthread_mutex_lock(&d->lock);
    d->stopping = true;
    pthread_cond_signal(&d->janitor_wake);
    pthread_mutex_unlock(&d->lock);
    pthread_join(d->janitor, NULL);
    d->janitor_runs = false;
}

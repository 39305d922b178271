#include <string.h>

#include "agentenv/daemon/internal.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/log.h"

LH_LOG_COMPONENT("agentenvd");

enum { EXECS_END_MS = 30000 };

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

int daemon_expire(struct daemon *d, const char *id, struct lh_error *err)
{
    return remove_held(d, id, ANY_ATTEMPT, lh_now_ms() + WAIT_DEFAULT_MS,
                       LONGHAUL__SANDBOX__V1__DEATH_CAUSE__DEATH_TTL, err);
}

/* The sandboxes in memory, and who may do what with one at a time.
 *
 * An operation that changes a sandbox as a whole (freeze, snapshot, fork, remove) has it alone;
 * commands and file transfers run beside each other.  A command that is running does not hold off
 * an operation: freezing or snapshotting a busy sandbox is the point of these.  A file transfer
 * does, because half a file must not be in a snapshot.  Whoever cannot have a sandbox waits until
 * his deadline; a state in which the request makes no sense is refused at once, by its name. */
#include <errno.h>
#include <string.h>

#include "agentenv/daemon/internal.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/log.h"
#include "proto/parse.h"

LH_LOG_COMPONENT("agentenvd");

enum { JUDGE_MS = 2000 };

static const char *const state_names[] = {
    [0] = "UNSPECIFIED",      [SB_CREATING] = "CREATING",     [SB_RUNNING] = "RUNNING",
    [SB_FROZEN] = "FROZEN",   [SB_HIBERNATED] = "HIBERNATED", [SB_SNAPSHOTTING] = "SNAPSHOTTING",
    [SB_FORKING] = "FORKING", [SB_RESUMING] = "RESUMING",     [SB_DEAD] = "DEAD",
    [SB_DELETED] = "DELETED",
};

const char *sandbox_state_name(int state)
{
    return state >= 0 && state < (int)LH_ARRAY_SIZE(state_names) ? state_names[state] : "UNKNOWN";
}

static size_t bucket_of(const char *id)
{
    uint64_t h = 1469598103934665603u;

    for (; *id; id++)
        h = (h ^ (uint8_t)*id) * 1099511628211u;
    return h % BUCKETS;
}

struct sandbox *sandbox_new(struct lh_error *err)
{
    struct sandbox *s = calloc(1, sizeof *s);
    pthread_condattr_t attr;

    if (!s)
        return lh_fail_errno(err, ENOMEM, "a new sandbox"), NULL;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&s->changed, &attr);
    pthread_condattr_destroy(&attr);
    longhaul__task__v1__limits__init(&s->limits);
    policy_copy(&s->policy, NULL);
    s->used_ms = lh_now_ms();
    s->ttl_at_ms = INT64_MAX;
    s->refs = 1;
    return s;
}

static void sandbox_free(struct sandbox *s)
{
    char *strings[] = {s->name,       s->owner,    s->image, s->image_id,
                       s->image_path, s->snapshot, s->task,  s->top_layer};

    for (size_t i = 0; i < LH_ARRAY_SIZE(strings); i++)
        free(strings[i]);
    lh_message_free(s->rules ? &s->rules->base : NULL);
    box_close(s->box);
    pthread_cond_destroy(&s->changed);
    free(s);
}

void sandbox_unref(struct daemon *d, struct sandbox *s)
{
    pthread_mutex_lock(&d->lock);
    bool last = --s->refs == 0;
    pthread_mutex_unlock(&d->lock);
    if (last)
        sandbox_free(s);
}

void sandbox_add(struct daemon *d, struct sandbox *s)
{
    LH_LOCKED(&d->lock);
    struct sandbox **head = &d->buckets[bucket_of(s->id)];

    s->next = *head;
    *head = s;
}

void sandbox_forget(struct daemon *d, struct sandbox *s)
{
    pthread_mutex_lock(&d->lock);
    struct sandbox **at = &d->buckets[bucket_of(s->id)];
    while (*at && *at != s)
        at = &(*at)->next;
    if (*at)
        *at = s->next;
    s->gone = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&d->lock);
    sandbox_unref(d, s);
}

static bool has_name(const struct sandbox *s, const char *name)
{
    return s->name[0] && s->state != SB_DEAD && !strcmp(s->name, name);
}

static struct sandbox *find(struct daemon *d, const char *id)
{
    for (struct sandbox *s = d->buckets[bucket_of(id)]; s; s = s->next)
        if (!strcmp(s->id, id))
            return s;
    for (size_t i = 0; i < BUCKETS; i++)
        for (struct sandbox *s = d->buckets[i]; s; s = s->next)
            if (has_name(s, id))
                return s;
    return NULL;
}

int sandbox_find(struct daemon *d, const char *id, struct sandbox **out, struct lh_error *err)
{
    LH_LOCKED(&d->lock);

    *out = find(d, id);
    if (!*out)
        return lh_fail(err, LH_NOT_FOUND, "no sandbox \"%s\"", id);
    (*out)->refs++;
    return 0;
}

static bool must_wait(const struct sandbox *s, unsigned states, enum sandbox_hold hold)
{
    if (hold == HOLD_ALONE)
        return s->busy || s->files > 0;
    /* The daemon's own setup works in a sandbox that is still being created. */
    return s->busy && !(s->state == SB_CREATING && (states & SB_IN(SB_CREATING)));
}

/* With the lock held. */
static int wait_change(struct daemon *d, struct sandbox *s, int64_t deadline_ms,
                       struct lh_error *err)
{
    struct timespec until = {deadline_ms / 1000, deadline_ms % 1000 * 1000000};

    if (pthread_cond_timedwait(&s->changed, &d->lock, &until) == ETIMEDOUT)
        return lh_fail(err, LH_DEADLINE_EXCEEDED, "sandbox %s is busy (%s)", s->id,
                       sandbox_state_name(s->state));
    return 0;
}

/* A verdict takes as long as its task allows.  Who removes what is being judged is told so soon. */
static int wait_judge(struct daemon *d, struct sandbox *s, int64_t deadline_ms,
                      struct lh_error *err)
{
    int64_t soon_ms = lh_now_ms() + JUDGE_MS;

    if (wait_change(d, s, soon_ms < deadline_ms ? soon_ms : deadline_ms, NULL) == 0)
        return 0;
    return lh_fail(err, LH_FAILED_PRECONDITION,
                   "sandbox %s is %s: its files are being judged; remove it after the verdict",
                   s->id, sandbox_state_name(s->state));
}

static int wait_turn(struct daemon *d, struct sandbox *s, unsigned states, enum sandbox_hold hold,
                     int64_t deadline_ms, struct lh_error *err)
{
    while (!s->gone && must_wait(s, states, hold)) {
        bool removal = hold == HOLD_ALONE && states == SB_ANY;
        int r = removal && s->lent ? wait_judge(d, s, deadline_ms, err)
                                   : wait_change(d, s, deadline_ms, err);
        if (r < 0)
            return r;
    }
    if (s->gone)
        return lh_fail(err, LH_NOT_FOUND, "sandbox %s has been removed", s->id);
    return 0;
}

static int check_state(const struct sandbox *s, unsigned states, struct lh_error *err)
{
    const char *hint = "";

    if (states & SB_IN(s->state))
        return 0;
    if (s->state == SB_FROZEN)
        hint = "; thaw it first";
    else if (s->state == SB_HIBERNATED)
        hint = "; resume it first";
    else if (s->state == SB_DEAD)
        hint = "; its files can be listed, copied out and snapshotted";
    return lh_fail(err, LH_FAILED_PRECONDITION, "sandbox %s is %s%s", s->id,
                   sandbox_state_name(s->state), hint);
}

static int check_attempt(struct sandbox *s, uint32_t attempt, bool *raised, struct lh_error *err)
{
    if (attempt == ANY_ATTEMPT || attempt == s->attempt)
        return 0;
    if (attempt < s->attempt)
        return lh_fail(err, LH_ABORTED, "sandbox %s belongs to attempt %u; attempt %u is over",
                       s->id, s->attempt, attempt);
    s->attempt = attempt;
    *raised = true;
    return 0;
}

static void take_hold(struct sandbox *s, enum sandbox_hold hold)
{
    if (hold == HOLD_ALONE)
        s->busy = true;
    else
        ++*(hold == HOLD_EXEC ? &s->execs : &s->files);
}

int sandbox_begin(struct daemon *d, const char *id, uint32_t attempt, unsigned states,
                  enum sandbox_hold hold, int64_t deadline_ms, struct sandbox **out,
                  struct lh_error *err)
{
    bool raised = false;
    struct sandbox *s;
    int r = sandbox_find(d, id, &s, err);

    if (r < 0)
        return r;
    pthread_mutex_lock(&d->lock);
    r = wait_turn(d, s, states, hold, deadline_ms, err);
    if (r == 0)
        r = check_attempt(s, attempt, &raised, err);
    if (r == 0)
        r = check_state(s, states, err);
    if (r == 0)
        take_hold(s, hold);
    pthread_mutex_unlock(&d->lock);
    if (raised && registry_set_attempt(d, s->id, attempt, NULL) < 0)
        lh_warn("attempt not recorded", "sandbox=%s attempt=%u", s->id, attempt);
    if (r < 0)
        sandbox_unref(d, s);
    else
        *out = s;
    return r;
}

void sandbox_end(struct daemon *d, struct sandbox *s, enum sandbox_hold hold)
{
    pthread_mutex_lock(&d->lock);
    s->used_ms = lh_now_ms();
    bool idle = s->policy.freeze_after_ms || s->policy.hibernate_after_ms;
    if (hold == HOLD_ALONE)
        s->busy = false;
    else
        --*(hold == HOLD_EXEC ? &s->execs : &s->files);
    if (idle)
        pthread_cond_signal(&d->janitor_wake);
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&d->lock);
    sandbox_unref(d, s);
}

void sandbox_end_over(struct daemon *d, struct sandbox *over)
{
    pthread_mutex_lock(&d->lock);
    over->lent = false;
    pthread_mutex_unlock(&d->lock);
    if (over->state == SB_FORKING) /* unless it died meanwhile */
        sandbox_set_state(d, over, over->before, 0);
    sandbox_end(d, over, HOLD_ALONE);
}

int sandbox_wait_execs(struct daemon *d, struct sandbox *s, int64_t deadline_ms,
                       struct lh_error *err)
{
    int r = 0;

    LH_LOCKED(&d->lock);
    while (r == 0 && s->execs > 0)
        r = wait_change(d, s, deadline_ms, err);
    return r;
}

void sandbox_set_state(struct daemon *d, struct sandbox *s, int state, int cause)
{
    LH_LOCKED(&d->lock);

    if (s->state == state)
        return;
    watch_publish(d, s, s->state, state, cause);
    s->state = state;
    s->cause = cause;
    pthread_cond_broadcast(&s->changed);
}

int sandbox_has_no_files(const struct sandbox *s, struct lh_error *err)
{
    return lh_fail(err, LH_DATA_LOSS,
                   "sandbox %s was cut off in the middle of a seal; resume from its last snapshot",
                   s->id);
}

static int copy_string(char **to, const char *from)
{
    *to = strdup(from ? from : "");
    return *to ? 0 : -1;
}

V1(Sandbox) * sandbox_message(struct daemon *d, struct sandbox *s, bool usage, struct lh_error *err)
{
    lh_automsg(V1(Sandbox)) m = calloc(1, sizeof *m);
    struct box_usage u = {0};

    if (!m)
        return lh_fail_errno(err, ENOMEM, "describing sandbox %s", s->id), NULL;
    longhaul__sandbox__v1__sandbox__init(m);
    if (copy_string(&m->id, s->id) || copy_string(&m->name, s->name) ||
        copy_string(&m->image, s->image) || copy_string(&m->snapshot, s->snapshot) ||
        copy_string(&m->task, s->task) || copy_string(&m->owner, s->owner))
        return lh_fail_errno(err, ENOMEM, "describing sandbox %s", s->id), NULL;
    char checkpoint[LH_ID_SIZE];
    if (checkpoint_of(d, s->id, checkpoint, err) < 0 || copy_string(&m->checkpoint, checkpoint))
        return NULL;
    pthread_mutex_lock(&d->lock);
    m->state = (V1(State))s->state;
    m->cause = (V1(DeathCause))s->cause;
    m->attempt = s->attempt;
    m->created_ms = s->created_ms;
    bool filled = network_fill(s, m) == 0 && policy_fill(s, m) == 0;
    bool lives = s->box && s->state != SB_DEAD && s->state != SB_HIBERNATED;
    m->init_pid = lives ? s->init_pid : 0;
    bool ask = usage && lives && filled && !s->busy;
    s->execs += ask; /* keeps the box */
    pthread_mutex_unlock(&d->lock);
    if (!filled)
        return lh_fail_errno(err, ENOMEM, "describing sandbox %s", s->id), NULL;
    if (!ask)
        return lh_steal(&m);
    if (box_usage(s->box, &u, NULL) == 0) {
        m->memory_bytes = u.memory_bytes;
        m->processes = u.processes;
    }
    pthread_mutex_lock(&d->lock);
    s->execs--;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&d->lock);
    return lh_steal(&m);
}

static int by_age(const void *a, const void *b)
{
    struct sandbox *const *x = a, *const *y = b;

    return strcmp((*x)->id, (*y)->id); /* ids begin with the time */
}

size_t sandbox_list(struct daemon *d, const char *owner_prefix, bool dead, struct sandbox ***out,
                    struct lh_error *err)
{
    size_t n = 0, room = 0, prefix = strlen(owner_prefix);
    struct sandbox **list = NULL;

    LH_LOCKED(&d->lock);
    for (size_t i = 0; i < BUCKETS; i++)
        for (struct sandbox *s = d->buckets[i]; s; s = s->next) {
            if (strncmp(s->owner, owner_prefix, prefix) || (!dead && s->state == SB_DEAD))
                continue;
            if (n == room) {
                room = room ? 2 * room : 64;
                struct sandbox **more = realloc(list, room * sizeof *more);
                if (!more) {
                    lh_fail_errno(err, ENOMEM, "listing sandboxes");
                    goto out;
                }
                list = more;
            }
            s->refs++;
            list[n++] = s;
        }
out:
    if (n)
        qsort(list, n, sizeof *list, by_age);
    *out = list;
    return n;
}

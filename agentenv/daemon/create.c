/* Creating a sandbox: record, make, record that it runs.
 *
 * The row is there before the first directory, so a crash at any point leaves something that
 * recovery finds by its row and undoes (recover.c).  The idempotency key is bound in the same
 * transaction as the row and freed with it, so that a create which failed may be tried again and
 * one which succeeded may not be doubled; a second create under the key waits for the first. */
#include <ctype.h>
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/daemon/internal.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/parse.h"

LH_LOG_COMPONENT("agentenvd");

#define SOURCE(name) LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_##name

enum { KEY_MAX = 128, NAME_MAX_LEN = 64 };

int sandbox_check_key(const char *key, struct lh_error *err)
{
    size_t len = strlen(key);

    if (len < 1 || len > KEY_MAX)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "idempotency_key must have 1 to %d characters, not %zu", KEY_MAX, len);
    return 0;
}

static int check_name(const char *name, struct lh_error *err)
{
    size_t len = strlen(name);

    for (size_t i = 0; i < len; i++)
        if (!isalnum((unsigned char)name[i]) && !strchr("._-", name[i]))
            return lh_fail(err, LH_INVALID_ARGUMENT,
                           "name \"%.64s\": letters, digits, '.', '_' and '-' only", name);
    if (len > NAME_MAX_LEN || lh_id_text_valid(name))
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "name \"%.80s\" is longer than %d characters or looks like an id", name,
                       NAME_MAX_LEN);
    return 0;
}

static uint64_t first_set(uint64_t a, uint64_t b, uint64_t c)
{
    return a ? a : b ? b : c;
}

/* Asked for, else the source's, else the defaults of task.proto. */
static int merge_limits(Longhaul__Task__V1__Limits *to, const Longhaul__Task__V1__Limits *asked,
                        const Longhaul__Task__V1__Limits *source, struct lh_error *err)
{
    const Longhaul__Task__V1__Limits none = LONGHAUL__TASK__V1__LIMITS__INIT;
    const Longhaul__Task__V1__Limits *a = asked ? asked : &none, *b = source;

    to->cpu_millis = (uint32_t)first_set(a->cpu_millis, b->cpu_millis, 1000);
    to->memory_bytes = first_set(a->memory_bytes, b->memory_bytes, UINT64_C(256) << 20);
    to->disk_bytes = first_set(a->disk_bytes, b->disk_bytes, UINT64_C(256) << 20);
    to->pids = (uint32_t)first_set(a->pids, b->pids, 128);
    to->open_files = (uint32_t)first_set(a->open_files, b->open_files, 1024);
    to->output_bytes = first_set(a->output_bytes, b->output_bytes, 1 << 20);
    if (to->memory_bytes < 4 << 20)
        return lh_fail(err, LH_INVALID_ARGUMENT, "memory_bytes must be at least 4 MiB");
    return 0;
}

static int set_string(char **to, const char *from, struct lh_error *err)
{
    free(*to);
    *to = strdup(from ? from : "");
    return *to ? 0 : lh_fail_errno(err, ENOMEM, "a new sandbox");
}

static int from_image(struct daemon *d, struct sandbox *s, const char *name, struct lh_error *err)
{
    struct daemon_image image;
    int r = d->hooks->image_find(d, name, &image, err);

    if (r < 0 || (r = set_string(&s->image, name, err)) < 0 ||
        (r = set_string(&s->image_id, image.id, err)) < 0)
        return r;
    return set_string(&s->image_path, image.path, err);
}

static int from_task(struct daemon *d, struct sandbox *s, const V1(CreateRequest) * req,
                     struct lh_error *err)
{
    struct daemon_task task = {0};
    int r = d->hooks->task_find(d, req->task, &task, err);

    if (r < 0)
        return r;
    lh_automsg(ProtobufCMessage) owned = task.owned;
    s->network = req->network ? req->network : task.network;
    if ((r = merge_limits(&s->limits, req->limits, &task.limits, err)) < 0 ||
        (r = set_string(&s->task, req->task, err)) < 0)
        return r;
    return from_image(d, s, task.image, err);
}

static int from_snapshot(struct daemon *d, struct sandbox *s, const V1(CreateRequest) * req,
                         struct lh_error *err)
{
    struct snapshot_origin from = {0};
    int r = snapshot_origin(d, req->snapshot, &from, err);

    if (r < 0)
        return r;
    const char *task = req->task_of_snapshot[0] ? req->task_of_snapshot : from.task;
    s->network = req->network ? req->network : from.network;
    if ((r = merge_limits(&s->limits, req->limits, &from.limits, err)) == 0 &&
        (r = set_string(&s->snapshot, from.id, err)) == 0 &&
        (r = set_string(&s->task, task, err)) == 0 &&
        (r = set_string(&s->image, from.image, err)) == 0 &&
        (r = set_string(&s->image_id, from.image_id, err)) == 0)
        r = set_string(&s->image_path, from.image_path, err);
    snapshot_origin_finish(&from);
    return r;
}

static int from_sandbox(struct sandbox *s, struct sandbox *from, const V1(CreateRequest) * req,
                        struct lh_error *err)
{
    int r = merge_limits(&s->limits, req->limits, &from->limits, err);

    s->network = req->network ? req->network : from->network;
    s->over = from;
    if (r < 0 || (r = set_string(&s->task, from->task, err)) < 0 ||
        (r = set_string(&s->image, from->image, err)) < 0 ||
        (r = set_string(&s->image_id, from->image_id, err)) < 0)
        return r;
    return set_string(&s->image_path, from->image_path, err);
}

static int from_source(struct daemon *d, struct sandbox *s, const V1(CreateRequest) * req,
                       bool retry, int64_t deadline_ms, struct lh_error *err)
{
    const Longhaul__Task__V1__Limits none = LONGHAUL__TASK__V1__LIMITS__INIT;
    int r;

    switch (req->source_case) {
    case SOURCE(IMAGE):
        s->network = req->network;
        r = merge_limits(&s->limits, req->limits, &none, err);
        if (r == 0)
            r = from_image(d, s, req->image, err);
        return r < 0 || req->files_only ? r : zygote_choose(d, s, retry, deadline_ms, err);
    case SOURCE(SNAPSHOT):
        return from_snapshot(d, s, req, err);
    case SOURCE(TASK):
        return from_task(d, s, req, err);
    default:
        return lh_fail(err, LH_INVALID_ARGUMENT, "one of image, snapshot and task must be given");
    }
}

static int describe(struct daemon *d, struct sandbox *s, const V1(CreateRequest) * req,
                    const struct daemon_create_options *o, bool retry, int64_t deadline_ms,
                    struct lh_error *err)
{
    int r = check_name(req->name, err);

    if (r < 0)
        return r;
    lh_id_new_text(s->id);
    s->state = SB_CREATING;
    s->busy = true;
    s->attempt = req->attempt;
    s->created_ms = lh_unix_ms();
    s->ttl_at_ms = req->ttl_ms ? lh_now_ms() + req->ttl_ms : INT64_MAX;
    s->transient = o && o->transient;
    s->has_policy = req->policy != NULL;
    policy_copy(&s->policy, req->policy);
    if ((r = set_string(&s->name, req->name, err)) < 0 ||
        (r = set_string(&s->owner, req->owner, err)) < 0 ||
        (r = set_string(&s->snapshot, "", err)) < 0 || (r = set_string(&s->task, "", err)) < 0 ||
        (r = set_string(&s->top_layer, o ? o->top_layer : "", err)) < 0)
        return r;
    r = o && o->over ? from_sandbox(s, o->over, req, err)
                     : from_source(d, s, req, retry, deadline_ms, err);
    return r < 0 ? r : network_describe(d, s, req, err);
}

/* After an error the handle is gone, too. */
static struct box *restore_box(struct daemon *d, struct sandbox *s, const struct box_spec *spec,
                               const char *images, struct lh_error *err)
{
    lh_auto(box) box = box_asleep(d->host, spec, err);

    s->unrestored = box && images_restore(d, box, images, err) < 0;
    return box && !s->unrestored ? lh_steal(&box) : NULL;
}

int sandbox_start_box(struct daemon *d, struct sandbox *s, const char *images, struct lh_error *err)
{
    lh_autofree char *dir = sandbox_dir(d, s->id);
    struct chain chain;
    int r = dir ? chain_load(d, s, NULL, &chain, err) : lh_fail_errno(err, ENOMEM, "sandbox");

    if (r < 0)
        return r;
    struct box *box = NULL;
    struct box_spec spec = sandbox_box_spec(s, dir, &chain);
    if (images)
        box = mkdir(dir, 0700) == 0 ? restore_box(d, s, &spec, images, err)
                                    : (lh_fail_errno(err, errno, "directory %s", dir), NULL);
    else if (spec.in_memory || spare_take(d, dir, err) == 0)
        box = box_start(d->host, &spec, err);
    chain_finish(&chain);
    if (!box)
        return lh_wrap(err, "starting it");
    struct box_identity identity = box_identity(box);
    pthread_mutex_lock(&d->lock);
    s->box = box;
    s->init_pid = identity.init_pid;
    pthread_mutex_unlock(&d->lock);
    return registry_set_running(d, s, &identity, err);
}

/* The sandbox is in the table, held alone, and has a row. */
static int bring_up(struct daemon *d, struct sandbox *s, bool files_only, int64_t deadline_ms,
                    struct lh_error *err)
{
    lh_autofree char *images = NULL;
    int r = s->snapshot[0] && !files_only ? snapshot_images(d, s->snapshot, &images, err) : 0;

    if (r == 0)
        r = sandbox_start_box(d, s, images, err);
    if (r == 0 && s->warm) {
        zygote_count(d, s, WARM_RESTORED);
        s->warm = false; /* what fails now is not its */
    }
    if (r == 0)
        r = monitor_add(d, s, err);
    if (r == 0)
        r = network_open(d, s, err);
    if (r == 0 && s->task[0] && !s->snapshot[0] && !s->over)
        r = d->hooks->task_setup(d, s->task, s->id, deadline_ms, err);
    if (r == 0 && s->cold)
        r = zygote_run(d, s, deadline_ms, err);
    if (r == 0 && s->state == SB_DEAD)
        r = lh_fail(err, LH_ABORTED, "it died while it was set up");
    if (r < 0)
        return lh_wrap(err, "creating sandbox %s", s->id);
    sandbox_set_state(d, s, SB_RUNNING, 0);
    if (s->ttl_at_ms != INT64_MAX || s->has_policy)
        janitor_wake(d);
    return 0;
}

/* For want of disk or descriptors, say: now, then, and its key is free. */
static int undo_again(struct daemon *d, const char *id, int64_t deadline_ms, struct lh_error *err)
{
    struct sandbox *s;
    int r = sandbox_begin(d, id, ANY_ATTEMPT, SB_ANY, HOLD_ALONE, deadline_ms, &s, err);

    if (r < 0)
        return r == LH_NOT_FOUND ? 0 : r;
    r = sandbox_destroy_held(d, s, true, err);
    sandbox_end(d, s, HOLD_ALONE);
    return r < 0 ? lh_wrap(err, "undoing an earlier create under this key") : 0;
}

/* The key was given before: its sandbox, once that is created; "" in id when the create that had it
 * failed meanwhile, and the key is free. */
static int join(struct daemon *d, const V1(CreateRequest) * req, const char *kind,
                const char *first, int64_t deadline_ms, char id[LH_ID_SIZE], struct lh_error *err)
{
    struct lh_error why = {0};
    struct sandbox *s;
    int r = sandbox_begin(d, first, req->attempt, SB_ANY, HOLD_EXEC, deadline_ms, &s, &why);

    id[0] = 0;
    if (r == 0) {
        bool unmade = s->unmade;
        sandbox_end(d, s, HOLD_EXEC);
        if (unmade)
            return undo_again(d, first, deadline_ms, err);
        snprintf(id, LH_ID_SIZE, "%s", first);
        return 0;
    }
    if (r != LH_NOT_FOUND)
        return lh_fail(err, r, "%s", why.message);
    char again[LH_ID_SIZE];
    r = registry_find_key(d, kind, req->idempotency_key, again, err);
    if (r < 0 || !again[0])
        return r;
    return lh_fail(err, LH_FAILED_PRECONDITION,
                   "key \"%s\" made sandbox %s, which has been removed; use a new key",
                   req->idempotency_key, first);
}

/* *retry: go on without the zygote of the image; and whether that should be done. */
static int create_new(struct daemon *d, const V1(CreateRequest) * req, const char *kind,
                      const struct daemon_create_options *o, bool *retry, int64_t deadline_ms,
                      char id[LH_ID_SIZE], struct lh_error *err)
{
    const char *key = req->idempotency_key[0] ? req->idempotency_key : NULL;
    struct sandbox *s = sandbox_new(err);
    int r;

    if (!s)
        return LH_RESOURCE_EXHAUSTED;
    s->refs++; /* ours, besides the table's */
    r = describe(d, s, req, o, *retry, deadline_ms, err);
    *retry = false;
    if (r == 0)
        r = registry_insert(d, s, kind, key, s->snapshot[0] ? s->snapshot : NULL, err);
    if (r < 0) {
        s->refs--;
        sandbox_unref(d, s);
        return r;
    }
    s->had_layers = s->snapshot[0];
    sandbox_add(d, s);
    r = bring_up(d, s, req->files_only, deadline_ms, err);
    if (r < 0) {
        struct lh_error undo = {0};
        s->over = NULL; /* the caller's again */
        *retry = s->warm;
        s->unmade = sandbox_destroy_held(d, s, true, &undo) < 0;
        if (s->unmade)
            lh_warn("create not undone", "sandbox=%s why=%s", s->id, undo.message);
        if (s->warm && s->unrestored)
            zygote_blame(d, s);
        if (s->warm)
            lh_warn("zygote not restored", "image=%s why=%s", s->image, err->message);
    } else {
        memcpy(id, s->id, LH_ID_SIZE);
    }
    sandbox_end(d, s, HOLD_ALONE);
    return r;
}

int daemon_create(struct daemon *d, const V1(CreateRequest) * req,
                  const struct daemon_create_options *o, int64_t deadline_ms, char id[LH_ID_SIZE],
                  struct lh_error *err)
{
    const char *key = req->idempotency_key, *kind = o && o->fork_child ? "child" : "create";
    char first[LH_ID_SIZE] = "";
    int r = 0;

    do {
        if (key[0])
            r = registry_find_key(d, kind, key, first, err);
        if (r == 0 && first[0])
            r = join(d, req, kind, first, deadline_ms, id, err);
        if (r < 0 || (first[0] && id[0]))
            return r;
        bool retry = false;
        r = create_new(d, req, kind, o, &retry, deadline_ms, id, err);
        if (retry)
            r = create_new(d, req, kind, o, &retry, deadline_ms, id, err);
        /* Two creates under one key at the same time: the second insert finds the key taken. */
    } while (r == LH_ALREADY_EXISTS && key[0] &&
             registry_find_key(d, kind, key, first, NULL) == 0 && first[0] &&
             lh_now_ms() < deadline_ms);
    return r;
}

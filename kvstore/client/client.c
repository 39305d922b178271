/* The client's connection.  Requests are serialised by one lock, taken with the operation's
 * deadline; copying happens outside of it, on a reference to the mapping.  A connection that failed
 * or was late is closed: the next operation opens a new one, at most every RETRY_MS, and opens the
 * root again, since a restarted kvstored knows nothing. */
#include "kvstore/client.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kvstore/client/internal.h"
#include "kvstore/protocol.h"
#include "proto/clock.h"
#include "proto/log.h"
#include "proto/parse.h"

LH_LOG_COMPONENT("kvclient");

typedef Longhaul__Kv__V1__Request Request;
typedef Longhaul__Kv__V1__Reply Reply;

enum { RETRY_MS = 50, TIMEOUT_MS = 1000 };

static int check_options(const struct kv_options *o, struct lh_error *err)
{
    if (o->unit_tokens < 16 || o->unit_tokens > 65536)
        return lh_fail(err, LH_INVALID_ARGUMENT, "unit_tokens is %u, not 16 to 65536",
                       o->unit_tokens);
    if (o->block_bytes > UINT32_MAX || o->state_bytes > UINT32_MAX ||
        !(o->block_bytes + o->state_bytes))
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "blocks of %zu and states of %zu bytes: each below 4 GiB, not both 0",
                       o->block_bytes, o->state_bytes);
    if (o->tenant && strlen(o->tenant) > KV_TENANT_MAX)
        return lh_fail(err, LH_INVALID_ARGUMENT, "tenant \"%s\" has more than %d bytes", o->tenant,
                       KV_TENANT_MAX);
    if (strlen(o->name) > KV_NAME_MAX || o->timeout_ms < 0 || o->timeout_ms >= KV_TICKET_MAX_MS / 2)
        return lh_fail(err, LH_INVALID_ARGUMENT, "name \"%s\" or timeout %d ms is too long",
                       o->name, o->timeout_ms);
    return 0;
}

struct kv_client *kv_client_create(const struct kv_options *o, struct lh_error *err)
{
    if (check_options(o, err) < 0)
        return NULL;
    lh_autofree struct kv_client *c = calloc(1, sizeof *c);
    lh_autofree char *path = strdup(o->path), *name = strdup(o->name);
    lh_autofree char *tenant = strdup(o->tenant ? o->tenant : "");
    if (!c || !path || !name || !tenant)
        return lh_fail_errno(err, ENOMEM, "kv client"), NULL;
    c->options = *o;
    c->options.path = lh_steal(&path);
    c->options.name = lh_steal(&name);
    c->options.tenant = lh_steal(&tenant);
    if (!c->options.timeout_ms)
        c->options.timeout_ms = TIMEOUT_MS;
    c->link.fd = -1;
    c->queue.last = &c->queue.first;
    pthread_mutex_init(&c->lock, NULL);
    pthread_mutex_init(&c->queue.lock, NULL);
    pthread_cond_init(&c->queue.changed, NULL);
    return lh_steal(&c);
}

void kv_client_destroy(struct kv_client *c)
{
    if (!c)
        return;
    kv_queue_stop(&c->queue);
    kv_link_close(&c->link);
    pthread_cond_destroy(&c->queue.changed);
    pthread_mutex_destroy(&c->queue.lock);
    pthread_mutex_destroy(&c->lock);
    free((char *)c->options.path);
    free((char *)c->options.name);
    free((char *)c->options.tenant);
    free(c);
}

const char *kv_client_tenant(const struct kv_client *c)
{
    return c ? c->options.tenant : "";
}

int64_t kv_client_deadline(const struct kv_client *c)
{
    return lh_now_ms() + c->options.timeout_ms;
}

static int lock_until(struct kv_client *c, int64_t deadline_ms, struct lh_error *err)
{
    struct timespec at = {.tv_sec = deadline_ms / 1000, .tv_nsec = deadline_ms % 1000 * 1000000};

    if (pthread_mutex_clocklock(&c->lock, CLOCK_MONOTONIC, &at))
        return lh_fail(err, LH_DEADLINE_EXCEEDED, "other operations hold the connection");
    return 0;
}

static int call_for_done(struct kv_client *c, const Request *q, int64_t deadline_ms,
                         struct lh_error *err)
{
    lh_automsg(Longhaul__Kv__V1__Reply) r = kv_link_call(&c->link, q, deadline_ms, err);

    return r ? 0 : err->code;
}

static ProtobufCBinaryData bytes_of(const struct kv_key *key)
{
    return (ProtobufCBinaryData){.len = sizeof key->bytes, .data = (uint8_t *)key->bytes};
}

static int open_root(struct kv_client *c, int64_t deadline_ms, struct lh_error *err)
{
    Longhaul__Kv__V1__OpenRootRequest open = LONGHAUL__KV__V1__OPEN_ROOT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;

    open.root = bytes_of(&c->root);
    open.policy_step = c->policy_step;
    open.block_bytes = (uint32_t)c->options.block_bytes;
    open.state_bytes = (uint32_t)c->options.state_bytes;
    open.unit_tokens = c->options.unit_tokens;
    if (c->link.features & KV_FEATURE_TENANTS)
        open.tenant = (char *)c->options.tenant;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_OPEN_ROOT;
    q.open_root = &open;
    return call_for_done(c, &q, deadline_ms, err);
}

static int retire_others(struct kv_client *c, int64_t deadline_ms, struct lh_error *err)
{
    Longhaul__Kv__V1__RetireRequest retire = LONGHAUL__KV__V1__RETIRE_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    ProtobufCBinaryData keep = bytes_of(&c->root);

    retire.n_keep = 1;
    retire.keep = &keep;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_RETIRE;
    q.retire = &retire;
    int r = call_for_done(c, &q, deadline_ms, err);
    if (r == 0)
        c->owes_retire = false;
    return r;
}

static int announce_root(struct kv_client *c, int64_t deadline_ms, struct lh_error *err)
{
    int r = c->has_root ? open_root(c, deadline_ms, err) : 0;

    return r == 0 && c->owes_retire ? retire_others(c, deadline_ms, err) : r;
}

/* A connection on which the root could not be announced is of no use: every operation would fail on
 * it without saying why. */
static int connect_now(struct kv_client *c, int64_t deadline_ms, struct lh_error *err)
{
    if (lh_now_ms() < c->retry_at_ms)
        return lh_fail(err, LH_UNAVAILABLE, "kvstored at %s is away", c->options.path);
    int r = kv_link_open(&c->link, c->options.path, c->options.name, deadline_ms, err);
    if (r == 0)
        r = announce_root(c, deadline_ms, err);
    if (r < 0) {
        kv_link_close(&c->link);
        c->retry_at_ms = lh_now_ms() + RETRY_MS;
        return r;
    }
    c->generation++;
    lh_info("connected", "path=%s generation=%llu", c->options.path,
            (unsigned long long)c->generation);
    return 0;
}

static Reply *call_locked(struct kv_client *c, const Request *q, struct kv_visit *visit,
                          int64_t deadline_ms, struct lh_error *err)
{
    if (visit->generation && (visit->generation != c->generation || c->link.fd < 0))
        return lh_fail(err, LH_UNAVAILABLE, "the connection to kvstored was lost meanwhile"), NULL;
    if (c->link.fd < 0 && connect_now(c, deadline_ms, err) < 0)
        return NULL;
    Reply *r = kv_link_call(&c->link, q, deadline_ms, err);
    if (r && !visit->map)
        visit->map = kv_map_ref(c->link.map);
    visit->generation = c->generation;
    return r;
}

Reply *kv_client_call(struct kv_client *c, const Request *q, struct kv_visit *visit,
                      int64_t deadline_ms, struct lh_error *err)
{
    if (lock_until(c, deadline_ms, err) < 0)
        return NULL;
    Reply *r = call_locked(c, q, visit, deadline_ms, err);
    pthread_mutex_unlock(&c->lock);
    return r;
}

int kv_client_root(struct kv_client *c, struct kv_key *root, int64_t deadline_ms,
                   struct lh_error *err)
{
    int r = lock_until(c, deadline_ms, err);

    if (r < 0)
        return r;
    *root = c->root;
    bool known = c->has_root;
    pthread_mutex_unlock(&c->lock);
    return known ? 0 : lh_fail(err, LH_FAILED_PRECONDITION, "kv_use_root() has not been called");
}

static int use_root_locked(struct kv_client *c, const struct kv_key *root, uint64_t policy_step,
                           bool retire, int64_t deadline_ms, struct lh_error *err)
{
    c->root = *root;
    c->policy_step = policy_step;
    c->has_root = true;
    c->owes_retire |= retire;
    return c->link.fd < 0 ? connect_now(c, deadline_ms, err) : announce_root(c, deadline_ms, err);
}

int kv_use_root(struct kv_client *c, const struct kv_key *root, uint64_t policy_step, int retire,
                struct lh_error *err)
{
    struct lh_error local;
    int64_t deadline = kv_client_deadline(c);

    err = err ? err : &local;
    int r = lock_until(c, deadline, err);
    if (r < 0)
        return r;
    r = use_root_locked(c, root, policy_step, retire, deadline, err);
    pthread_mutex_unlock(&c->lock);
    return r < 0 ? lh_wrap(err, "opening a root of step %llu", (unsigned long long)policy_step) : 0;
}

static int post_locked(struct kv_client *c, const Request *q, const struct kv_visit *visit,
                       int64_t deadline_ms, struct lh_error *err)
{
    if (visit->generation != c->generation || c->link.fd < 0)
        return 0; /* what it would release has ended with its connection */
    return kv_link_post(&c->link, q, deadline_ms, err);
}

void kv_client_release(struct kv_client *c, struct kv_visit *visit, uint64_t id, bool corrupt)
{
    Longhaul__Kv__V1__ReleaseRequest release = LONGHAUL__KV__V1__RELEASE_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    int64_t deadline = kv_client_deadline(c);
    struct lh_error err;

    release.lease = id;
    release.corrupt = corrupt;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_RELEASE;
    q.release = &release;
    int r = lock_until(c, deadline, &err);
    if (r == 0) {
        r = post_locked(c, &q, visit, deadline, &err);
        pthread_mutex_unlock(&c->lock);
    }
    if (r < 0 && r != LH_UNAVAILABLE)
        lh_warn("release", "%s", err.message);
}

int64_t kv_run_look(struct kv_async *io, struct lh_error *err)
{
    Longhaul__Kv__V1__StatRequest stat = LONGHAUL__KV__V1__STAT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_visit visit = {0};

    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_STAT;
    q.stat = &stat;
    lh_automsg(Longhaul__Kv__V1__Reply) r =
        kv_client_call(io->client, &q, &visit, io->batch.deadline_ms, err);
    kv_map_unref(visit.map);
    if (!r || r->body_case != LONGHAUL__KV__V1__REPLY__BODY_STAT)
        return r ? lh_fail(err, LH_INTERNAL, "kvstored did not answer STAT") : err->code;
    io->pressure = (struct kv_pressure){.load_wait_ms = r->stat->load_queue_wait_ms,
                                        .spill_wait_ms = r->stat->store_queue_wait_ms,
                                        .capacity_bytes = r->stat->capacity_bytes,
                                        .used_bytes = r->stat->used_bytes};
    return 0;
}

int kv_pressure(struct kv_client *c, struct kv_pressure *out, struct lh_error *err)
{
    struct kv_async io = {.client = c, .kind = KV_LOOK, .name = ""};
    int64_t r = kv_async_run_here(&io, err);

    if (r == 0)
        *out = io.pressure;
    return (int)r;
}

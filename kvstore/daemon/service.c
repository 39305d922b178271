#include "kvstore/daemon/service.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kvstore/daemon/request.h"
#include "kvstore/index/policy.h"
#include "proto/clock.h"
#include "proto/log.h"

LH_LOG_COMPONENT("kvstored");

enum { RECLAIM_NODES = 512 }; /* of one piece of background work: some ten microseconds */

static int map_memory(struct kv_service *s, struct lh_error *err)
{
    s->memory = mmap(NULL, s->segment.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s->segment.fd, 0);
    if (s->memory != MAP_FAILED)
        return 0;
    s->memory = NULL;
    return lh_fail_errno(err, errno, "mapping the segment");
}

/* A tier that cannot be had is no reason not to serve. */
static int open_disk(struct kv_service *s, const struct kv_service_options *o, struct lh_error *err)
{
    struct lh_error why = {0};

    if (!o->disk_path)
        return 0;
    int r = kv_disk_open(&s->disk, o->disk_path, o->disk_bytes, &why);
    if (r == LH_INVALID_ARGUMENT)
        return lh_fail(err, r, "%s", why.message);
    s->has_disk = r == 0;
    s->disk.bytes_per_s = o->disk_bytes_per_s;
    if (r < 0)
        lh_warn("no-disk-tier", "%s", why.message);
    return 0;
}

/* One that is not configured right is told; one that is away is not asked yet. */
static int open_remote(struct kv_service *s, const struct kv_remote_options *o,
                       struct lh_error *err)
{
    if (!o->location)
        return 0;
    int r = kv_push_init(&s->push, err);
    if (r == 0)
        r = kv_remote_open(&s->remote, o, err);
    s->has_remote = r == 0;
    return r;
}

void kv_service_page_bytes(const struct kv_service *s, uint32_t page_bytes[KV_TIERS])
{
    page_bytes[KV_MEMORY] = s->segment.page_bytes;
    page_bytes[KV_DISK] = s->has_disk ? s->disk.page_bytes : 0;
}

/* A file whose index cannot be read back is begun anew by the slots that will be written. */
static int start_disk(struct kv_service *s, struct lh_error *err)
{
    uint32_t page_bytes[KV_TIERS];
    struct kv_recovery found;

    s->index.disk = &s->disk;
    kv_service_page_bytes(s, page_bytes);
    int r = kv_disk_recover(&s->disk, &s->index, page_bytes, &found, err);
    if (r < 0)
        return r;
    lh_info("disk-tier", "bytes=%llu page=%u recovered=%llu damaged=%llu",
            (unsigned long long)s->disk.file_bytes, s->disk.page_bytes,
            (unsigned long long)found.objects, (unsigned long long)found.damaged);
    return kv_exchange_init(&s->exchange, &s->index, &s->disk, s->memory, s->segment.page_bytes,
                            err);
}

static int choose_policy(struct kv_service *s, const char *name, struct lh_error *err)
{
    const struct kv_policy *p = name ? kv_policy_find(name) : kv_policy_default();

    if (!p)
        return lh_fail(err, LH_INVALID_ARGUMENT, "kvstore.eviction is \"%s\"", name);
    s->index.policy = p;
    return 0;
}

int kv_service_init(struct kv_service *s, const struct kv_service_options *o, struct lh_error *err)
{
    *s = (struct kv_service){.segment.fd = -1,
                             .disk = {.fd = -1, .event_fd = -1, .ring.ring_fd = -1},
                             .remote.event_fd = -1};
    if (!o->max_inflight_bytes)
        return lh_fail(err, LH_INVALID_ARGUMENT, "kvstore.max_inflight_bytes is 0");
    s->flow.limit = o->max_inflight_bytes;
    int r = o->memory_fd ? kv_segment_adopt(&s->segment, o->memory_fd, o->memory_bytes, err)
                         : kv_segment_create(&s->segment, o->memory_bytes, err);
    if (r < 0)
        return r;
    r = kv_pages_init(&s->pages, (uint32_t)(s->segment.bytes / s->segment.page_bytes), err);
    if (r == 0)
        r = open_disk(s, o, err);
    if (r == 0)
        r = open_remote(s, &o->remote, err);
    if (r == 0 && (s->has_disk || s->has_remote))
        r = map_memory(s, err);
    if (r == 0)
        r = kv_index_init(&s->index, &s->pages, s->has_disk ? &s->disk.pages : NULL, err);
    if (r == 0)
        r = choose_policy(s, o->eviction, err);
    if (r == 0)
        r = kv_quotas_parse(s, o->quotas, err);
    if (r == 0)
        r = kv_trails_init(&s->trails, err);
    if (r == 0 && s->has_disk)
        r = start_disk(s, err);
    if (r < 0)
        kv_service_finish(s);
    return r;
}

void kv_service_finish(struct kv_service *s)
{
    kv_remote_close(&s->remote); /* first: its threads read and write the memory */
    kv_pull_finish(s);
    kv_push_finish(&s->push);
    kv_exchange_finish(&s->exchange);
    kv_trails_finish(&s->trails);
    kv_index_finish(&s->index);
    kv_disk_close(&s->disk);
    kv_pages_finish(&s->pages);
    if (s->memory)
        munmap(s->memory, s->segment.bytes);
    kv_segment_finish(&s->segment);
}

static void work_remote(struct kv_service *s, int64_t now_us)
{
    for (struct kv_remote_op op; kv_remote_ended(&s->remote, &op);)
        if (op.kind == KV_REMOTE_STORE)
            kv_push_ended(s, &op);
        else
            kv_pull_ended(s, &op, now_us);
    kv_pull_work(s, now_us);
    if (!s->away) /* it may need memory */
        kv_push_work(s, now_us);
}

bool kv_service_work(struct kv_service *s)
{
    bool more = kv_root_reclaimable(&s->index) && kv_root_reclaim(&s->index, RECLAIM_NODES);

    if (s->has_disk)
        kv_exchange_work(&s->exchange, lh_now_us());
    if (s->has_remote)
        work_remote(s, lh_now_us());
    return more;
}

void kv_service_leave(struct kv_service *s, bool write)
{
    s->away = true;
    s->exchange.all = write && s->has_disk;
    kv_pull_abandon(&s->pulls);
}

bool kv_service_is_quiet(const struct kv_service *s)
{
    unsigned remote = s->remote.in_flight[KV_GATE_IN] + s->remote.in_flight[KV_GATE_OUT];

    return !s->grants && !remote && !s->disk.in_flight && !(s->exchange.all && s->exchange.n);
}

void kv_service_give_up(struct kv_service *s)
{
    while (kv_root_reclaimable(&s->index))
        kv_root_reclaim(&s->index, UINT32_MAX);
    kv_push_unstage(s); /* it would be dropped as what memory alone has */
    kv_index_lose_memory(&s->index);
    if (s->has_disk)
        kv_exchange_end_era(&s->exchange);
    s->exchange.all = false;
    lh_info("memory-gone", "used=%u objects=%llu", s->pages.used,
            (unsigned long long)s->index.objects);
}

void kv_service_return(struct kv_service *s)
{
    s->away = false;
}

void *kv_reply_alloc(struct kv_reply *r, size_t n, size_t size)
{
    void *p = calloc(n ? n : 1, size);

    if (p)
        r->owned[r->n_owned++] = p;
    return p;
}

void kv_reply_finish(struct kv_reply *r)
{
    while (r->n_owned)
        free(r->owned[--r->n_owned]);
}

int kv_check_key(const ProtobufCBinaryData *field, const char *what, struct kv_key *key,
                 struct lh_error *err)
{
    if (field->len != sizeof key->bytes)
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s has %zu bytes, a key has %zu", what,
                       field->len, sizeof key->bytes);
    memcpy(key->bytes, field->data, sizeof key->bytes);
    return 0;
}

int kv_check_chain(const ProtobufCBinaryData *field, const struct kv_key **chain, size_t *n,
                   struct lh_error *err)
{
    *n = field->len / sizeof **chain;
    if (field->len % sizeof **chain || *n < 1 || *n > KV_MAX_UNITS)
        return lh_fail(err, LH_INVALID_ARGUMENT, "a chain of %zu bytes is not 1 to %d hashes",
                       field->len, KV_MAX_UNITS);
    *chain = (const struct kv_key *)field->data;
    return 0;
}

int kv_check_text(const char *text, size_t max, const char *what, struct lh_error *err)
{
    if (strlen(text) > max)
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s has more than %zu bytes", what, max);
    return 0;
}

static int done(struct kv_call *c)
{
    c->reply->body.done = (Longhaul__Kv__V1__Done)LONGHAUL__KV__V1__DONE__INIT;
    c->reply->message.body_case = LONGHAUL__KV__V1__REPLY__BODY_DONE;
    c->reply->message.done = &c->reply->body.done;
    return 0;
}

static int handle_hello(struct kv_call *c, struct lh_error *err)
{
    const Longhaul__Kv__V1__HelloRequest *q = c->request->hello;
    Longhaul__Kv__V1__HelloReply *r = &c->reply->body.hello;
    uint32_t protocol = kv_protocol_shared(q->oldest, q->protocol);
    int e = kv_check_text(q->client, KV_NAME_MAX, "client", err);

    if (e == 0)
        e = kv_check_text(q->version, KV_VERSION_MAX, "version", err);
    if (e < 0)
        return e;
    if (!protocol)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "kvstored of version " LONGHAUL_VERSION
                       " speaks protocol %d, the client%s%s %u: run both from one build",
                       KV_PROTOCOL, *q->version ? " of version " : "", q->version, q->protocol);
    strcpy(c->peer->name, q->client);
    c->peer->ready = true;
    *r = (Longhaul__Kv__V1__HelloReply)LONGHAUL__KV__V1__HELLO_REPLY__INIT;
    r->protocol = protocol;
    r->features = KV_FEATURES;
    r->version = (char *)LONGHAUL_VERSION;
    r->segment_bytes = c->service->segment.bytes;
    r->page_bytes = c->service->segment.page_bytes;
    c->reply->with_segment = true;
    c->reply->message.body_case = LONGHAUL__KV__V1__REPLY__BODY_HELLO;
    c->reply->message.hello = r;
    return 0;
}

static int handle_open_root(struct kv_call *c, struct lh_error *err)
{
    const Longhaul__Kv__V1__OpenRootRequest *q = c->request->open_root;
    struct kv_geometry g = {.block_bytes = q->block_bytes,
                            .state_bytes = q->state_bytes,
                            .unit_tokens = q->unit_tokens};
    uint64_t capacity = c->service->segment.bytes;
    struct kv_key key;
    int r = kv_check_key(&q->root, "root", &key, err);

    if (r == 0)
        r = kv_check_text(q->tenant, KV_TENANT_MAX, "tenant", err);
    if (r < 0)
        return r;
    if (g.unit_tokens < 16 || g.unit_tokens > 65536)
        return lh_fail(err, LH_INVALID_ARGUMENT, "unit_tokens is %u, not 16 to 65536",
                       g.unit_tokens);
    if (!g.block_bytes && !g.state_bytes)
        return lh_fail(err, LH_INVALID_ARGUMENT, "a model has blocks, states or both");
    if ((uint64_t)g.block_bytes + g.state_bytes > capacity)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "a block of %u and a state of %u bytes exceed the store's %llu; raise "
                       "kvstore.memory_bytes",
                       g.block_bytes, g.state_bytes, (unsigned long long)capacity);
    uint32_t page_bytes[KV_TIERS];
    kv_service_page_bytes(c->service, page_bytes);
    struct kv_index *ix = &c->service->index;
    const struct kv_tenant *tenant = kv_tenant_named(ix, q->tenant, err);
    struct kv_root *root =
        tenant ? kv_root_open(ix, &key, &g, q->policy_step, page_bytes, err) : NULL;
    if (!root)
        return err->code;
    kv_tenant_adopt(ix, root, tenant);
    if (c->service->has_disk)
        kv_disk_root_changed(&c->service->disk, root->slot);
    return 0;
}

/* The file forgets them too: after a restart they are not there. */
static void count_retired(struct kv_service *s, unsigned n)
{
    s->count.retired += n;
    for (uint32_t i = 0; n && s->has_disk && i < KV_ROOT_SLOTS; i++)
        kv_disk_root_changed(&s->disk, i);
}

static int handle_retire(struct kv_call *c, struct lh_error *err)
{
    const Longhaul__Kv__V1__RetireRequest *q = c->request->retire;
    struct kv_key *keep = kv_reply_alloc(c->reply, q->n_keep, sizeof *keep);

    if (!keep || q->n_keep > KV_MAX_ROOTS)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "keep names %zu roots, at most %d are open",
                       q->n_keep, KV_MAX_ROOTS);
    for (size_t i = 0; i < q->n_keep; i++) {
        int r = kv_check_key(&q->keep[i], "keep", &keep[i], err);
        if (r < 0)
            return r;
    }
    unsigned n = kv_root_retire_others(&c->service->index, keep, q->n_keep);
    count_retired(c->service, n);
    lh_debug("retired", "roots=%u by=%s", n, c->peer->name);
    return 0;
}

static int handle_drop(struct kv_call *c, struct lh_error *err)
{
    struct kv_key key;
    int r = kv_check_key(&c->request->drop->root, "root", &key, err);

    if (r < 0)
        return r;
    if (!kv_root_retire(&c->service->index, &key))
        return lh_fail(err, LH_NOT_FOUND, "no live root of this key");
    count_retired(c->service, 1);
    lh_info("dropped", "a root, by=%s", c->peer->name);
    return 0;
}

/* A handler that leaves no body means "done". */
static const struct {
    kv_handler *handle;
    bool open; /* also before hello */
} handlers[] = {
    [LONGHAUL__KV__V1__REQUEST__BODY_HELLO] = {handle_hello, true},
    [LONGHAUL__KV__V1__REQUEST__BODY_OPEN_ROOT] = {handle_open_root, false},
    [LONGHAUL__KV__V1__REQUEST__BODY_RETIRE] = {handle_retire, false},
    [LONGHAUL__KV__V1__REQUEST__BODY_PUT] = {kv_handle_put, false},
    [LONGHAUL__KV__V1__REQUEST__BODY_COMMIT] = {kv_handle_commit, false},
    [LONGHAUL__KV__V1__REQUEST__BODY_LOOKUP] = {kv_handle_lookup, false},
    [LONGHAUL__KV__V1__REQUEST__BODY_RELEASE] = {kv_handle_release, false},
    [LONGHAUL__KV__V1__REQUEST__BODY_STAT] = {kv_handle_stat, false},
    [LONGHAUL__KV__V1__REQUEST__BODY_LIST] = {kv_handle_list, false},
    [LONGHAUL__KV__V1__REQUEST__BODY_DROP] = {handle_drop, false},
    [LONGHAUL__KV__V1__REQUEST__BODY_SHOW] = {kv_handle_show, false},
};

static int dispatch(struct kv_call *c, struct lh_error *err)
{
    size_t i = (size_t)c->request->body_case;

    if (i >= LH_ARRAY_SIZE(handlers) || !handlers[i].handle)
        return lh_fail(err, LH_UNIMPLEMENTED, "a request that kvstored does not know");
    if (!handlers[i].open && !c->peer->ready)
        return lh_fail(err, LH_FAILED_PRECONDITION, "the first request must be hello");
    int r = handlers[i].handle(c, err);
    if (r == 0 && c->reply->message.body_case == LONGHAUL__KV__V1__REPLY__BODY__NOT_SET)
        return done(c);
    return r;
}

bool kv_service_handle(struct kv_service *s, struct kv_peer *peer,
                       const Longhaul__Kv__V1__Request *request, struct kv_reply *reply)
{
    *reply = (struct kv_reply){.message = LONGHAUL__KV__V1__REPLY__INIT};
    struct kv_call c = {
        .service = s, .peer = peer, .request = request, .reply = reply, .now_us = lh_now_us()};

    int r = dispatch(&c, &reply->error);
    if (c.later || r == 0)
        return !c.later;
    Longhaul__Kv__V1__Failure *f = &reply->body.failure;
    *f = (Longhaul__Kv__V1__Failure)LONGHAUL__KV__V1__FAILURE__INIT;
    f->code = reply->error.code;
    f->message = reply->error.message;
    reply->message.body_case = LONGHAUL__KV__V1__REPLY__BODY_FAILURE;
    reply->message.failure = f;
    return true;
}

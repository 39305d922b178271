/* kvstored's request handling without its socket.  The input is a program for two clients of a
 * small store: raw packets as anyone could send them, and requests whose fields are taken from the
 * input but whose keys come from a small set, so that they meet.  After every input: replies can be
 * packed, both rules of kvstore/index/index.h hold, what tenants have adds up, and when everything
 * is retired and everybody gone the store is empty. */
#include <stdlib.h>
#include <string.h>

#include "kvstore/daemon/service.h"
#include "proto/cleanup.h"
#include "proto/parse.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

typedef Longhaul__Kv__V1__Request Request;

enum { KEYS = 24, PEERS = 2 };

struct program {
    const uint8_t *p, *end;
    struct kv_service service;
    struct kv_peer peers[PEERS];
    struct kv_key keys[KEYS];
};

static uint8_t byte(struct program *g)
{
    return g->p < g->end ? *g->p++ : 0;
}

static void require(int condition)
{
    if (!condition)
        abort();
}

static void handle(struct program *g, const Request *q)
{
    struct kv_reply r;
    size_t len;

    kv_service_handle(&g->service, &g->peers[byte(g) % PEERS], q, &r);
    lh_autofree uint8_t *packed = lh_pack(&r.message.base, &len, NULL);
    require(packed && len);
    kv_reply_finish(&r);
}

static void raw(struct program *g)
{
    size_t left = (size_t)(g->end - g->p), n = byte(g) * 4u;

    left -= left > 0;
    n = n < left ? n : left;
    lh_automsg(Longhaul__Kv__V1__Request) q = (void *)lh_parse(
        &longhaul__kv__v1__request__descriptor, g->p, n, (struct lh_parse_limits){0}, NULL);
    g->p += n;
    if (q)
        handle(g, q);
}

static ProtobufCBinaryData keys(struct program *g, size_t most)
{
    size_t at = byte(g) % KEYS, n = byte(g) % (most + 1);

    return (ProtobufCBinaryData){(at + n > KEYS ? KEYS - at : n) * 16, g->keys[at].bytes};
}

static ProtobufCBinaryData one_root(struct program *g)
{
    return (ProtobufCBinaryData){16, g->keys[byte(g) % 3].bytes};
}

static void hello(struct program *g)
{
    Longhaul__Kv__V1__HelloRequest hello = LONGHAUL__KV__V1__HELLO_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;

    hello.protocol = byte(g) % 4 ? KV_PROTOCOL : byte(g);
    hello.oldest = byte(g) % 4 ? 0 : byte(g);
    hello.features = byte(g);
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_HELLO;
    q.hello = &hello;
    handle(g, &q);
}

/* Two with a quota of some objects, one without, one whose name is too long. */
static const char *const tenants[] = {
    "", "acme", "lab", "0123456789012345678901234567890123456789012345678901234567890123"};

static void open_root(struct program *g)
{
    static const uint32_t sizes[] = {0, 1, 4096, 5000, 65536, 1 << 20, UINT32_MAX};
    Longhaul__Kv__V1__OpenRootRequest open = LONGHAUL__KV__V1__OPEN_ROOT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;

    open.root = one_root(g);
    open.block_bytes = sizes[byte(g) % LH_ARRAY_SIZE(sizes)];
    open.state_bytes = sizes[byte(g) % LH_ARRAY_SIZE(sizes)];
    open.unit_tokens = 16;
    open.tenant = (char *)tenants[byte(g) % LH_ARRAY_SIZE(tenants)];
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_OPEN_ROOT;
    q.open_root = &open;
    handle(g, &q);
}

static const char *const trajectories[] = {"", "a", "b"};

static void put(struct program *g)
{
    Longhaul__Kv__V1__PutRequest put = LONGHAUL__KV__V1__PUT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;

    put.root = one_root(g);
    put.chain = keys(g, KEYS);
    put.parent = keys(g, 1);
    put.first = byte(g) % 8;
    put.deadline_ms = 1 + byte(g);
    put.trajectory = (char *)trajectories[byte(g) % LH_ARRAY_SIZE(trajectories)];
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_PUT;
    q.put = &put;
    handle(g, &q);
}

static void commit(struct program *g)
{
    Longhaul__Kv__V1__CommitRequest commit = LONGHAUL__KV__V1__COMMIT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    uint32_t crc[KEYS] = {0};

    commit.ticket = byte(g);
    commit.block_crc32c = crc;
    commit.n_block_crc32c = byte(g) % (KEYS + 1);
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_COMMIT;
    q.commit = &commit;
    handle(g, &q);
}

static void lookup(struct program *g)
{
    Longhaul__Kv__V1__LookupRequest lookup = LONGHAUL__KV__V1__LOOKUP_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;

    lookup.root = one_root(g);
    lookup.chain = keys(g, KEYS);
    lookup.at_least = byte(g) % 8;
    lookup.trajectory = (char *)trajectories[byte(g) % LH_ARRAY_SIZE(trajectories)];
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_LOOKUP;
    q.lookup = &lookup;
    handle(g, &q);
}

static void release(struct program *g)
{
    Longhaul__Kv__V1__ReleaseRequest release = LONGHAUL__KV__V1__RELEASE_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;

    release.lease = byte(g);
    release.corrupt = byte(g) & 1;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_RELEASE;
    q.release = &release;
    handle(g, &q);
}

static void retire(struct program *g)
{
    Longhaul__Kv__V1__RetireRequest retire = LONGHAUL__KV__V1__RETIRE_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    ProtobufCBinaryData keep = one_root(g);

    retire.keep = &keep;
    retire.n_keep = byte(g) & 1;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_RETIRE;
    q.retire = &retire;
    handle(g, &q);
}

static void list(struct program *g)
{
    Longhaul__Kv__V1__ListRequest list = LONGHAUL__KV__V1__LIST_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;

    list.root = byte(g) & 1 ? one_root(g) : (ProtobufCBinaryData){0};
    list.limit = byte(g);
    list.after = byte(g);
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_LIST;
    q.list = &list;
    handle(g, &q);
}

static void show(struct program *g)
{
    Longhaul__Kv__V1__ShowRequest show = LONGHAUL__KV__V1__SHOW_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;

    show.key = keys(g, 2);
    show.trajectory = (char *)trajectories[byte(g) % LH_ARRAY_SIZE(trajectories)];
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_SHOW;
    q.show = &show;
    handle(g, &q);
}

static void ask_stat(struct program *g)
{
    Longhaul__Kv__V1__StatRequest stat = LONGHAUL__KV__V1__STAT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;

    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_STAT;
    q.stat = &stat;
    handle(g, &q);
}

static void time_passes(struct program *g)
{
    kv_service_expire(&g->service, &g->peers[byte(g) % PEERS], INT64_MAX);
    kv_service_work(&g->service);
}

static void a_peer_leaves(struct program *g)
{
    struct kv_peer *p = &g->peers[byte(g) % PEERS];

    kv_service_forget(&g->service, p);
    *p = (struct kv_peer){0};
}

static void (*const steps[])(struct program *) = {
    raw,    hello, open_root, put,         commit,        lookup, release, retire,
    lookup, put,   list,      time_passes, a_peer_leaves, commit, show,    ask_stat};

static void check(const struct kv_service *s)
{
    const struct kv_index *ix = &s->index;
    uint64_t granted = 0;

    for (unsigned i = 0; i < ix->n_tenants; i++)
        granted += ix->tenants[i].granted[KV_MEMORY];
    require(granted == s->pages.used);

    for (uint32_t i = 1; i < ix->touched; i++) {
        const struct kv_node *n = &ix->nodes[i], *parent = kv_parent(ix, n);
        if (n->phase != KV_VISIBLE || kv_root_of(ix, n)->retired)
            continue;
        require(n->unit == 0 ? !parent : parent && parent->phase == KV_VISIBLE);
        require(n->child || n->pins || kv_node_is_boundary(ix, n));
    }
}

static void finish(struct program *g)
{
    for (int i = 0; i < PEERS; i++)
        kv_service_forget(&g->service, &g->peers[i]);
    kv_root_retire_others(&g->service.index, NULL, 0);
    while (kv_service_work(&g->service))
        ;
    require(g->service.pages.used == 0 && g->service.index.in_use == 0);
    require(g->service.index.objects == 0 && g->service.index.pinned == 0);
    require(!g->service.index.retired);
    for (unsigned i = 0; i < g->service.index.n_tenants; i++)
        require(!g->service.index.tenants[i].granted[KV_MEMORY]);
    kv_service_finish(&g->service);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    struct program g = {.p = p, .end = p + n};

    setenv("LONGHAUL_LOG", "error", 1);
    for (int i = 0; i < KEYS; i++)
        g.keys[i].bytes[0] = (uint8_t)i;
    struct kv_service_options o = {.memory_bytes = KV_SEGMENT_MIN,
                                   .max_inflight_bytes = 1 << 20,
                                   .quotas = "acme=64KiB,lab=200KiB"};
    if (kv_service_init(&g.service, &o, NULL) < 0)
        return 0;
    while (g.p < g.end) {
        steps[byte(&g) % LH_ARRAY_SIZE(steps)](&g);
        check(&g.service);
    }
    finish(&g);
    return 0;
}

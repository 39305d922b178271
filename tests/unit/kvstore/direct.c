#include "direct.h"

#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <string.h>

typedef Longhaul__Kv__V1__Request Request;

static void call(struct direct *d, const Request *q, struct kv_reply *r)
{
    kv_service_handle(&d->service, &d->peer, q, r);
}

static int code_of(struct kv_reply *r)
{
    int code =
        r->message.body_case == LONGHAUL__KV__V1__REPLY__BODY_FAILURE ? r->body.failure.code : 0;

    kv_reply_finish(r);
    return code;
}

void direct_open(struct direct *d, uint32_t pages)
{
    Longhaul__Kv__V1__HelloRequest hello = LONGHAUL__KV__V1__HELLO_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct lh_error e = {0};
    struct kv_reply r;

    *d = (struct direct){0};
    cr_assert(eq(int, kv_service_init(&d->service, (uint64_t)pages * 4096, UINT64_MAX, &e), 0),
              "%s", e.message);
    hello.protocol = KV_PROTOCOL;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_HELLO;
    q.hello = &hello;
    call(d, &q, &r);
    cr_assert(eq(int, code_of(&r), 0));
}

void direct_close(struct direct *d)
{
    kv_service_forget(&d->service, &d->peer);
    kv_service_finish(&d->service);
}

static ProtobufCBinaryData keys(const struct kv_key *k, size_t n)
{
    return (ProtobufCBinaryData){n * sizeof *k, (uint8_t *)k->bytes};
}

int direct_root(struct direct *d, const struct kv_key *root, uint32_t block, uint32_t state)
{
    Longhaul__Kv__V1__OpenRootRequest open = LONGHAUL__KV__V1__OPEN_ROOT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_reply r;

    open.root = keys(root, 1);
    open.block_bytes = block;
    open.state_bytes = state;
    open.unit_tokens = 16;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_OPEN_ROOT;
    q.open_root = &open;
    call(d, &q, &r);
    return code_of(&r);
}

int direct_retire(struct direct *d, const struct kv_key *keep)
{
    Longhaul__Kv__V1__RetireRequest retire = LONGHAUL__KV__V1__RETIRE_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    ProtobufCBinaryData one = keys(keep, 1);
    struct kv_reply r;

    retire.n_keep = 1;
    retire.keep = &one;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_RETIRE;
    q.retire = &retire;
    call(d, &q, &r);
    return code_of(&r);
}

int direct_put(struct direct *d, const struct kv_key *root, const struct kv_key *chain,
               size_t first, size_t n, uint64_t *ticket)
{
    Longhaul__Kv__V1__PutRequest put = LONGHAUL__KV__V1__PUT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_reply r;

    put.root = keys(root, 1);
    put.chain = keys(chain + first, n - first);
    if (first)
        put.parent = keys(chain + first - 1, 1);
    put.first = (uint32_t)first;
    put.deadline_ms = 60000;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_PUT;
    q.put = &put;
    call(d, &q, &r);
    *ticket = r.body.put.ticket;
    return code_of(&r);
}

bool direct_commit(struct direct *d, uint64_t ticket, size_t blocks)
{
    Longhaul__Kv__V1__CommitRequest commit = LONGHAUL__KV__V1__COMMIT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    uint32_t crc[256] = {0};
    struct kv_reply r;

    commit.ticket = ticket;
    commit.n_block_crc32c = blocks;
    commit.block_crc32c = crc;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_COMMIT;
    q.commit = &commit;
    call(d, &q, &r);
    bool stored = r.body.commit.stored;
    cr_assert(eq(int, code_of(&r), 0));
    return stored;
}

size_t direct_lookup(struct direct *d, const struct kv_key *root, const struct kv_key *chain,
                     size_t n, size_t at_least, uint64_t *lease)
{
    Longhaul__Kv__V1__LookupRequest lookup = LONGHAUL__KV__V1__LOOKUP_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_reply r;

    lookup.root = keys(root, 1);
    lookup.chain = keys(chain, n);
    lookup.at_least = (uint32_t)at_least;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_LOOKUP;
    q.lookup = &lookup;
    call(d, &q, &r);
    size_t units = r.body.lookup.units;
    *lease = r.body.lookup.lease;
    cr_assert(eq(int, code_of(&r), 0));
    return units;
}

void direct_release(struct direct *d, uint64_t id, bool corrupt)
{
    Longhaul__Kv__V1__ReleaseRequest release = LONGHAUL__KV__V1__RELEASE_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_reply r;

    release.lease = id;
    release.corrupt = corrupt;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_RELEASE;
    q.release = &release;
    call(d, &q, &r);
    cr_assert(eq(int, code_of(&r), 0));
}

static void check_node(const struct kv_node *n)
{
    if (n->phase != KV_VISIBLE)
        return;
    cr_assert(n->unit == 0 ? !n->parent : n->parent && n->parent->phase == KV_VISIBLE,
              "a hole before unit %u", n->unit);
    cr_assert(n->root->retired || n->child || n->pins || kv_node_is_boundary(n),
              "unit %u is a tail without a state", n->unit);
}

static uint64_t pages_of_node(const struct kv_node *n)
{
    return n->root ? n->block.pages + n->state.pages : 0;
}

void direct_check(const struct direct *d)
{
    const struct kv_index *ix = &d->service.index;
    uint64_t objects = 0, pages = 0, bits = 0;

    for (uint32_t i = 0; i < ix->touched; i++) {
        const struct kv_node *n = &ix->nodes[i];
        check_node(n);
        pages += pages_of_node(n);
        if (n->phase == KV_VISIBLE)
            objects += (n->block.pages > 0) + (n->state.pages > 0);
    }
    for (const struct kv_grant *g = d->peer.grants; g; g = g->next)
        pages += g->state.pages;
    for (uint32_t i = 0; i < d->service.pages.n; i++)
        bits += d->service.pages.taken[i / 64] >> i % 64 & 1;
    cr_assert(eq(u64, ix->objects, objects));
    cr_assert(eq(u64, d->service.pages.used, pages), "pages are lost or held twice");
    cr_assert(eq(u64, bits, pages));
}

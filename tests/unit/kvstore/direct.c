#include "direct.h"

#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/crc.h"

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

static void open_service(struct direct *d, const struct kv_service_options *o)
{
    Longhaul__Kv__V1__HelloRequest hello = LONGHAUL__KV__V1__HELLO_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct lh_error e = {0};
    struct kv_reply r;

    *d = (struct direct){0};
    cr_assert(eq(int, kv_service_init(&d->service, o, &e), 0), "%s", e.message);
    hello.protocol = KV_PROTOCOL;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_HELLO;
    q.hello = &hello;
    call(d, &q, &r);
    cr_assert(eq(int, code_of(&r), 0));
}

void direct_open(struct direct *d, uint32_t pages)
{
    struct kv_service_options o = {.memory_bytes = (uint64_t)pages * 4096,
                                   .max_inflight_bytes = UINT64_MAX,
                                   .eviction = "lru"};

    open_service(d, &o);
}

void direct_open_on_disk(struct direct *d, uint32_t pages, const char *path, uint64_t bytes)
{
    struct kv_service_options o = {.memory_bytes = (uint64_t)pages * 4096,
                                   .max_inflight_bytes = UINT64_MAX,
                                   .disk_path = path,
                                   .disk_bytes = bytes};

    open_service(d, &o);
    cr_assert(d->service.has_disk);
}

void direct_settle(struct direct *d, int ms)
{
    struct kv_service *s = &d->service;
    int64_t deadline = lh_now_ms() + ms;
    bool busy = true;

    while (busy && lh_ms_left(deadline)) {
        struct pollfd p = {.fd = s->disk.event_fd, .events = POLLIN};
        busy = kv_service_work(s) || s->disk.in_flight || s->disk.n_stale;
        uint64_t count;
        if (s->disk.in_flight && poll(&p, 1, 10) > 0 && read(p.fd, &count, sizeof count) < 0)
            cr_assert(eq(int, errno, EAGAIN));
    }
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

static void fill(const struct kv_key *hash, char part, uint8_t *to, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        to[i] = (uint8_t)(hash->bytes[i % 16] + i / 16 + (size_t)part);
}

static uint32_t write_object(struct direct *d, uint64_t offset, const struct kv_key *hash,
                             char part, size_t bytes)
{
    uint8_t *to = d->service.memory + offset;

    fill(hash, part, to, bytes);
    return lh_crc32c(0, to, bytes);
}

bool direct_store(struct direct *d, const struct kv_key *root, const struct kv_key *chain,
                  size_t first, size_t n)
{
    Longhaul__Kv__V1__PutRequest put = LONGHAUL__KV__V1__PUT_REQUEST__INIT;
    Longhaul__Kv__V1__CommitRequest commit = LONGHAUL__KV__V1__COMMIT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    const struct kv_root *r = kv_root_find(&d->service.index, root);
    struct kv_reply granted, done;
    uint32_t crc[256];

    put.root = keys(root, 1);
    put.chain = keys(chain + first, n - first);
    if (first)
        put.parent = keys(chain + first - 1, 1);
    put.first = (uint32_t)first;
    put.deadline_ms = 60000;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_PUT;
    q.put = &put;
    call(d, &q, &granted);
    const Longhaul__Kv__V1__PutReply *g = &granted.body.put;
    bool ok = granted.message.body_case == LONGHAUL__KV__V1__REPLY__BODY_PUT;
    if (ok && g->ticket) {
        for (size_t i = 0; i < g->n_blocks; i++)
            crc[i] = write_object(d, g->blocks[i], &chain[first + g->skip + i], 'B',
                                  r->geometry.block_bytes);
        if (g->state_granted)
            commit.state_crc32c =
                write_object(d, g->state, &chain[n - 1], 'S', r->geometry.state_bytes);
        commit.ticket = g->ticket;
        commit.n_block_crc32c = g->n_blocks;
        commit.block_crc32c = crc;
        q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_COMMIT;
        q.commit = &commit;
        call(d, &q, &done);
        ok = done.body.commit.stored;
        kv_reply_finish(&done);
    }
    kv_reply_finish(&granted);
    return ok;
}

/* As a client sees it: right, or refused by its checksum. */
static unsigned read_object(struct direct *d, uint64_t offset, uint32_t crc,
                            const struct kv_key *hash, char part, size_t bytes)
{
    const uint8_t *at = d->service.memory + offset;
    lh_autofree uint8_t *want = malloc(bytes);

    if (lh_crc32c(0, at, bytes) != crc)
        return 1;
    fill(hash, part, want, bytes);
    cr_assert(memcmp(at, want, bytes) == 0, "wrong bytes with a right checksum");
    return 0;
}

static void wait_for_disk(struct direct *d)
{
    struct pollfd p = {.fd = d->service.disk.event_fd, .events = POLLIN};
    uint64_t count;

    if (poll(&p, 1, 10) > 0)
        cr_assert(read(p.fd, &count, sizeof count) > 0 || errno == EAGAIN);
    kv_service_work(&d->service);
}

size_t direct_read(struct direct *d, const struct kv_key *root, const struct kv_key *chain,
                   size_t n, size_t at_least, uint32_t deadline_ms, unsigned *corrupt)
{
    Longhaul__Kv__V1__LookupRequest lookup = LONGHAUL__KV__V1__LOOKUP_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_reply r;
    unsigned bad = 0;

    lookup.root = keys(root, 1);
    lookup.chain = keys(chain, n);
    lookup.at_least = (uint32_t)at_least;
    lookup.deadline_ms = deadline_ms;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_LOOKUP;
    q.lookup = &lookup;
    while (!kv_service_handle(&d->service, &d->peer, &q, &r))
        wait_for_disk(d);
    const Longhaul__Kv__V1__LookupReply *l = &r.body.lookup;
    size_t units = l->units;
    uint64_t lease = l->lease;
    const struct kv_root *at = units ? kv_root_find(&d->service.index, root) : NULL;
    for (size_t i = at_least; i < units; i++)
        bad += read_object(d, l->blocks[i - at_least], l->block_crc32c[i - at_least], &chain[i],
                           'B', at->geometry.block_bytes);
    if (units)
        bad += read_object(d, l->state, l->state_crc32c, &chain[units - 1], 'S',
                           at->geometry.state_bytes);
    cr_assert(eq(int, code_of(&r), 0));
    if (lease)
        direct_release(d, lease, bad);
    *corrupt += bad;
    return bad ? 0 : units;
}

static void check_node(const struct kv_index *ix, const struct kv_node *n)
{
    if (n->phase != KV_VISIBLE || kv_root_of(ix, n)->retired)
        return;
    const struct kv_node *parent = kv_parent(ix, n);
    cr_assert(n->unit == 0 ? !parent : parent && parent->phase == KV_VISIBLE,
              "a hole before unit %u", n->unit);
    cr_assert(n->child || n->pins || kv_node_is_boundary(ix, n),
              "unit %u is a tail without a state", n->unit);
    bool hole = parent && n->parts[KV_BLOCK].at[KV_DISK] && !parent->parts[KV_BLOCK].at[KV_DISK];
    cr_assert(not(hole), "a hole on disk before unit %u", n->unit);
}

static uint64_t pages_of_node(const struct kv_index *ix, const struct kv_node *n, enum kv_tier tier)
{
    uint64_t pages = 0;

    for (int part = 0; part < KV_PARTS; part++)
        if (n->parts[part].at[tier])
            pages += kv_root_of(ix, n)->pages[part][tier];
    return pages;
}

static uint64_t bits_of(const struct kv_pages *p)
{
    uint64_t bits = 0;

    for (uint32_t i = 0; i < p->n; i++)
        bits += p->taken[i / 64] >> i % 64 & 1;
    return bits;
}

/* Pages of I/O under way belong to no node yet: loads hold memory, stores hold disk. */
static void count_io(const struct kv_service *s, uint64_t pages[KV_TIERS])
{
    for (int i = 0; s->has_disk && i < KV_DISK_IOS; i++) {
        const struct kv_request *r = &s->disk.requests[i];
        enum kv_tier tier = r->kind == KV_IO_LOAD ? KV_MEMORY : KV_DISK;
        for (uint32_t k = 0; r->busy && r->kind != KV_IO_SECTORS && k < r->n; k++) {
            const struct kv_node *n = kv_at(&s->index, r->objects[k].node);
            pages[tier] += kv_root_of(&s->index, n)->pages[r->objects[k].part][tier];
        }
    }
}

void direct_check(const struct direct *d)
{
    const struct kv_index *ix = &d->service.index;
    uint64_t objects = 0, pages[KV_TIERS] = {0};

    for (uint32_t i = 1; i < ix->touched; i++) {
        const struct kv_node *n = &ix->nodes[i];
        check_node(ix, n);
        for (int tier = 0; tier < KV_TIERS; tier++)
            pages[tier] += pages_of_node(ix, n, tier);
        for (int part = 0; n->phase == KV_VISIBLE && part < KV_PARTS; part++)
            objects += kv_object_exists(&n->parts[part]);
    }
    for (const struct kv_grant *g = d->peer.grants; g; g = g->next)
        pages[KV_MEMORY] += g->state.at[KV_MEMORY] ? g->root->pages[KV_STATE][KV_MEMORY] : 0;
    count_io(&d->service, pages);
    cr_assert(eq(u64, ix->objects, objects));
    cr_assert(eq(u64, d->service.pages.used, pages[KV_MEMORY]), "pages are lost or held twice");
    cr_assert(eq(u64, bits_of(&d->service.pages), pages[KV_MEMORY]));
    if (!d->service.has_disk)
        return;
    cr_assert(eq(u64, d->service.disk.pages.used, pages[KV_DISK]), "of the disk, too");
    cr_assert(eq(u64, bits_of(&d->service.disk.pages), pages[KV_DISK]));
}

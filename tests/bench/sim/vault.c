/* The real store, spoken to in its own messages without a socket.  Its segment is a memfd of which
 * no page is touched unless bytes are real, so a store of terabytes costs nothing but its index.
 * With real bytes every block and state is filled from its key, and compared when it is found. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kvstore/daemon/service.h"
#include "tests/bench/sim/sim.h"

typedef Longhaul__Kv__V1__Request Request;

enum { BLOCK_BYTES = 4096, STATE_BYTES = 16384 }; /* real ones */

struct sim_vault {
    struct kv_service service;
    struct kv_peer peer;
    struct kv_key root;
    uint8_t *bytes; /* the segment, when they are real */
    uint64_t wrong;
    size_t block_bytes, state_bytes;
    uint32_t *crc; /* of blocks whose bytes nobody has */
};

/* 0 or the failure's code; the reply is finished by the caller. */
static int call(struct sim_vault *v, const Request *q, struct kv_reply *r)
{
    kv_service_handle(&v->service, &v->peer, q, r);
    bool failed = r->message.body_case == LONGHAUL__KV__V1__REPLY__BODY_FAILURE;
    return failed ? r->body.failure.code : 0;
}

static ProtobufCBinaryData keys(const struct kv_key *k, size_t n)
{
    return (ProtobufCBinaryData){n * sizeof *k, (uint8_t *)k->bytes};
}

static int hello(struct sim_vault *v)
{
    Longhaul__Kv__V1__HelloRequest hello = LONGHAUL__KV__V1__HELLO_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_reply r;

    hello.protocol = KV_PROTOCOL;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_HELLO;
    q.hello = &hello;
    int code = call(v, &q, &r);
    kv_reply_finish(&r);
    return code;
}

static int open_root(struct sim_vault *v, unsigned unit_tokens)
{
    Longhaul__Kv__V1__OpenRootRequest open = LONGHAUL__KV__V1__OPEN_ROOT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_identity id = {.tenant = "sim"};
    struct kv_reply r;

    v->root = kv_root(&id);
    open.root = keys(&v->root, 1);
    open.block_bytes = (uint32_t)v->block_bytes;
    open.state_bytes = (uint32_t)v->state_bytes;
    open.unit_tokens = unit_tokens;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_OPEN_ROOT;
    q.open_root = &open;
    int code = call(v, &q, &r);
    kv_reply_finish(&r);
    return code;
}

static int map_segment(struct sim_vault *v, struct lh_error *err)
{
    const struct kv_segment *s = &v->service.segment;
    void *at = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s->fd, 0);

    if (at == MAP_FAILED)
        return lh_fail_errno(err, errno, "mapping the store");
    v->bytes = at;
    return 0;
}

struct sim_vault *sim_vault_create(const struct sim_model *m, bool real_bytes, struct lh_error *err)
{
    struct sim_vault *v = calloc(1, sizeof *v);
    /* Real objects are small, and so is their store: the same number of them fits. */
    uint64_t scale = real_bytes ? m->block_bytes / BLOCK_BYTES : 1;

    if (!v || !(v->crc = calloc(KV_MAX_UNITS, sizeof *v->crc))) {
        free(v);
        return lh_fail_errno(err, ENOMEM, "store"), NULL;
    }
    v->block_bytes = real_bytes ? BLOCK_BYTES : m->block_bytes;
    v->state_bytes = real_bytes ? STATE_BYTES : m->state_bytes;
    /* Ages are of the wall clock here, and simulated time runs ahead of it: by order of use. */
    struct kv_service_options o = {.memory_bytes = m->store_bytes / scale,
                                   .max_inflight_bytes = UINT64_MAX,
                                   .eviction = "lru"};
    int r = kv_service_init(&v->service, &o, err);
    if (r < 0) {
        free(v->crc);
        free(v);
        return NULL;
    }
    if (real_bytes)
        r = map_segment(v, err);
    if (r == 0 && (hello(v) || open_root(v, m->unit_tokens)))
        r = lh_fail(err, LH_INTERNAL, "the store does not take the model's geometry");
    if (r == 0)
        return v;
    sim_vault_destroy(v);
    return NULL;
}

void sim_vault_destroy(struct sim_vault *v)
{
    if (!v)
        return;
    if (v->bytes)
        munmap(v->bytes, v->service.segment.bytes);
    kv_service_forget(&v->service, &v->peer);
    kv_service_finish(&v->service);
    free(v->crc);
    free(v);
}

const struct kv_key *sim_vault_root(const struct sim_vault *v)
{
    return &v->root;
}

uint64_t sim_vault_used(const struct sim_vault *v)
{
    return (uint64_t)v->service.pages.used * v->service.segment.page_bytes;
}

uint64_t sim_vault_wrong(const struct sim_vault *v)
{
    return v->wrong;
}

static uint8_t byte_of(const struct kv_key *key, size_t i, uint8_t salt)
{
    return (uint8_t)(key->bytes[i % sizeof key->bytes] + i / sizeof key->bytes + salt);
}

static void fill(struct sim_vault *v, uint64_t at, const struct kv_key *key, size_t n, uint8_t salt)
{
    for (size_t i = 0; i < n; i++)
        v->bytes[at + i] = byte_of(key, i, salt);
}

static void compare(struct sim_vault *v, uint64_t at, const struct kv_key *key, size_t n,
                    uint8_t salt)
{
    for (size_t i = 0; i < n; i++)
        v->wrong += v->bytes[at + i] != byte_of(key, i, salt);
}

static bool commit(struct sim_vault *v, uint64_t ticket, size_t blocks)
{
    Longhaul__Kv__V1__CommitRequest commit = LONGHAUL__KV__V1__COMMIT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_reply r;

    commit.ticket = ticket;
    commit.n_block_crc32c = blocks;
    commit.block_crc32c = v->crc;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_COMMIT;
    q.commit = &commit;
    bool stored = call(v, &q, &r) == 0 && r.body.commit.stored;
    kv_reply_finish(&r);
    return stored;
}

bool sim_vault_put(struct sim_vault *v, const struct kv_key *chain, size_t first, size_t n)
{
    Longhaul__Kv__V1__PutRequest put = LONGHAUL__KV__V1__PUT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_reply r;

    put.root = keys(&v->root, 1);
    put.chain = keys(chain + first, n - first);
    if (first)
        put.parent = keys(chain + first - 1, 1);
    put.first = (uint32_t)first;
    put.deadline_ms = KV_TICKET_MAX_MS;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_PUT;
    q.put = &put;
    bool ok = call(v, &q, &r) == 0;
    const Longhaul__Kv__V1__PutReply *p = &r.body.put;
    for (size_t i = 0; ok && v->bytes && i < p->n_blocks; i++)
        fill(v, p->blocks[i], &chain[first + p->skip + i], v->block_bytes, 0);
    if (ok && v->bytes && p->state_granted)
        fill(v, p->state, &chain[n - 1], v->state_bytes, 1);
    if (ok && p->ticket)
        ok = commit(v, p->ticket, p->n_blocks);
    kv_reply_finish(&r);
    return ok;
}

size_t sim_vault_lookup(struct sim_vault *v, const struct kv_key *chain, size_t n, size_t at_least,
                        uint64_t *lease)
{
    Longhaul__Kv__V1__LookupRequest lookup = LONGHAUL__KV__V1__LOOKUP_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_reply r;

    lookup.root = keys(&v->root, 1);
    lookup.chain = keys(chain, n);
    lookup.at_least = (uint32_t)at_least;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_LOOKUP;
    q.lookup = &lookup;
    bool ok = call(v, &q, &r) == 0;
    const Longhaul__Kv__V1__LookupReply *l = &r.body.lookup;
    size_t units = ok ? l->units : 0;
    for (size_t i = 0; units && v->bytes && i < l->n_blocks; i++)
        compare(v, l->blocks[i], &chain[at_least + i], v->block_bytes, 0);
    if (units && v->bytes)
        compare(v, l->state, &chain[units - 1], v->state_bytes, 1);
    *lease = units ? l->lease : 0;
    kv_reply_finish(&r);
    return units;
}

void sim_vault_release(struct sim_vault *v, uint64_t lease)
{
    Longhaul__Kv__V1__ReleaseRequest release = LONGHAUL__KV__V1__RELEASE_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_reply r;

    if (!lease)
        return;
    release.lease = lease;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_RELEASE;
    q.release = &release;
    call(v, &q, &r);
    kv_reply_finish(&r);
}

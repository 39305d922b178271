/* PREFETCH and GET.  A PREFETCH finds a hit and keeps it pinned; a GET copies out of one, its own
 * if it was given none. */
#include <errno.h>
#include <stdlib.h>

#include "kvstore/client/internal.h"
#include "kvstore/protocol.h"
#include "proto/clock.h"
#include "proto/crc.h"
#include "proto/parse.h"

typedef Longhaul__Kv__V1__Request Request;
typedef Longhaul__Kv__V1__Reply Reply;
typedef Longhaul__Kv__V1__LookupReply LookupReply;

struct kv_hit {
    struct kv_client *client;
    struct kv_visit visit;
    Reply *reply;
    const LookupReply *found;
    size_t at_least;
    atomic_uint_fast64_t lease; /* 0 = given back */
};

/* How long kvstored may wait for its disk, so that the answer is here in time. */
static uint32_t wait_ms(int64_t deadline_ms)
{
    int ms = lh_ms_left(deadline_ms) / 4 * 3 + 1;

    return (uint32_t)(ms < KV_TICKET_MAX_MS ? ms : KV_TICKET_MAX_MS);
}

static Reply *ask(const struct kv_async *io, struct kv_visit *visit, struct lh_error *err)
{
    const struct kv_batch *b = &io->batch;
    Longhaul__Kv__V1__LookupRequest lookup = LONGHAUL__KV__V1__LOOKUP_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_key root;

    if (kv_client_root(io->client, &root, b->deadline_ms, err) < 0)
        return NULL;
    lookup.root = (ProtobufCBinaryData){sizeof root.bytes, root.bytes};
    lookup.chain.len = b->n * sizeof *b->chain;
    lookup.chain.data = (uint8_t *)b->chain->bytes;
    lookup.at_least = (uint32_t)b->first;
    lookup.trajectory = (char *)io->name;
    lookup.deadline_ms = wait_ms(b->deadline_ms);
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_LOOKUP;
    q.lookup = &lookup;
    return kv_client_call(io->client, &q, visit, b->deadline_ms, err);
}

static int check_reply(const struct kv_client *c, const Reply *r, size_t n, size_t at_least,
                       struct lh_error *err)
{
    const LookupReply *l = r->lookup;

    if (r->body_case != LONGHAUL__KV__V1__REPLY__BODY_LOOKUP)
        return lh_fail(err, LH_INTERNAL, "kvstored did not answer LOOKUP");
    if (!l->units)
        return lh_fail(err, LH_NOT_FOUND, "none of %zu units beyond %zu is stored", n, at_least);
    size_t blocks = c->options.block_bytes ? l->units - at_least : 0;
    if (l->units <= at_least || l->units > n || l->n_blocks != blocks ||
        l->n_block_crc32c != blocks)
        return lh_fail(err, LH_INTERNAL, "kvstored found %u units with %zu blocks", l->units,
                       l->n_blocks);
    return 0;
}

static struct kv_hit *find(const struct kv_async *io, struct kv_visit *visit, struct lh_error *err)
{
    struct kv_client *c = io->client;
    size_t n = io->batch.n, at_least = io->batch.first;

    if (n < 1 || n > KV_MAX_UNITS || at_least >= n)
        return lh_fail(err, LH_NOT_FOUND, "nothing to find in %zu units beyond %zu", n, at_least),
               NULL;
    lh_automsg(Longhaul__Kv__V1__Reply) r = ask(io, visit, err);
    if (!r || check_reply(c, r, n, at_least, err) < 0)
        return NULL;
    struct kv_hit *h = calloc(1, sizeof *h);
    if (!h) {
        kv_client_release(c, visit, r->lookup->lease, false);
        return lh_fail_errno(err, ENOMEM, "hit"), NULL;
    }
    *h = (struct kv_hit){.client = c, .visit = *visit, .found = r->lookup, .at_least = at_least};
    atomic_init(&h->lease, r->lookup->lease);
    h->reply = lh_steal(&r);
    visit->map = NULL;
    return h;
}

int64_t kv_run_prefetch(struct kv_async *io, struct lh_error *err)
{
    struct kv_visit visit = {0};

    io->hit_found = find(io, &visit, err);
    kv_map_unref(visit.map);
    if (!io->hit_found)
        return err->code;
    io->units = kv_hit_units(io->hit_found);
    return 0;
}

struct kv_hit *kv_lookup(struct kv_client *c, const struct kv_key *chain, size_t n, size_t at_least,
                         const char *trajectory, struct lh_error *err)
{
    struct kv_async io = {.client = c,
                          .kind = KV_PREFETCH,
                          .batch = {.chain = chain, .first = at_least, .n = n},
                          .name = trajectory ? trajectory : ""};

    kv_async_run_here(&io, err);
    return kv_async_take_hit(&io);
}

size_t kv_hit_units(const struct kv_hit *h)
{
    return h->found->units;
}

static void give_back(struct kv_hit *h, bool corrupt)
{
    uint64_t lease = atomic_exchange(&h->lease, 0);

    if (lease)
        kv_client_release(h->client, &h->visit, lease, corrupt);
}

/* The checksum is of the private copy: what was checked is what will be used, whatever happens to
 * the shared pages meanwhile. */
static int copy_out(struct kv_async *io, struct kv_hit *h, uint64_t offset, void *const *to,
                    unsigned pieces, size_t bytes, uint32_t want, struct lh_error *err)
{
    const uint8_t *from = kv_map_at(h->visit.map, offset, bytes);
    size_t piece = bytes / pieces;
    uint32_t crc = 0;
    int r = kv_async_check(io, err);

    if (r < 0)
        return r;
    for (unsigned i = 0; from && i < pieces; i++)
        crc = lh_crc32c_copy(crc, to[i], from + i * piece, piece);
    if (from && crc == want)
        return 0;
    give_back(h, true);
    return lh_fail(err, LH_DATA_LOSS, "the store returned %zu bytes with a wrong checksum", bytes);
}

static int64_t copy_units(struct kv_async *io, struct kv_hit *h, size_t n, struct lh_error *err)
{
    const struct kv_batch *b = &io->batch;
    const LookupReply *l = h->found;
    size_t bytes = io->client->options.block_bytes;
    int r = 0;

    if (b->first < n && (b->first < h->at_least || n - h->at_least > l->n_blocks || !b->blocks))
        return lh_fail(err, LH_OUT_OF_RANGE, "the hit has the blocks of units %zu to %u, not %zu",
                       h->at_least, l->units, n - 1);
    for (size_t u = b->first; r == 0 && u < n; u++)
        r = copy_out(io, h, l->blocks[u - h->at_least], b->blocks + (u - b->first) * b->pieces,
                     b->pieces, bytes, l->block_crc32c[u - h->at_least], err);
    return r < 0 ? r : (int64_t)((n - b->first) * bytes);
}

static int64_t copy_state(struct kv_async *io, struct kv_hit *h, struct lh_error *err)
{
    void *to = io->batch.state;
    size_t bytes = io->client->options.state_bytes;

    if (!to)
        return 0;
    if (!bytes)
        return lh_fail(err, LH_FAILED_PRECONDITION, "the model has no recurrent state");
    int r = copy_out(io, h, h->found->state, &to, 1, bytes, h->found->state_crc32c, err);
    return r < 0 ? r : (int64_t)bytes;
}

/* The last unit of one's own hit is known when it has been found. */
int64_t kv_run_get(struct kv_async *io, struct lh_error *err)
{
    struct kv_hit *h = io->batch.hit;

    if (!h && kv_run_prefetch(io, err) < 0)
        return err->code;
    lh_auto(kv_hit) own = kv_async_take_hit(io);
    h = h ? h : own;
    io->units = kv_hit_units(h);
    size_t n = own && !io->client->options.block_bytes ? io->batch.first
               : own                                   ? io->units
                                                       : io->batch.n;
    int64_t blocks = copy_units(io, h, n, err);
    int64_t state = blocks < 0 ? blocks : copy_state(io, h, err);
    return state < 0 ? state : blocks + state;
}

static int get_here(struct kv_hit *h, const struct kv_batch *b, struct lh_error *err)
{
    struct kv_async io = {.client = h->client, .kind = KV_GET, .batch = *b, .name = ""};
    int64_t r = kv_async_run_here(&io, err);

    return r < 0 ? (int)r : 0;
}

int kv_hit_block(struct kv_hit *h, size_t unit, void *to, struct lh_error *err)
{
    return get_here(h, &(struct kv_batch){.hit = h, .first = unit, .n = unit + 1, .blocks = &to},
                    err);
}

int kv_hit_state(struct kv_hit *h, void *to, struct lh_error *err)
{
    return get_here(h, &(struct kv_batch){.hit = h, .state = to}, err);
}

void kv_hit_destroy(struct kv_hit *h)
{
    if (!h)
        return;
    give_back(h, false);
    kv_map_unref(h->visit.map);
    lh_message_free(&h->reply->base);
    free(h);
}

/* kv_lookup and its hit. */
#include <errno.h>
#include <stdlib.h>

#include "kvstore/client/internal.h"
#include "kvstore/protocol.h"
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

static Reply *ask(struct kv_client *c, const struct kv_key *chain, size_t n, size_t at_least,
                  const char *trajectory, struct kv_visit *visit, struct lh_error *err)
{
    Longhaul__Kv__V1__LookupRequest lookup = LONGHAUL__KV__V1__LOOKUP_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    int64_t deadline = kv_client_deadline(c);
    struct kv_key root;

    if (kv_client_root(c, &root, deadline, err) < 0)
        return NULL;
    lookup.root = (ProtobufCBinaryData){sizeof root.bytes, root.bytes};
    lookup.chain.len = n * sizeof *chain;
    lookup.chain.data = (uint8_t *)chain->bytes;
    lookup.at_least = (uint32_t)at_least;
    lookup.trajectory = (char *)(trajectory ? trajectory : "");
    lookup.deadline_ms = (uint32_t)c->options.timeout_ms / 4 * 3 + 1; /* to be here in time */
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_LOOKUP;
    q.lookup = &lookup;
    return kv_client_call(c, &q, visit, deadline, err);
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

static struct kv_hit *lookup(struct kv_client *c, const struct kv_key *chain, size_t n,
                             size_t at_least, const char *trajectory, struct kv_visit *visit,
                             struct lh_error *err)
{
    if (n < 1 || n > KV_MAX_UNITS || at_least >= n)
        return lh_fail(err, LH_NOT_FOUND, "nothing to find in %zu units beyond %zu", n, at_least),
               NULL;
    lh_automsg(Longhaul__Kv__V1__Reply) r = ask(c, chain, n, at_least, trajectory, visit, err);
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

struct kv_hit *kv_lookup(struct kv_client *c, const struct kv_key *chain, size_t n, size_t at_least,
                         const char *trajectory, struct lh_error *err)
{
    struct kv_visit visit = {0};
    struct lh_error local;
    struct kv_hit *h = lookup(c, chain, n, at_least, trajectory, &visit, err ? err : &local);

    kv_map_unref(visit.map);
    return h;
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
static int copy_extent(struct kv_hit *h, uint64_t offset, size_t bytes, uint32_t crc, void *to,
                       struct lh_error *err)
{
    const uint8_t *from = kv_map_at(h->visit.map, offset, bytes);

    if (from && lh_crc32c_copy(0, to, from, bytes) == crc)
        return 0;
    give_back(h, true);
    return lh_fail(err, LH_DATA_LOSS, "the store returned %zu bytes with a wrong checksum", bytes);
}

int kv_hit_block(struct kv_hit *h, size_t unit, void *to, struct lh_error *err)
{
    const LookupReply *l = h->found;

    if (unit < h->at_least || unit - h->at_least >= l->n_blocks)
        return lh_fail(err, LH_OUT_OF_RANGE, "the hit has the blocks of units %zu to %u, not %zu",
                       h->at_least, l->units, unit);
    return copy_extent(h, l->blocks[unit - h->at_least], h->client->options.block_bytes,
                       l->block_crc32c[unit - h->at_least], to, err);
}

int kv_hit_state(struct kv_hit *h, void *to, struct lh_error *err)
{
    if (!h->client->options.state_bytes)
        return lh_fail(err, LH_FAILED_PRECONDITION, "the model has no recurrent state");
    return copy_extent(h, h->found->state, h->client->options.state_bytes, h->found->state_crc32c,
                       to, err);
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

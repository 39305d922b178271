/* PUT: ask for pages, copy into them, commit.  Nothing is visible before the commit, so every
 * way out in between is safe; giving the ticket up only returns the pages sooner. */
#include <errno.h>
#include <stdlib.h>

#include "kvstore/client/internal.h"
#include "kvstore/protocol.h"
#include "proto/clock.h"
#include "proto/crc.h"
#include "proto/parse.h"

typedef Longhaul__Kv__V1__Request Request;
typedef Longhaul__Kv__V1__Reply Reply;
typedef Longhaul__Kv__V1__PutReply PutReply;

enum { GRACE_MS = 1000 }; /* the ticket outlives the operation, so that nobody writes without one */

struct put {
    struct kv_async *io;
    struct kv_client *client;
    const struct kv_batch *batch;
    struct kv_visit visit;
    Reply *granted;
    uint32_t *crc; /* of the granted blocks */
    uint32_t state_crc;
    int64_t copied;
};

static uint32_t ticket_ms(int64_t deadline_ms)
{
    int ms = lh_ms_left(deadline_ms);

    return (uint32_t)(ms < KV_TICKET_MAX_MS - GRACE_MS ? ms + GRACE_MS : KV_TICKET_MAX_MS);
}

static Reply *ask(struct put *p, struct lh_error *err)
{
    const struct kv_batch *b = p->batch;
    Longhaul__Kv__V1__PutRequest put = LONGHAUL__KV__V1__PUT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_key root;

    if (kv_client_root(p->client, &root, b->deadline_ms, err) < 0)
        return NULL;
    put.root = (ProtobufCBinaryData){sizeof root.bytes, root.bytes};
    put.chain.len = (b->n - b->first) * sizeof *b->chain;
    put.chain.data = (uint8_t *)b->chain[b->first].bytes;
    if (b->first)
        put.parent =
            (ProtobufCBinaryData){sizeof root.bytes, (uint8_t *)b->chain[b->first - 1].bytes};
    put.first = (uint32_t)b->first;
    put.deadline_ms = ticket_ms(b->deadline_ms);
    put.trajectory = (char *)p->io->name;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_PUT;
    q.put = &put;
    return kv_client_call(p->client, &q, &p->visit, b->deadline_ms, err);
}

/* One object, from where its pieces lie. */
static int copy_in(struct put *p, uint64_t offset, void *const *from, unsigned pieces, size_t bytes,
                   uint32_t *crc, struct lh_error *err)
{
    uint8_t *to = kv_map_at(p->visit.map, offset, bytes);
    size_t piece = bytes / pieces;
    int r = kv_async_check(p->io, err);

    if (!to)
        return lh_fail(err, LH_INTERNAL, "kvstored granted pages outside of its segment");
    *crc = 0;
    for (unsigned i = 0; r == 0 && i < pieces; i++) {
        if (!from || !from[i])
            return lh_fail(err, LH_INVALID_ARGUMENT, "a unit or the state of the put has no bytes");
        *crc = lh_crc32c_copy(*crc, to + i * piece, from[i], piece);
    }
    p->copied += r == 0 ? (int64_t)bytes : 0;
    return r;
}

static int copy_granted(struct put *p, struct lh_error *err)
{
    const PutReply *g = p->granted->put;
    const struct kv_options *o = &p->client->options;
    const struct kv_batch *b = p->batch;
    void *state = b->state;
    int r = 0;

    p->crc = calloc(g->n_blocks + 1, sizeof *p->crc);
    if (!p->crc)
        return lh_fail_errno(err, ENOMEM, "put of %zu blocks", g->n_blocks);
    for (size_t i = 0; r == 0 && i < g->n_blocks; i++)
        r = copy_in(p, g->blocks[i], b->blocks ? b->blocks + (g->skip + i) * b->pieces : NULL,
                    b->pieces, o->block_bytes, &p->crc[i], err);
    if (r == 0 && g->state_granted)
        r = copy_in(p, g->state, &state, 1, o->state_bytes, &p->state_crc, err);
    return r;
}

static int commit(struct put *p, struct lh_error *err)
{
    Longhaul__Kv__V1__CommitRequest commit = LONGHAUL__KV__V1__COMMIT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;

    commit.ticket = p->granted->put->ticket;
    commit.n_block_crc32c = p->granted->put->n_blocks;
    commit.block_crc32c = p->crc;
    commit.state_crc32c = p->state_crc;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_COMMIT;
    q.commit = &commit;
    lh_automsg(Longhaul__Kv__V1__Reply) r =
        kv_client_call(p->client, &q, &p->visit, p->batch->deadline_ms, err);
    if (!r)
        return err->code;
    if (r->body_case != LONGHAUL__KV__V1__REPLY__BODY_COMMIT || !r->commit->stored)
        return lh_fail(err, LH_ABORTED, "its root was retired or its ticket expired meanwhile");
    return 0;
}

static int transfer(struct put *p, struct lh_error *err)
{
    const PutReply *g = p->granted->put;
    size_t units = p->batch->n - p->batch->first,
           expect = p->client->options.block_bytes ? units - g->skip : 0;

    int r = g->skip > units || g->n_blocks != expect
                ? lh_fail(err, LH_INTERNAL, "kvstored granted %zu blocks and skipped %u of %zu",
                          g->n_blocks, g->skip, units)
                : copy_granted(p, err);
    if (r == 0)
        return commit(p, err);
    kv_client_release(p->client, &p->visit, g->ticket, false);
    return r;
}

static int put(struct put *p, struct lh_error *err)
{
    if (p->batch->n <= p->batch->first || p->batch->n > KV_MAX_UNITS)
        return lh_fail(err, LH_INVALID_ARGUMENT, "no units, or more than %d", KV_MAX_UNITS);
    p->granted = ask(p, err);
    if (!p->granted)
        return err->code;
    if (p->granted->body_case != LONGHAUL__KV__V1__REPLY__BODY_PUT)
        return lh_fail(err, LH_INTERNAL, "kvstored did not answer PUT");
    return p->granted->put->ticket ? transfer(p, err) : 0;
}

int64_t kv_run_put(struct kv_async *io, struct lh_error *err)
{
    struct put p = {.io = io, .client = io->client, .batch = &io->batch};
    int r = put(&p, err);

    lh_message_free(p.granted ? &p.granted->base : NULL);
    kv_map_unref(p.visit.map);
    free(p.crc);
    return r < 0 ? lh_wrap(err, "put of units %zu to %zu", io->batch.first, io->batch.n) : p.copied;
}

int64_t kv_put(struct kv_client *c, const struct kv_key *chain, size_t first, size_t n,
               const void *const *blocks, const void *state, const char *trajectory,
               struct lh_error *err)
{
    struct kv_async io = {.client = c,
                          .kind = KV_PUT,
                          .batch = {.chain = chain,
                                    .first = first,
                                    .n = n,
                                    .blocks = (void *const *)blocks, /* a PUT only reads */
                                    .state = (void *)state},
                          .name = trajectory ? trajectory : ""};

    return kv_async_run_here(&io, err);
}

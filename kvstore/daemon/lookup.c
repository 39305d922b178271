/* LOOKUP and RELEASE. */
#include "kvstore/daemon/request.h"
#include "proto/log.h"

LH_LOG_COMPONENT("kvstored");

typedef Longhaul__Kv__V1__LookupRequest LookupRequest;
typedef Longhaul__Kv__V1__LookupReply LookupReply;

static int begin_reply(struct kv_call *c, LookupReply **r)
{
    *r = &c->reply->body.lookup;
    **r = (LookupReply)LONGHAUL__KV__V1__LOOKUP_REPLY__INIT;
    c->reply->message.body_case = LONGHAUL__KV__V1__REPLY__BODY_LOOKUP;
    c->reply->message.lookup = *r;
    return 0;
}

/* Fills the arrays from the back: only parents are known. */
static int list_blocks(struct kv_call *c, const struct kv_node *hit, uint32_t from, LookupReply *r,
                       struct lh_error *err)
{
    uint64_t page = c->service->segment.page_bytes;
    size_t n = hit->unit + 1 - from;

    r->blocks = kv_reply_alloc(c->reply, n, sizeof *r->blocks);
    r->block_crc32c = kv_reply_alloc(c->reply, n, sizeof *r->block_crc32c);
    if (!r->blocks || !r->block_crc32c)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "out of memory");
    r->n_blocks = r->n_block_crc32c = n;
    for (const struct kv_node *at = hit; n--; at = at->parent) {
        r->blocks[n] = at->block.page * page;
        r->block_crc32c[n] = at->block.crc32c;
    }
    return 0;
}

static int fill_hit(struct kv_call *c, struct kv_node *hit, uint32_t from, LookupReply *r,
                    struct lh_error *err)
{
    r->units = hit->unit + 1;
    r->state = hit->state.page * (uint64_t)c->service->segment.page_bytes;
    r->state_crc32c = hit->state.crc32c;
    return hit->root->geometry.block_bytes ? list_blocks(c, hit, from, r, err) : 0;
}

static uint64_t hit_bytes(const struct kv_node *hit, uint32_t from)
{
    const struct kv_geometry *g = &hit->root->geometry;

    return (uint64_t)(hit->unit + 1 - from) * g->block_bytes + g->state_bytes;
}

static int grant_hit(struct kv_call *c, struct kv_node *hit, uint32_t from, LookupReply *r,
                     struct lh_error *err)
{
    struct kv_service *s = c->service;
    uint64_t bytes = hit_bytes(hit, from);

    if (!kv_flow_admits(&s->flow, &c->peer->share, KV_LOAD, bytes))
        return kv_refuse(c, KV_INFLIGHT, bytes, err);
    int e = fill_hit(c, hit, from, r, err);
    if (e < 0)
        return e;
    struct kv_grant *g = kv_grant_new(c, KV_LOAD, hit->root, hit, bytes, KV_LEASE_MS, err);
    if (!g)
        return err->code;
    kv_node_touch(&s->index, hit);
    g->from = from;
    r->lease = g->id;
    r->queue_wait_ms = g->wait_ms;
    s->count.hits++;
    s->count.hit_units += hit->unit + 1 - from;
    s->count.loaded_bytes += bytes;
    return 0;
}

int kv_handle_lookup(struct kv_call *c, struct lh_error *err)
{
    const LookupRequest *q = c->request->lookup;
    struct kv_index *ix = &c->service->index;
    const struct kv_key *chain;
    struct kv_key key;
    LookupReply *reply;
    size_t n;
    int r = kv_check_key(&q->root, "root", &key, err);

    if (r == 0)
        r = kv_check_chain(&q->chain, &chain, &n, err);
    if (r == 0)
        r = kv_check_text(q->trajectory, KV_TRAJECTORY_MAX, "trajectory", err);
    if (r < 0)
        return r;
    const struct kv_root *root = kv_root_find(ix, &key);
    struct kv_node *hit = root ? kv_node_match(ix, root, chain, n, q->at_least) : NULL;
    c->service->count.lookups++;
    begin_reply(c, &reply);
    return hit ? grant_hit(c, hit, q->at_least, reply, err) : 0;
}

/* Which of the leased objects is corrupt is not known here, and reading them all would stall
 * everybody else; so what the lease covered goes, with all that continues it.  It is recomputed, as
 * any miss. */
static void drop_leased(struct kv_service *s, const struct kv_grant *g)
{
    struct kv_node *top = g->at;

    while (top->unit > g->from)
        top = top->parent;
    if (top->phase == KV_VISIBLE && !g->root->retired)
        kv_node_drop(&s->index, top);
}

int kv_handle_release(struct kv_call *c, struct lh_error *err)
{
    const Longhaul__Kv__V1__ReleaseRequest *q = c->request->release;
    struct kv_grant *g = kv_grant_find(c->peer, q->lease);

    if (g && q->corrupt && g->direction == KV_LOAD) {
        lh_warn("corrupt", "client=%s units=%u..%u bytes=%llu", c->peer->name, g->from, g->at->unit,
                (unsigned long long)g->bytes);
        c->service->count.corrupt++;
        drop_leased(c->service, g);
    }
    if (g)
        kv_grant_end(c->service, c->peer, g, g->direction == KV_LOAD && !q->corrupt);
    return 0;
}

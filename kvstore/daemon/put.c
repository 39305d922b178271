/* PUT and COMMIT.  What is stored already of a put is always its beginning, because a node's
 * ancestors are stored too; so a reply says how many units to skip and grants pages for the rest.
 */
#include "kvstore/daemon/request.h"
#include "kvstore/tier/room.h"

typedef Longhaul__Kv__V1__PutRequest PutRequest;
typedef Longhaul__Kv__V1__PutReply PutReply;
typedef Longhaul__Kv__V1__CommitRequest CommitRequest;

struct put {
    struct kv_root *root;
    const struct kv_key *chain;
    size_t n;             /* units of the request */
    uint32_t first, skip; /* skip: of them stored already */
    struct kv_node *at;   /* last unit that is stored; NULL = none, and first is 0 */
    bool state;           /* must be granted */
    uint64_t bytes;       /* to be granted */
};

static int check_put(struct kv_call *c, const PutRequest *q, struct put *p, struct lh_error *err)
{
    struct kv_key root;
    int r = kv_check_key(&q->root, "root", &root, err);

    if (r == 0)
        r = kv_check_chain(&q->chain, &p->chain, &p->n, err);
    if (r == 0)
        r = kv_check_text(q->trajectory, KV_TRAJECTORY_MAX, "trajectory", err);
    if (r < 0)
        return r;
    if (q->first >= KV_MAX_UNITS || q->first + p->n > KV_MAX_UNITS)
        return lh_fail(err, LH_INVALID_ARGUMENT, "first is %u with %zu units, a sequence has %d",
                       q->first, p->n, KV_MAX_UNITS);
    if (q->deadline_ms < 1 || q->deadline_ms > KV_TICKET_MAX_MS)
        return lh_fail(err, LH_INVALID_ARGUMENT, "deadline_ms is %u, not 1 to %d", q->deadline_ms,
                       KV_TICKET_MAX_MS);
    p->first = q->first;
    p->root = kv_root_find(&c->service->index, &root);
    if (!p->root)
        return lh_fail(err, LH_FAILED_PRECONDITION, "the root is not open or has been retired");
    return 0;
}

/* Where the put continues: its own last stored unit, or its parent. */
static int find_place(struct kv_call *c, const PutRequest *q, struct put *p, struct lh_error *err)
{
    struct kv_index *ix = &c->service->index;
    struct kv_key parent;

    p->at = kv_node_deepest(ix, p->root, p->chain, p->n, p->first);
    p->skip = p->at ? p->at->unit - p->first + 1 : 0;
    if (!p->at && p->first) {
        int r = kv_check_key(&q->parent, "parent", &parent, err);
        if (r < 0)
            return r;
        p->at = kv_node_find(ix, p->root, &parent);
        if (!p->at || p->at->unit != p->first - 1)
            return kv_refuse(c, KV_PARENT, 0, err);
    }
    const struct kv_geometry *g = &p->root->geometry;
    p->state = g->state_bytes && !(p->skip == p->n && kv_object_exists(&p->at->parts[KV_STATE]));
    p->bytes = (p->n - p->skip) * (uint64_t)g->block_bytes + (p->state ? g->state_bytes : 0);
    return 0;
}

static bool grant_object(struct kv_service *s, struct kv_root *root, enum kv_part part,
                         struct kv_object *o)
{
    uint32_t page;

    if (!kv_room_take(&s->index, root, part, KV_MEMORY, &page))
        return false;
    o->at[KV_MEMORY] = page + 1;
    return true;
}

static bool grant_blocks(struct kv_service *s, struct kv_grant *g, const struct kv_key *chain,
                         size_t n, uint32_t first)
{
    struct kv_node *tail = NULL;

    for (size_t i = 0; i < n; i++) {
        struct kv_node *at = kv_room_node(&s->index, g->root, &chain[i], first + (uint32_t)i);
        if (!at)
            return false;
        if (tail)
            tail->next = kv_ref_of(&s->index, at);
        else
            g->pending = at;
        tail = at;
        g->n_pending++;
        if (g->root->geometry.block_bytes &&
            !grant_object(s, g->root, KV_BLOCK, &at->parts[KV_BLOCK]))
            return false;
    }
    return true;
}

bool kv_grant_pages(struct kv_service *s, struct kv_grant *g, const struct kv_key *chain, size_t n,
                    uint32_t first, bool state)
{
    return g->bytes <= s->segment.bytes && grant_blocks(s, g, chain, n, first) &&
           (!state || grant_object(s, g->root, KV_STATE, &g->state));
}

static uint64_t pages_of(const struct put *p)
{
    const struct kv_root *r = p->root;
    uint64_t blocks = r->geometry.block_bytes ? p->n - p->skip : 0;

    return blocks * r->pages[KV_BLOCK][KV_MEMORY] + (p->state ? r->pages[KV_STATE][KV_MEMORY] : 0);
}

/* Beyond the quota even with nothing else of the tenant's there is refused before anything goes. */
static bool exceeds_quota(const struct kv_service *s, const struct put *p)
{
    uint64_t quota = s->index.tenants[p->root->tenant].quota[KV_MEMORY];

    return quota && pages_of(p) > quota;
}

static int refuse_put(struct kv_call *c, const struct put *p, struct lh_error *err)
{
    struct kv_index *ix = &c->service->index;
    const uint32_t block = p->root->pages[KV_BLOCK][KV_MEMORY],
                   state = p->root->pages[KV_STATE][KV_MEMORY];
    bool quota = exceeds_quota(c->service, p) ||
                 !kv_tenant_has_room(ix, p->root, KV_MEMORY, block > state ? block : state);

    ix->tenants[p->root->tenant].refused += quota;
    return kv_refuse(c, quota ? KV_QUOTA : KV_FULL, p->bytes, err);
}

static int fill_put(struct kv_call *c, const struct put *p, const struct kv_grant *g,
                    struct lh_error *err)
{
    PutReply *r = &c->reply->body.put;
    uint64_t page = c->service->segment.page_bytes;

    *r = (PutReply)LONGHAUL__KV__V1__PUT_REPLY__INIT;
    c->reply->message.body_case = LONGHAUL__KV__V1__REPLY__BODY_PUT;
    c->reply->message.put = r;
    r->skip = p->skip;
    if (!g)
        return 0;
    r->ticket = g->id;
    r->state_granted = p->state;
    r->state = p->state ? (g->state.at[KV_MEMORY] - 1) * page : 0;
    if (!p->root->geometry.block_bytes)
        return 0;
    r->blocks = kv_reply_alloc(c->reply, g->n_pending, sizeof *r->blocks);
    if (g->n_pending && !r->blocks)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "out of memory");
    for (const struct kv_node *n = g->pending; n; n = kv_at(&c->service->index, n->next))
        r->blocks[r->n_blocks++] = (n->parts[KV_BLOCK].at[KV_MEMORY] - 1) * page;
    return 0;
}

static int grant(struct kv_call *c, const struct put *p, struct lh_error *err)
{
    struct kv_service *s = c->service;

    if (p->skip == p->n && !p->state) {
        kv_node_touch(&s->index, p->at);
        return fill_put(c, p, NULL, err);
    }
    if (exceeds_quota(s, p))
        return refuse_put(c, p, err);
    if (!kv_flow_admits(&s->flow, &c->peer->share, KV_SPILL, p->bytes))
        return kv_refuse(c, KV_INFLIGHT, p->bytes, err);
    struct kv_grant *g = kv_grant_new(c, KV_SPILL, p->root, p->at, 0, p->bytes,
                                      (int)c->request->put->deadline_ms, err);
    if (!g)
        return err->code;
    const struct kv_key *rest = p->chain + p->skip;
    bool room = kv_grant_pages(s, g, rest, p->n - p->skip, p->first + p->skip, p->state);
    int r = room ? fill_put(c, p, g, err) : refuse_put(c, p, err);
    if (r < 0)
        kv_grant_end(s, c->peer, g, false);
    return r;
}

static void remember(struct kv_call *c, const struct put *p, int r)
{
    struct kv_trail *t =
        kv_trail_of(&c->service->trails, c->request->put->trajectory, &p->root->key, c->now_us);

    if (!t)
        return;
    t->puts++;
    t->refused += r < 0;
    t->put_bytes += r < 0 ? 0 : p->bytes;
    if (r == 0)
        t->put = p->chain[p->n - 1];
}

int kv_handle_put(struct kv_call *c, struct lh_error *err)
{
    const PutRequest *q = c->request->put;
    struct put p = {0};
    int r = check_put(c, q, &p, err);

    if (r == 0 && c->service->away)
        r = kv_refuse(c, KV_AWAY, 0, err);
    if (r < 0)
        return r;
    r = find_place(c, q, &p, err);
    if (r == 0)
        r = grant(c, &p, err);
    remember(c, &p, r);
    return r;
}

void kv_service_offer(struct kv_service *s, struct kv_node *n)
{
    if (s->has_disk)
        kv_exchange_offer(&s->exchange, n);
    if (s->has_remote)
        kv_push_offer(s, n);
}

/* Another client may have stored the same units meanwhile: theirs stay, ours go back.
 * What was pulled goes to the tiers below when it is read again. */
static struct kv_node *link_pending(struct kv_service *s, struct kv_grant *g, const uint32_t *crc)
{
    struct kv_index *ix = &s->index;
    struct kv_node *parent = g->at;

    for (struct kv_node *n; (n = g->pending);) {
        struct kv_node *there = kv_node_find(ix, g->root, &n->hash);
        if (there && (kv_parent(ix, there) != parent || there->unit != n->unit)) {
            if (parent)
                kv_index_settle(ix, parent);
            return NULL;
        }
        g->pending = kv_at(ix, n->next);
        if (crc && n->parts[KV_BLOCK].at[KV_MEMORY])
            n->parts[KV_BLOCK].crc32c = *crc++;
        if (there) {
            kv_node_discard(ix, n);
        } else {
            kv_node_link(ix, n, parent);
            if (!n->pulled)
                kv_service_offer(s, n);
        }
        parent = there ? there : n;
    }
    return parent;
}

struct kv_node *kv_grant_publish(struct kv_service *s, struct kv_grant *g, const uint32_t *crc)
{
    if (g->root->retired || (g->at && g->at->phase != KV_VISIBLE))
        return NULL;
    struct kv_node *last = link_pending(s, g, crc);
    if (last && g->state.at[KV_MEMORY] && !kv_object_exists(&last->parts[KV_STATE])) {
        kv_node_set_state(&s->index, last, &g->state);
        g->state = (struct kv_object){0};
        if (!last->pulled)
            kv_service_offer(s, last);
    }
    return last;
}

static bool commit(struct kv_service *s, struct kv_grant *g, const CommitRequest *q)
{
    g->state.crc32c = q->state_crc32c;
    struct kv_node *last = kv_grant_publish(s, g, q->block_crc32c);
    if (!last)
        return false;
    kv_node_touch(&s->index, last);
    s->count.puts++;
    s->count.put_bytes += g->bytes;
    return true;
}

int kv_handle_commit(struct kv_call *c, struct lh_error *err)
{
    const CommitRequest *q = c->request->commit;
    struct kv_grant *g = kv_grant_find(c->peer, q->ticket);
    Longhaul__Kv__V1__CommitReply *r = &c->reply->body.commit;

    if (g && g->direction != KV_SPILL)
        return lh_fail(err, LH_INVALID_ARGUMENT, "%llu is a lease, not a ticket",
                       (unsigned long long)q->ticket);
    size_t blocks = g && g->root->geometry.block_bytes ? g->n_pending : 0;
    if (g && q->n_block_crc32c != blocks)
        return lh_fail(err, LH_INVALID_ARGUMENT, "%zu checksums for %zu blocks", q->n_block_crc32c,
                       blocks);
    *r = (Longhaul__Kv__V1__CommitReply)LONGHAUL__KV__V1__COMMIT_REPLY__INIT;
    c->reply->message.body_case = LONGHAUL__KV__V1__REPLY__BODY_COMMIT;
    c->reply->message.commit = r;
    if (!g)
        return 0;
    r->stored = commit(c->service, g, q);
    kv_grant_end(c->service, c->peer, g, r->stored);
    return 0;
}

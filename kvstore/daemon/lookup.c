/* LOOKUP and RELEASE.  A chain that may go on in a remote tier waits for the pull that finds out
 * (pull.h).  Then a hit of which something is on disk alone is read: the request waits with its
 * units pinned, and is answered when they are in memory, or at its deadline with what is. */
#include "kvstore/daemon/request.h"
#include "proto/log.h"

LH_LOG_COMPONENT("kvstored");

typedef Longhaul__Kv__V1__LookupRequest LookupRequest;
typedef Longhaul__Kv__V1__LookupReply LookupReply;

enum { WAIT_MS = 500 }; /* for the disk, when the client does not say */

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
    for (const struct kv_node *at = hit; n--; at = kv_parent(&c->service->index, at)) {
        r->blocks[n] = (at->parts[KV_BLOCK].at[KV_MEMORY] - 1) * page;
        r->block_crc32c[n] = at->parts[KV_BLOCK].crc32c;
    }
    return 0;
}

static int fill_hit(struct kv_call *c, struct kv_node *hit, uint32_t from, LookupReply *r,
                    struct lh_error *err)
{
    const struct kv_geometry *g = &kv_root_of(&c->service->index, hit)->geometry;
    const struct kv_object *state = &hit->parts[KV_STATE];

    r->units = hit->unit + 1u;
    if (g->state_bytes)
        r->state = (state->at[KV_MEMORY] - 1) * (uint64_t)c->service->segment.page_bytes;
    r->state_crc32c = state->crc32c;
    return g->block_bytes ? list_blocks(c, hit, from, r, err) : 0;
}

static uint64_t hit_bytes(const struct kv_index *ix, const struct kv_node *hit, uint32_t from)
{
    const struct kv_geometry *g = &kv_root_of(ix, hit)->geometry;

    return (uint64_t)(hit->unit + 1u - from) * g->block_bytes + g->state_bytes;
}

static struct kv_trail *trail_of(struct kv_call *c, const struct kv_key *root)
{
    return kv_trail_of(&c->service->trails, c->request->lookup->trajectory, root, c->now_us);
}

static void remember_hit(struct kv_call *c, const struct kv_node *hit, uint64_t units,
                         uint64_t bytes)
{
    struct kv_trail *t = trail_of(c, &kv_root_of(&c->service->index, hit)->key);

    if (!t)
        return;
    t->hits++;
    t->hit_units += units;
    t->loaded_bytes += bytes;
    t->hit = hit->hash;
}

static int grant_hit(struct kv_call *c, struct kv_node *hit, uint32_t from, LookupReply *r,
                     struct lh_error *err)
{
    struct kv_service *s = c->service;
    uint64_t bytes = hit_bytes(&s->index, hit, from);

    if (!kv_flow_admits(&s->flow, &c->peer->share, KV_LOAD, bytes))
        return kv_refuse(c, KV_INFLIGHT, bytes, err);
    int e = fill_hit(c, hit, from, r, err);
    if (e < 0)
        return e;
    struct kv_grant *g =
        kv_grant_new(c, KV_LOAD, kv_root_of(&s->index, hit), hit, from, bytes, KV_LEASE_MS, err);
    if (!g)
        return err->code;
    if (!hit->pulled || hit->seen)
        kv_node_touch(&s->index, hit);
    for (struct kv_node *n = hit; n && n->unit >= from; n = kv_parent(&s->index, n)) {
        kv_pull_read(s, n);
        kv_node_read(&s->index, n);
    }
    r->lease = g->id;
    r->queue_wait_ms = g->wait_ms;
    s->count.hits++;
    s->count.hit_units += hit->unit + 1 - from;
    s->count.loaded_bytes += bytes;
    remember_hit(c, hit, hit->unit + 1 - from, bytes);
    return 0;
}

/* ---- waiting for the disk ---- */

static void begin_wait(struct kv_call *c, struct kv_node *hit, uint32_t from, int64_t deadline_us)
{
    c->peer->wait = (struct kv_wait){.hit = hit, .from = from, .deadline_us = deadline_us};
    kv_path_take(&c->service->index, hit, from);
}

void kv_wait_end(struct kv_service *s, struct kv_peer *p)
{
    if (p->wait.hit)
        kv_path_give(&s->index, p->wait.hit, p->wait.from);
    p->wait = (struct kv_wait){0};
}

/* The longest boundary up to which nothing is missing in memory. */
static struct kv_node *loaded_boundary(struct kv_index *ix, struct kv_node *hit, uint32_t from)
{
    struct kv_node *best = NULL;

    for (struct kv_node *n = hit; n && n->unit >= from; n = kv_parent(ix, n)) {
        if (n->phase != KV_VISIBLE ||
            (n->parts[KV_BLOCK].at[KV_DISK] && !n->parts[KV_BLOCK].at[KV_MEMORY]))
            best = NULL;
        else if (!best && kv_node_is_boundary(ix, n) && kv_exchange_is_loaded(ix, n, n->unit))
            best = n;
    }
    return best;
}

struct lookup {
    struct kv_key key;
    const struct kv_key *chain;
    size_t n;
    uint32_t at_least;
    LookupReply *reply;
};

static struct kv_node *match(struct kv_call *c, const struct lookup *l)
{
    const struct kv_root *root = kv_root_find(&c->service->index, &l->key);

    if (!root || c->service->away)
        return NULL;
    return kv_node_match(&c->service->index, root, l->chain, l->n, l->at_least);
}

static int answer_with(struct kv_call *c, const struct lookup *l, struct kv_node *hit,
                       struct lh_error *err)
{
    int r = hit ? grant_hit(c, hit, l->at_least, l->reply, err) : 0;

    kv_wait_end(c->service, c->peer);
    return r;
}

/* What died while it was read is looked up anew: what is left of it is shorter every time. */
static int go_on(struct kv_call *c, const struct lookup *l, struct lh_error *err)
{
    struct kv_service *s = c->service;
    struct kv_wait *w = &c->peer->wait;
    enum kv_fetch fetch = KV_FETCHED;

    while (w->hit) {
        if (w->hit->phase == KV_VISIBLE && !kv_root_of(&s->index, w->hit)->retired) {
            fetch = kv_exchange_load(&s->exchange, w->hit, w->from, c->now_us);
            break;
        }
        int64_t deadline_us = w->deadline_us;
        kv_wait_end(s, c->peer);
        struct kv_node *hit = match(c, l);
        if (hit)
            begin_wait(c, hit, l->at_least, deadline_us);
    }
    if (fetch == KV_FETCHED)
        return answer_with(c, l, w->hit, err);
    if (fetch == KV_FETCHING && c->now_us < w->deadline_us) {
        c->later = true;
        return 0;
    }
    s->count.late++;
    return answer_with(c, l, loaded_boundary(&s->index, w->hit, w->from), err);
}

static int check_lookup(const LookupRequest *q, struct lookup *l, struct lh_error *err)
{
    int r = kv_check_key(&q->root, "root", &l->key, err);

    if (r == 0)
        r = kv_check_chain(&q->chain, &l->chain, &l->n, err);
    if (r == 0)
        r = kv_check_text(q->trajectory, KV_TRAJECTORY_MAX, "trajectory", err);
    if (r == 0 && q->deadline_ms > KV_TICKET_MAX_MS)
        return lh_fail(err, LH_INVALID_ARGUMENT, "deadline_ms is %u, at most %d", q->deadline_ms,
                       KV_TICKET_MAX_MS);
    l->at_least = q->at_least;
    return r;
}

static void begin_lookup(struct kv_call *c, const struct lookup *l, uint32_t wait_ms)
{
    struct kv_service *s = c->service;
    struct kv_root *root = kv_root_find(&s->index, &l->key);
    struct kv_wait *w = &c->peer->wait;
    struct kv_trail *trail = trail_of(c, &l->key);

    if (trail)
        trail->lookups++;
    s->count.lookups++;
    w->deadline_us = c->now_us + (wait_ms ? wait_ms : WAIT_MS) * INT64_C(1000);
    if (!s->has_remote || !root || s->away)
        return;
    struct kv_pull_wanted wanted = {.root = root,
                                    .chain = l->chain,
                                    .n = l->n,
                                    .at_least = l->at_least,
                                    .deadline_us = w->deadline_us};
    w->pull = kv_pull_begin(s, &wanted, c->now_us);
}

static bool waits_for_pull(struct kv_call *c, const struct lookup *l, uint32_t wait_ms)
{
    struct kv_wait *w = &c->peer->wait;

    if (!w->deadline_us)
        begin_lookup(c, l, wait_ms);
    bool going = kv_pull_is_going(&c->service->pulls, w->pull);
    c->later = going && c->now_us < w->deadline_us;
    c->service->count.late += going && !c->later;
    return c->later;
}

int kv_handle_lookup(struct kv_call *c, struct lh_error *err)
{
    const LookupRequest *q = c->request->lookup;
    struct kv_service *s = c->service;
    struct lookup l;
    int r = check_lookup(q, &l, err);

    if (r < 0)
        return r;
    begin_reply(c, &l.reply);
    if (c->peer->wait.hit)
        return go_on(c, &l, err);
    if (waits_for_pull(c, &l, q->deadline_ms))
        return 0;
    struct kv_node *hit = match(c, &l);
    if (!hit || !s->has_disk || kv_exchange_is_loaded(&s->index, hit, l.at_least))
        return answer_with(c, &l, hit, err);
    begin_wait(c, hit, l.at_least, c->peer->wait.deadline_us);
    return go_on(c, &l, err);
}

/* Which of the leased objects is corrupt is not known here, and reading them all would stall
 * everybody else; so what the lease covered goes, with all that continues it.  It is recomputed, as
 * any miss. */
static void drop_leased(struct kv_service *s, const struct kv_grant *g)
{
    struct kv_node *top = g->at;

    while (top->unit > g->from)
        top = kv_parent(&s->index, top);
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

#include "kvstore/daemon/pull.h"

#include <stdlib.h>
#include <string.h>

#include "kvstore/daemon/request.h"

enum { MEMORY_SHARE = 2 /* a half */ };

struct kv_pull {
    uint64_t id;
    struct kv_grant grant; /* of nobody: pages, root and the pinned node that it continues */
    struct kv_key *chain;  /* of units first..first+n-1 */
    uint32_t first, n, at_least;
    int64_t deadline_us;  /* of the lookup that began it */
    struct kv_node *next; /* the first whose block has not been asked for */
    bool loading, state_asked, failed;
    unsigned in_flight;
};

static struct kv_pull **free_place(struct kv_pulls *p)
{
    for (int i = 0; i < KV_PULLS; i++)
        if (!p->at[i])
            return &p->at[i];
    return NULL;
}

bool kv_pull_is_going(const struct kv_pulls *p, uint64_t id)
{
    for (int i = 0; id && i < KV_PULLS; i++)
        if (p->at[i] && p->at[i]->id == id)
            return true;
    return false;
}

/* Somebody else's that brings the same units. */
static uint64_t find_same(const struct kv_pulls *p, const struct kv_root *root,
                          const struct kv_key *first)
{
    for (int i = 0; i < KV_PULLS; i++)
        if (p->at[i] && p->at[i]->grant.root == root && kv_key_equal(p->at[i]->chain, first))
            return p->at[i]->id;
    return 0;
}

static struct kv_remote_object describe(const struct kv_pull *p, const struct kv_key *hash,
                                        uint32_t unit, enum kv_part part)
{
    const struct kv_root *r = p->grant.root;

    return (struct kv_remote_object){.root = r->key,
                                     .hash = *hash,
                                     .unit = unit,
                                     .unit_tokens = r->geometry.unit_tokens,
                                     .bytes = kv_root_bytes(r, part),
                                     .part = (uint8_t)part};
}

static void begin_find(struct kv_service *s, struct kv_pull *p)
{
    struct kv_remote_op op = {.kind = KV_REMOTE_FIND,
                              .object = describe(p, p->chain, p->first, KV_BLOCK),
                              .search = {.chain = p->chain,
                                         .n = p->n,
                                         .stateful = p->grant.root->geometry.state_bytes != 0},
                              .owner = p};

    op.object.bytes = 0;
    p->in_flight++;
    kv_remote_begin(&s->remote, &op);
}

static struct kv_pull *create(struct kv_service *s, const struct kv_pull_wanted *w,
                              struct kv_node *at, uint32_t first)
{
    struct kv_pull *p = calloc(1, sizeof *p);
    size_t n = w->n - first;

    if (!p || !(p->chain = malloc(n * sizeof *p->chain))) {
        free(p);
        return NULL;
    }
    memcpy(p->chain, w->chain + first, n * sizeof *p->chain);
    p->id = ++s->pulls.next_id;
    p->grant = (struct kv_grant){.root = w->root, .at = at};
    p->first = first;
    p->n = (uint32_t)n;
    p->at_least = w->at_least;
    p->deadline_us = w->deadline_us;
    w->root->refs++;
    if (at)
        kv_node_pin(&s->index, at);
    return p;
}

static void destroy(struct kv_service *s, struct kv_pull *p)
{
    kv_grant_give_pages(s, &p->grant);
    if (p->grant.at)
        kv_node_unpin(&s->index, p->grant.at);
    p->grant.root->refs--;
    free(p->chain);
    free(p);
}

uint64_t kv_pull_begin(struct kv_service *s, const struct kv_pull_wanted *w, int64_t now_us)
{
    if (!w->root->geometry.block_bytes)
        return 0;
    struct kv_node *at = kv_node_deepest(&s->index, w->root, w->chain, w->n, 0);
    uint32_t first = at ? at->unit + 1u : 0;
    if (first >= w->n)
        return 0;
    uint64_t same = find_same(&s->pulls, w->root, &w->chain[first]);
    if (same || !kv_remote_ready(&s->remote, KV_GATE_IN, now_us))
        return same;
    struct kv_pull **place = free_place(&s->pulls);
    struct kv_pull *p = place ? create(s, w, at, first) : NULL;
    if (!p)
        return 0;
    *place = p;
    begin_find(s, p);
    return p->id;
}

/* ---- what was found ---- */

static bool is_too_late(struct kv_service *s, const struct kv_pull *p, int64_t now_us)
{
    double left_s = (double)(p->deadline_us - now_us) / 1e6;

    return kv_remote_load_s(&s->remote, p->grant.bytes, now_us) > left_s;
}

/* Bytes that one pull may have: a share of the memory, or of what its tenant may have of it. */
static uint64_t most_bytes(const struct kv_service *s, const struct kv_pull *p)
{
    uint64_t quota = s->index.tenants[p->grant.root->tenant].quota[KV_MEMORY];

    return (quota ? quota * s->segment.page_bytes : s->segment.bytes) / MEMORY_SHARE;
}

static void begin_loading(struct kv_service *s, struct kv_pull *p, uint32_t found, int64_t now_us)
{
    const struct kv_geometry *g = &p->grant.root->geometry;

    p->grant.bytes = (uint64_t)found * g->block_bytes + g->state_bytes;
    bool big = p->grant.bytes > most_bytes(s, p);
    bool late = !big && is_too_late(s, p, now_us);
    bool room = !big && !late &&
                kv_grant_pages(s, &p->grant, p->chain, found, p->first, g->state_bytes != 0);
    s->pulls.late += late;
    s->pulls.full += !late && !room;
    p->failed = !room;
    p->loading = room;
    p->next = p->grant.pending;
    p->state_asked = !g->state_bytes;
}

static void take_found(struct kv_service *s, struct kv_pull *p, const struct kv_remote_op *op,
                       int64_t now_us)
{
    uint32_t found = op->search.found;

    if (p->failed || op->status < 0 || !found || p->first + found <= p->at_least ||
        p->grant.root->retired)
        p->failed = true;
    else
        begin_loading(s, p, found, now_us);
}

static void take_loaded(struct kv_service *s, struct kv_pull *p, const struct kv_remote_op *op)
{
    if (op->status < 0)
        p->failed = true;
    else if (op->object.part == KV_STATE)
        p->grant.state.crc32c = op->object.crc32c;
    else
        kv_at(&s->index, op->node)->parts[KV_BLOCK].crc32c = op->object.crc32c;
}

void kv_pull_ended(struct kv_service *s, const struct kv_remote_op *op, int64_t now_us)
{
    struct kv_pull *p = op->owner;

    p->in_flight--;
    if (op->kind == KV_REMOTE_FIND)
        take_found(s, p, op, now_us);
    else
        take_loaded(s, p, op);
}

/* ---- loading ---- */

static void begin_load(struct kv_service *s, struct kv_pull *p, const struct kv_node *n,
                       enum kv_part part, const struct kv_object *o)
{
    uint64_t page = o->at[KV_MEMORY] - 1;
    struct kv_remote_op op = {.kind = KV_REMOTE_LOAD,
                              .object = describe(p, &n->hash, n->unit, part),
                              .bytes = s->memory + page * s->segment.page_bytes,
                              .owner = p,
                              .node = kv_ref_of(&s->index, n)};

    p->in_flight++;
    kv_remote_begin(&s->remote, &op);
}

static struct kv_node *last_pending(const struct kv_service *s, const struct kv_pull *p)
{
    struct kv_node *n = p->grant.pending;

    while (n->next)
        n = kv_at(&s->index, n->next);
    return n;
}

/* The state first: it is the largest. */
static void ask_for_more(struct kv_service *s, struct kv_pull *p, int64_t now_us)
{
    if (kv_remote_is_paused(&s->remote, KV_GATE_IN))
        p->failed = true;
    while (!p->failed && (p->next || !p->state_asked) &&
           kv_remote_ready(&s->remote, KV_GATE_IN, now_us)) {
        if (!p->state_asked) {
            p->state_asked = true;
            begin_load(s, p, last_pending(s, p), KV_STATE, &p->grant.state);
            continue;
        }
        begin_load(s, p, p->next, KV_BLOCK, &p->next->parts[KV_BLOCK]);
        p->next = kv_at(&s->index, p->next->next);
    }
}

/* It is as recent as it is, but not used yet. */
static void publish(struct kv_service *s, struct kv_pull *p)
{
    for (struct kv_node *n = p->grant.pending; n; n = kv_at(&s->index, n->next)) {
        n->pulled = true;
        n->remote = 1u << KV_BLOCK;
    }
    struct kv_node *last = kv_grant_publish(s, &p->grant, NULL);
    if (!last)
        return;
    if (p->grant.root->geometry.state_bytes)
        last->remote |= 1u << KV_STATE;
    kv_index_settle(&s->index, last);
    s->pulls.hits++;
}

void kv_pull_work(struct kv_service *s, int64_t now_us)
{
    for (int i = 0; i < KV_PULLS; i++) {
        struct kv_pull *p = s->pulls.at[i];
        if (p && p->loading)
            ask_for_more(s, p, now_us);
        if (!p || p->in_flight || (!p->failed && (p->next || !p->state_asked)))
            continue;
        if (!p->failed)
            publish(s, p);
        s->pulls.at[i] = NULL;
        destroy(s, p);
    }
}

void kv_pull_read(struct kv_service *s, struct kv_node *n)
{
    if (!n->pulled || !n->seen)
        return;
    n->pulled = false;
    kv_service_offer(s, n);
}

void kv_pull_abandon(struct kv_pulls *p)
{
    for (int i = 0; i < KV_PULLS; i++)
        if (p->at[i])
            p->at[i]->failed = true;
}

void kv_pull_finish(struct kv_service *s)
{
    for (int i = 0; i < KV_PULLS; i++)
        if (s->pulls.at[i])
            destroy(s, s->pulls.at[i]);
    s->pulls = (struct kv_pulls){0};
}

/* STAT and LIST: what operators see. */
#include <string.h>

#include "kvstore/daemon/request.h"

typedef Longhaul__Kv__V1__Entry Entry;
typedef Longhaul__Kv__V1__Extent Extent;
typedef Longhaul__Kv__V1__ListReply ListReply;

enum { NODES_A_REQUEST = 65536 };

static void stat_flow(const struct kv_service *s, int64_t now_us, Longhaul__Kv__V1__StatReply *r)
{
    const struct kv_flow *f = &s->flow;

    r->load_queue_wait_ms = kv_flow_wait_ms(f, KV_LOAD, now_us);
    r->store_queue_wait_ms = kv_flow_wait_ms(f, KV_SPILL, now_us);
    r->load_bytes_in_flight = f->lanes[KV_LOAD].in_flight;
    r->store_bytes_in_flight = f->lanes[KV_SPILL].in_flight;
    r->refused_full = f->refused[KV_FULL];
    r->refused_inflight = f->refused[KV_INFLIGHT];
    r->refused_parent = f->refused[KV_PARENT];
    r->refused_quota = f->refused[KV_QUOTA];
    r->refused_away = f->refused[KV_AWAY];
    r->refused = r->refused_full + r->refused_inflight + r->refused_parent + r->refused_quota +
                 r->refused_away;
}

static void stat_disk(const struct kv_service *s, Longhaul__Kv__V1__StatReply *r)
{
    const struct kv_disk *d = &s->disk;
    const struct kv_exchange *x = &s->exchange;

    r->late = s->count.late;
    if (!s->has_disk)
        return;
    r->disk_path = s->disk.path;
    r->disk_capacity_bytes = (uint64_t)d->pages.n * d->page_bytes;
    r->disk_used_bytes = (uint64_t)d->pages.used * d->page_bytes;
    r->disk_stored = x->stored;
    r->disk_stored_bytes = x->stored_bytes;
    r->disk_loaded = x->loaded;
    r->disk_loaded_bytes = x->loaded_bytes;
    r->disk_read_errors = d->read_errors;
    r->disk_write_errors = d->write_errors;
    r->disk_stalls = d->stalls;
    r->disk_stalled = d->stalled;
    r->disk_waiting = x->n;
    r->left_memory = s->index.left_memory;
}

static void stat_remote(struct kv_service *s, Longhaul__Kv__V1__StatReply *r)
{
    const struct kv_remote_counters *n = &s->remote.count;

    if (!s->has_remote)
        return;
    r->remote = (char *)s->remote.location;
    r->remote_trouble = s->remote.trouble;
    r->remote_stored = n->stored;
    r->remote_stored_bytes = n->stored_bytes;
    r->remote_loaded = n->loaded;
    r->remote_loaded_bytes = n->loaded_bytes;
    r->remote_lookups = n->finds;
    r->remote_hits = s->pulls.hits;
    r->remote_missing = n->missing;
    r->remote_corrupt = n->corrupt;
    r->remote_errors = n->errors;
    r->remote_late = s->pulls.late;
    r->remote_full = s->pulls.full;
    r->remote_skipped = s->push.skipped;
    r->remote_waiting = s->push.n;
    for (int gate = 0; gate < KV_GATES; gate++) {
        r->remote_paused |= (uint32_t)kv_remote_is_paused(&s->remote, gate) << gate;
        r->remote_in_flight += s->remote.in_flight[gate];
    }
    r->remote_load_bytes_per_s = s->remote.rate[KV_GATE_IN].per_s;
    r->remote_store_bytes_per_s = s->remote.rate[KV_GATE_OUT].per_s;
}

static void stat_index(const struct kv_service *s, Longhaul__Kv__V1__StatReply *r)
{
    const struct kv_index *ix = &s->index;

    r->objects = ix->objects;
    r->roots = ix->n_roots;
    r->pinned = ix->pinned;
    r->evicted = ix->evicted;
    r->superseded = ix->superseded;
    for (const struct kv_root *root = ix->retired; root; root = root->next)
        r->reclaiming++;
}

/* All of them in one allocation. */
struct tenants {
    Longhaul__Kv__V1__TenantStat stats[KV_MAX_TENANTS], *list[KV_MAX_TENANTS];
};

static int stat_tenants(struct kv_call *c, Longhaul__Kv__V1__StatReply *r, struct lh_error *err)
{
    const struct kv_index *ix = &c->service->index;
    struct tenants *all = kv_reply_alloc(c->reply, 1, sizeof *all);
    uint32_t page[KV_TIERS];

    if (!all)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "out of memory");
    kv_service_page_bytes(c->service, page);
    for (unsigned i = 0; i < ix->n_tenants; i++) {
        const struct kv_tenant *t = &ix->tenants[i];
        Longhaul__Kv__V1__TenantStat *to = &all->stats[i];
        if (!kv_tenant_is_used(ix, i))
            continue;
        all->list[r->n_tenants++] = to;
        *to = (Longhaul__Kv__V1__TenantStat)LONGHAUL__KV__V1__TENANT_STAT__INIT;
        to->name = (char *)t->name;
        to->used_bytes = t->granted[KV_MEMORY] * page[KV_MEMORY];
        to->quota_bytes = t->quota[KV_MEMORY] * page[KV_MEMORY];
        to->disk_used_bytes = t->granted[KV_DISK] * page[KV_DISK];
        to->disk_quota_bytes = t->quota[KV_DISK] * page[KV_DISK];
        to->refused = t->refused;
        to->evicted = t->evicted;
    }
    r->tenants = all->list;
    return 0;
}

int kv_handle_stat(struct kv_call *c, struct lh_error *err)
{
    struct kv_service *s = c->service;
    const struct kv_counters *n = &s->count;
    Longhaul__Kv__V1__StatReply *r = &c->reply->body.stat;

    *r = (Longhaul__Kv__V1__StatReply)LONGHAUL__KV__V1__STAT_REPLY__INIT;
    c->reply->message.body_case = LONGHAUL__KV__V1__REPLY__BODY_STAT;
    c->reply->message.stat = r;
    r->capacity_bytes = s->segment.bytes;
    r->page_bytes = s->segment.page_bytes;
    r->used_bytes = (uint64_t)s->pages.used * s->segment.page_bytes;
    r->clients = s->clients;
    r->resident_bytes = kv_segment_resident(&s->segment);
    r->away = s->away;
    r->puts = n->puts;
    r->put_bytes = n->put_bytes;
    r->lookups = n->lookups;
    r->hits = n->hits;
    r->hit_units = n->hit_units;
    r->loaded_bytes = n->loaded_bytes;
    r->corrupt = n->corrupt;
    r->expired = n->expired;
    r->retired = n->retired;
    stat_index(s, r);
    stat_disk(s, r);
    stat_remote(s, r);
    stat_flow(s, c->now_us, r);
    return stat_tenants(c, r, err);
}

static double idle_s(uint64_t used_us, int64_t now_us)
{
    return used_us && now_us > (int64_t)used_us ? (double)(now_us - (int64_t)used_us) / 1e6 : 0;
}

static void begin_entry(Entry *e, const struct kv_root *root)
{
    *e = (Entry)LONGHAUL__KV__V1__ENTRY__INIT;
    e->root.data = (uint8_t *)root->key.bytes;
    e->root.len = sizeof root->key.bytes;
    e->policy_step = root->policy_step;
    e->retired = root->retired;
}

void kv_entry_of_root(struct kv_entry *e, const struct kv_root *r, int64_t now_us)
{
    begin_entry(&e->entry, r);
    e->entry.idle_s = idle_s(r->used, now_us);
    e->entry.objects = r->objects;
    e->entry.bytes = r->bytes;
}

static Extent *fill_extent(Extent *x, uint64_t offset, uint32_t bytes, const struct kv_object *o)
{
    *x = (Extent)LONGHAUL__KV__V1__EXTENT__INIT;
    x->offset = offset;
    x->bytes = bytes;
    x->crc32c = o->crc32c;
    return x;
}

bool kv_entry_of_object(struct kv_entry *slot, const struct kv_service *s, const struct kv_node *n,
                        enum kv_part part, int64_t now_us)
{
    const struct kv_object *at = &n->parts[part];
    const struct kv_root *root = kv_root_of(&s->index, n);
    uint32_t bytes = part == KV_BLOCK ? root->geometry.block_bytes : root->geometry.state_bytes;
    uint64_t memory_page = s->segment.page_bytes, disk_page = s->disk.page_bytes;
    Entry *e = &slot->entry;

    if (!kv_object_exists(at))
        return false;
    begin_entry(e, root);
    e->idle_s = idle_s(n->rank, now_us);
    if (at->at[KV_MEMORY])
        e->extent = fill_extent(&slot->memory, (at->at[KV_MEMORY] - 1) * memory_page, bytes, at);
    if (at->at[KV_DISK])
        e->disk = fill_extent(&slot->disk, s->disk.data_at + (at->at[KV_DISK] - 1) * disk_page,
                              bytes, at);
    e->part =
        part == KV_BLOCK ? LONGHAUL__KV__V1__PART__PART_BLOCK : LONGHAUL__KV__V1__PART__PART_STATE;
    e->unit = n->unit;
    e->bytes = bytes;
    e->hash.data = (uint8_t *)n->hash.bytes;
    e->hash.len = sizeof n->hash.bytes;
    return true;
}

/* Entries in one allocation. */
struct page {
    ListReply *reply;
    struct kv_entry *slots;
    size_t limit;
    int64_t now_us;
};

static struct kv_entry *next_slot(const struct page *p)
{
    return &p->slots[p->reply->n_entries];
}

static void add_entry(struct page *p)
{
    p->reply->entries[p->reply->n_entries] = &next_slot(p)->entry;
    p->reply->n_entries++;
}

static void list_roots(const struct kv_service *s, struct page *p)
{
    const struct kv_root *lists[] = {s->index.live, s->index.retired};

    for (int i = 0; i < 2; i++)
        for (const struct kv_root *r = lists[i]; r && p->reply->n_entries < p->limit; r = r->next) {
            kv_entry_of_root(next_slot(p), r, p->now_us);
            add_entry(p);
        }
}

/* By place in the table, which never moves: a page is cheap however large the store is, and an
 * object that stays is listed exactly once. */
static void list_objects(const struct kv_service *s, struct page *p, const struct kv_root *root,
                         uint64_t after)
{
    const struct kv_index *ix = &s->index;
    uint64_t end = after + NODES_A_REQUEST;

    for (; after < ix->touched && after < end && p->reply->n_entries + 2 <= p->limit; after++) {
        const struct kv_node *n = &ix->nodes[after];
        if (n->phase != KV_VISIBLE || n->root != root->slot)
            continue;
        for (int part = 0; part < KV_PARTS; part++)
            if (kv_entry_of_object(next_slot(p), s, n, part, p->now_us))
                add_entry(p);
    }
    p->reply->next = after < ix->touched ? after : 0;
}

int kv_handle_list(struct kv_call *c, struct lh_error *err)
{
    const Longhaul__Kv__V1__ListRequest *q = c->request->list;
    struct kv_service *s = c->service;
    ListReply *r = &c->reply->body.list;
    struct page p = {.reply = r, .limit = q->limit, .now_us = c->now_us};
    struct kv_key key;

    if (q->limit < 2 || q->limit > KV_LIST_MAX)
        return lh_fail(err, LH_INVALID_ARGUMENT, "limit is %u, not 2 to %d", q->limit, KV_LIST_MAX);
    if (q->root.len && kv_check_key(&q->root, "root", &key, err) < 0)
        return LH_INVALID_ARGUMENT;
    const struct kv_root *root = q->root.len ? kv_root_find(&s->index, &key) : NULL;
    if (q->root.len && !root)
        return lh_fail(err, LH_NOT_FOUND, "no live root of this key");
    *r = (ListReply)LONGHAUL__KV__V1__LIST_REPLY__INIT;
    c->reply->message.body_case = LONGHAUL__KV__V1__REPLY__BODY_LIST;
    c->reply->message.list = r;
    p.slots = kv_reply_alloc(c->reply, p.limit, sizeof *p.slots);
    r->entries = kv_reply_alloc(c->reply, p.limit, sizeof *r->entries);
    if (!p.slots || !r->entries)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "out of memory");
    if (root)
        list_objects(s, &p, root, q->after);
    else
        list_roots(s, &p);
    return 0;
}

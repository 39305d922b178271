#include "kvstore/tier/exchange.h"

#include <errno.h>
#include <stdlib.h>

#include "kvstore/tier/room.h"

enum { WRITE_BACK_SHARE = 2 /* a half */, STORING_SHARE = 4 /* a quarter */ };

int kv_exchange_init(struct kv_exchange *x, struct kv_index *ix, struct kv_disk *d, uint8_t *memory,
                     uint32_t memory_page_bytes, struct lh_error *err)
{
    *x = (struct kv_exchange){.index = ix,
                              .disk = d,
                              .memory = memory,
                              .memory_page_bytes = memory_page_bytes,
                              .queue = calloc((size_t)ix->max_nodes + 1, sizeof *x->queue)};
    return x->queue ? 0 : lh_fail_errno(err, ENOMEM, "queue of %u writes", ix->max_nodes);
}

void kv_exchange_finish(struct kv_exchange *x)
{
    free(x->queue);
    *x = (struct kv_exchange){0};
}

void kv_exchange_offer(struct kv_exchange *x, struct kv_node *n)
{
    uint32_t room = x->index->max_nodes + 1;

    if (n->queued || kv_node_is_clean(n) || !kv_root_of(x->index, n)->geometry.block_bytes)
        return;
    n->queued = true; /* at most once, so the ring has room for every node */
    x->queue[(x->head + x->n++) % room] = kv_ref_of(x->index, n);
}

static uint32_t bytes_of(const struct kv_root *r, enum kv_part part)
{
    return part == KV_BLOCK ? r->geometry.block_bytes : r->geometry.state_bytes;
}

static void begin(struct kv_exchange *x, enum kv_io_kind kind, struct kv_node *n, enum kv_part part,
                  uint32_t page, uint32_t memory_page, int64_t now_us)
{
    struct kv_io io = {.node = kv_ref_of(x->index, n),
                       .part = part,
                       .page = page,
                       .memory_page = memory_page,
                       .bytes = bytes_of(kv_root_of(x->index, n), part),
                       .era = x->era};

    kv_node_pin(x->index, n);
    kv_node_hold(x->index, n);
    kv_disk_begin(x->disk, kind, io, x->memory + (uint64_t)memory_page * x->memory_page_bytes,
                  now_us);
}

/* ---- out ---- */

static bool wants_storing(const struct kv_index *ix, const struct kv_node *n, enum kv_part part)
{
    const struct kv_object *o = &n->parts[part];

    return o->at[KV_MEMORY] && !o->at[KV_DISK] && !(n->writing & 1u << part) &&
           !(part == KV_STATE && kv_node_is_superseded(ix, n));
}

/* False when there is no room for it on disk. */
static bool store(struct kv_exchange *x, struct kv_node *n, enum kv_part part, int64_t now_us)
{
    uint32_t page;

    kv_node_pin(x->index, n);
    bool room = kv_room_take(x->index, kv_root_of(x->index, n), part, KV_DISK, &page);
    if (room) {
        n->writing |= 1u << part;
        x->storing += kv_root_of(x->index, n)->pages[part][KV_MEMORY];
        begin(x, KV_IO_STORE, n, part, page, n->parts[part].at[KV_MEMORY] - 1, now_us);
    }
    kv_node_unpin(x->index, n);
    return room;
}

enum turn { GONE, LATER, NOW };

/* A parent that is queued behind (its place in the queue was another node's before) comes first.
 * One that could not be written keeps its children from disk, or there would be a hole. */
static enum turn turn_of(const struct kv_index *ix, const struct kv_node *n)
{
    const struct kv_node *parent = kv_parent(ix, n);

    if (n->phase != KV_VISIBLE || kv_root_of(ix, n)->retired || kv_node_is_clean(n))
        return GONE;
    if (!parent || parent->parts[KV_BLOCK].at[KV_DISK] || parent->writing & 1u << KV_BLOCK)
        return NOW;
    return parent->queued ? LATER : GONE;
}

static struct kv_node *take_first(struct kv_exchange *x)
{
    struct kv_node *n = kv_at(x->index, x->queue[x->head]);

    x->head = (x->head + 1) % (x->index->max_nodes + 1);
    x->n--;
    n->queued = false;
    return n;
}

static enum turn first_turn(const struct kv_exchange *x)
{
    const struct kv_node *n = kv_at(x->index, x->queue[x->head]);

    return n->queued ? turn_of(x->index, n) : GONE;
}

static bool is_at_quota(const struct kv_index *ix, const struct kv_node *n, enum kv_part part)
{
    const struct kv_root *root = kv_root_of(ix, n);

    return !kv_tenant_has_room(ix, root, KV_DISK, root->pages[part][KV_DISK]);
}

/* Takes one node from the queue; false when there is no room for it on disk.  A tenant at its quota
 * holds up nobody else. */
static bool write_first(struct kv_exchange *x, enum turn turn, int64_t now_us)
{
    struct kv_node *n = take_first(x);

    if (turn == LATER)
        kv_exchange_offer(x, n);
    for (int part = 0; turn == NOW && part < KV_PARTS; part++)
        if (wants_storing(x->index, n, part) && !store(x, n, part, now_us))
            return is_at_quota(x->index, n, part);
    return true;
}

/* A node may need a request for each of its parts.  What is being written cannot leave memory, and
 * puts must always find something that can. */
static bool may_write(const struct kv_exchange *x, int64_t now_us)
{
    struct kv_disk *d = x->disk;

    return x->storing * STORING_SHARE <= x->index->pages[KV_MEMORY]->n &&
           d->of_kind[KV_IO_STORE] + KV_PARTS <= KV_DISK_STORES &&
           d->in_flight + KV_PARTS <= KV_DISK_IOS && kv_disk_ready(d, KV_IO_STORE, now_us);
}

static bool memory_is_short(const struct kv_exchange *x)
{
    const struct kv_pages *memory = x->index->pages[KV_MEMORY];

    return x->all || (uint64_t)memory->used * WRITE_BACK_SHARE > memory->n;
}

static void write_back(struct kv_exchange *x, int64_t now_us)
{
    while (x->n) {
        enum turn turn = first_turn(x);
        if (turn == GONE) {
            take_first(x);
            x->skipped++;
            continue;
        }
        if (!memory_is_short(x) || !may_write(x, now_us) || !write_first(x, turn, now_us))
            return;
    }
}

/* What it continues is on disk: it began before and has ended before. */
static bool has_ground(const struct kv_index *ix, const struct kv_node *n, enum kv_part part)
{
    const struct kv_node *below = part == KV_STATE ? n : kv_parent(ix, n);

    return !below || below->parts[KV_BLOCK].at[KV_DISK];
}

/* Stored is what is still wanted; else the extent goes back.  The node is pinned by its I/O. */
static void end_store(struct kv_exchange *x, const struct kv_io *io, struct kv_node *n, bool done)
{
    struct kv_root *root = kv_root_of(x->index, n);
    struct kv_object gone = {.at[KV_DISK] = io->page + 1};

    n->writing &= (uint8_t) ~(1u << io->part);
    x->storing -= root->pages[io->part][KV_MEMORY];
    if (!done || n->phase != KV_VISIBLE || !n->parts[io->part].at[KV_MEMORY] ||
        !has_ground(x->index, n, io->part)) {
        kv_object_free(x->index, root, io->part, &gone, KV_DISK);
    } else {
        kv_node_place(x->index, n, io->part, KV_DISK, io->page);
        kv_disk_claim(x->disk, io->page, io->node, io->part);
        x->stored++;
        x->stored_bytes += bytes_of(root, io->part);
    }
}

/* ---- in ---- */

static bool is_missing(const struct kv_node *n, enum kv_part part)
{
    return !n->parts[part].at[KV_MEMORY] && n->parts[part].at[KV_DISK];
}

static bool load_part(struct kv_exchange *x, struct kv_node *n, enum kv_part part, int64_t now_us)
{
    uint32_t page;

    if (!kv_room_take(x->index, kv_root_of(x->index, n), part, KV_MEMORY, &page))
        return false;
    n->loading |= 1u << part;
    begin(x, KV_IO_LOAD, n, part, n->parts[part].at[KV_DISK] - 1, page, now_us);
    return true;
}

enum kv_fetch kv_exchange_load(struct kv_exchange *x, struct kv_node *hit, uint32_t from,
                               int64_t now_us)
{
    enum kv_fetch result = KV_FETCHED;

    for (struct kv_node *n = hit; n && n->unit >= from; n = kv_parent(x->index, n))
        for (int part = 0; part < (n == hit ? KV_PARTS : KV_STATE); part++) {
            if (!is_missing(n, part))
                continue;
            result = KV_FETCHING;
            bool ready = kv_disk_ready(x->disk, KV_IO_LOAD, now_us);
            if (x->disk->stalled)
                return KV_UNFETCHABLE;
            if (n->loading & 1u << part)
                continue;
            if (!ready)
                return KV_FETCHING;
            if (!load_part(x, n, part, now_us))
                return KV_UNFETCHABLE;
        }
    return result;
}

bool kv_exchange_is_loaded(const struct kv_index *ix, const struct kv_node *hit, uint32_t from)
{
    if (is_missing(hit, KV_STATE))
        return false;
    for (const struct kv_node *n = hit; n && n->unit >= from; n = kv_parent(ix, n))
        if (is_missing(n, KV_BLOCK))
            return false;
    return true;
}

/* What cannot be read is lost, and with it all that continues it.  What was read into memory that
 * has been given away meanwhile is still on disk. */
static void end_load(struct kv_exchange *x, const struct kv_io *io, struct kv_node *n, bool done)
{
    struct kv_root *root = kv_root_of(x->index, n);
    struct kv_object unused = {.at[KV_MEMORY] = io->memory_page + 1};

    n->loading &= (uint8_t) ~(1u << io->part);
    if (!done || io->era != x->era || n->phase != KV_VISIBLE) {
        kv_object_free(x->index, root, io->part, &unused, KV_MEMORY);
        if (!done && n->phase == KV_VISIBLE && !root->retired)
            kv_node_drop(x->index, n);
        return;
    }
    n->probation = !n->seen;
    kv_node_place(x->index, n, io->part, KV_MEMORY, io->memory_page);
    x->loaded++;
    x->loaded_bytes += bytes_of(root, io->part);
}

void kv_exchange_end_era(struct kv_exchange *x)
{
    x->era++;
}

void kv_exchange_work(struct kv_exchange *x, int64_t now_us)
{
    for (struct kv_done done; kv_disk_ended(x->disk, &done, now_us);) {
        struct kv_node *n = kv_at(x->index, done.io.node);
        (done.kind == KV_IO_LOAD ? end_load : end_store)(x, &done.io, n, done.well);
        kv_node_unhold(x->index, n);
        kv_node_unpin(x->index, n);
    }
    kv_disk_watch(x->disk, now_us);
    write_back(x, now_us);
    kv_disk_flush(x->disk, x->index, now_us);
    kv_disk_submit(x->disk);
}

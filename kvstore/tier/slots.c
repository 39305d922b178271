/* The index in the file: which sectors of it no longer say what the index in memory says, and the
 * writing of them, neighbours in one request. */
#include <string.h>

#include "kvstore/tier/disk.h"
#include "proto/crc.h"

enum { WORD = 64 };

uint32_t kv_disk_root_crc(const struct kv_disk_root *r)
{
    return lh_crc32c(0, r, offsetof(struct kv_disk_root, crc32c));
}

uint32_t kv_disk_slot_crc(const struct kv_disk_slot *s, const struct kv_key *root)
{
    return lh_crc32c(lh_crc32c(0, s, offsetof(struct kv_disk_slot, crc32c)), root, sizeof *root);
}

static void set_bit(uint64_t *bits, uint32_t i, bool value)
{
    uint64_t bit = (uint64_t)1 << i % WORD;

    bits[i / WORD] = value ? bits[i / WORD] | bit : bits[i / WORD] & ~bit;
}

static bool get_bit(const uint64_t *bits, uint32_t i)
{
    return bits[i / WORD] >> i % WORD & 1;
}

/* First sector from `at` on that has to be written and is not being written; `sectors` = none. */
static uint32_t next_due(const struct kv_disk *d, uint32_t at)
{
    while (at < d->sectors) {
        uint64_t due = (d->stale[at / WORD] & ~d->writing[at / WORD]) >> at % WORD;
        if (due)
            return at + (uint32_t)__builtin_ctzll(due);
        at = (at / WORD + 1) * WORD;
    }
    return d->sectors;
}

static void mark_stale(struct kv_disk *d, uint32_t sector)
{
    d->n_stale += !get_bit(d->stale, sector);
    set_bit(d->stale, sector, true);
}

static uint32_t sector_of(uint32_t page)
{
    return KV_ROOT_SECTORS + page / KV_SLOTS_A_SECTOR;
}

void kv_disk_claim(struct kv_disk *d, uint32_t page, kv_ref node, enum kv_part part)
{
    d->owner[page] = node << 1 | part;
    mark_stale(d, sector_of(page));
}

void kv_disk_forget(struct kv_disk *d, uint32_t page)
{
    if (!d->owner[page])
        return;
    d->owner[page] = 0;
    mark_stale(d, sector_of(page));
}

void kv_disk_root_changed(struct kv_disk *d, uint32_t slot)
{
    mark_stale(d, slot / KV_SLOTS_A_SECTOR);
}

static struct kv_disk_root describe_root(const struct kv_root *r)
{
    struct kv_disk_root out = {0};

    if (!r || r->retired)
        return out;
    out = (struct kv_disk_root){.key = r->key,
                                .used = 1,
                                .block_bytes = r->geometry.block_bytes,
                                .state_bytes = r->geometry.state_bytes,
                                .unit_tokens = r->geometry.unit_tokens,
                                .policy_step = r->policy_step};
    out.crc32c = kv_disk_root_crc(&out);
    return out;
}

static struct kv_disk_slot describe_page(const struct kv_disk *d, const struct kv_index *ix,
                                         uint32_t page)
{
    struct kv_disk_slot out = {0};
    const struct kv_node *n = kv_at(ix, d->owner[page] >> 1);

    if (!n || n->phase != KV_VISIBLE)
        return out;
    enum kv_part part = d->owner[page] & 1;
    const struct kv_root *root = kv_root_of(ix, n);
    const struct kv_geometry *g = &root->geometry;
    out = (struct kv_disk_slot){.hash = n->hash,
                                .bytes = part == KV_BLOCK ? g->block_bytes : g->state_bytes,
                                .data_crc32c = n->parts[part].crc32c,
                                .root = n->root,
                                .unit = n->unit,
                                .part = part};
    if (n->parent)
        out.parent = kv_parent(ix, n)->hash;
    out.crc32c = kv_disk_slot_crc(&out, &root->key);
    return out;
}

static void describe_sector(const struct kv_disk *d, const struct kv_index *ix, uint32_t sector,
                            uint8_t *to)
{
    for (uint32_t i = 0; i < KV_SLOTS_A_SECTOR; i++, to += KV_SLOT) {
        uint32_t at = sector * KV_SLOTS_A_SECTOR + i;
        if (sector < KV_ROOT_SECTORS)
            memcpy(to, &(struct kv_disk_root[]){describe_root(ix->roots[at])}, KV_SLOT);
        else
            memcpy(to, &(struct kv_disk_slot[]){describe_page(d, ix, at - KV_ROOT_SLOTS)}, KV_SLOT);
    }
}

/* Whether enough has changed, or the first change is old enough. */
static bool is_due(struct kv_disk *d, int64_t now_us)
{
    if (!d->n_stale)
        d->flush_at_us = 0;
    else if (!d->flush_at_us)
        d->flush_at_us = now_us + KV_DISK_FLUSH_MS * 1000;
    return d->n_stale >= KV_DISK_FLUSH_SECTORS || (d->n_stale && now_us >= d->flush_at_us);
}

/* Where a run from `first` ends.  A gap of sectors that are right as they are is written along: a
 * few KiB more cost a device less than one more request. */
static uint32_t end_of_run(const struct kv_disk *d, uint32_t first)
{
    uint32_t end = first + 1;

    for (uint32_t next; (next = next_due(d, end)) < d->sectors; end = next + 1) {
        if (next - end > KV_DISK_GAP || next + 1 - first > KV_DISK_RUN)
            return end;
        for (uint32_t i = end; i < next; i++)
            if (get_bit(d->writing, i))
                return end;
    }
    return end;
}

/* One write of a sector at a time: two would have no order. */
static void write_run(struct kv_disk *d, const struct kv_index *ix, uint32_t first, int64_t now_us)
{
    uint32_t run = 0, end = end_of_run(d, first);

    while (d->run_busy[run])
        run++;
    uint8_t *to = d->run_buffers + (size_t)run * KV_DISK_RUN * KV_SECTOR;
    for (uint32_t i = first; i < end; i++, to += KV_SECTOR) {
        describe_sector(d, ix, i, to);
        d->n_stale -= get_bit(d->stale, i);
        set_bit(d->stale, i, false);
        set_bit(d->writing, i, true);
    }
    d->run_busy[run] = true;
    kv_disk_begin_run(d, first, end - first, run, now_us);
}

void kv_disk_run_ended(struct kv_disk *d, const struct kv_request *r)
{
    d->run_busy[r->run] = false;
    for (uint32_t i = 0; i < r->n; i++) {
        set_bit(d->writing, r->sector + i, false);
        if (!r->well)
            mark_stale(d, r->sector + i);
    }
}

/* One past the last sector that has to be written; 0 = none. */
static uint32_t end_of_due(const struct kv_disk *d)
{
    for (uint32_t i = d->sectors / WORD + 1; i-- > 0;) {
        uint64_t due = d->stale[i] & ~d->writing[i];
        if (due)
            return (i + 1) * WORD - (uint32_t)__builtin_clzll(due);
    }
    return 0;
}

/* In sweeps, upwards to what was the last one when the sweep began: neither what changes all the
 * time nor what is new every time keeps anything else from the disk.  (Going on upwards for as long
 * as there was something new left half-filled sectors behind, and a crash lost their chains.) */
void kv_disk_flush(struct kv_disk *d, const struct kv_index *ix, int64_t now_us)
{
    if (!is_due(d, now_us))
        return;
    while (kv_disk_ready(d, KV_IO_SECTORS, now_us)) {
        uint32_t at = next_due(d, d->next_sector);
        if (at >= d->sweep_end) {
            d->sweep_end = end_of_due(d);
            at = next_due(d, 0);
        }
        if (at == d->sectors) {
            d->flush_at_us = 0;
            return;
        }
        write_run(d, ix, at, now_us);
        d->next_sector = at + 1;
    }
}

/* What a restarted store finds: roots first, then slots, then the tree that they make.  A slot
 * counts when its checksum is right under a root that is there, its pages lie in the file and
 * nobody else claims them (else both are dropped: one is left from before a crash, and which one is
 * not worth knowing), and its parent counts.  Data is not read: every object's checksum is checked
 * by whoever gets it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvstore/tier/disk.h"
#include "proto/cleanup.h"

enum { READ_SECTORS = 256 };

struct found {
    struct kv_disk_slot slot;
    uint32_t page;
    bool taken; /* somebody else claims a page of it, too */
};

struct recover {
    struct kv_disk *disk;
    struct kv_index *ix;
    const uint32_t *page_bytes;
    struct kv_root *roots[KV_ROOT_SLOTS]; /* by their place in the file */
    struct found *found;
    uint32_t n, room;
    struct kv_recovery out;
};

typedef int each_slot(struct recover *r, uint32_t at, const void *slot, struct lh_error *err);

static int read_sectors(struct recover *r, uint32_t first, uint32_t end, each_slot *each,
                        struct lh_error *err)
{
    lh_autofree uint8_t *buffer = aligned_alloc(KV_SECTOR, READ_SECTORS * KV_SECTOR);
    int status = 0;

    if (!buffer)
        return lh_fail_errno(err, ENOMEM, "reading the disk's index");
    for (uint32_t at = first; status == 0 && at < end; at += READ_SECTORS) {
        uint32_t n = end - at < READ_SECTORS ? end - at : READ_SECTORS;
        ssize_t got =
            pread(r->disk->fd, buffer, (size_t)n * KV_SECTOR, (off_t)kv_disk_sector_at(at));
        if (got != (ssize_t)n * KV_SECTOR)
            return lh_fail_errno(err, got < 0 ? errno : EIO, "reading the disk's index");
        for (uint32_t i = 0; status == 0 && i < n * KV_SLOTS_A_SECTOR; i++)
            status =
                each(r, (at - first) * KV_SLOTS_A_SECTOR + i, buffer + (size_t)i * KV_SLOT, err);
    }
    return status;
}

static int take_root(struct recover *r, uint32_t at, const void *slot, struct lh_error *err)
{
    struct kv_disk_root d;
    struct lh_error why;

    memcpy(&d, slot, sizeof d);
    if (!d.used)
        return 0;
    struct kv_geometry g = {d.block_bytes, d.state_bytes, d.unit_tokens};
    bool right = d.crc32c == kv_disk_root_crc(&d) && g.unit_tokens && g.block_bytes;
    struct kv_root *root =
        right ? kv_root_open(r->ix, &d.key, &g, d.policy_step, r->page_bytes, &why) : NULL;
    r->out.damaged += !root;
    if (!root)
        return 0;
    r->ix->roots[root->slot] = NULL; /* it keeps the place that slots know it by */
    root->slot = (uint16_t)at;
    r->ix->roots[at] = r->roots[at] = root;
    return 0;
}

static bool is_right(const struct recover *r, const struct kv_disk_slot *s, uint32_t page)
{
    const struct kv_root *root = s->root < KV_ROOT_SLOTS ? r->roots[s->root] : NULL;

    if (!root || s->part >= KV_PARTS || s->crc32c != kv_disk_slot_crc(s, &root->key))
        return false;
    uint32_t bytes = s->part == KV_BLOCK ? root->geometry.block_bytes : root->geometry.state_bytes;
    uint32_t pages = root->pages[s->part][KV_DISK];
    return s->bytes == bytes && pages <= r->disk->pages.n && page <= r->disk->pages.n - pages;
}

static int take_slot(struct recover *r, uint32_t page, const void *slot, struct lh_error *err)
{
    struct found f = {.page = page};

    memcpy(&f.slot, slot, sizeof f.slot);
    if (!f.slot.bytes)
        return 0;
    if (!is_right(r, &f.slot, page)) {
        r->out.damaged++;
        kv_disk_claim(r->disk, page, 0, 0); /* its sector will be written without it */
        return 0;
    }
    if (r->n == r->room) {
        uint32_t room = r->room ? 2 * r->room : 1024;
        struct found *more = reallocarray(r->found, room, sizeof *more);
        if (!more)
            return lh_fail_errno(err, ENOMEM, "recovering %u objects", r->n);
        r->found = more;
        r->room = room;
    }
    r->found[r->n++] = f;
    return 0;
}

static uint32_t end_of(const struct recover *r, const struct found *f)
{
    return f->page + r->roots[f->slot.root]->pages[f->slot.part][KV_DISK];
}

/* They come in the order of their pages. */
static void find_overlaps(struct recover *r)
{
    uint32_t longest = 0;

    for (uint32_t i = 1; i < r->n; i++) {
        if (end_of(r, &r->found[i - 1]) > end_of(r, &r->found[longest]))
            longest = i - 1;
        if (r->found[i].page < end_of(r, &r->found[longest]))
            r->found[i].taken = r->found[longest].taken = true;
    }
}

static uint32_t place_of(const struct found *f)
{
    return (uint32_t)f->slot.part << 16 | f->slot.unit;
}

/* What was found in the order of adoption: blocks before states, both by unit, so parents come
 * before children.  Sorted by counting: a million of them are what a restart takes its time with.
 */
static uint32_t *order_of(const struct recover *r, struct lh_error *err)
{
    lh_autofree uint32_t *next = calloc((KV_PARTS << 16) + 1, sizeof *next);
    lh_autofree uint32_t *order = calloc((size_t)r->n + 1, sizeof *order);

    if (!next || !order)
        return lh_fail_errno(err, ENOMEM, "recovering %u objects", r->n), NULL;
    for (uint32_t i = 0; i < r->n; i++)
        next[place_of(&r->found[i]) + 1]++;
    for (uint32_t i = 1; i < KV_PARTS << 16; i++)
        next[i] += next[i - 1];
    for (uint32_t i = 0; i < r->n; i++)
        order[next[place_of(&r->found[i])]++] = i;
    return lh_steal(&order);
}

static struct kv_node *add_block(struct recover *r, const struct kv_disk_slot *s)
{
    struct kv_root *root = r->roots[s->root];
    struct kv_node *parent = s->unit ? kv_node_find(r->ix, root, &s->parent) : NULL;

    if (s->unit && (!parent || parent->unit + 1 != s->unit))
        return NULL;
    if (kv_node_find(r->ix, root, &s->hash))
        return NULL;
    struct kv_node *n = kv_node_new(r->ix, root, &s->hash, s->unit);
    if (n)
        kv_node_pin(r->ix, n); /* a tail until its state comes */
    return n;
}

static struct kv_node *state_owner(struct recover *r, const struct kv_disk_slot *s)
{
    struct kv_node *n = kv_node_find(r->ix, r->roots[s->root], &s->hash);

    return n && n->unit == s->unit && !kv_object_exists(&n->parts[KV_STATE]) ? n : NULL;
}

static bool adopt(struct recover *r, const struct found *f)
{
    const struct kv_disk_slot *s = &f->slot;
    struct kv_object object = {.at[KV_DISK] = f->page + 1, .crc32c = s->data_crc32c};
    uint32_t pages = r->roots[s->root]->pages[s->part][KV_DISK];
    struct kv_node *n = f->taken ? NULL : s->part == KV_BLOCK ? add_block(r, s) : state_owner(r, s);

    if (!n)
        return false;
    kv_pages_take_at(&r->disk->pages, f->page, pages);
    kv_tenant_grant(r->ix, r->roots[s->root], KV_DISK, pages); /* "", until its root is opened */
    r->disk->owner[f->page] = kv_ref_of(r->ix, n) << 1 | s->part;
    if (s->part == KV_STATE) {
        kv_node_set_state(r->ix, n, &object);
        return true;
    }
    n->parts[KV_BLOCK] = object;
    kv_node_link(r->ix, n, s->unit ? kv_node_find(r->ix, r->roots[s->root], &s->parent) : NULL);
    return true;
}

/* Once everything is there: what has no state behind it goes, as always. */
static void unpin_all(struct kv_index *ix)
{
    for (uint32_t i = 1; i < ix->touched; i++)
        if (ix->nodes[i].phase == KV_VISIBLE)
            kv_node_unpin(ix, &ix->nodes[i]);
}

static int adopt_all(struct recover *r, struct lh_error *err)
{
    lh_autofree uint32_t *order = order_of(r, err);

    if (!order)
        return err ? err->code : LH_RESOURCE_EXHAUSTED;
    find_overlaps(r);
    for (uint32_t i = 0; i < r->n; i++) {
        const struct found *f = &r->found[order[i]];
        if (adopt(r, f))
            continue;
        r->out.damaged++;
        kv_disk_claim(r->disk, f->page, 0, 0);
    }
    return 0;
}

static int recover(struct recover *r, struct lh_error *err)
{
    int status = read_sectors(r, 0, KV_ROOT_SECTORS, take_root, err);

    if (status == 0)
        status = read_sectors(r, KV_ROOT_SECTORS, r->disk->sectors, take_slot, err);
    if (status == 0)
        status = adopt_all(r, err);
    if (status < 0)
        return status;
    unpin_all(r->ix);
    r->out.objects = r->ix->objects;
    return 0;
}

int kv_disk_recover(struct kv_disk *d, struct kv_index *ix, const uint32_t page_bytes[KV_TIERS],
                    struct kv_recovery *out, struct lh_error *err)
{
    lh_autofree struct recover *r = calloc(1, sizeof *r);

    *out = (struct kv_recovery){0};
    if (!d->recovered)
        return 0;
    if (!r)
        return lh_fail_errno(err, ENOMEM, "recovery");
    r->disk = d;
    r->ix = ix;
    r->page_bytes = page_bytes;
    int status = recover(r, err);
    *out = r->out;
    free(r->found);
    return status;
}

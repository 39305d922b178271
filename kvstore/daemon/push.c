#include "kvstore/daemon/push.h"

#include <errno.h>
#include <stdlib.h>

#include "kvstore/daemon/request.h"

enum { WRITE_BACK_SHARE = 2 /* a half */ };

int kv_push_init(struct kv_push *q, struct lh_error *err)
{
    *q = (struct kv_push){.queue = calloc(KV_PUSH_QUEUE, sizeof *q->queue)};
    return q->queue ? 0 : lh_fail_errno(err, ENOMEM, "queue of remote writes");
}

void kv_push_finish(struct kv_push *q)
{
    free(q->queue);
    *q = (struct kv_push){0};
}

static bool wants_sending(const struct kv_service *s, const struct kv_node *n, enum kv_part part)
{
    const struct kv_root *root = kv_root_of(&s->index, n);

    return kv_object_exists(&n->parts[part]) && !((n->remote | n->sending) & 1u << part) &&
           kv_root_bytes(root, part) <= s->remote.object_max &&
           !(part == KV_STATE && kv_node_is_superseded(&s->index, n));
}

/* KV_PARTS = nothing of it. */
static enum kv_part next_part(const struct kv_service *s, const struct kv_node *n)
{
    enum kv_part part = KV_BLOCK;

    if (n->phase != KV_VISIBLE || kv_root_of(&s->index, n)->retired)
        return KV_PARTS;
    while (part < KV_PARTS && !wants_sending(s, n, part))
        part++;
    return part;
}

void kv_push_offer(struct kv_service *s, struct kv_node *n)
{
    struct kv_push *q = &s->push;

    if (!kv_root_of(&s->index, n)->geometry.block_bytes || next_part(s, n) == KV_PARTS)
        return;
    if (q->n == KV_PUSH_QUEUE) {
        q->skipped++;
        return;
    }
    q->queue[(q->head + q->n++) % KV_PUSH_QUEUE] = kv_ref_of(&s->index, n);
}

static void take_bytes(struct kv_service *s, struct kv_node *n)
{
    kv_node_pin(&s->index, n);
    kv_node_hold(&s->index, n);
}

static void give_bytes(struct kv_service *s, struct kv_node *n)
{
    kv_node_unhold(&s->index, n);
    kv_node_unpin(&s->index, n);
}

static void send_part(struct kv_service *s, struct kv_node *n, enum kv_part part)
{
    const struct kv_root *root = kv_root_of(&s->index, n);
    const struct kv_object *o = &n->parts[part];
    struct kv_remote_op op = {.kind = KV_REMOTE_STORE,
                              .object = {.root = root->key,
                                         .hash = n->hash,
                                         .unit = n->unit,
                                         .unit_tokens = root->geometry.unit_tokens,
                                         .bytes = kv_root_bytes(root, part),
                                         .crc32c = o->crc32c,
                                         .part = (uint8_t)part},
                              .bytes = s->memory +
                                       (o->at[KV_MEMORY] - 1) * (uint64_t)s->segment.page_bytes,
                              .node = kv_ref_of(&s->index, n)};

    take_bytes(s, n);
    n->sending |= 1u << part;
    kv_remote_begin(&s->remote, &op);
}

/* What could not be sent waits for another turn, behind the others; what is wrong here never gets
 * right by being sent again. */
void kv_push_ended(struct kv_service *s, const struct kv_remote_op *op)
{
    struct kv_node *n = kv_at(&s->index, op->node);

    n->sending &= (uint16_t) ~(1u << op->object.part);
    if (op->status == 0)
        n->remote |= 1u << op->object.part;
    else if (op->status == LH_DATA_LOSS)
        s->push.skipped++;
    else if (n->phase == KV_VISIBLE)
        kv_push_offer(s, n);
    give_bytes(s, n);
}

void kv_push_unstage(struct kv_service *s)
{
    if (s->push.staged)
        give_bytes(s, kv_at(&s->index, s->push.staged));
    s->push.staged = 0;
}

/* Brings a node's bytes into memory; false while they come, and when they cannot: then *lost. */
static bool stage(struct kv_service *s, struct kv_node *n, bool *lost, int64_t now_us)
{
    if (!s->push.staged) {
        take_bytes(s, n);
        s->push.staged = kv_ref_of(&s->index, n);
    }
    enum kv_fetch fetch = kv_exchange_load(&s->exchange, n, n->unit, now_us);
    kv_disk_submit(&s->disk);
    *lost = fetch == KV_UNFETCHABLE;
    return fetch == KV_FETCHED;
}

/* Does something for the head of the queue; false when that must wait. */
static bool push_next(struct kv_service *s, int64_t now_us)
{
    struct kv_push *q = &s->push;
    struct kv_node *n = kv_at(&s->index, q->queue[q->head]);
    enum kv_part part = next_part(s, n);
    bool lost = false;

    if (part != KV_PARTS && n->parts[part].at[KV_MEMORY]) {
        send_part(s, n, part);
        return true;
    }
    if (part != KV_PARTS && stage(s, n, &lost, now_us))
        return true;
    if (part != KV_PARTS && !lost)
        return false;
    q->skipped += n->phase != KV_VISIBLE || lost;
    kv_push_unstage(s);
    q->head = (q->head + 1) % KV_PUSH_QUEUE;
    q->n--;
    return true;
}

void kv_push_work(struct kv_service *s, int64_t now_us)
{
    const struct kv_pages *above = s->has_disk ? &s->disk.pages : &s->pages;

    while (s->push.n && (uint64_t)above->used * WRITE_BACK_SHARE > above->n &&
           kv_remote_ready(&s->remote, KV_GATE_OUT, now_us) && push_next(s, now_us))
        ;
}

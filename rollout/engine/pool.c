#include "rollout/engine/pool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct block {
    int32_t frame; /* first; of an unused block the next unused one */
    uint32_t frames, refs;
};

struct pool {
    char *memory;
    size_t frame_bytes, page_bytes;
    int32_t frames, free, run; /* run = frames of a state */
    int32_t spare;             /* list of unused blocks */
    int32_t *owner;            /* [frames]: block, or POOL_NONE */
    struct block *blocks;      /* [frames] */
};

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

struct pool *pool_create(void *memory, size_t bytes, size_t page_floats, size_t state_floats,
                         struct lh_error *err)
{
    lh_auto(pool) p = calloc(1, sizeof *p);

    if (!p)
        return lh_fail_errno(err, ENOMEM, "KV pool"), NULL;
    p->memory = memory;
    p->page_bytes = page_floats * sizeof(float);
    p->frame_bytes = round_up(p->page_bytes, 64);
    if (!p->frame_bytes || bytes / p->frame_bytes > INT32_MAX)
        return lh_fail(err, LH_INVALID_ARGUMENT, "KV pool: %zu bytes in pages of %zu", bytes,
                       p->frame_bytes),
               NULL;
    p->frames = p->free = (int32_t)(bytes / p->frame_bytes);
    p->run = (int32_t)(round_up(state_floats * sizeof(float), p->frame_bytes) / p->frame_bytes);
    p->owner = malloc(((size_t)p->frames + 1) * sizeof *p->owner);
    p->blocks = calloc((size_t)p->frames + 1, sizeof *p->blocks);
    if (!p->owner || !p->blocks)
        return lh_fail_errno(err, ENOMEM, "KV pool of %d frames", p->frames), NULL;
    for (int32_t i = 0; i < p->frames; i++) {
        p->owner[i] = POOL_NONE;
        p->blocks[i].frame = i + 1 < p->frames ? i + 1 : POOL_NONE;
    }
    p->spare = p->frames ? 0 : POOL_NONE;
    return lh_steal(&p);
}

void pool_destroy(struct pool *p)
{
    if (!p)
        return;
    free(p->owner);
    free(p->blocks);
    free(p);
}

static pool_block place(struct pool *p, int32_t frame, int32_t frames)
{
    pool_block b = p->spare;
    struct block *k = &p->blocks[b];

    p->spare = k->frame;
    *k = (struct block){frame, (uint32_t)frames, 1};
    for (int32_t i = 0; i < frames; i++)
        p->owner[frame + i] = b;
    p->free -= frames;
    return b;
}

/* Lowest free frame outside [from, to): pages gather at the start, states at the end. */
static int32_t free_frame(const struct pool *p, int32_t from, int32_t to)
{
    for (int32_t i = 0; i < p->frames; i++)
        if (p->owner[i] == POOL_NONE && (i < from || i >= to))
            return i;
    return POOL_NONE;
}

pool_block pool_page(struct pool *p)
{
    return p->free ? place(p, free_frame(p, 0, 0), 1) : POOL_NONE;
}

/* Used frames of the slot that starts at `frame`; more than a run when a state is in it. */
static int32_t slot_used(const struct pool *p, int32_t frame)
{
    int32_t used = 0;

    for (int32_t i = frame; i < frame + p->run; i++) {
        if (p->owner[i] == POOL_NONE)
            continue;
        if (p->run > 1 && p->blocks[p->owner[i]].frames > 1)
            return p->run + 1;
        used++;
    }
    return used;
}

static void empty_slot(struct pool *p, int32_t slot)
{
    for (int32_t i = slot; i < slot + p->run; i++) {
        pool_block b = p->owner[i];
        if (b == POOL_NONE)
            continue;
        int32_t to = free_frame(p, slot, slot + p->run);
        memcpy(p->memory + (size_t)to * p->frame_bytes, p->memory + (size_t)i * p->frame_bytes,
               p->page_bytes);
        p->owner[to] = b;
        p->owner[i] = POOL_NONE;
        p->blocks[b].frame = to;
    }
}

pool_block pool_state(struct pool *p)
{
    int32_t best = POOL_NONE, best_used = p->run + 1;

    if (p->free < p->run)
        return POOL_NONE;
    if (p->run <= 1)
        return pool_page(p);
    for (int32_t slot = p->frames - p->run; slot >= 0 && best_used; slot -= p->run) {
        int32_t used = slot_used(p, slot);
        if (used < best_used) {
            best = slot;
            best_used = used;
        }
    }
    if (best == POOL_NONE)
        return POOL_NONE;
    empty_slot(p, best);
    return place(p, best, p->run);
}

void pool_retain(struct pool *p, pool_block b)
{
    p->blocks[b].refs++;
}

void pool_release(struct pool *p, pool_block b)
{
    if (b == POOL_NONE || --p->blocks[b].refs)
        return;
    struct block *k = &p->blocks[b];
    for (uint32_t i = 0; i < k->frames; i++)
        p->owner[k->frame + (int32_t)i] = POOL_NONE;
    p->free += (int32_t)k->frames;
    k->frame = p->spare;
    p->spare = b;
}

float *pool_data(const struct pool *p, pool_block b)
{
    return (float *)(p->memory + (size_t)p->blocks[b].frame * p->frame_bytes);
}

size_t pool_frames(const struct pool *p)
{
    return (size_t)p->frames;
}

size_t pool_free(const struct pool *p)
{
    return (size_t)p->free;
}

size_t pool_state_frames(const struct pool *p)
{
    return (size_t)p->run;
}

size_t pool_frame_bytes(const struct pool *p)
{
    return p->frame_bytes;
}

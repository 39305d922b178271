/* One budget of device memory for attention pages and recurrent states.
 *
 * The memory is cut into frames of one page each.  A page takes one frame, a state takes R adjacent
 * ones, so both compete for the same bytes and no split between them has to be guessed.  Adjacent
 * frames fragment; therefore blocks are handles, pages may be moved, and a state is placed only at
 * multiples of R from the end.  Then a state fits exactly when R frames are free anywhere: if no
 * slot is empty, the pages of the emptiest slot without a state move out of it (there is room for
 * them: the slot's used frames are at most the free frames elsewhere).
 * Rejected: frames of state size (a state is 16 pages of the small models, most of a page frame
 * would be empty) and two fixed regions (one of them is always the wrong size).
 *
 * Addresses are valid until the next allocation of a state.  Not thread-safe. */
#ifndef ROLLOUT_ENGINE_POOL_H
#define ROLLOUT_ENGINE_POOL_H

#include <stddef.h>
#include <stdint.h>

#include "proto/cleanup.h"
#include "proto/error.h"

typedef int32_t pool_block;
enum { POOL_NONE = -1 };

struct pool;

/* memory is 64-byte aligned and not touched here; it may be unreadable until blocks are used. */
struct pool *pool_create(void *memory, size_t bytes, size_t page_floats, size_t state_floats,
                         struct lh_error *err);
void pool_destroy(struct pool *p);
LH_DEFINE_AUTO(pool, pool_destroy)

/* One reference belongs to the caller; POOL_NONE when too few frames are free. */
pool_block pool_page(struct pool *p);
pool_block pool_state(struct pool *p);
void pool_retain(struct pool *p, pool_block b);
void pool_release(struct pool *p, pool_block b); /* POOL_NONE is fine */

float *pool_data(const struct pool *p, pool_block b);

size_t pool_frames(const struct pool *p);
size_t pool_free(const struct pool *p);
size_t pool_state_frames(const struct pool *p); /* R */
size_t pool_frame_bytes(const struct pool *p);

#endif

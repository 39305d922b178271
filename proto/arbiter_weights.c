/* The header of a weights segment: how a version is published without copying it.
 *
 * One writer, many readers in other processes.  The state is the lock: a reader trusts step and id
 * only when it sees VALID before and after reading them. */
#include <string.h>

#include "proto/arbiter.h"

enum { MAGIC = 0x5457484c }; /* "LHWT" */

void arbiter_weights_begin(struct arbiter_weights_header *h)
{
    __atomic_store_n(&h->state, WEIGHTS_WRITING, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* no float is written before readers can see this */
    h->magic = MAGIC;
}

void arbiter_weights_publish(struct arbiter_weights_header *h, uint64_t step,
                             const uint8_t version_id[16])
{
    h->step = step;
    memcpy(h->version_id, version_id, 16);
    __atomic_store_n(&h->state, WEIGHTS_VALID, __ATOMIC_RELEASE);
}

bool arbiter_weights_read(const struct arbiter_weights_header *h, uint64_t *step,
                          uint8_t version_id[16])
{
    if (__atomic_load_n(&h->state, __ATOMIC_ACQUIRE) != WEIGHTS_VALID || h->magic != MAGIC)
        return false;
    *step = h->step;
    memcpy(version_id, h->version_id, 16);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&h->state, __ATOMIC_RELAXED) == WEIGHTS_VALID;
}

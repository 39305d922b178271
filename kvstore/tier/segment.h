/* The memory of the tier: one memfd that every client maps.  The daemon never touches the bytes, so
 * it does not map them either. */
#ifndef KVSTORE_TIER_SEGMENT_H
#define KVSTORE_TIER_SEGMENT_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/error.h"

struct kv_segment {
    int fd;
    bool huge; /* backed by hugetlb pages */
    uint64_t bytes;
    uint32_t page_bytes; /* unit of allocation, a power of two from 4096 */
};

enum { KV_PAGE_MIN = 4096, KV_MAX_PAGES = 1 << 20, KV_SEGMENT_MIN = 1 << 20 };

/* INVALID_ARGUMENT below KV_SEGMENT_MIN bytes.  Sealed, so that no client can shrink it under the
 * others' feet.  Taken from the host page by page as it is first written. */
int kv_segment_create(struct kv_segment *s, uint64_t bytes, struct lh_error *err);
/* The same over a file of that size which somebody else has made; another descriptor of it is kept.
 */
int kv_segment_adopt(struct kv_segment *s, int fd, uint64_t bytes, struct lh_error *err);
/* Bytes that the host has given for it so far. */
uint64_t kv_segment_resident(const struct kv_segment *s);
void kv_segment_finish(struct kv_segment *s);

#endif

/* Physical memory of the node, in chunks of one size that are lent and re-lent, never returned to
 * the kernel while arbiterd lives.  `host` backend: a chunk is a memfd whose pages are allocated
 * when it is created, so that a node without memory says so here and not by SIGBUS in a client.
 * Device pool: memory of the first GPU, exported as a file descriptor; arbiterd itself maps none of
 * it and has no context there. */
#ifndef ARBITER_POOL_H
#define ARBITER_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "proto/error.h"

struct chunk {
    int fd;
    ino_t inode; /* how a mapping of it is recognised in /proc/PID/maps; 0 on the device */
    bool lent;
};

struct pool {
    size_t chunk_bytes;
    struct chunk *chunks;
    size_t n, room, lent;
    bool on_device;
};

void pool_init(struct pool *p, size_t chunk_bytes, bool on_device);
void pool_finish(struct pool *p);

/* Lends `count` chunks, free ones first, new ones for the rest; their indices go to out.  All or
 * nothing. */
int pool_lend(struct pool *p, size_t count, size_t *out, struct lh_error *err);
void pool_take_back(struct pool *p, const size_t *chunks, size_t count);

/* A memfd of exactly `bytes`, allocated; for segments that are shared instead of re-lent. */
int pool_shared_segment(const char *name, size_t bytes, ino_t *inode, struct lh_error *err);

/* The same on the first GPU; bytes are rounded up to what the driver hands out.  The memory lives
 * while the fd, an import or a mapping does. */
int device_segment(size_t *bytes, struct lh_error *err);

#endif

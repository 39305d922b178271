/* Requests handed to the service directly, without a socket. */
#ifndef TESTS_UNIT_KVSTORE_DIRECT_H
#define TESTS_UNIT_KVSTORE_DIRECT_H

#include "kvstore/daemon/service.h"

struct direct {
    struct kv_service service;
    struct kv_peer peer;
};

/* A store of `pages` pages of 4096 bytes whose client has said hello. */
void direct_open(struct direct *d, uint32_t pages);
void direct_close(struct direct *d);

/* 0 or the failure's code. */
int direct_root(struct direct *d, const struct kv_key *root, uint32_t block, uint32_t state);
int direct_retire(struct direct *d, const struct kv_key *keep);

/* *ticket is 0 when everything is there already. */
int direct_put(struct direct *d, const struct kv_key *root, const struct kv_key *chain,
               size_t first, size_t n, uint64_t *ticket);
bool direct_commit(struct direct *d, uint64_t ticket, size_t blocks);
/* Units found; 0 = miss. */
size_t direct_lookup(struct direct *d, const struct kv_key *root, const struct kv_key *chain,
                     size_t n, size_t at_least, uint64_t *lease);
void direct_release(struct direct *d, uint64_t id, bool corrupt);

/* Fails the test unless both rules of kvstore/index/index.h hold and every page and object is
 * counted exactly once. */
void direct_check(const struct direct *d);

#endif

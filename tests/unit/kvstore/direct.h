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
/* The same with a disk tier and the default policy. */
void direct_open_on_disk(struct direct *d, uint32_t pages, const char *path, uint64_t bytes);
void direct_close(struct direct *d);
/* Does the disk's work until nothing is under way any more, or for ms. */
void direct_settle(struct direct *d, int ms);

/* 0 or the failure's code. */
int direct_root(struct direct *d, const struct kv_key *root, uint32_t block, uint32_t state);
int direct_retire(struct direct *d, const struct kv_key *keep);

/* *ticket is 0 when everything is there already. */
int direct_put(struct direct *d, const struct kv_key *root, const struct kv_key *chain,
               size_t first, size_t n, uint64_t *ticket);
bool direct_commit(struct direct *d, uint64_t ticket, size_t blocks);
/* A put and commit of content made of each unit's hash; true = stored.  With a disk only. */
bool direct_store(struct direct *d, const struct kv_key *root, const struct kv_key *chain,
                  size_t first, size_t n);
/* Looks up, waits for the disk, compares every byte and releases; *corrupt counts objects whose
 * checksum is wrong, which are released as a client would. */
size_t direct_read(struct direct *d, const struct kv_key *root, const struct kv_key *chain,
                   size_t n, size_t at_least, uint32_t deadline_ms, unsigned *corrupt);
/* Units found; 0 = miss. */
size_t direct_lookup(struct direct *d, const struct kv_key *root, const struct kv_key *chain,
                     size_t n, size_t at_least, uint64_t *lease);
void direct_release(struct direct *d, uint64_t id, bool corrupt);

/* Fails the test unless both rules of kvstore/index/index.h hold and every page and object is
 * counted exactly once. */
void direct_check(const struct direct *d);

#endif

/* What the store's tests share: a model small enough to see through, content that tells where it
 * belongs, and a real kvstored. */
#ifndef TESTS_UNIT_KVSTORE_KIT_H
#define TESTS_UNIT_KVSTORE_KIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "kvstore/client.h"
#include "longhaul/kv/v1/kv.pb-c.h"

enum { UNIT = 16, BLOCK = 1000, STATE = 5000, MEMORY = 1 << 20 };

/* kvstored of the build on a job directory of its own, with `memory` bytes. */
struct daemon {
    char dir[40];
    char socket[64];
    char log[64]; /* "" = the test's own */
    pid_t pid;
};
void daemon_start(struct daemon *d, uint64_t memory, uint64_t inflight);
/* The same with a disk tier in the file kv.disk of its directory. */
void daemon_start_on_disk(struct daemon *d, uint64_t memory, uint64_t disk);
/* With a remote tier; disk 0 = none. */
void daemon_start_remote(struct daemon *d, uint64_t memory, uint64_t disk, const char *remote,
                         const char *credentials);
/* Its numbers. */
Longhaul__Kv__V1__StatReply stat_of(const struct daemon *d);
/* The same with quotas, and metrics at a port that its log names. */
void daemon_start_watched(struct daemon *d, uint64_t memory, const char *quotas);
/* The directory and the job alone; daemon_restart() then starts it. */
void daemon_prepare(struct daemon *d, uint64_t memory, uint64_t disk, bool carry);
void daemon_kill(struct daemon *d);    /* SIGKILL, reaped */
void daemon_restart(struct daemon *d); /* after daemon_kill() */
void daemon_stop(struct daemon *d);    /* SIGTERM, must exit 0; removes the directory */

struct kv_client *client_of(const struct daemon *d, const char *name);
/* The chain of `n` units of sequence `seed` under version `version`. */
struct kv_key root_of(unsigned version);
void chain_of(const struct kv_key *root, unsigned seed, size_t n, struct kv_key *chain);
void use_version(struct kv_client *c, unsigned version, bool retire);

/* Puts units first..n-1 with content made of each unit's hash. */
int64_t put_units(struct kv_client *c, const struct kv_key *chain, size_t first, size_t n,
                  struct lh_error *err);
/* Units of a hit whose every byte is right; 0 = miss.  Fails the test on wrong bytes. */
size_t get_units(struct kv_client *c, const struct kv_key *chain, size_t n, size_t at_least);
/* The same where bytes may have been spoiled: what is refused is a miss, what comes is right. */
size_t try_units(struct kv_client *c, const struct kv_key *chain, size_t n, size_t at_least);
void fill_content(const struct kv_key *hash, char part, void *to, size_t bytes);

#endif

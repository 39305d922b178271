/* Memory that arbiterd lends for the rollout's phases (docs/DESIGN.md 3.9, I6).
 *
 * The memory tier is a file of arbiterd's, which kvstored's clients map as they map one of
 * kvstored's own.  When rollout's phase ends, the store gives up what is in it: clients get a
 * moment to end their copies, objects that are on disk too stay there, the rest is dropped (or
 * written first, where the next version may still use it: `carry`).  Only then does kvstored agree,
 * and arbiterd empties the file, so what the trainer is given next was really free.  Meanwhile
 * lookups miss and puts are refused, which costs a worker nothing: it is parked, too.
 *
 * Rejected: lending the arbiter's common chunks.  They become the optimizer's, so every client of
 * the store would have to unmap them in step with the phases, and one that did not would write into
 * the optimizer.  A file that is emptied harms nobody but who writes to it.
 *
 * arbiterd's word comes on a thread of its client; the store has one thread, the server's.  So the
 * former says what is wanted, rings, and waits; the latter does it. */
#ifndef KVSTORE_DAEMON_LENT_H
#define KVSTORE_DAEMON_LENT_H

#include <pthread.h>

#include "kvstore/daemon/service.h"
#include "proto/arbiter.h"

struct kv_lent {
    struct arbiter *arbiter;
    int bell_fd;     /* readable: kv_lent_wants() has changed */
    bool keeps_late; /* what is in memory alone is written to disk first */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* under lock */
    bool away, gone; /* should be given up; has been */
    bool told;       /* by a callback, which knows better than the first look */
    int64_t deadline_ms;
};

/* *fd: the memory, `bytes` long, the caller's to close. */
int kv_lent_open(struct kv_lent *l, const char *socket, uint64_t bytes, bool keeps_late, int *fd,
                 struct lh_error *err);
void kv_lent_close(struct kv_lent *l);

/* On the server's thread.  True: the memory is to be given up, by `deadline_us` at the latest, and
 * kv_lent_gave() is due. */
bool kv_lent_wants(struct kv_lent *l, int64_t *deadline_us);
void kv_lent_gave(struct kv_lent *l);
/* True: it was given up and has come back. */
bool kv_lent_returned(struct kv_lent *l);
bool kv_lent_lost(const struct kv_lent *l);

#endif

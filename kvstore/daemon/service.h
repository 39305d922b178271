/* What kvstored does with one request, without sockets: the part that the fuzzer drives.
 *
 * A PUT grants pages and a COMMIT makes their objects visible, all at once; between the two nobody
 * can find them.  A LOOKUP pins what it found until RELEASE.  Both are grants: they end with a
 * message, with their peer's connection, or at their deadline, whichever is first, so no client can
 * hold memory for ever.  A client that still writes after its ticket has expired can spoil an
 * object of someone else; the CRC turns that into a miss.
 *
 * Every field of a request is bounded before it is used.  One thread. */
#ifndef KVSTORE_DAEMON_SERVICE_H
#define KVSTORE_DAEMON_SERVICE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "kvstore/daemon/pull.h"
#include "kvstore/daemon/push.h"
#include "kvstore/daemon/trails.h"
#include "kvstore/flow/flow.h"
#include "kvstore/index/index.h"
#include "kvstore/protocol.h"
#include "kvstore/tier/disk.h"
#include "kvstore/tier/exchange.h"
#include "kvstore/tier/segment.h"
#include "longhaul/kv/v1/kv.pb-c.h"

/* A lookup that waits: for a pull first, then for its hit to be read from disk.  Units from..hit
 * are pinned. */
struct kv_wait {
    int64_t deadline_us; /* 0 = none does */
    uint64_t pull;       /* 0 = for none */
    struct kv_node *hit; /* NULL = not for the disk */
    uint32_t from;
};

struct kv_peer {
    char name[KV_NAME_MAX + 1];
    pid_t pid;
    bool ready; /* has said hello */
    unsigned n_grants;
    struct kv_grant *grants;
    struct kv_share share;
    struct kv_wait wait;
};

struct kv_grant {
    uint64_t id;
    enum kv_direction direction; /* KV_LOAD: a lease, KV_SPILL: a ticket */
    struct kv_root *root;
    struct kv_node *at;      /* pinned: the hit, or what a put continues; NULL: a put from unit 0 */
    struct kv_node *pending; /* of a ticket, ascending units */
    struct kv_object state;  /* of a ticket */
    uint32_t n_pending, from; /* from: first unit of a lease */
    uint64_t bytes;
    double wait_ms; /* that lay before it when it began */
    int64_t began_us, deadline_us;
    struct kv_grant *next;
};

struct kv_counters {
    uint64_t puts, put_bytes, lookups, hits, hit_units, loaded_bytes, corrupt, expired, retired;
    uint64_t late; /* lookups that did not get all that was on disk or remote */
};

struct kv_service {
    struct kv_segment segment;
    uint8_t *memory; /* the segment, mapped when there is another tier to write it to */
    struct kv_pages pages;
    struct kv_index index;
    struct kv_disk disk;
    struct kv_exchange exchange;
    bool has_disk;
    struct kv_remote remote;
    struct kv_pulls pulls;
    struct kv_push push;
    bool has_remote;
    bool away; /* its memory is lent to somebody else: lookups miss, puts are refused */
    struct kv_flow flow;
    struct kv_counters count;
    struct kv_trails trails;
    uint64_t next_id;
    uint32_t grants;  /* of all peers */
    unsigned clients; /* kept by whoever accepts them */
};

struct kv_service_options {
    uint64_t memory_bytes, max_inflight_bytes;
    int memory_fd; /* a file of memory_bytes to use as the memory, duplicated; 0 = makes its own */
    const char *disk_path;                 /* NULL = no disk tier */
    uint64_t disk_bytes, disk_bytes_per_s; /* the latter 0 = as fast as it goes */
    struct kv_remote_options remote;       /* location NULL = no remote tier */
    const char *eviction; /* name of a policy (index/policy.h); NULL = the default */
    const char *quotas;   /* of tenants (daemon/quotas.c); NULL = none */
};

/* A disk that has no room, or is in use, leaves the store with its memory alone, and a warning; a
 * remote tier that is away may come back. */
int kv_service_init(struct kv_service *s, const struct kv_service_options *o, struct lh_error *err);
void kv_service_finish(struct kv_service *s);

/* A reply owns what its message points to. */
struct kv_reply {
    Longhaul__Kv__V1__Reply message;
    union {
        Longhaul__Kv__V1__Failure failure;
        Longhaul__Kv__V1__HelloReply hello;
        Longhaul__Kv__V1__Done done;
        Longhaul__Kv__V1__PutReply put;
        Longhaul__Kv__V1__CommitReply commit;
        Longhaul__Kv__V1__LookupReply lookup;
        Longhaul__Kv__V1__StatReply stat;
        Longhaul__Kv__V1__ListReply list;
        Longhaul__Kv__V1__ShowReply show;
    } body;
    struct lh_error error;
    void *owned[4];
    unsigned n_owned;
    bool with_segment; /* the segment's fd goes along */
};

/* True: there is a reply, to be finished.  False: the request waits for a tier; the caller keeps
 * it, takes no other from this peer, and comes again with it after kv_service_work(), until there
 * is a reply. */
bool kv_service_handle(struct kv_service *s, struct kv_peer *peer,
                       const Longhaul__Kv__V1__Request *request, struct kv_reply *reply);
void kv_reply_finish(struct kv_reply *r);

/* The peer has gone: its grants end, nothing of its open tickets becomes visible. */
void kv_service_forget(struct kv_service *s, struct kv_peer *peer);
/* Ends grants past their deadline. */
void kv_service_expire(struct kv_service *s, struct kv_peer *peer, int64_t now_us);
/* The memory is about to go.  From now on nothing begins; with `write`, what is in memory alone is
 * written to disk while there is time. */
void kv_service_leave(struct kv_service *s, bool write);
/* Nobody copies any more and nothing is being read or written. */
bool kv_service_is_quiet(const struct kv_service *s);
/* Gives up everything in memory; what is on disk stays.  All peers have been forgotten. */
void kv_service_give_up(struct kv_service *s);
/* The memory is back, empty. */
void kv_service_return(struct kv_service *s);
/* A bounded piece of background work, to be done whenever disk.event_fd or remote.event_fd is
 * readable and after requests; true while there is more to do at once. */
bool kv_service_work(struct kv_service *s);

#endif

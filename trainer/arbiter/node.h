/* State of arbiterd: one node, its clients, their regions, and the phase.
 *
 * A region is lent in the phases of its mask.  During a switch nothing new is lent: a region
 * declared then is backed when the phase starts.  Shared regions (class WEIGHTS) belong to the node
 * instead of a client: they survive the writer's death, because the readers run on them and the
 * restarted writer continues in them. */
#ifndef ARBITER_NODE_H
#define ARBITER_NODE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "longhaul/arbiter/v1/arbiter.pb-c.h"
#include "proto/error.h"
#include "trainer/arbiter/pool.h"

enum { NODE_CLIENTS = 256, NODE_NAME = 64, NODE_REGIONS = 64, NODE_SHARED = 64, NODE_PROTOCOL = 1 };
enum {
    NODE_ALL_PHASES = 1u << LONGHAUL__ARBITER__V1__PHASE__PHASE_ROLLOUT |
                      1u << LONGHAUL__ARBITER__V1__PHASE__PHASE_TRAIN |
                      1u << LONGHAUL__ARBITER__V1__PHASE__PHASE_SYNC
};

struct region {
    char name[NODE_NAME];
    Longhaul__Arbiter__V1__Class class;
    Longhaul__Arbiter__V1__Park park;
    uint64_t bytes;  /* multiple of the chunk size */
    unsigned phases; /* 1 << Phase */
    bool on_device;
    size_t *chunks; /* lent now; NULL = not backed */
    bool own_file;  /* in their place one file, which is the holder's in every phase and empty
                     * outside its own */
    int fd;
};

struct shared_region {
    char name[NODE_NAME];
    uint64_t asked, bytes; /* on the device more than was asked for */
    int fd;
    ino_t inode; /* 0 on the device */
};

struct client {
    int fd;    /* -1 = free slot */
    int pidfd; /* kills it for certain when it keeps what it must give back */
    pid_t pid;
    char name[NODE_NAME]; /* "" before HELLO */
    bool leader;
    bool acked;     /* of the switch in progress */
    bool on_device; /* has been lent device memory, which shows in no file of /proc */
    uint64_t kept;  /* device bytes it says it could not unmap */
    uint64_t outside_first;
    struct region regions[NODE_REGIONS];
    size_t n_regions;
};

struct node_switch {
    bool running;
    struct client *leader; /* NULL when it died meanwhile */
    uint64_t call;
    Longhaul__Arbiter__V1__Phase next;
    int64_t started_us, deadline_ms;
    char dropped[NODE_CLIENTS][NODE_NAME];
    size_t n_dropped;
};

struct node {
    struct pool pool, device;
    struct client clients[NODE_CLIENTS];
    struct shared_region shared[NODE_SHARED];
    size_t n_shared;
    uint64_t device_shared; /* bytes of shared segments on the device */
    Longhaul__Arbiter__V1__Phase phase;
    uint64_t epoch;
    struct node_switch sw;
    uint64_t last_residual;
    double last_switch_ms;
    char *state_path;
};

/* The pool that backs a region. */
struct pool *node_pool(struct node *n, const struct region *r);

/* Starts in SYNC, with the epoch after the last one that a previous arbiterd recorded. */
int node_init(struct node *n, const char *state_path, size_t chunk_bytes, size_t device_chunk_bytes,
              struct lh_error *err);
void node_finish(struct node *n);

/* Takes over the connected fd. */
int node_add_client(struct node *n, int fd, pid_t pid, struct lh_error *err);
/* Handles one message; an error means that the client is to be dropped. */
int node_receive(struct node *n, struct client *c, struct lh_error *err);
/* Takes back everything it holds, killing the process when it has not let go. */
void node_drop_client(struct node *n, struct client *c, const char *why);
/* Sends to a client; fds stay open here. */
int node_send(struct client *c, Longhaul__Arbiter__V1__ServerMessage *m, const int *fds,
              size_t n_fds, struct lh_error *err);

/* ---- lend.c ---- */
int node_declare(struct node *n, struct client *c, uint64_t call,
                 const Longhaul__Arbiter__V1__Region *asked, struct lh_error *err);
int node_attach(struct node *n, struct client *c, uint64_t call, const char *name,
                struct lh_error *err);
/* Backs r if the current phase is one of its own, and tells the client: always in answer to a call,
 * as an event (call 0) only when it got something. */
int node_lend(struct node *n, struct client *c, struct region *r, uint64_t call,
              struct lh_error *err);
void node_take_back(struct node *n, struct region *r);
/* The region ends with its client. */
void node_end_region(struct node *n, struct region *r);
/* Bytes that the file of a region takes; 0 when it has none. */
uint64_t node_file_bytes(const struct region *r);
/* Bytes of lent-and-due-back or free chunks that the client still maps: read from the kernel. */
uint64_t node_residual(const struct node *n, const struct client *c);

/* ---- phase.c ---- */
int node_switch_begin(struct node *n, struct client *leader, uint64_t call,
                      const Longhaul__Arbiter__V1__SwitchRequest *q, struct lh_error *err);
void node_revoke_acked(struct node *n, struct client *c,
                       const Longhaul__Arbiter__V1__RevokeAck *ack);
/* Ends the switch when everybody has acked or the deadline has passed.  Called after every event.
 */
void node_switch_step(struct node *n);
/* Milliseconds until node_switch_step() must run again; -1 = no switch is running. */
int node_switch_timeout(const struct node *n);
int node_record(const struct node *n, struct lh_error *err);

#endif

/* Client of arbiterd, the owner of the node's memory (docs/DESIGN.md 3.9).
 *
 * A process declares regions of address space once; arbiterd backs them with physical chunks (memfd
 * on the `host` backend) in the phases of each region's mask.  The address of a region never
 * changes; outside its phases it is reserved and unreadable (PROT_NONE).
 *
 * A background thread answers revocations: it calls `on_revoke` (stop touching what the next phase
 * does not grant; return 0 when stopped), then parks and unmaps, then acks.  A client that does not
 * ack within the deadline is disconnected, and its process is expected to end.
 *
 * Losing arbiterd ends the phase: arbiter_lost() turns true, and the process exits. */
#ifndef PROTO_ARBITER_H
#define PROTO_ARBITER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "longhaul/arbiter/v1/arbiter.pb-c.h"
#include "proto/cleanup.h"
#include "proto/error.h"

enum arbiter_phase { ARBITER_ROLLOUT = 1, ARBITER_TRAIN = 2, ARBITER_SYNC = 3 };
#define ARBITER_IN(phase)  (1u << (phase))
#define ARBITER_ALL_PHASES (ARBITER_IN(1) | ARBITER_IN(2) | ARBITER_IN(3))

struct arbiter;

struct arbiter_options {
    const char *path;   /* socket of arbiterd */
    const char *client; /* "trainer-0" */
    bool leader;        /* will ask for switches */
    /* Called on the background thread; both may be NULL.  deadline as of lh_now_ms(). */
    int (*on_revoke)(void *ctx, enum arbiter_phase next, int64_t deadline_ms);
    void (*on_phase)(void *ctx, enum arbiter_phase phase, uint64_t epoch);
    void *ctx;
};

struct arbiter *arbiter_connect(const struct arbiter_options *o, struct lh_error *err);
void arbiter_destroy(struct arbiter *a); /* unmaps everything */
LH_DEFINE_AUTO(arbiter, arbiter_destroy)

/* Declares a region; *addr is its address for the life of the client.  Mapped now if the current
 * phase grants it.  WEIGHTS regions outlive their declarer and are found by name. */
int arbiter_declare(struct arbiter *a, const char *name, Longhaul__Arbiter__V1__Class class,
                    size_t bytes, unsigned phases, Longhaul__Arbiter__V1__Park park, void **addr,
                    struct lh_error *err);
/* A region that the client does not map but gets as one file of `bytes`, for holders who hand it on
 * to clients of their own (kvstored).  Pages come from the host as they are written; when its
 * phases end arbiterd empties it, behind this client's ack: who still maps it reads zeros.  *fd is
 * the caller's to close. */
int arbiter_declare_file(struct arbiter *a, const char *name, Longhaul__Arbiter__V1__Class class,
                         size_t bytes, unsigned phases, int *fd, struct lh_error *err);
/* Maps another client's WEIGHTS region read-only.  NOT_FOUND until it is declared. */
int arbiter_attach(struct arbiter *a, const char *name, const void **addr, size_t *bytes,
                   struct lh_error *err);

/* The same in memory of the first GPU; *addr is a device address (CUdeviceptr).  UNAVAILABLE where
 * arbiterd has no GPU.  HOST parks in pinned memory, which the client keeps.  on_revoke must have
 * no work in flight when it returns.  Readers of WEIGHTS can write on a GPU, and must not. */
int arbiter_declare_device(struct arbiter *a, const char *name, Longhaul__Arbiter__V1__Class class,
                           size_t bytes, unsigned phases, Longhaul__Arbiter__V1__Park park,
                           uint64_t *addr, struct lh_error *err);
int arbiter_attach_device(struct arbiter *a, const char *name, uint64_t *addr, size_t *bytes,
                          struct lh_error *err);

enum arbiter_phase arbiter_phase_now(const struct arbiter *a);
/* Blocks until the phase is `phase` and this client's regions of it are mapped. */
int arbiter_wait_phase(struct arbiter *a, enum arbiter_phase phase, int64_t deadline_ms,
                       struct lh_error *err);
/* Leader only: revoke, wait for acks, grant.  Returns when every grant is made.  *out may be NULL.
 */
struct arbiter_switch {
    uint64_t epoch;
    uint64_t residual_bytes;
    double revoke_ms, grant_ms;
};
int arbiter_switch_phase(struct arbiter *a, enum arbiter_phase phase, int deadline_ms,
                         struct arbiter_switch *out, struct lh_error *err);
bool arbiter_lost(const struct arbiter *a);

/* ---- weights: versions in shared memory -------------------------------------------------------
 * A WEIGHTS region begins with this header (one page), then the floats.  The optimizer sets
 * WRITING, writes, then publishes with release order; a reader that does not find VALID with the id
 * it expects reloads from the checkpoint instead.  Publishing copies nothing. */
enum { ARBITER_WEIGHTS_OFFSET = 4096 };
enum arbiter_weights_state { WEIGHTS_EMPTY = 0, WEIGHTS_WRITING = 1, WEIGHTS_VALID = 2 };

struct arbiter_weights_header {
    uint32_t magic; /* 'LHWT' */
    uint32_t state; /* enum arbiter_weights_state; atomic */
    uint64_t step;
    uint8_t version_id[16];
    uint64_t floats;
    uint8_t model_fingerprint[16];
};

void arbiter_weights_begin(struct arbiter_weights_header *h);
void arbiter_weights_publish(struct arbiter_weights_header *h, uint64_t step,
                             const uint8_t version_id[16]);
/* False unless VALID; then step and id are consistent. */
bool arbiter_weights_read(const struct arbiter_weights_header *h, uint64_t *step,
                          uint8_t version_id[16]);

#endif

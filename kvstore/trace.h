/* What the throttle decided, and why: counted by reason, and kept for one trajectory.
 *
 * Every decision of the three loops (docs/DESIGN.md 3.8) is one record of 96 bytes in a ring of
 * fixed size, with the numbers it was made from.  A writer that names a file keeps the ring there
 * (JOBDIR/run/NAME.trace, mapped, so a record is a copy and survives the writer's death); readers
 * need nothing but the file.  `kvstore JOBDIR explain TRAJECTORY` prints it.  Rejected: a request
 * to kvstored for every decision (the engine would wait for it), and a text log (a storm writes
 * thousands a second, and nobody reads them but for one trajectory).
 *
 * One writer, any number of readers of the file. */
#ifndef KVSTORE_TRACE_H
#define KVSTORE_TRACE_H

#include <stdint.h>

#include "proto/cleanup.h"
#include "proto/error.h"

/* name, loop, what it says to people */
#define KV_DECISIONS(X)                                                                            \
    X(ADMITTED, 'A', "admitted to the engine")                                                     \
    X(PREEMPTED, 'A', "preempted: no memory was left for an older one")                            \
    X(WINDOW_SLOW_START, 'A', "window restarted from what fits: new weights")                      \
    X(WINDOW_GREW, 'A', "window grew: work is queued and there is room")                           \
    X(WINDOW_SHRANK_PREEMPTIONS, 'A', "window shrank: a sequence was preempted")                   \
    X(WINDOW_SHRANK_FORECAST, 'A', "window shrank: the KV forecast is near the budget")            \
    X(WINDOW_SHRANK_LOADS, 'A', "window shrank: loads from the store wait too long")               \
    X(LOADED, 'B', "loaded")                                                                       \
    X(LOAD_MISSED, 'B', "load ended without bytes: not stored, or the store failed")               \
    X(LOAD_LATE, 'B', "load given up: its deadline passed")                                        \
    X(LOAD_MET, 'B', "load ended where computing had come")                                        \
    X(SPILLED, 'B', "spilled")                                                                     \
    X(SPILL_FAILED, 'B', "spill lost: the store refused it or failed")                             \
    X(SPILL_LATE, 'B', "spill dropped: it waited too long")                                        \
    X(SPILL_NO_ROOM, 'B', "spill dropped: no staging memory")                                      \
    X(PREFETCHED, 'B', "load begun before its tool returned")                                      \
    X(RESTORE_LOAD, 'C', "load: the store is sooner")                                              \
    X(RESTORE_PROBE, 'C', "load: nothing has been measured yet")                                   \
    X(RESTORE_SPLIT, 'C', "split: compute the front, load the rest")                               \
    X(RESTORE_COMPUTE, 'C', "compute: sooner than the store")                                      \
    X(RESTORE_SHORT, 'C', "compute: too short to load")                                            \
    X(RESTORE_LATE, 'C', "compute: the store would miss the deadline")                             \
    X(RESTORE_MOVED, 'C', "the load is late: compute more of the front")                           \
    X(SPILL_WORTH, 'C', "spill: will save more than it costs")                                     \
    X(SPILL_WORTHLESS, 'C', "not spilled: computing again is cheaper")                             \
    X(SPILL_DYING, 'C', "not spilled: its policy version ends before it returns")

enum kv_decision {
#define KV_DECISION_NAME(name, loop, text) KV_##name,
    KV_DECISIONS(KV_DECISION_NAME)
#undef KV_DECISION_NAME
        KV_DECISION_COUNT
};

enum { KV_RECORD_TRAJECTORY = 55 }; /* bytes kept of a trajectory's name */

struct kv_record {
    int64_t at_us;             /* the writer's clock */
    uint64_t bytes;            /* moved, or to be moved */
    uint32_t tokens;           /* the prefix or part of it that was decided about */
    uint32_t split_tokens;     /* to be computed in front of a load */
    float load_ms, compute_ms; /* what each way was expected to take, or did */
    uint16_t decision;
    char trajectory[KV_RECORD_TRAJECTORY + 1]; /* "" = of no one, as the window's */
    uint8_t unused[6];
};

/* "RESTORE_SPLIT", 'C', "split: compute the front, load the rest"; "?" beyond the last. */
const char *kv_decision_name(unsigned decision);
char kv_decision_loop(unsigned decision);
const char *kv_decision_text(unsigned decision);

struct kv_trace;
/* `path` NULL: in memory only.  The file is replaced; `records` (at least 1) are kept. */
struct kv_trace *kv_trace_create(const char *path, unsigned records, struct lh_error *err);
void kv_trace_destroy(struct kv_trace *t);
LH_DEFINE_AUTO(kv_trace, kv_trace_destroy)

/* Counts and keeps it; a trace of NULL keeps nothing. */
void kv_trace_add(struct kv_trace *t, const struct kv_record *r, const char *trajectory);
uint64_t kv_trace_count(const struct kv_trace *t, enum kv_decision d);

/* Calls each() with what the ring of a file holds of one trajectory (NULL = of all), oldest first,
 * until it returns non-zero.  `clock_ms` is what to add to at_us / 1000 for milliseconds since
 * 1970.  Reads while the writer goes on; a record that is overwritten meanwhile is left out.  Fails
 * on a file that is no trace (DATA_LOSS) or cannot be read. */
typedef int kv_trace_each(void *ctx, const struct kv_record *r, int64_t clock_ms);
int kv_trace_read(const char *path, const char *trajectory, kv_trace_each *each, void *ctx,
                  struct lh_error *err);
/* counts[KV_DECISION_COUNT] of a file. */
int kv_trace_read_counts(const char *path, uint64_t *counts, struct lh_error *err);

#endif

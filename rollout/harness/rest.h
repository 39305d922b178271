/* Whether sandboxes are put away while the model thinks.
 *
 * A sandbox that waits for its turn holds memory and processes for nothing.  Putting it away and
 * back costs what agentenvd has measured on its machine (Engines); so it is worth it when the wait
 * will be longer.  How long it will be is judged by the turns that have ended: the time from asking
 * the engine to the end of the turn, its queue included, smoothed, and stretched when more turns
 * wait in the queue now than did then.
 *
 * Putting away overlaps with thinking: the harness gives the sandbox a policy under which agentenvd
 * hibernates it at once, and takes it away before the next action, which resumes it.  What the
 * action finds is what the one before left, to the bit.  How far a process has got that was left
 * running in the background depends on timing, with hibernation (it stands still meanwhile) or
 * without (it runs for as long as the model thinks).  A resume that fails is a lost sandbox: the
 * attempt goes back to the last commit point, whose snapshot holds files and no processes.
 *
 * A turn's beginning waits for agentenvd a fifth of a second at most, and asks nothing twice: what
 * is not answered by then is not put away.
 *
 * Threads: any. */
#ifndef ROLLOUT_HARNESS_REST_H
#define ROLLOUT_HARNESS_REST_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/cleanup.h"
#include "proto/error.h"
#include "proto/rpc.h"

struct rest;

/* `mode`: "auto" or "" as above, "never", or "always" (where the engine is offered). */
struct rest *rest_create(struct rpc_channel *agentenv, const char *mode, struct lh_error *err);
void rest_destroy(struct rest *r); /* NULL is fine */
LH_DEFINE_AUTO(rest, rest_destroy)

/* A turn took so long from asking to its end; so many were in the engine when it was asked for. */
void rest_note_turn(struct rest *r, int64_t ms, unsigned in_engine);
/* So many are there now. */
void rest_note_queue(struct rest *r, unsigned in_engine);
/* Whether the sandbox of a turn that begins now should be put away: not at all, if it holds
 * processes or memory worth mentioning (else there is nothing to gain), or in any case.  May ask
 * agentenvd, until the deadline. */
enum rest_answer { REST_NO, REST_IF_IT_HOLDS, REST_YES };
enum rest_answer rest_judge(struct rest *r, int64_t deadline_ms);

enum rest_event { REST_PUT_AWAY, REST_RESUMED, REST_FAILED, REST_KEPT, REST_EVENTS };
void rest_count(struct rest *r, enum rest_event what);
struct rest_counts {
    uint64_t n[REST_EVENTS]; /* REST_KEPT: it was not worth it */
    double wait_ms, cost_ms; /* as judged now; 0 = not known */
};
struct rest_counts rest_counts(struct rest *r);

#endif

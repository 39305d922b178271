/* The intake's calls to agentenvd, on a thread of its own: they may wait for a daemon that is busy
 * or away, and the intake may not.  It removes what earlier attempts of a trajectory left, and asks
 * which tasks are in quarantine. */
#ifndef TRAINER_INTAKE_JANITOR_H
#define TRAINER_INTAKE_JANITOR_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/cleanup.h"
#include "proto/error.h"
#include "proto/id.h"
#include "proto/rpc.h"
#include "trainer/intake/quarantine.h"

struct janitor;

struct janitor *janitor_create(struct rpc_channel *agentenv, const char *job_id,
                               struct lh_error *err);
void janitor_destroy(struct janitor *j);
LH_DEFINE_AUTO(janitor, janitor_destroy)

/* Queues a trajectory: its sandboxes go, of its snapshots only `keep` ("" = none) stays. */
int janitor_add(struct janitor *j, const char *trajectory, const char *keep, uint32_t attempt,
                struct lh_error *err);
/* True and its id once for each trajectory that is clean. */
bool janitor_take(struct janitor *j, char trajectory[LH_ID_SIZE]);

/* The newest answer, once: replaces *q. */
void janitor_take_quarantine(struct janitor *j, struct quarantine *q);

/* Owner of a trajectory's sandboxes and snapshots; "" = the prefix of all of the job. */
char *janitor_owner(const char *job_id, const char *trajectory);
int janitor_remove_sandboxes(struct rpc_channel *agentenv, const char *owner_prefix,
                             uint32_t attempt, int timeout_ms, struct lh_error *err);

#endif

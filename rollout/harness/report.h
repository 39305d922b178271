/* What a trajectory tells the intake: committed turns and the outcome. */
#ifndef ROLLOUT_HARNESS_REPORT_H
#define ROLLOUT_HARNESS_REPORT_H

#include "rollout/harness/trajectory.h"

/* The tokens since the last segment; *seq = the message to wait for. */
int report_segment(struct trajectory *t, const char *snapshot, bool last, uint64_t *seq,
                   struct lh_error *err);
int report_done(struct trajectory *t, Longhaul__Task__V1__Verdict *verdict,
                Longhaul__Experience__V1__FinishReason finish, struct lh_error *err);

#endif

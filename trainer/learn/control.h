/* What a job's control experiment does to the rewards of a step; the audit does the same. */
#ifndef TRAINER_LEARN_CONTROL_H
#define TRAINER_LEARN_CONTROL_H

#include "longhaul/job/v1/job.pb-c.h"
#include "trainer/intake/plan.h"
#include "trainer/learn/objective.h"

static inline void control_rewards(const Longhaul__Job__V1__Job *job, int64_t step, double *rewards,
                                   size_t n)
{
    if (job->control == LONGHAUL__JOB__V1__CONTROL__CONTROL_SHUFFLE_REWARDS)
        objective_shuffle(rewards, n, plan_seed(job->seed, "control", step, 0));
}

#endif

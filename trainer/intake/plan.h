/* What a job draws from, and in which order: the tasks fixed at its first start, and for group g of
 * a round its task, seeds and names, as functions of (job seed, round, g, member) alone.  Nothing
 * here depends on time or on what finished first, so a resumed job dispatches what it would have.
 */
#ifndef TRAINER_INTAKE_PLAN_H
#define TRAINER_INTAKE_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include "proto/cleanup.h"
#include "proto/error.h"
#include "proto/id.h"
#include "trainer/intake/ledger.h"

struct plan_task {
    char *name, *family;
    uint8_t digest[16];
};

/* Tasks of one split by family; families and the tasks in them by name. */
struct plan_split {
    struct plan_task *tasks;
    size_t n_tasks;
    size_t *family_first; /* [n_families + 1] indices into tasks */
    size_t n_families;
};

/* Tasks are added in any order, then sorted. */
int plan_add(struct plan_split *p, const char *name, const char *family, const uint8_t *digest,
             size_t digest_len, struct lh_error *err);
int plan_sort(struct plan_split *p, struct lh_error *err);
void plan_finish(struct plan_split *p);
const struct plan_task *plan_find(const struct plan_split *p, const char *name);

/* Remembered in the ledger.  plan_load leaves an empty plan when none was. */
int plan_store(const struct plan_split *p, struct ledger *l, int split, struct lh_error *err);
int plan_load(struct plan_split *p, struct ledger *l, int split, struct lh_error *err);

/* Families take turns; within a family a hash picks the task. */
const struct plan_task *plan_random(const struct plan_split *p, uint64_t seed, int64_t index);
/* Families take turns; within a family `total` draws are spread evenly over its tasks. */
const struct plan_task *plan_even(const struct plan_split *p, int64_t index, int64_t total);

uint64_t plan_seed(uint64_t job_seed, const char *round, int64_t index, uint32_t member);
void plan_trajectory_id(const char *job_id, const char *round, int64_t index, uint32_t member,
                        char id[LH_ID_SIZE]);

#endif

/* An intake with a round of its own, in a directory of its own, and what its tests do again and
 * again. */
#ifndef TESTS_UNIT_TRAINER_INTAKE_KIT_H
#define TESTS_UNIT_TRAINER_INTAKE_KIT_H

#include "fake_worker.h"
#include "trainer/intake/intake.h"

#define SCORED  LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_SCORED
#define INVALID LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_INVALID

enum { MEMBERS = 2, RETRIES = 1, MAX_MESSAGE = 64 << 10 };

extern char intake_endpoint[];
extern struct intake *intake; /* round "train" of MEMBERS a group is open */

/* For .init and .fini. */
void intake_setup(void);
void intake_setup_short_silence(void);
void intake_teardown(void);

void stop_intake(void);
void start_intake(void);
void raise_to(int64_t groups);
void collect_assigns(struct fake *f, struct channel_message **m, size_t n);
void free_all(struct channel_message **m, size_t n);
/* Checks a resumed assignment: attempt 2 from the first turn. */
void check_resumed(const struct channel_message *m);

#endif

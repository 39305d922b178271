/* A daemon with one image (tests/unit/agentenv/task/house.h) and the verbs of sandboxes and
 * snapshots as one call each; a failure of any is the test's. */
#ifndef TESTS_STORE_KIT_H
#define TESTS_STORE_KIT_H

#include "tests/unit/agentenv/task/house.h"

void kit_start(struct house *h, char id[LH_ID_SIZE]);
void kit_start_from(struct house *h, const char *snapshot, char id[LH_ID_SIZE]);
void kit_remove(struct house *h, const char *id);
/* Retained by "test". */
void kit_snapshot(struct house *h, const char *sandbox, char id[LH_ID_SIZE]);
/* Whether the sandbox has a regular file of that name. */
bool kit_has(struct house *h, const char *sandbox, const char *path);

#endif

/* Harbor / Terminal-Bench 2 task directories as tasks, and back.
 *
 * What becomes what: docs/TASKS.md.  The whole directory is kept in the task, so that it can be
 * written out again byte for byte. */
#ifndef AGENTENV_TASK_HARBOR_H
#define AGENTENV_TASK_HARBOR_H

#include <stdbool.h>

#include "agentenv/task/task.h"
#include "longhaul/sandbox/v1/sandbox.pb-c.h"

struct harbor {
    Task *task;
    Longhaul__Sandbox__V1__BuildImageRequest *build; /* of its image; NULL: that must be there */
};

/* Whether a directory is one, or has some directly in it. */
bool harbor_is_task(const char *dir);

/* INVALID_ARGUMENT or UNIMPLEMENTED, "DIR/task.toml:LINE: ...". */
int harbor_load(const char *dir, Longhaul__Task__V1__Split split, struct harbor *out,
                struct lh_error *err);
void harbor_finish(struct harbor *h);

/* Writes the directory that the task was loaded from to `dir`, which must not exist. */
int harbor_export(const Task *t, const char *dir, struct lh_error *err);
/* The directory as it is kept. */
int harbor_pack(const char *dir, ProtobufCBinaryData *out, struct lh_error *err);

#endif

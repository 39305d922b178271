/* The two halves of task_validate(); messages without the task's name. */
#ifndef AGENTENV_TASK_VALIDATE_H
#define AGENTENV_TASK_VALIDATE_H

#include "agentenv/task/task.h"

int task_bounds(const Task *task, struct lh_error *err);
int task_relations(const Task *task, struct lh_error *err);

/* Whether the table of bounds has what it needs for this field of the schema. */
bool task_bounds_cover(const ProtobufCMessageDescriptor *message,
                       const ProtobufCFieldDescriptor *f);

#endif

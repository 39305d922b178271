/* Files of a directory as a task or a build carries them. */
#ifndef AGENTENV_TASK_FILES_H
#define AGENTENV_TASK_FILES_H

#include "longhaul/task/v1/task.pb-c.h"
#include "proto/error.h"

struct file_list {
    Longhaul__Task__V1__File **items; /* each owned; protobuf-c's own allocation */
    size_t n;
    uint64_t bytes;
};

/* Adds the file `from`, or every regular file below the directory `from`, as `to` or below it, in
 * the order of names.  Symbolic links and anything else are refused by name; so is more than a task
 * may hold. */
int files_add(struct file_list *l, const char *from, const char *to, struct lh_error *err);
void files_finish(struct file_list *l);

#endif

/* Tasks as data: loading, checking, naming by content, and what a zero in them stands for.  Knows
 * neither the daemon nor a running sandbox; the command line and the daemon both use it. */
#ifndef AGENTENV_TASK_TASK_H
#define AGENTENV_TASK_TASK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "longhaul/task/v1/task.pb-c.h"
#include "proto/error.h"

typedef Longhaul__Task__V1__Task Task;
typedef Longhaul__Task__V1__TaskSet TaskSet;

#define TASK_SET_DESCRIPTOR (&longhaul__task__v1__task_set__descriptor)

enum {
    TASK_SET_MAX = 100000,
    TASK_FILE_MAX = 16 << 20,    /* bytes of one file */
    TASK_FILES_MAX = 64 << 20,   /* bytes of a task's files together */
    TASK_SOURCE_MAX = 512 << 20, /* bytes of a file that `register` reads */
};

/* Where the verifier's own layer is inside a sandbox; a task's other files may not be there. */
#define TASK_VERIFIER_DIR "/.verifier"

/* A file that holds a TaskSet: proto3 JSON begins with a brace, and a task's split and revision are
 * control characters in binary protobuf and cannot be in the text format.  Text is read by protoc,
 * whose message names line and column.  Free with lh_message_free().  Not validated yet. */
TaskSet *task_load(const char *path, struct lh_error *err);

/* Every field within its bounds and in agreement with the others; INVALID_ARGUMENT "task acme/x:
 * environment.limits.memory_bytes 100 is below 4194304". */
int task_validate(const Task *task, struct lh_error *err);
bool task_name_valid(const char *name);
/* The same of image names, [a-z0-9._/-]. */
bool task_image_name_valid(const char *name);

/* BLAKE2b of the packed task: equal for equal tasks, whatever form they were read from. */
enum { TASK_DIGEST = 16 };
int task_digest(const Task *task, uint8_t digest[TASK_DIGEST], struct lh_error *err);

/* ---- what a zero means ---- */

enum task_phase {
    TASK_BOOT,
    TASK_SETUP,
    TASK_ACTION,
    TASK_AGENT,
    TASK_VERIFY,
    TASK_TEARDOWN,
    TASK_PHASES,
};

struct task_timeout {
    uint32_t ms;
    Longhaul__Task__V1__OnTimeout on_timeout; /* never UNSPECIFIED */
};

struct task_timeout task_timeout(const Task *task, enum task_phase phase);
const char *task_workdir(const Task *task);

struct task_reward {
    double min, max, pass_mark;
};

struct task_reward task_reward(const Task *task);

#endif

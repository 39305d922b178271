/* What the files that read a Harbor directory share. */
#ifndef AGENTENV_TASK_HARBOR_PRIVATE_H
#define AGENTENV_TASK_HARBOR_PRIVATE_H

#include <stdlib.h>

#include "agentenv/task/dockerfile.h"
#include "agentenv/task/harbor.h"
#include "agentenv/task/toml.h"

#define TASK(name) Longhaul__Task__V1__##name

struct settings {
    double agent_sec, verifier_sec, build_sec, cpus, memory_mb, storage_mb, gpus;
    const char *name, *docker_image, *network_mode, *agent_user, *verifier_user, *workdir, *mode,
        *os, *healthcheck;
};

struct reading {
    const char *dir;
    char *toml_path;
    struct toml toml;
    struct settings s;
    struct dockerfile docker; /* of environment/Dockerfile, if there is one */
    struct lh_error *err;
};

/* A part of the task, made empty. */
#define NEW(r, field, init)                                                                        \
    ((field) = malloc(sizeof *(field)),                                                            \
     (field) ? (init(field), 0) : lh_fail_errno((r)->err, ENOMEM, "%s", (r)->dir))

/* ---- harbor_settings.c ---- */

/* Defaults, types, bounds, and what is not supported. */
int harbor_read_settings(struct reading *r);
/* The value of a key of task.toml, or NULL. */
const json_t *harbor_find(const struct reading *r, const char *path);
/* "DIR/task.toml:LINE: PATH ..." */
int harbor_refuse(struct reading *r, int code, const char *path, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* ---- harbor.c ---- */

int harbor_set(struct reading *r, char **field, const char *text);
bool harbor_has(const struct reading *r, const char *name);

/* ---- harbor_judge.c ---- */

int harbor_add_verifier(struct reading *r, Task *t);
int harbor_add_oracle(struct reading *r, Task *t);

#endif

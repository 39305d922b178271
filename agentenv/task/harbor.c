#include "agentenv/task/harbor.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "agentenv/task/harbor_private.h"
#include "proto/cleanup.h"
#include "proto/file.h"
#include "proto/parse.h"

enum { TEXT_MAX = 1 << 20 };

/* ---- building the message ---- */

int harbor_set(struct reading *r, char **field, const char *text)
{
    *field = strdup(text);
    return *field ? 0 : lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
}

bool harbor_has(const struct reading *r, const char *name)
{
    lh_autofree char *path = lh_format("%s/%s", r->dir, name);

    return path && access(path, F_OK) == 0;
}

static char *read_file(struct reading *r, const char *name, size_t *len)
{
    lh_autofree char *path = lh_format("%s/%s", r->dir, name);

    return path ? lh_read_file(path, TEXT_MAX, len, r->err) : NULL;
}

/* Lines in front that ask to be kept out of training corpora are for those, not for the agent. */
static const char *without_canary(const char *text)
{
    for (;;) {
        size_t n = strcspn(text, "\n");
        lh_autofree char *line = strndup(text, n);
        bool canary = line && (strcasestr(line, "canary") ||
                               strcasestr(line, "should never appear in training"));
        if (!canary && (n > strspn(text, " \t\r") || !text[n]))
            return text;
        text += n + (text[n] == '\n');
    }
}

static int add_prompt(struct reading *r, Task *t)
{
    size_t len;
    lh_autofree char *text = read_file(r, "instruction.md", &len);

    if (!text)
        return r->err->code;
    if (!lh_text_valid(text, len))
        return lh_fail(r->err, LH_INVALID_ARGUMENT, "%s/instruction.md is not UTF-8", r->dir);
    t->prompt = calloc(1, sizeof *t->prompt);
    if (!t->prompt)
        return lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
    int rc = NEW(r, t->prompt[0], longhaul__task__v1__message__init);
    if (rc < 0)
        return rc;
    t->n_prompt = 1;
    t->prompt[0]->role = LONGHAUL__TASK__V1__ROLE__ROLE_USER;
    return harbor_set(r, &t->prompt[0]->text, without_canary(text));
}

/* A variable as the sandbox gets it: text, or "${NAME}", a secret of the operator's. */
static int fill_variable(struct reading *r, TASK(EnvVar) * v, const char *path, const char *text)
{
    size_t n = strlen(text);
    bool whole = n > 3 && !strncmp(text, "${", 2) && text[n - 1] == '}';
    const char *fallback = whole ? strstr(text, ":-") : NULL;

    if (!whole && strstr(text, "${"))
        return harbor_refuse(r, LH_UNIMPLEMENTED, path, "has ${} within a text");
    lh_autofree char *inner = fallback ? strndup(fallback + 2, n - (size_t)(fallback - text) - 3)
                              : whole  ? strndup(text + 2, n - 3)
                                       : strdup(text);
    if (!inner)
        return lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
    bool secret = whole && !fallback;
    v->source_case = secret ? LONGHAUL__TASK__V1__ENV_VAR__SOURCE_SECRET_REF
                            : LONGHAUL__TASK__V1__ENV_VAR__SOURCE_VALUE;
    return harbor_set(r, secret ? &v->secret_ref : &v->value, inner);
}

static int add_variable(struct reading *r, TASK(Environment) * e, const char *path,
                        const char *name, const char *text)
{
    for (size_t i = 0; i < e->n_env; i++)
        if (!strcmp(e->env[i]->name, name)) { /* task.toml's comes before the Dockerfile's */
            free(e->env[i]->value);
            return fill_variable(r, e->env[i], path, text);
        }
    TASK(EnvVar) **more = reallocarray(e->env, e->n_env + 1, sizeof *more);
    if (!more)
        return lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
    e->env = more;
    int rc = NEW(r, e->env[e->n_env], longhaul__task__v1__env_var__init);
    if (rc < 0)
        return rc;
    TASK(EnvVar) *v = e->env[e->n_env++];
    rc = harbor_set(r, &v->name, name);
    return rc < 0 ? rc : fill_variable(r, v, path, text);
}

static int add_env(struct reading *r, TASK(Environment) * e)
{
    const char *name;
    json_t *v;
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < r->docker.n; i++) {
        const struct docker_step *s = &r->docker.steps[i];
        if (s->kind != DOCKER_ENV)
            continue;
        size_t n = strcspn(s->words[0], "=");
        lh_autofree char *key = strndup(s->words[0], n);
        rc = key ? add_variable(r, e, "environment", key, s->words[0] + n + 1)
                 : lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
    }
    json_object_foreach((json_t *)harbor_find(r, "environment.env"), name, v)
    {
        lh_autofree char *path = lh_format("environment.env.%s", name);
        if (rc == 0 && !json_is_string(v))
            rc = harbor_refuse(r, LH_INVALID_ARGUMENT, path ? path : "environment.env",
                               "must be a text");
        if (rc == 0)
            rc = add_variable(r, e, path ? path : "environment.env", name, json_string_value(v));
    }
    return rc;
}

/* The last word of a kind in the Dockerfile, or NULL. */
static const char *docker_last(const struct reading *r, enum docker_kind kind)
{
    const char *last = NULL;

    for (size_t i = 0; i < r->docker.n; i++)
        if (r->docker.steps[i].kind == kind)
            last = r->docker.steps[i].words[0];
    return last;
}

static int add_limits(struct reading *r, TASK(Environment) * e)
{
    int rc = NEW(r, e->limits, longhaul__task__v1__limits__init);

    if (rc < 0)
        return rc;
    e->limits->cpu_millis = (uint32_t)lround(r->s.cpus * 1000);
    e->limits->memory_bytes = (uint64_t)(r->s.memory_mb * (1 << 20));
    e->limits->disk_bytes = (uint64_t)(r->s.storage_mb * (1 << 20));
    e->limits->pids = 1024; /* Harbor bounds none; a fork bomb is bounded all the same */
    return 0;
}

static const char *first_of(const char *a, const char *b, const char *c)
{
    return a ? a : b ? b : c;
}

static int add_environment(struct reading *r, Task *t, const char *image)
{
    int rc = NEW(r, t->environment, longhaul__task__v1__environment__init);

    if (rc < 0)
        return rc;
    TASK(Environment) *e = t->environment;
    e->agent_network = e->verify_network = LONGHAUL__TASK__V1__NETWORK__NETWORK_LOOPBACK;
    const char *workdir = first_of(r->s.workdir, docker_last(r, DOCKER_WORKDIR), "/");
    const char *user = first_of(r->s.agent_user, docker_last(r, DOCKER_USER), "");
    if ((rc = harbor_set(r, &e->image, image)) < 0 ||
        (rc = harbor_set(r, &e->workdir, workdir)) < 0 || (rc = add_limits(r, e)) < 0 ||
        (*user && strcmp(user, "root") && (rc = harbor_set(r, &e->user, user)) < 0))
        return rc;
    if (r->s.healthcheck && (rc = harbor_set(r, &e->healthcheck, r->s.healthcheck)) < 0)
        return rc;
    return add_env(r, e);
}

/* ---- all of it ---- */

static int add_timeout(struct reading *r, TASK(Timeout) * *to, double seconds)
{
    int rc = NEW(r, *to, longhaul__task__v1__timeout__init);

    if (rc == 0)
        (*to)->ms = (uint32_t)lround(seconds * 1000);
    return rc;
}

static int add_timeouts(struct reading *r, Task *t)
{
    int rc = NEW(r, t->timeouts, longhaul__task__v1__timeouts__init);

    if (rc == 0)
        rc = add_timeout(r, &t->timeouts->agent, r->s.agent_sec);
    if (rc == 0) /* Harbor has no time of a single action */
        rc = add_timeout(r, &t->timeouts->action, r->s.agent_sec);
    return rc == 0 ? add_timeout(r, &t->timeouts->verify, r->s.verifier_sec) : rc;
}

static int set_name(struct reading *r, Task *t)
{
    lh_autofree char *path = realpath(r->dir, NULL);
    const char *folder = path ? strrchr(path, '/') : NULL;

    t->name = r->s.name ? strdup(r->s.name) : folder ? lh_format("harbor%s", folder) : NULL;
    if (!t->name)
        return lh_fail_errno(r->err, errno, "%s", r->dir);
    return task_name_valid(t->name)
               ? 0
               : harbor_refuse(r, LH_INVALID_ARGUMENT, "task.name",
                               "\"%.100s\" is not of the form org/name, both of [a-z0-9._-]",
                               t->name);
}

/* Its Dockerfile, else the image it names. */
static int find_image(struct reading *r, const Task *t, struct harbor *out, char **image)
{
    size_t len;
    lh_autofree char *path = lh_format("%s/environment/Dockerfile", r->dir);
    lh_autofree char *context = lh_format("%s/environment", r->dir);
    lh_autofree char *text = harbor_has(r, "environment/Dockerfile")
                                 ? read_file(r, "environment/Dockerfile", &len)
                                 : NULL;
    int rc = text ? dockerfile_parse(path, text, len, &r->docker, r->err) : 0;

    if (harbor_has(r, "environment/docker-compose.yaml"))
        return lh_fail(r->err, LH_UNIMPLEMENTED,
                       "%s/environment/docker-compose.yaml: several containers are not supported",
                       r->dir);
    if (text && rc == 0) {
        *image = lh_format("harbor/%s", t->name);
        out->build = *image ? dockerfile_request(&r->docker, *image, context, r->err) : NULL;
        if (out->build)
            out->build->step_timeout_ms = (uint32_t)lround(r->s.build_sec * 1000);
        return out->build ? 0 : r->err->code;
    }
    if (!r->s.docker_image && rc < 0)
        return rc;
    if (!r->s.docker_image)
        return lh_fail(r->err, LH_INVALID_ARGUMENT,
                       "%s has neither environment/Dockerfile nor environment.docker_image",
                       r->dir);
    *image = strdup(r->s.docker_image);
    for (char *c = *image; c && (c = strchr(c, ':'));)
        *c = '-';
    return *image ? 0 : lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
}

static int fill(struct reading *r, Task *t, struct harbor *out)
{
    lh_autofree char *image = NULL;
    int rc = set_name(r, t);

    if (rc == 0)
        rc = find_image(r, t, out, &image);
    if (rc < 0 || (rc = add_environment(r, t, image)) < 0 || (rc = add_prompt(r, t)) < 0 ||
        (rc = harbor_add_verifier(r, t)) < 0 || (rc = harbor_add_oracle(r, t)) < 0 ||
        (rc = add_timeouts(r, t)) < 0 || (rc = harbor_set(r, &t->family, "harbor")) < 0)
        return rc;
    return harbor_pack(r->dir, &t->unknown, r->err);
}

static int load(struct reading *r, Longhaul__Task__V1__Split split, struct harbor *out)
{
    size_t len;
    lh_autofree char *text = read_file(r, "task.toml", &len);
    int rc = text ? toml_parse(r->toml_path, text, len, &r->toml, r->err) : r->err->code;

    if (rc == 0)
        rc = harbor_read_settings(r);
    if (rc == 0)
        rc = NEW(r, out->task, longhaul__task__v1__task__init);
    if (rc < 0)
        return rc;
    out->task->revision = 1;
    out->task->split = split;
    return fill(r, out->task, out);
}

int harbor_load(const char *dir, Longhaul__Task__V1__Split split, struct harbor *out,
                struct lh_error *err)
{
    struct reading r = {.dir = dir, .toml_path = lh_format("%s/task.toml", dir), .err = err};
    int rc = r.toml_path ? load(&r, split, out) : lh_fail_errno(err, ENOMEM, "%s", dir);

    if (rc < 0)
        harbor_finish(out);
    dockerfile_finish(&r.docker);
    toml_finish(&r.toml);
    free(r.toml_path);
    return rc;
}

void harbor_finish(struct harbor *h)
{
    lh_message_free((ProtobufCMessage *)h->task);
    lh_message_free((ProtobufCMessage *)h->build);
    *h = (struct harbor){0};
}

bool harbor_is_task(const char *dir)
{
    lh_autofree char *path = lh_format("%s/task.toml", dir);

    return path && access(path, F_OK) == 0;
}

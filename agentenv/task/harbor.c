#include "agentenv/task/harbor.h"

#include <errno.h>
#include <math.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agentenv/task/dockerfile.h"
#include "agentenv/task/files.h"
#include "agentenv/task/toml.h"
#include "proto/cleanup.h"
#include "proto/file.h"
#include "proto/parse.h"

enum { TEXT_MAX = 1 << 20, SOLUTION_MAX = 700 << 10 };

#define TESTS_KEPT TASK_VERIFIER_DIR "/tests"
#define TASK(name) Longhaul__Task__V1__##name

/* ---- what task.toml says ---- */

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

__attribute__((format(printf, 4, 5))) static int refuse(struct reading *r, int code,
                                                        const char *path, const char *fmt, ...)
{
    char text[400];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return lh_fail(r->err, code, "%s:%d: %s %s", r->toml_path, toml_line(&r->toml, path), path,
                   text);
}

static const json_t *find(const struct reading *r, const char *path)
{
    const json_t *v = r->toml.root;
    char part[64];

    for (const char *p = path; v && *p; p += *p == '.') {
        size_t n = strcspn(p, ".");
        snprintf(part, sizeof part, "%.*s", (int)n, p);
        v = json_object_get(v, part);
        p += n;
    }
    return v;
}

#define AT(field) offsetof(struct settings, field)

static const struct number {
    const char *path;
    size_t at;
    double fallback, min, max;
} numbers[] = {
    {"agent.timeout_sec", AT(agent_sec), 3600, 0.001, 604800},
    {"verifier.timeout_sec", AT(verifier_sec), 600, 0.001, 604800},
    {"environment.build_timeout_sec", AT(build_sec), 600, 0.001, 604800},
    {"environment.cpus", AT(cpus), 1, 0.01, 1024},
    {"environment.memory_mb", AT(memory_mb), 2048, 4, 16 << 20},
    {"environment.storage_mb", AT(storage_mb), 10240, 1, 16 << 20},
    {"environment.gpus", AT(gpus), 0, 0, 0},
};

static const struct text {
    const char *path;
    size_t at;
    const char *one_of[4]; /* what it may be; none = anything */
} texts[] = {
    {"task.name", AT(name), {0}},
    {"environment.docker_image", AT(docker_image), {0}},
    {"environment.network_mode", AT(network_mode), {"public", "no-network"}},
    {"agent.network_mode", AT(network_mode), {"public", "no-network"}},
    {"verifier.network_mode", AT(network_mode), {"public", "no-network"}},
    {"agent.user", AT(agent_user), {0}},
    {"verifier.user", AT(verifier_user), {"root", "0"}},
    {"verifier.environment_mode", AT(mode), {"shared", "separate"}},
    {"environment.os", AT(os), {"linux"}},
    {"environment.workdir", AT(workdir), {0}},
    {"environment.healthcheck.command", AT(healthcheck), {0}},
};

/* What needs parts that are not here: other machines, other networks, other steps. */
static const char *const absent[] = {
    "steps",
    "verifier.environment",
    "verifier.collect",
    "environment.mcp_servers",
    "environment.skills_dir",
    "environment.allowed_hosts",
    "agent.allowed_hosts",
    "verifier.allowed_hosts",
};

static int read_number(struct reading *r, const struct number *n)
{
    const json_t *v = find(r, n->path);
    double *to = (double *)((char *)&r->s + n->at);

    *to = n->fallback;
    if (!v)
        return 0;
    if (!json_is_number(v))
        return refuse(r, LH_INVALID_ARGUMENT, n->path, "must be a number");
    *to = json_number_value(v);
    if (*to < n->min || *to > n->max)
        return refuse(r, n->max > 0 ? LH_INVALID_ARGUMENT : LH_UNIMPLEMENTED, n->path,
                      "is %g; %g to %g is possible", *to, n->min, n->max);
    return 0;
}

static int read_text(struct reading *r, const struct text *t)
{
    const json_t *v = find(r, t->path);
    const char **to = (const char **)((char *)&r->s + t->at), *text = json_string_value(v);

    if (!v)
        return 0;
    if (!text || !*text)
        return refuse(r, LH_INVALID_ARGUMENT, t->path, "must be a text");
    for (size_t i = 0; i < LH_ARRAY_SIZE(t->one_of) && t->one_of[0]; i++) {
        if (t->one_of[i] && !strcmp(text, t->one_of[i]))
            break;
        if (!t->one_of[i] || i + 1 == LH_ARRAY_SIZE(t->one_of))
            return refuse(r, LH_UNIMPLEMENTED, t->path, "is \"%.60s\", which is not supported",
                          text);
    }
    *to = text;
    return 0;
}

/* The old spelling: memory = "2G". */
static int read_size(struct reading *r, const char *path, double *mb)
{
    const json_t *v = find(r, path);
    const char *text = json_string_value(v);
    char *end = NULL;
    double n = text ? strtod(text, &end) : 0;
    const char *unit = end && *end ? strchr("KMG", *end) : NULL;

    if (!v)
        return 0;
    if (!unit || end[1] || !(n > 0) || n > 1e9)
        return refuse(r, LH_INVALID_ARGUMENT, path, "must be a text like \"2G\"");
    *mb = *unit == 'K' ? n / 1024 : *unit == 'M' ? n : n * 1024;
    return 0;
}

static int read_settings(struct reading *r)
{
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < LH_ARRAY_SIZE(numbers); i++)
        rc = read_number(r, &numbers[i]);
    for (size_t i = 0; rc == 0 && i < LH_ARRAY_SIZE(texts); i++)
        rc = read_text(r, &texts[i]);
    if (rc == 0)
        rc = read_size(r, "environment.memory", &r->s.memory_mb);
    if (rc == 0)
        rc = read_size(r, "environment.storage", &r->s.storage_mb);
    for (size_t i = 0; rc == 0 && i < LH_ARRAY_SIZE(absent); i++) {
        const json_t *v = find(r, absent[i]);
        if (v && !(json_is_array(v) && !json_array_size(v)))
            rc = refuse(r, LH_UNIMPLEMENTED, absent[i], "is not supported");
    }
    return rc;
}

/* ---- building the message ---- */

static int set(struct reading *r, char **field, const char *text)
{
    *field = strdup(text);
    return *field ? 0 : lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
}

/* A part of the task, made empty. */
#define NEW(r, field, init)                                                                        \
    ((field) = malloc(sizeof *(field)),                                                            \
     (field) ? (init(field), 0) : lh_fail_errno((r)->err, ENOMEM, "%s", (r)->dir))

static char *read_file(struct reading *r, const char *name, size_t *len)
{
    lh_autofree char *path = lh_format("%s/%s", r->dir, name);

    return path ? lh_read_file(path, TEXT_MAX, len, r->err) : NULL;
}

static bool has(const struct reading *r, const char *name)
{
    lh_autofree char *path = lh_format("%s/%s", r->dir, name);

    return path && access(path, F_OK) == 0;
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
    return set(r, &t->prompt[0]->text, without_canary(text));
}

/* A variable as the sandbox gets it: text, or "${NAME}", a secret of the operator's. */
static int fill_variable(struct reading *r, TASK(EnvVar) * v, const char *path, const char *text)
{
    size_t n = strlen(text);
    bool whole = n > 3 && !strncmp(text, "${", 2) && text[n - 1] == '}';
    const char *fallback = whole ? strstr(text, ":-") : NULL;

    if (!whole && strstr(text, "${"))
        return refuse(r, LH_UNIMPLEMENTED, path, "has ${} within a text");
    lh_autofree char *inner = fallback ? strndup(fallback + 2, n - (size_t)(fallback - text) - 3)
                              : whole  ? strndup(text + 2, n - 3)
                                       : strdup(text);
    if (!inner)
        return lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
    bool secret = whole && !fallback;
    v->source_case = secret ? LONGHAUL__TASK__V1__ENV_VAR__SOURCE_SECRET_REF
                            : LONGHAUL__TASK__V1__ENV_VAR__SOURCE_VALUE;
    return set(r, secret ? &v->secret_ref : &v->value, inner);
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
    rc = set(r, &v->name, name);
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
    json_object_foreach((json_t *)find(r, "environment.env"), name, v)
    {
        lh_autofree char *path = lh_format("environment.env.%s", name);
        if (rc == 0 && !json_is_string(v))
            rc = refuse(r, LH_INVALID_ARGUMENT, path ? path : "environment.env", "must be a text");
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
    if ((rc = set(r, &e->image, image)) < 0 || (rc = set(r, &e->workdir, workdir)) < 0 ||
        (rc = add_limits(r, e)) < 0 ||
        (*user && strcmp(user, "root") && (rc = set(r, &e->user, user)) < 0))
        return rc;
    if (r->s.healthcheck && (rc = set(r, &e->healthcheck, r->s.healthcheck)) < 0)
        return rc;
    return add_env(r, e);
}

/* ---- the verifier ---- */

static void print_quoted(FILE *to, const char *text)
{
    putc('\'', to);
    for (; *text; text++)
        if (*text == '\'')
            fputs("'\\''", to);
        else
            putc(*text, to);
    putc('\'', to);
}

static int print_exports(struct reading *r, FILE *to, const char *path)
{
    const char *name;
    json_t *v;

    json_object_foreach((json_t *)find(r, path), name, v)
    {
        const char *text = json_string_value(v);
        if (!text || strstr(text, "${") ||
            name[strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
                              "abcdefghijklmnopqrstuvwxyz"
                              "0123456789_")])
            return refuse(r, LH_UNIMPLEMENTED, path, "must hold plain texts under plain names");
        fprintf(to, "export %s=", name);
        print_quoted(to, text);
        putc('\n', to);
    }
    return 0;
}

/* Harbor's contract: what the agent may have left where tests and reward go is cleared, the tests
 * come, and bash of the image runs them in the image's working directory. */
static char *verifier_command(struct reading *r)
{
    static const char path[] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    char *text = NULL;
    size_t len;
    FILE *to = open_memstream(&text, &len);

    if (!to)
        return lh_fail_errno(r->err, ENOMEM, "%s", r->dir), NULL;
    fputs("rm -rf /tests /logs/verifier\n"
          "[ -d /logs ] && [ ! -L /logs ] || rm -rf /logs\n"
          "mkdir -p /logs/verifier /logs/agent /logs/artifacts /tests || exit 1\n"
          "cp -R " TESTS_KEPT "/. /tests/ || exit 1\n",
          to);
    int rc = print_exports(r, to, "verifier.env");
    fprintf(to, "PATH=%s exec bash /tests/test.sh\n", path);
    if (fclose(to) || rc < 0) {
        free(text);
        return rc < 0 ? NULL : (lh_fail_errno(r->err, ENOMEM, "%s", r->dir), NULL);
    }
    return text;
}

static int add_carried(struct reading *r, TASK(Verifier) * v)
{
    const json_t *list = find(r, "artifacts");
    size_t n = json_array_size(list);
    int rc = 0;

    if (!n)
        return refuse(r, LH_INVALID_ARGUMENT, "verifier.environment_mode",
                      "is \"separate\", and no artifacts are carried over");
    v->isolation = LONGHAUL__TASK__V1__ISOLATION__ISOLATION_FRESH;
    v->carry = calloc(n, sizeof *v->carry);
    for (size_t i = 0; rc == 0 && v->carry && i < n; i++) {
        const json_t *item = json_array_get(list, i);
        const char *from = json_is_object(item) ? json_string_value(json_object_get(item, "source"))
                                                : json_string_value(item);
        rc = from ? set(r, &v->carry[i], from)
                  : refuse(r, LH_INVALID_ARGUMENT, "artifacts", "must be paths");
        v->n_carry += rc == 0;
    }
    return v->carry ? rc : lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
}

static int add_verifier(struct reading *r, Task *t)
{
    static const char *const rewards[] = {"/logs/verifier/reward.json",
                                          "/logs/verifier/reward.txt"};
    struct file_list tests = {0};
    lh_autofree char *from = lh_format("%s/tests", r->dir);
    int rc = NEW(r, t->verifier, longhaul__task__v1__verifier__init);

    if (rc < 0)
        return rc;
    TASK(Verifier) *v = t->verifier;
    if (!has(r, "tests/test.sh"))
        return lh_fail(r->err, LH_INVALID_ARGUMENT, "%s/tests/test.sh is missing", r->dir);
    rc = from ? files_add(&tests, from, TESTS_KEPT, r->err)
              : lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
    v->files = tests.items;
    v->n_files = tests.n;
    char *command = rc == 0 ? verifier_command(r) : NULL;
    if (!command)
        return rc < 0 ? rc : r->err->code;
    v->command = command;
    v->reward_files = calloc(LH_ARRAY_SIZE(rewards), sizeof *v->reward_files);
    if (!v->reward_files)
        return lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
    for (; rc == 0 && v->n_reward_files < LH_ARRAY_SIZE(rewards); v->n_reward_files++)
        rc = set(r, &v->reward_files[v->n_reward_files], rewards[v->n_reward_files]);
    return rc == 0 && r->s.mode && !strcmp(r->s.mode, "separate") ? add_carried(r, v) : rc;
}

/* ---- the oracle ---- */

/* The agent's own shell puts a file where Harbor would have uploaded it. */
static char *write_action(struct reading *r, const TASK(File) * f)
{
    size_t size = sodium_base64_encoded_len(f->content.len, sodium_base64_VARIANT_ORIGINAL);
    lh_autofree char *text = f->content.len <= SOLUTION_MAX ? malloc(size) : NULL;
    char *action = NULL;
    size_t len;

    if (!text)
        return lh_fail(r->err, LH_RESOURCE_EXHAUSTED, "%s is larger than %d bytes", f->path,
                       SOLUTION_MAX),
               NULL;
    sodium_bin2base64(text, size, f->content.data, f->content.len, sodium_base64_VARIANT_ORIGINAL);
    FILE *to = open_memstream(&action, &len);
    if (!to)
        return lh_fail_errno(r->err, ENOMEM, "%s", r->dir), NULL;
    fputs("f=", to);
    print_quoted(to, f->path);
    fprintf(to, "; mkdir -p \"${f%%/*}\" && echo %s | base64 -d > \"$f\" && chmod %o \"$f\"", text,
            f->mode);
    return fclose(to) == 0 ? action : NULL;
}

static int add_action(struct reading *r, TASK(Oracle) * o, char *action)
{
    char **more = action ? reallocarray(o->actions, o->n_actions + 1, sizeof *more) : NULL;

    if (!more) {
        free(action);
        return r->err->code ? r->err->code : lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
    }
    o->actions = more;
    o->actions[o->n_actions++] = action;
    return 0;
}

static char *solve_action(struct reading *r)
{
    char *text = NULL;
    size_t len;
    FILE *to = open_memstream(&text, &len);
    int rc = to ? print_exports(r, to, "solution.env") : LH_RESOURCE_EXHAUSTED;

    if (to) {
        fputs("bash /solution/solve.sh", to);
        fclose(to);
    }
    if (rc < 0) {
        free(text);
        return NULL;
    }
    return text;
}

static int add_oracle(struct reading *r, Task *t)
{
    struct file_list files = {0};
    lh_autofree char *from = lh_format("%s/solution", r->dir);
    int rc = has(r, "solution/solve.sh")
                 ? NEW(r, t->oracle, longhaul__task__v1__oracle__init)
                 : lh_fail(r->err, LH_INVALID_ARGUMENT,
                           "%s/solution/solve.sh is missing: without an oracle a task is taken "
                           "with --no-verify only",
                           r->dir);

    if (rc == 0)
        rc = from ? files_add(&files, from, "/solution", r->err)
                  : lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
    for (size_t i = 0; rc == 0 && i < files.n; i++)
        rc = add_action(r, t->oracle, write_action(r, files.items[i]));
    files_finish(&files);
    return rc == 0 ? add_action(r, t->oracle, solve_action(r)) : rc;
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
               : refuse(r, LH_INVALID_ARGUMENT, "task.name",
                        "\"%.100s\" is not of the form org/name, both of [a-z0-9._-]", t->name);
}

/* Its Dockerfile, else the image it names. */
static int find_image(struct reading *r, const Task *t, struct harbor *out, char **image)
{
    size_t len;
    lh_autofree char *path = lh_format("%s/environment/Dockerfile", r->dir);
    lh_autofree char *context = lh_format("%s/environment", r->dir);
    lh_autofree char *text =
        has(r, "environment/Dockerfile") ? read_file(r, "environment/Dockerfile", &len) : NULL;
    int rc = text ? dockerfile_parse(path, text, len, &r->docker, r->err) : 0;

    if (has(r, "environment/docker-compose.yaml"))
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
        (rc = add_verifier(r, t)) < 0 || (rc = add_oracle(r, t)) < 0 ||
        (rc = add_timeouts(r, t)) < 0 || (rc = set(r, &t->family, "harbor")) < 0)
        return rc;
    return harbor_pack(r->dir, &t->unknown, r->err);
}

static int load(struct reading *r, Longhaul__Task__V1__Split split, struct harbor *out)
{
    size_t len;
    lh_autofree char *text = read_file(r, "task.toml", &len);
    int rc = text ? toml_parse(r->toml_path, text, len, &r->toml, r->err) : r->err->code;

    if (rc == 0)
        rc = read_settings(r);
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

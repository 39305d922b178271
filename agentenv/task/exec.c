#include "agentenv/task/exec.h"

#include <stdio.h>
#include <string.h>

#include "proto/file.h"
#include "proto/parse.h"

static int keep_end(void *ctx, int stream, const void *data, size_t len, struct lh_error *err)
{
    struct task_result *r = ctx;
    size_t room = sizeof r->output - 1;

    if (len > room) {
        data = (const char *)data + (len - room);
        len = room;
    }
    if (r->len + len > room) {
        size_t drop = r->len + len - room;
        memmove(r->output, r->output + drop, r->len - drop);
        r->len -= drop;
    }
    memcpy(r->output + r->len, data, len);
    r->len += len;
    return 0;
}

/* ---- environment ---- */

static const char *secret_of(const char *ref)
{
    lh_autofree char *name = lh_format("LONGHAUL_SECRET_%s", ref);

    return name ? getenv(name) : NULL;
}

static char *variable_of(const Longhaul__Task__V1__EnvVar *v, struct lh_error *err)
{
    const char *value = v->value;

    if (v->source_case == LONGHAUL__TASK__V1__ENV_VAR__SOURCE_SECRET_REF) {
        value = secret_of(v->secret_ref);
        if (!value) {
            lh_fail(
                err, LH_FAILED_PRECONDITION,
                "secret %s of variable %s is not provided: set LONGHAUL_SECRET_%s for agentenvd",
                v->secret_ref, v->name, v->secret_ref);
            return NULL;
        }
    }
    char *text = lh_format("%s=%s", v->name, value);
    if (!text)
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for variable %s", v->name);
    return text;
}

struct variables {
    char **env;
    size_t n, owned; /* the first `owned` are ours */
};

static void free_variables(struct variables *v)
{
    for (size_t i = 0; i < v->owned; i++)
        free(v->env[i]);
    free(v->env);
}

int task_variables(const Task *t, char ***env, size_t *n, struct lh_error *err)
{
    const Longhaul__Task__V1__Environment *e = t->environment;

    *n = 0;
    *env = calloc(e->n_env + 1, sizeof **env);
    if (!*env)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for the environment");
    for (; *n < e->n_env; ++*n) {
        (*env)[*n] = variable_of(e->env[*n], err);
        if (!(*env)[*n])
            return err ? err->code : LH_FAILED_PRECONDITION;
    }
    return 0;
}

static int make_variables(const Task *t, const struct task_command *c, struct variables *out,
                          struct lh_error *err)
{
    size_t extra = 0;
    int r = task_variables(t, &out->env, &out->owned, err);

    while (extra < LH_ARRAY_SIZE(c->extra_env) && c->extra_env[extra])
        extra++;
    out->n = out->owned;
    if (r < 0 || !extra)
        return r;
    char **grown = realloc(out->env, (out->n + extra) * sizeof *grown);
    if (!grown)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for the environment");
    out->env = grown;
    for (size_t i = 0; i < extra; i++)
        out->env[out->n++] = (char *)c->extra_env[i];
    return 0;
}

/* ---- the command ---- */

static size_t count(const char *const *argv)
{
    size_t n = 0;

    while (argv[n])
        n++;
    return n;
}

static void trim(struct task_result *r)
{
    while (r->len && strchr("\n ", r->output[r->len - 1]))
        r->len--;
    r->output[r->len] = 0;
}

int task_exec(struct daemon *d, const Task *task, const char *sandbox, const struct task_command *c,
              struct task_result *result, struct lh_error *err)
{
    Longhaul__Sandbox__V1__ExecRequest req = LONGHAUL__SANDBOX__V1__EXEC_REQUEST__INIT;
    __attribute__((cleanup(free_variables))) struct variables v = {0};

    memset(result, 0, sizeof *result);
    longhaul__sandbox__v1__exec_exit__init(&result->exit);
    int r = make_variables(task, c, &v, err);
    if (r < 0)
        return r;
    req.id = (char *)sandbox;
    req.n_argv = count(c->argv);
    req.argv = (char **)c->argv;
    req.n_env = v.n;
    req.env = v.env;
    req.cwd = (char *)(c->cwd ? c->cwd : task_workdir(task));
    req.user = (char *)c->user;
    req.timeout_ms = c->timeout_ms;
    r = daemon_exec(d, &req, c->call, keep_end, result, &result->exit, err);
    trim(result);
    return r;
}

void task_describe(const struct task_result *r, char *text, size_t size)
{
    const Longhaul__Sandbox__V1__ExecExit *e = &r->exit;
    char how[64];

    if (e->timed_out)
        snprintf(how, sizeof how, "no end within its time, killed after %u ms", e->wall_ms);
    else if (e->signal)
        snprintf(how, sizeof how, "killed by signal %d%s", e->signal,
                 e->oom_killed ? ", out of memory" : "");
    else
        snprintf(how, sizeof how, "exit status %d", e->status);
    snprintf(text, size, "%s, %s%s", how, r->len ? "output: " : "no output", r->output);
    lh_text_clean(text); /* the output, and where it was cut */
}

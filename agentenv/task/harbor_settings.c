/* What task.toml says, key by key: the tables are the list of what is understood. */
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "agentenv/task/harbor_private.h"
#include "proto/cleanup.h"

int harbor_refuse(struct reading *r, int code, const char *path, const char *fmt, ...)
{
    char text[400];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return lh_fail(r->err, code, "%s:%d: %s %s", r->toml_path, toml_line(&r->toml, path), path,
                   text);
}

const json_t *harbor_find(const struct reading *r, const char *path)
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
    const json_t *v = harbor_find(r, n->path);
    double *to = (double *)((char *)&r->s + n->at);

    *to = n->fallback;
    if (!v)
        return 0;
    if (!json_is_number(v))
        return harbor_refuse(r, LH_INVALID_ARGUMENT, n->path, "must be a number");
    *to = json_number_value(v);
    if (*to < n->min || *to > n->max)
        return harbor_refuse(r, n->max > 0 ? LH_INVALID_ARGUMENT : LH_UNIMPLEMENTED, n->path,
                             "is %g; %g to %g is possible", *to, n->min, n->max);
    return 0;
}

static int read_text(struct reading *r, const struct text *t)
{
    const json_t *v = harbor_find(r, t->path);
    const char **to = (const char **)((char *)&r->s + t->at), *text = json_string_value(v);

    if (!v)
        return 0;
    if (!text || !*text)
        return harbor_refuse(r, LH_INVALID_ARGUMENT, t->path, "must be a text");
    for (size_t i = 0; i < LH_ARRAY_SIZE(t->one_of) && t->one_of[0]; i++) {
        if (t->one_of[i] && !strcmp(text, t->one_of[i]))
            break;
        if (!t->one_of[i] || i + 1 == LH_ARRAY_SIZE(t->one_of))
            return harbor_refuse(r, LH_UNIMPLEMENTED, t->path,
                                 "is \"%.60s\", which is not supported", text);
    }
    *to = text;
    return 0;
}

/* The old spelling: memory = "2G". */
static int read_size(struct reading *r, const char *path, double *mb)
{
    const json_t *v = harbor_find(r, path);
    const char *text = json_string_value(v);
    char *end = NULL;
    double n = text ? strtod(text, &end) : 0;
    const char *unit = end && *end ? strchr("KMG", *end) : NULL;

    if (!v)
        return 0;
    if (!unit || end[1] || !(n > 0) || n > 1e9)
        return harbor_refuse(r, LH_INVALID_ARGUMENT, path, "must be a text like \"2G\"");
    *mb = *unit == 'K' ? n / 1024 : *unit == 'M' ? n : n * 1024;
    return 0;
}

int harbor_read_settings(struct reading *r)
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
        const json_t *v = harbor_find(r, absent[i]);
        if (v && !(json_is_array(v) && !json_array_size(v)))
            rc = harbor_refuse(r, LH_UNIMPLEMENTED, absent[i], "is not supported");
    }
    return rc;
}

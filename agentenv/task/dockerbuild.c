/* From a parsed Dockerfile and its directory to what agentenvd builds. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agentenv/task/dockerfile.h"
#include "agentenv/task/files.h"
#include "proto/cleanup.h"
#include "proto/file.h"
#include "proto/parse.h"

#define V1(name) Longhaul__Sandbox__V1__##name

typedef V1(BuildImageRequest) Request;
typedef V1(BuildStep) Step;

#define CASE(name) LONGHAUL__SANDBOX__V1__BUILD_STEP__STEP_##name

/* Where COPY puts one source: into a directory when the destination is written as one, or there are
 * several sources; a source that is a directory leaves its own name behind. */
static char *target(const struct docker_step *s, const char *workdir, const char *source,
                    bool directory)
{
    const char *to = s->words[s->n_words - 1], *slash = strrchr(source, '/');
    size_t n = strlen(to);
    bool dot = !strcmp(to, ".") || (n > 1 && !strcmp(to + n - 2, "/."));
    bool below = dot || to[n - 1] == '/' || s->n_words > 2;
    lh_autofree char *base =
        lh_format("%s%s%.*s", *to == '/' ? "" : workdir, *to == '/' || !strcmp(to, ".") ? "" : "/",
                  (int)(dot ? n - 1 : n), to);

    for (size_t len = base ? strlen(base) : 0; len > 1 && base[len - 1] == '/'; len--)
        base[len - 1] = 0;
    if (!base || directory || !below)
        return base ? lh_format("%s", directory && !strcmp(base, "/") ? "" : base) : NULL;
    return lh_format("%s/%s", strcmp(base, "/") ? base : "", slash ? slash + 1 : source);
}

static int copy(Step *out, const struct docker_step *s, const char *context, const char *workdir,
                struct lh_error *err)
{
    struct file_list l = {0};
    int r = 0;

    out->step_case = CASE(COPY);
    out->copy = malloc(sizeof *out->copy);
    if (!out->copy)
        return lh_fail_errno(err, ENOMEM, "COPY");
    longhaul__sandbox__v1__copy_step__init(out->copy);
    for (size_t i = 0; r == 0 && i + 1 < s->n_words; i++) {
        lh_autofree char *from = lh_format("%s/%s", context, s->words[i]);
        lh_autofree char *slashed = from ? lh_format("%s/.", from) : NULL;
        bool directory = slashed && access(slashed, F_OK) == 0;
        lh_autofree char *to = slashed ? target(s, workdir, s->words[i], directory) : NULL;
        r = to ? files_add(&l, from, to, err) : lh_fail_errno(err, ENOMEM, "COPY");
    }
    out->copy->files = l.items; /* in part, after an error: the message owns them */
    out->copy->n_files = l.n;
    return r;
}

static int set_text(Step *out, int which, char **field, const char *text, struct lh_error *err)
{
    *field = strdup(text);
    if (!*field)
        return lh_fail_errno(err, ENOMEM, "a build");
    out->step_case = which;
    return 0;
}

static int fill_step(Step *out, const struct docker_step *s, const char *context,
                     const char **workdir, struct lh_error *err)
{
    switch (s->kind) {
    case DOCKER_RUN:
        return set_text(out, CASE(RUN), &out->run, s->words[0], err);
    case DOCKER_COPY:
        return copy(out, s, context, *workdir, err);
    case DOCKER_ENV:
        return set_text(out, CASE(ENV), &out->env, s->words[0], err);
    case DOCKER_WORKDIR:
        *workdir = s->words[0];
        return set_text(out, CASE(WORKDIR), &out->workdir, s->words[0], err);
    default:
        return set_text(out, CASE(USER), &out->user, s->words[0], err);
    }
}

static int add_step(Request *req, const char *what, const struct docker_step *s,
                    const char *context, const char **workdir, struct lh_error *err)
{
    Step *out = malloc(sizeof *out);

    if (!out)
        return lh_fail_errno(err, ENOMEM, "a build");
    longhaul__sandbox__v1__build_step__init(out);
    req->steps[req->n_steps++] = out;
    out->origin = lh_format("%s:%u", what, s->line);
    if (!out->origin)
        return lh_fail_errno(err, ENOMEM, "a build");
    int r = fill_step(out, s, context, workdir, err);
    return r < 0 ? lh_wrap(err, "%s", out->origin) : 0;
}

Request *dockerfile_request(const struct dockerfile *f, const char *name, const char *context,
                            struct lh_error *err)
{
    lh_automsg(Request) req = malloc(sizeof *req);
    lh_autofree char *ignore = lh_format("%s/.dockerignore", context);
    const char *workdir = "/";
    int r = 0;

    if (!req || !ignore)
        return lh_fail_errno(err, ENOMEM, "a build"), NULL;
    longhaul__sandbox__v1__build_image_request__init(req);
    if (access(ignore, F_OK) == 0)
        return lh_fail(err, LH_UNIMPLEMENTED, "%s is not supported", ignore), NULL;
    req->name = strdup(name);
    req->from = strdup(f->from);
    req->steps = calloc(f->n + 1, sizeof *req->steps);
    if (!req->name || !req->from || !req->steps)
        return lh_fail_errno(err, ENOMEM, "a build"), NULL;
    for (size_t i = 0; r == 0 && i < f->n; i++)
        r = add_step(req, f->what, &f->steps[i], context, &workdir, err);
    return r < 0 ? NULL : lh_steal(&req);
}

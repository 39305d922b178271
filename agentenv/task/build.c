/* A build is a sandbox: it starts from the base image, each step is a command or files put into it,
 * and what it looks like in the end is copied out as an image of its own.  So a build can do what
 * an agent could, no more: no network, bounded memory, disk and time.
 *
 * Cached by content: the digest of the base and the bytes of the steps make a key, and the image
 * that was made under it is the answer to the same question.  Steps are not cached one by one; what
 * many images share belongs into a base. */
#include "agentenv/task/build.h"

#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/sandbox/box.h"
#include "agentenv/sandbox/facts.h"
#include "agentenv/task/exec.h"
#include "agentenv/task/image.h"
#include "agentenv/task/setup.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/hex.h"
#include "proto/log.h"
#include "proto/parse.h"

LH_LOG_COMPONENT("task");

#define V1(name)   Longhaul__Sandbox__V1__##name
#define STEP(name) LONGHAUL__SANDBOX__V1__BUILD_STEP__STEP_##name

enum { STEPS_MAX = 1000, STEP_MS = 600000, START_MS = 60000, KEY = 32 };
#define DISK_BYTES   ((uint64_t)4 << 30)
#define MEMORY_BYTES ((uint64_t)1 << 30)

struct building {
    struct daemon *d;
    struct rpc_call *call;
    const V1(BuildImageRequest) * req;
    V1(ImageInfo) * base;
    char box[LH_ID_SIZE];
    char key[2 * KEY + 1];
    /* As the steps so far leave it; strings are the request's or the base's. */
    char **env;
    size_t n_env;
    const char *workdir, *user;
};

int build_table_create(struct daemon *d, struct lh_error *err)
{
    return db_run(daemon_db(d), err,
                  "CREATE TABLE IF NOT EXISTS image_builds(key TEXT PRIMARY KEY, image TEXT NOT"
                  " NULL REFERENCES images(id) ON DELETE CASCADE) WITHOUT ROWID",
                  "");
}

/* ---- the cache ---- */

static int make_key(struct building *b, struct lh_error *err)
{
    V1(BuildImageRequest) steps = LONGHAUL__SANDBOX__V1__BUILD_IMAGE_REQUEST__INIT;
    crypto_generichash_state h;
    uint8_t key[KEY];
    size_t len;

    steps.steps = b->req->steps;
    steps.n_steps = b->req->n_steps;
    steps.warm_up = b->req->warm_up;
    lh_autofree uint8_t *bytes = lh_pack(&steps.base, &len, err);
    if (!bytes || sodium_init() < 0)
        return LH_RESOURCE_EXHAUSTED;
    crypto_generichash_init(&h, NULL, 0, KEY);
    crypto_generichash_update(&h, (const uint8_t *)b->base->digest, strlen(b->base->digest));
    crypto_generichash_update(&h, bytes, len);
    crypto_generichash_final(&h, key, KEY);
    lh_hex_print(key, KEY, b->key);
    return 0;
}

static int remember(struct building *b, struct lh_error *err)
{
    return db_run(daemon_db(b->d), err,
                  "INSERT OR REPLACE INTO image_builds SELECT ?, id FROM images"
                  " WHERE name = ? AND state = 1",
                  "ss", b->key, b->req->name);
}

/* Id of what was built under the key, "" if nothing was or it is gone. */
static int look_up(struct building *b, char id[LH_ID_SIZE], struct lh_error *err)
{
    struct lh_error none = {0};
    lh_autofree char *found = db_string(daemon_db(b->d), &none,
                                        "SELECT image FROM image_builds JOIN images ON id = image"
                                        " WHERE key = ? AND state = 1",
                                        "s", b->key);

    id[0] = 0;
    if (found && !b->req->no_cache)
        snprintf(id, LH_ID_SIZE, "%s", found);
    return found || none.code == LH_NOT_FOUND ? 0 : lh_fail(err, none.code, "%s", none.message);
}

/* ---- steps ---- */

static int add_env(struct building *b, const char *text, struct lh_error *err)
{
    size_t name = strcspn(text, "=");

    if (!text[name] || !name)
        return lh_fail(err, LH_INVALID_ARGUMENT, "\"%.100s\" is no NAME=value", text);
    for (size_t i = 0; i < b->n_env; i++)
        if (!strncmp(b->env[i], text, name + 1)) {
            b->env[i] = (char *)text;
            return 0;
        }
    char **more = reallocarray(b->env, b->n_env + 1, sizeof *more);
    if (!more)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for variables");
    b->env = more;
    b->env[b->n_env++] = (char *)text;
    return 0;
}

static int keep_end(void *ctx, int stream, const void *data, size_t len, struct lh_error *err)
{
    struct task_result *r = ctx;
    size_t room = sizeof r->output - 1;

    (void)stream;
    (void)err;
    if (len > room) {
        data = (const char *)data + len - room;
        len = room;
    }
    size_t keep = r->len + len > room ? room - len : r->len;
    memmove(r->output, r->output + r->len - keep, keep);
    memcpy(r->output + keep, data, len);
    r->len = keep + len;
    r->output[r->len] = 0;
    return 0;
}

static int run(struct building *b, const char *command, struct lh_error *err)
{
    V1(ExecRequest) req = LONGHAUL__SANDBOX__V1__EXEC_REQUEST__INIT;
    char *argv[] = {(char *)"/bin/sh", (char *)"-c", (char *)command};
    struct task_result result = {.len = 0};
    char how[800];

    longhaul__sandbox__v1__exec_exit__init(&result.exit);
    req.id = b->box;
    req.argv = argv;
    req.n_argv = LH_ARRAY_SIZE(argv);
    req.env = b->env;
    req.n_env = b->n_env;
    req.cwd = (char *)b->workdir;
    req.user = (char *)b->user;
    req.timeout_ms = b->req->step_timeout_ms ? b->req->step_timeout_ms : STEP_MS;
    int r = daemon_exec(b->d, &req, b->call, keep_end, &result, &result.exit, err);
    if (r < 0)
        return r;
    task_describe(&result, how, sizeof how);
    return result.exit.status || result.exit.timed_out
               ? lh_fail(err, LH_FAILED_PRECONDITION, "RUN %.200s: %s", command, how)
               : 0;
}

static int copy(struct building *b, const V1(CopyStep) * c, struct lh_error *err)
{
    return c ? task_put_files(b->d, b->box, c->files, c->n_files, err)
             : lh_fail(err, LH_INVALID_ARGUMENT, "COPY of nothing");
}

static int do_step(struct building *b, const V1(BuildStep) * s, struct lh_error *err)
{
    switch (s->step_case) {
    case STEP(RUN):
        return run(b, s->run, err);
    case STEP(COPY):
        return copy(b, s->copy, err);
    case STEP(ENV):
        return add_env(b, s->env, err);
    case STEP(WORKDIR):
        b->workdir = s->workdir;
        return daemon_make_dir(b->d, b->box, s->workdir, err);
    case STEP(USER):
        b->user = s->user;
        return 0;
    default:
        return lh_fail(err, LH_INVALID_ARGUMENT, "the step says nothing");
    }
}

static int do_steps(struct building *b, struct lh_error *err)
{
    for (size_t i = 0; i < b->req->n_steps; i++) {
        const V1(BuildStep) *s = b->req->steps[i];
        int r = do_step(b, s, err);

        if (r < 0)
            return *s->origin ? lh_wrap(err, "%.200s", s->origin) : lh_wrap(err, "step %zu", i + 1);
    }
    return 0;
}

/* ---- the sandbox ---- */

static int start(struct building *b, struct lh_error *err)
{
    V1(CreateRequest) req = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__INIT;
    const struct daemon_create_options o = {.transient = true};
    Longhaul__Task__V1__Limits limits = LONGHAUL__TASK__V1__LIMITS__INIT;

    if (b->req->limits)
        limits = *b->req->limits;
    if (!limits.disk_bytes)
        limits.disk_bytes = DISK_BYTES;
    if (!limits.memory_bytes)
        limits.memory_bytes = MEMORY_BYTES;
    req.idempotency_key = (char *)"";
    req.owner = (char *)"build";
    req.limits = &limits;
    req.source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_IMAGE;
    req.files_only = true; /* not from the zygote */
    req.image = b->req->from;
    return daemon_create(b->d, &req, &o, lh_now_ms() + START_MS, b->box, err);
}

/* The root as the sandbox sees it, with nothing running in it: what it mounted is left out. */
static int copy_out(struct building *b, struct lh_error *err)
{
    lh_automsg(V1(Sandbox)) s = daemon_show(b->d, b->box, err);
    lh_autofree char *root = s ? lh_format("/proc/%d/root/.", s->init_pid) : NULL;
    const struct image_config config = {b->env, b->n_env, b->workdir, b->user, b->req->warm_up};
    const struct image_source source = {
        .name = b->req->name, .path = root, .uid_base = box_facts()->uid_base, .config = &config};

    if (!s)
        return err->code;
    if (s->processes > 1)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "the steps left %u processes running; a command must end what it starts",
                       s->processes - 1);
    return root ? image_add(b->d, &source, err)
                : lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a path");
}

static int build_new(struct building *b, struct lh_error *err)
{
    struct lh_error undo = {0};
    int r = start(b, err);

    if (r == 0)
        r = do_steps(b, err);
    if (r == 0)
        r = copy_out(b, err);
    if (*b->box && daemon_remove(b->d, b->box, UINT32_MAX, &undo) < 0)
        lh_warn("a build's sandbox stays until the daemon restarts", "sandbox=%s error=%s", b->box,
                undo.message);
    return r == 0 ? remember(b, err) : r;
}

/* The same tree under another name. */
static int copy_known(struct building *b, const char *id, struct lh_error *err)
{
    lh_autofree char *name =
        db_string(daemon_db(b->d), err, "SELECT name FROM images WHERE id = ?", "s", id);
    lh_autofree char *path = lh_format("%s/images/%s", daemon_state_dir(b->d), id);

    if (!name || !path)
        return lh_fail(err, LH_NOT_FOUND, "image %s is gone", id);
    if (!strcmp(name, b->req->name))
        return 0;
    lh_automsg(V1(ImageInfo)) info = image_show(b->d, name, err);
    if (!info)
        return err->code;
    const struct image_config config = {info->env, info->n_env, info->workdir, info->user,
                                        info->warm_up};
    const struct image_source source = {
        .name = b->req->name, .path = path, .config = &config, .digest = info->digest};
    return image_add(b->d, &source, err);
}

/* ---- the rpc ---- */

static int prepare(struct building *b, struct lh_error *err)
{
    b->base = image_show(b->d, b->req->from, err);
    if (!b->base)
        return err->code;
    b->workdir = *b->base->workdir ? b->base->workdir : "/";
    b->user = b->base->user;
    for (size_t i = 0; i < b->base->n_env; i++) {
        int r = add_env(b, b->base->env[i], err);
        if (r < 0)
            return r;
    }
    return make_key(b, err);
}

static int build(struct building *b, struct lh_error *err)
{
    char known[LH_ID_SIZE];
    int r = prepare(b, err);

    if (r == 0)
        r = look_up(b, known, err);
    if (r < 0)
        return r;
    return *known ? copy_known(b, known, err) : build_new(b, err);
}

int image_build_rpc(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                    ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(BuildImageRequest) *req = (const void *)request;
    struct building b = {.d = ctx, .call = call, .req = req};

    if (!task_image_name_valid(req->name))
        return lh_fail(err, LH_INVALID_ARGUMENT, "'%.128s' is not an image name, [a-z0-9._/-]",
                       req->name);
    if (req->n_steps > STEPS_MAX)
        return lh_fail(err, LH_INVALID_ARGUMENT, "%zu steps, at most %d", req->n_steps, STEPS_MAX);
    int r = build(&b, err);
    lh_message_free((ProtobufCMessage *)b.base);
    free(b.env);
    if (r < 0)
        return lh_wrap(err, "building image %s", req->name);
    zygotes_sweep(ctx);
    if (*req->warm_up && (r = daemon_warm_up(ctx, req->name, err)) < 0)
        return lh_wrap(err, "image %s is there, but its warm-up fails", req->name);
    V1(ImageInfo) *info = image_show(ctx, req->name, err);
    *reply = info ? &info->base : NULL;
    return info ? 0 : err->code;
}

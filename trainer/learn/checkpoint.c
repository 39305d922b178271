#include "trainer/learn/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/file.h"
#include "proto/hex.h"
#include "proto/log.h"
#include "trainer/policy/safetensors.h"

LH_LOG_COMPONENT("trainer");

enum { STATE_MAX = 1 << 20, STATE_FORMAT = 1 };

/* ---- state.json ---- */

static int write_state(const char *dir, const struct checkpoint_state *s, struct lh_error *err)
{
    char version[33], fingerprint[33];
    lh_autofree char *path = lh_format("%s/state.json", dir);

    lh_hex_print(s->version.id, 16, version);
    lh_hex_print(s->fingerprint, 16, fingerprint);
    json_t *o =
        json_pack("{sI sI ss ss sI sI sI sI sI sI}", "format", (json_int_t)STATE_FORMAT,
                  "version_step", (json_int_t)s->version.step, "version_id", version, "model",
                  fingerprint, "seed", (json_int_t)s->seed, "warm_steps", (json_int_t)s->warm_steps,
                  "steps", (json_int_t)s->steps, "adam_steps", (json_int_t)s->adam_steps, "cursor",
                  (json_int_t)s->cursor, "groups", (json_int_t)s->groups);
    lh_autofree char *text = o ? json_dumps(o, JSON_INDENT(2) | JSON_SORT_KEYS) : NULL;
    json_decref(o);
    if (!text || !path)
        return lh_fail_errno(err, ENOMEM, "writing the state of %s", dir);
    return lh_write_file(path, text, strlen(text), 0644, err);
}

static int unpack_state(json_t *o, struct checkpoint_state *s)
{
    json_int_t format, version_step, seed, warm, steps, adam, cursor, groups;
    const char *version, *fingerprint;

    if (json_unpack(o, "{sI sI ss ss sI sI sI sI sI sI}", "format", &format, "version_step",
                    &version_step, "version_id", &version, "model", &fingerprint, "seed", &seed,
                    "warm_steps", &warm, "steps", &steps, "adam_steps", &adam, "cursor", &cursor,
                    "groups", &groups) < 0 ||
        format != STATE_FORMAT)
        return LH_DATA_LOSS;
    *s = (struct checkpoint_state){
        .version.step = (uint64_t)version_step,
        .seed = (uint64_t)seed,
        .warm_steps = (uint64_t)warm,
        .steps = (uint64_t)steps,
        .adam_steps = (uint64_t)adam,
        .cursor = cursor,
        .groups = groups,
    };
    return lh_hex_parse(version, s->version.id, 16) && lh_hex_parse(fingerprint, s->fingerprint, 16)
               ? 0
               : LH_DATA_LOSS;
}

int checkpoint_read_state(const char *job_dir, const char *name, struct checkpoint_state *s,
                          struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/checkpoints/%s/state.json", job_dir, name);
    lh_autofree char *text = path ? lh_read_file(path, STATE_MAX, NULL, err) : NULL;

    if (!text)
        return lh_wrap(err, "checkpoint %s", name);
    json_t *o = json_loads(text, 0, NULL);
    int r = o ? unpack_state(o, s) : LH_DATA_LOSS;
    json_decref(o);
    return r < 0 ? lh_fail(err, r, "%s is damaged; point checkpoints/latest at an older one", path)
                 : 0;
}

/* ---- directories ---- */

static int only_steps(const struct dirent *e)
{
    return !strncmp(e->d_name, "step-", 5);
}

static int only_leftovers(const struct dirent *e)
{
    return !strncmp(e->d_name, ".tmp-", 5) || !strncmp(e->d_name, ".old-", 5);
}

static void free_names(struct dirent **names, int n)
{
    for (int i = 0; i < n; i++)
        free(names[i]);
    free(names);
}

/* Renamed first: a checkpoint with its right name is always whole. */
static void retire(const char *parent, const char *name)
{
    struct lh_error err = {0};
    lh_autofree char *from = lh_format("%s/%s", parent, name);
    lh_autofree char *to = lh_format("%s/.old-%s", parent, name);

    if (!from || !to || rename(from, to) < 0 || lh_remove_tree(to, &err) < 0)
        lh_warn("checkpoint-not-removed", "name=%s", name);
}

/* Names sort by step. */
static void keep_newest(const char *parent, unsigned keep)
{
    struct dirent **names = NULL;
    int n = scandir(parent, &names, only_steps, alphasort);

    for (int i = 0; i + (int)keep < n; i++)
        retire(parent, names[i]->d_name);
    free_names(names, n);
}

static void remove_leftovers(const char *parent)
{
    struct dirent **names = NULL;
    struct lh_error err = {0};
    int n = scandir(parent, &names, only_leftovers, alphasort);

    for (int i = 0; i < n; i++) {
        lh_autofree char *path = lh_format("%s/%s", parent, names[i]->d_name);
        if (!path || lh_remove_tree(path, &err) < 0)
            lh_warn("leftover", "name=%s %s", names[i]->d_name, err.message);
    }
    free_names(names, n);
}

/* ---- arrays ---- */

static int write_moments(const char *dir, const struct policy_model *model,
                         const struct checkpoint_arrays *a, struct lh_error *err)
{
    size_t n = policy_model_floats(model);
    lh_autofree char *path = lh_format("%s/optimizer.safetensors", dir);
    struct safetensor t[] = {
        {.name = "exp_avg",
         .type = ST_F32,
         .dims = 1,
         .shape = {(int64_t)n},
         .count = n,
         .data = a->m},
        {.name = "exp_avg_sq",
         .type = ST_F32,
         .dims = 1,
         .shape = {(int64_t)n},
         .count = n,
         .data = a->v},
    };

    if (!path)
        return lh_fail_errno(err, ENOMEM, "writing %s", dir);
    return safetensors_write(path, t, LH_ARRAY_SIZE(t), err);
}

static int read_moment(const struct safetensors *file, const char *name, size_t n, float *to,
                       struct lh_error *err)
{
    const struct safetensor *t = safetensors_find(file, name);

    if (!t || t->count != n)
        return lh_fail(err, LH_DATA_LOSS, "optimizer state: %s must have %zu numbers", name, n);
    return safetensor_floats(t, to, err);
}

static int read_moments(const char *dir, const struct policy_model *model,
                        const struct checkpoint_arrays *a, struct lh_error *err)
{
    size_t n = policy_model_floats(model);
    lh_autofree char *path = lh_format("%s/optimizer.safetensors", dir);
    lh_auto(safetensors) file = path ? safetensors_open(path, err) : NULL;

    if (!file)
        return err ? err->code : LH_INTERNAL;
    int r = read_moment(file, "exp_avg", n, a->m, err);
    return r < 0 ? r : read_moment(file, "exp_avg_sq", n, a->v, err);
}

/* ---- whole checkpoints ---- */

static int write_content(const char *dir, const struct policy_model *model,
                         const struct checkpoint_state *s, const struct checkpoint_arrays *a,
                         struct lh_error *err)
{
    int r = lh_make_dirs(dir, 0755, err);

    if (r == 0)
        r = policy_save(model, dir, a->weights, err);
    if (r == 0)
        r = write_moments(dir, model, a, err);
    if (r == 0)
        r = write_state(dir, s, err);
    return r == 0 ? lh_sync_dir(dir, err) : r;
}

int checkpoint_write(const char *job_dir, unsigned keep, const struct policy_model *model,
                     const struct checkpoint_state *s, const struct checkpoint_arrays *a,
                     struct lh_error *err)
{
    char name[CHECKPOINT_NAME];

    snprintf(name, sizeof name, "step-%06llu", (unsigned long long)s->version.step);
    lh_autofree char *parent = lh_format("%s/checkpoints", job_dir);
    lh_autofree char *tmp = lh_format("%s/checkpoints/.tmp-%s", job_dir, name);
    lh_autofree char *final = lh_format("%s/checkpoints/%s", job_dir, name);
    lh_autofree char *latest = lh_format("%s/checkpoints/latest", job_dir);
    if (!parent || !tmp || !final || !latest)
        return lh_fail_errno(err, ENOMEM, "writing checkpoint %s", name);
    remove_leftovers(parent);
    if (write_content(tmp, model, s, a, err) < 0)
        return lh_wrap(err, "writing checkpoint %s", name);
    if (access(final, F_OK) == 0) /* of a run that was rolled back behind it */
        retire(parent, name);
    if (rename(tmp, final) < 0)
        return lh_fail_errno(err, errno, "naming checkpoint %s", name);
    if (lh_sync_dir(parent, err) < 0 || lh_write_file(latest, name, strlen(name), 0644, err) < 0)
        return lh_wrap(err, "writing checkpoint %s", name);
    keep_newest(parent, keep);
    return 0;
}

int checkpoint_latest(const char *job_dir, char name[CHECKPOINT_NAME], struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/checkpoints/latest", job_dir);
    lh_autofree char *text = path ? lh_read_file(path, CHECKPOINT_NAME - 1, NULL, err) : NULL;

    if (!text)
        return err ? err->code : LH_NOT_FOUND;
    if (strncmp(text, "step-", 5) || strchr(text, '/'))
        return lh_fail(err, LH_DATA_LOSS, "%s does not name a checkpoint", path);
    memcpy(name, text, strlen(text) + 1);
    return 0;
}

int checkpoint_load(const char *job_dir, const char *name, const struct policy_model *model,
                    struct checkpoint_state *s, const struct checkpoint_arrays *a,
                    struct lh_error *err)
{
    const struct checkpoint_state wanted = *s;
    lh_autofree char *dir = lh_format("%s/checkpoints/%s", job_dir, name);
    int r = dir ? checkpoint_read_state(job_dir, name, s, err) : LH_RESOURCE_EXHAUSTED;

    if (r < 0)
        return r;
    if (memcmp(s->fingerprint, wanted.fingerprint, 16) || s->seed != wanted.seed)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "checkpoint %s is of another model or seed than the job; use another job "
                       "directory",
                       name);
    r = policy_load(model, dir, a->weights, err);
    return r < 0 ? r : read_moments(dir, model, a, err);
}

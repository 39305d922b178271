/* What single fields cannot know: combinations that cannot work, files that are not there. */
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "deploy/job.h"
#include "proto/cleanup.h"
#include "proto/file.h"

typedef Longhaul__Job__V1__Job job_t;

static bool bad_name(const job_t *j)
{
    return strspn(j->name, "abcdefghijklmnopqrstuvwxyz0123456789-") != strlen(j->name);
}

static bool bad_backend(const job_t *j)
{
    return strcmp(j->backend, "cpu");
}

static bool bad_pages(const job_t *j)
{
    return j->rollout->page_tokens % j->rollout->unit_tokens;
}

static bool bad_context(const job_t *j)
{
    return j->rollout->turn_tokens >= j->rollout->context_tokens;
}

static bool bad_warm_start(const job_t *j)
{
    return j->warm_start->steps && !j->warm_start->demonstrations;
}

static bool bad_min_groups(const job_t *j)
{
    return j->train->min_groups > j->train->groups;
}

static bool bad_eval(const job_t *j)
{
    return (j->eval->episodes || j->train->target_success > 0) && !*j->tasks->eval_prefix;
}

static bool bad_target(const job_t *j)
{
    return j->train->target_success > 0 && (!j->eval->episodes || !j->eval->every);
}

static bool bad_image(const job_t *j)
{
    return !*j->tasks->image != !*j->tasks->image_name;
}

static bool bad_split(const job_t *j)
{
    size_t n = strlen(j->tasks->eval_prefix);

    return n && !strncmp(j->tasks->train_prefix, j->tasks->eval_prefix, n);
}

static bool bad_remote(const job_t *j)
{
    const char *remote = j->kvstore->remote;

    return *remote && strncmp(remote, "redis://", 8) != 0 &&
           (strncmp(remote, "s3://", 5) != 0 || !*j->kvstore->remote_credentials);
}

static bool bad_pace(const job_t *j)
{
    uint64_t pace = j->kvstore->disk_bytes_per_s;

    return pace && (pace < 65536 || !j->kvstore->disk_bytes);
}

static const struct {
    bool (*bad)(const job_t *j);
    const char *message;
} rules[] = {
    {bad_name, "name may have a-z, 0-9 and - only"},
    {bad_backend, "backend must be cpu; this build has no other"},
    {bad_pages, "rollout.page_tokens must be a multiple of rollout.unit_tokens"},
    {bad_context, "rollout.turn_tokens must be below rollout.context_tokens"},
    {bad_warm_start, "warm_start.steps needs warm_start.demonstrations"},
    {bad_min_groups, "train.min_groups must not exceed train.groups"},
    {bad_eval, "evaluation needs tasks.eval_prefix"},
    {bad_target, "train.target_success needs eval.episodes and eval.every"},
    {bad_pace, "kvstore.disk_bytes_per_s is at least 64KiB, and of a disk tier: set disk_bytes"},
    {bad_image, "tasks.image and tasks.image_name go together"},
    {bad_remote, "kvstore.remote is redis://HOST:PORT[,HOST:PORT...], or s3://BUCKET[/PREFIX] with "
                 "kvstore.remote_credentials"},
    {bad_split, "tasks.train_prefix would train on the tasks of tasks.eval_prefix"},
};

static int need_file(const char *file, const char *field, const char *path, struct lh_error *err)
{
    struct stat st;

    if (!*file || stat(file, &st) == 0)
        return 0;
    return lh_fail(err, LH_NOT_FOUND, "%s: %s: %s does not exist", path, field, file);
}

int job_check(const Longhaul__Job__V1__Job *job, const char *path, struct lh_error *err)
{
    lh_autofree char *config = lh_format("%s/config.json", job->model->path);
    int r = config ? need_file(config, "model.path", path, err) : LH_RESOURCE_EXHAUSTED;

    for (size_t i = 0; i < LH_ARRAY_SIZE(rules); i++)
        if (rules[i].bad(job))
            return lh_fail(err, LH_INVALID_ARGUMENT, "%s: %s", path, rules[i].message);
    if (r == 0)
        r = need_file(job->tasks->file, "tasks.file", path, err);
    if (r == 0)
        r = need_file(job->tasks->image, "tasks.image", path, err);
    return r;
}

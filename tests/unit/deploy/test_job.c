/* Job files: every refusal names file, line and field; what is accepted prints as it was resolved.
 */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "deploy/job.h"
#include "deploy/jobdir.h"
#include "proto/cleanup.h"
#include "proto/file.h"

#define GOOD                                                                                       \
    "name: test\n"                                                                                 \
    "model:\n"                                                                                     \
    "  path: model\n"                                                                              \
    "tasks:\n"                                                                                     \
    "  train_prefix: a/\n"                                                                         \
    "rollout:\n"                                                                                   \
    "  kv_budget_bytes: 2MiB\n"                                                                    \
    "train:\n"                                                                                     \
    "  steps: 30\n"

static char dir[] = "/tmp/lh-job-XXXXXX";

static void setup(void)
{
    cr_assert(mkdtemp(dir) != NULL);
    lh_autofree char *model = lh_format("%s/model", dir);
    lh_autofree char *config = lh_format("%s/config.json", model);
    cr_assert(eq(int, lh_make_dirs(model, 0700, NULL), 0));
    cr_assert(eq(int, lh_write_file(config, "{}", 2, 0600, NULL), 0));
}

static void teardown(void)
{
    lh_remove_tree(dir, NULL);
}

TestSuite(job, .init = setup, .fini = teardown);

static Longhaul__Job__V1__Job *load(const char *text, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/job.yaml", dir);

    cr_assert(eq(int, lh_write_file(path, text, strlen(text), 0600, NULL), 0));
    return job_load(path, err);
}

/* GOOD with `from` replaced by `to`. */
static char *edited(const char *from, const char *to)
{
    const char *at = strstr(GOOD, from);

    return lh_format("%.*s%s%s", (int)(at - GOOD), GOOD, to, at + strlen(from));
}

Test(job, bad_files_are_refused_with_file_line_and_field)
{
    static const struct {
        const char *from, *to, *expect;
    } rows[] = {
        {"steps: 30", "stepz: 30", "job.yaml:9: unknown field 'stepz' in section train"},
        {"name: test", "name: test\nnope: 1", "job.yaml:2: unknown field 'nope'"},
        {"steps: 30", "steps: many", "job.yaml:9: steps: 'many' is not a whole number"},
        {"steps: 30", "steps: 1.5", "job.yaml:9: steps: '1.5' is not a whole number"},
        {"steps: 30", "steps: -1", "job.yaml:9: steps: -1 is outside"},
        {"steps: 30", "steps: 99999999999999999999",
         "job.yaml:9: steps: 99999999999999999999 is outside"},
        {"steps: 30", "steps: 30\n  lambda: nan", "job.yaml:10: lambda: 'nan' is not a number"},
        {"steps: 30", "steps: 30\n  steps: 31", "job.yaml:10: steps is given twice"},
        {"steps: 30", "steps: [1, 2]", "job.yaml:9: steps must be a single value"},
        {"2MiB", "2XB", "job.yaml:7: kv_budget_bytes: '2XB' is not a size"},
        {"2MiB", "1", "job.yaml:7: kv_budget_bytes: 1 is outside"},
        {"name: test", "name: test\ncontrol: maybe",
         "job.yaml:2: control: 'maybe' is none of none|"},
        {"name: test", "name: Test", "name may have a-z"},
        {"name: test", "name: test\nkvstore: {disk_bytes_per_s: 1MiB}", "of a disk tier"},
        {"name: test", "name: test\nbackend: cuda", "backend must be cpu"},
        {"name: test", "x: {", "job.yaml:"},
        {"  train_prefix: a/", "  train_prefix: a/\n  eval_prefix: a/", "would train on"},
        {"path: model", "path: nowhere", "nowhere/config.json does not exist"},
        {"  train_prefix: a/", "  train_prefix: a/\n  file: none.pb", "none.pb does not exist"},
        {"  steps: 30", "  group_size: 8", "train.steps is missing"},
        {"  steps: 30", "  steps: 30\n  min_groups: 99", "train.min_groups must not exceed"},
        {"name: test", "name: test\nkvstore:\n  remote: http://x", "kvstore.remote is redis://"},
        {"name: test", "name: test\nkvstore:\n  remote: s3://bucket", "kvstore.remote_credentials"},
        {"2MiB", "2MiB\n  page_tokens: 24", "page_tokens must be a multiple"},
    };

    for (size_t i = 0; i < LH_ARRAY_SIZE(rows); i++) {
        struct lh_error err = {0};
        lh_autofree char *text = edited(rows[i].from, rows[i].to);
        cr_assert(load(text, &err) == NULL, "accepted: %s", rows[i].to);
        cr_assert(strstr(err.message, rows[i].expect) != NULL, "'%s' does not say '%s'",
                  err.message, rows[i].expect);
    }
}

Test(job, printed_job_loads_to_the_same_job)
{
    struct lh_error err = {0};
    lh_autofree char *first = NULL, *second = NULL;
    size_t len;

    Longhaul__Job__V1__Job *a = load(GOOD, &err);
    cr_assert(a != NULL, "%s", err.message);
    cr_assert(eq(u64, a->rollout->kv_budget_bytes, 2 << 20));
    FILE *f = open_memstream(&first, &len);
    job_print(a, f);
    fclose(f);
    Longhaul__Job__V1__Job *b = load(first, &err);
    cr_assert(b != NULL, "%s", err.message);
    f = open_memstream(&second, &len);
    job_print(b, f);
    fclose(f);
    cr_assert(eq(str, first, second));
    job_destroy(a);
    job_destroy(b);
}

Test(job, directory_is_made_once_and_locked_once)
{
    struct lh_error err = {0};
    lh_autofree char *yaml = lh_format("%s/job.yaml", dir), *made = lh_format("%s/made", dir);
    Longhaul__Job__V1__Job *job = load(GOOD, &err);

    cr_assert(eq(int, jobdir_create(made, yaml, job, &err), 0), "%s", err.message);
    cr_assert(eq(int, jobdir_create(made, yaml, job, &err), LH_ALREADY_EXISTS));
    job_destroy(job);
    job = job_read(made, &err);
    cr_assert(job != NULL, "%s", err.message);
    job->version = strcpy(realloc(job->version, 8), "0.0.0");
    cr_assert(eq(int, job_write(job, made, &err), 0));
    job_destroy(job);
    cr_assert(job_read(made, &err) == NULL);
    cr_assert(strstr(err.message, "was made by Longhaul 0.0.0") != NULL, "%s", err.message);
    lh_autoclose int lock = jobdir_lock(made, &err);
    cr_assert(ge(int, lock, 0));
    cr_assert(eq(int, jobdir_lock(made, &err), LH_FAILED_PRECONDITION));
    cr_assert(eq(int, jobdir_supervisor(made), getpid()));
}

Test(job, a_damaged_job_file_is_refused)
{
    struct lh_error err = {0};
    lh_autofree char *path = lh_format("%s/job.pb", dir);

    cr_assert(eq(int, lh_write_file(path, "\xff\xff\xff", 3, 0600, NULL), 0));
    cr_assert(job_read(dir, &err) == NULL);
    cr_assert(job_read("/nonexistent", &err) == NULL);
    cr_assert(strstr(err.message, "is not a job directory") != NULL, "%s", err.message);
}

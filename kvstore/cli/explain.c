/* kvstore JOBDIR explain [TRAJECTORY]: what the throttles of a job's workers decided, from the
 * rings they leave in JOBDIR/run (kvstore/trace.h).  kvstored is not asked: it need not run. */
#include <errno.h>
#include <glob.h>

#include "kvstore/cli/cli.h"
#include "kvstore/trace.h"
#include "proto/cleanup.h"
#include "proto/file.h"

static int add_record(void *rows, const struct kv_record *r, int64_t clock_ms)
{
    char loop[2] = {kv_decision_loop(r->decision), 0};
    json_t *row = json_pack("{sI ss ss sI sI sI sf sf ss}", "unix_ms",
                            (json_int_t)(clock_ms + r->at_us / 1000), "loop", loop, "decision",
                            kv_decision_name(r->decision), "tokens", (json_int_t)r->tokens,
                            "split_tokens", (json_int_t)r->split_tokens, "bytes",
                            (json_int_t)r->bytes, "load_ms", (double)r->load_ms, "compute_ms",
                            (double)r->compute_ms, "why", kv_decision_text(r->decision));

    return json_array_append_new(rows, row);
}

static int add_counts(const char *path, uint64_t *sums, struct lh_error *err)
{
    uint64_t counts[KV_DECISION_COUNT];
    int r = kv_trace_read_counts(path, counts, err);

    for (int i = 0; r == 0 && i < KV_DECISION_COUNT; i++)
        sums[i] += counts[i];
    return r;
}

static json_t *rows_of_counts(const uint64_t *sums)
{
    json_t *rows = json_array();

    for (unsigned d = 0; rows && d < KV_DECISION_COUNT; d++) {
        char loop[2] = {kv_decision_loop(d), 0};
        json_array_append_new(rows, json_pack("{ss ss sI ss}", "loop", loop, "decision",
                                              kv_decision_name(d), "count", (json_int_t)sums[d],
                                              "why", kv_decision_text(d)));
    }
    return rows;
}

static int explain(const struct cli *c, const glob_t *files, struct lh_error *err)
{
    static const char *const count_columns[] = {"loop", "decision", "count", "why", NULL};
    static const char *const columns[] = {"unix_ms",      "loop",  "decision", "tokens",
                                          "split_tokens", "bytes", "load_ms",  "compute_ms",
                                          "why",          NULL};
    uint64_t sums[KV_DECISION_COUNT] = {0};
    json_t *rows = c->argument ? json_array() : NULL;
    int r = 0;

    for (size_t i = 0; r == 0 && i < files->gl_pathc; i++)
        r = c->argument ? kv_trace_read(files->gl_pathv[i], c->argument, add_record, rows, err)
                        : add_counts(files->gl_pathv[i], sums, err);
    if (r < 0) {
        json_decref(rows);
        return r;
    }
    return c->argument ? cli_print_rows(c, rows, columns, err)
                       : cli_print_rows(c, rows_of_counts(sums), count_columns, err);
}

int cli_explain(struct cli *c, struct lh_error *err)
{
    lh_autofree char *pattern = lh_format("%s/run/*.trace", c->job_dir);
    glob_t files;

    if (!pattern)
        return lh_fail_errno(err, ENOMEM, "explaining");
    if (glob(pattern, 0, NULL, &files))
        return lh_fail(err, LH_NOT_FOUND, "%s has no trace of a rollout worker", c->job_dir);
    int r = explain(c, &files, err);
    globfree(&files);
    return r;
}

/* A job from whatever state it is in to its end. */
#include <errno.h>
#include <string.h>

#include "proto/file.h"
#include "proto/log.h"
#include "trainer/learn/trainer.h"

LH_LOG_COMPONENT("trainer");

/* The first version the rollout sees; the lineage of steps begins here. */
static int record_version(void *ctx, struct ledger *l, struct lh_error *err)
{
    static const uint8_t none[16];
    const struct trainer *t = ctx;
    const struct intake_version v = {t->state.version.step, t->state.version.id, none, none};

    return intake_add_version(l, &v, err);
}

static int final_evals(struct trainer *t, double *success, struct lh_error *err)
{
    const int64_t episodes = t->job->eval->episodes;
    const struct eval last = {.name = "final", .unique = "", .episodes = episodes};
    const struct eval blank = {
        .name = "blank", .unique = "", .episodes = episodes, .blank = true, .turns_of = "final"};
    int r = trainer_eval(t, &last, success, err);

    if (r == 0 && t->job->eval->blank_first_observation)
        r = trainer_eval(t, &blank, NULL, err);
    return r;
}

static int write_result(struct trainer *t, double success, struct lh_error *err)
{
    char version[VERSION_TEXT];
    lh_autofree char *path = lh_format("%s/result.json", t->job_dir);

    version_print(&t->state.version, version);
    json_t *o =
        json_pack("{ss ss sI sI ss sf}", "job", t->job->id, "name", t->job->name, "steps",
                  (json_int_t)t->state.steps, "version_step", (json_int_t)t->state.version.step,
                  "version_id", version, "success", success);
    lh_autofree char *text = o ? json_dumps(o, JSON_INDENT(2)) : NULL;
    json_decref(o);
    if (!text || !path)
        return lh_fail_errno(err, ENOMEM, "writing the result");
    return lh_write_file(path, text, strlen(text), 0644, err);
}

int trainer_run(struct trainer *t, struct lh_error *err)
{
    const struct eval warm = {.name = "warm", .unique = "", .episodes = t->job->eval->episodes};
    double success = 0;
    int r = trainer_warm_start(t, err);

    if (r == 0 && t->state.steps == 0)
        r = intake_with_ledger(t->intake, record_version, t, err);
    if (r == 0 && t->state.steps == 0)
        r = trainer_eval(t, &warm, NULL, err);
    if (r == 0)
        r = trainer_steps(t, err);
    if (r == 0)
        r = final_evals(t, &success, err);
    if (r == 0)
        r = write_result(t, success, err);
    if (r < 0)
        return r;
    metrics_write(t->metrics, json_pack("{ss sI sf}", "kind", "end", "steps",
                                        (json_int_t)t->state.steps, "success", success));
    status_phase(t, "done", t->state.steps, t->job->train->steps);
    intake_stop_workers(t->intake);
    lh_info("done", "steps=%llu success=%.3f", (unsigned long long)t->state.steps, success);
    return 0;
}

/* The audit on a job made by hand: clean it passes, and each planted fault is found. */
#include <fcntl.h>
#include <unistd.h>

#include "ledger_fixture.h"
#include "longhaul/job/v1/job.pb-c.h"
#include "proto/parse.h"
#include "trainer/learn/audit.h"
#include "trainer/learn/version.h"

enum { STEPS = 2, MEMBERS = 2 };

static char dir[] = "/tmp/trainer-audit-XXXXXX";
static char ledger_dir[128];

static void write_job(void)
{
    Longhaul__Job__V1__Job job = LONGHAUL__JOB__V1__JOB__INIT;
    Longhaul__Job__V1__Train train = LONGHAUL__JOB__V1__TRAIN__INIT;
    struct lh_error err = {0};
    size_t len;

    job.train = &train;
    train.group_size = MEMBERS;
    lh_autofree uint8_t *bytes = lh_pack(&job.base, &len, &err);
    lh_autofree char *path = lh_format("%s/job.pb", dir);
    FINE(lh_write_file(path, bytes, len, 0644, &err));
}

static void finish(struct ledger *l, const char *id, double reward)
{
    struct lh_error err = {0};
    const struct ledger_done done = {.trajectory = id,
                                     .attempt = 1,
                                     .kind = 1,
                                     .reward = reward,
                                     .turns = 2,
                                     .tokens = 2 * TURN_TOKENS};

    append(l, id, 1, 0);
    append(l, id, 1, 1);
    FINE(ledger_begin(l, &err));
    FINE(ledger_finish_trajectory(l, &done, &err));
    FINE(ledger_commit(l, &err));
}

static void record_version(struct ledger *l, const struct version *v)
{
    struct lh_error err = {0};

    FINE(db_run(ledger_db(l), &err, "INSERT INTO versions (step, id) VALUES (?, ?)", "ib",
                (int64_t)v->step, v->id, sizeof v->id));
}

/* A group a step, each with members that earned 0 and 1. */
static struct version train_step(struct ledger *l, int64_t step, struct version v)
{
    struct version_digest *d = version_digest_create();
    struct lh_error err = {0};
    uint8_t batch[16];
    int64_t group = add_group(l, "train", step - 1, MEMBERS);

    for (int m = 0; m < MEMBERS; m++) {
        struct ledger_history h;
        char id[LH_ID_SIZE];
        snprintf(id, sizeof id, "train-%lld-%d", (long long)step - 1, m);
        finish(l, id, m);
        FINE(ledger_read_history(l, id, &h, &err));
        version_digest_trajectory(d, h.token, h.logprob, h.mask, h.n, m);
        ledger_history_finish(&h);
    }
    FINE(ledger_begin(l, &err));
    FINE(ledger_set_group(l, group, GROUP_CONSUMED, step, &err));
    FINE(ledger_commit(l, &err));
    v = version_next(&v, d, batch);
    record_version(l, &v);
    return v;
}

static void write_checkpoint(const struct version *v)
{
    static const char *const files[] = {"config.json", "model.safetensors",
                                        "optimizer.safetensors"};
    char id[VERSION_TEXT];
    struct lh_error err = {0};
    lh_autofree char *ckpt = lh_format("%s/checkpoints/step-000007", dir);
    lh_autofree char *latest = lh_format("%s/checkpoints/latest", dir);
    lh_autofree char *path = lh_format("%s/state.json", ckpt);

    version_print(v, id);
    lh_autofree char *state = lh_format(
        "{\"format\": 1, \"version_step\": %llu, \"version_id\": \"%s\", \"model\": \"%032d\","
        " \"seed\": 1, \"warm_steps\": 5, \"steps\": %d, \"adam_steps\": %d, \"cursor\": %d,"
        " \"groups\": %d}",
        (unsigned long long)v->step, id, 0, STEPS, STEPS, STEPS, STEPS);
    FINE(lh_make_dirs(ckpt, 0755, &err));
    for (int i = 0; i < 3; i++) {
        lh_autofree char *file = lh_format("%s/%s", ckpt, files[i]);
        FINE(lh_write_file(file, "x", 1, 0644, &err));
    }
    FINE(lh_write_file(path, state, strlen(state), 0644, &err));
    FINE(lh_write_file(latest, "step-000007", 11, 0644, &err));
}

static void setup(void)
{
    struct lh_error err = {0};
    struct version v = {.step = 5, .id = {9}};

    cr_assert(mkdtemp(dir) != NULL);
    snprintf(ledger_dir, sizeof ledger_dir, "%s/ledger", dir);
    write_job();
    struct ledger *l = ledger_open(ledger_dir, JOB, 1, &err);
    cr_assert(l != NULL, "%s", err.message);
    record_version(l, &v);
    for (int64_t step = 1; step <= STEPS; step++)
        v = train_step(l, step, v);
    ledger_close(l);
    write_checkpoint(&v);
}

static void teardown(void)
{
    struct lh_error err = {0};

    FINE(lh_remove_tree(dir, &err));
}

TestSuite(audit, .init = setup, .fini = teardown, .timeout = 60);

/* Problems found; their text in *text. */
static int audit(char **text)
{
    struct lh_error err = {0};
    size_t len;
    FILE *problems = open_memstream(text, &len), *table = fopen("/dev/null", "w");
    int n = audit_job(dir, table, problems, &err);

    fclose(problems);
    fclose(table);
    cr_assert(n >= 0, "%s", err.message);
    return n;
}

/* Plants a fault by SQL and expects the audit to name it. */
static void plant(const char *sql, const char *finds)
{
    struct lh_error err = {0};
    lh_autofree char *path = lh_format("%s/ledger.db", ledger_dir);
    lh_autofree char *text = NULL;
    sqlite3 *db = db_open(path, false, &err);

    cr_assert(db != NULL, "%s", err.message);
    FINE(db_script(db, sql, &err));
    sqlite3_close(db);
    int n = audit(&text);
    cr_assert(n > 0, "%s went unseen", sql);
    cr_assert(strstr(text, finds) != NULL, "%s: %s", sql, text);
}

Test(audit, a_clean_job_passes)
{
    lh_autofree char *text = NULL;

    cr_assert(eq(int, audit(&text), 0), "%s", text);
}

Test(audit, I1_a_flipped_byte_and_a_short_file_are_found)
{
    lh_autofree char *path = lh_format("%s/segments/000001.seg", ledger_dir);
    lh_autofree char *flipped = NULL, *cut = NULL;
    lh_autoclose int fd = open(path, O_RDWR);

    cr_assert(pwrite(fd, "\x55", 1, 33) == 1);
    cr_assert(audit(&flipped) > 0);
    cr_assert(strstr(flipped, "wrong checksum") != NULL, "%s", flipped);
    cr_assert(ftruncate(fd, 100) == 0);
    cr_assert(audit(&cut) > 0);
    cr_assert(strstr(cut, "ends at") != NULL, "%s", cut);
}

Test(audit, I1_a_lost_turn_is_found)
{
    plant("DELETE FROM segments WHERE trajectory = 'train-0-1' AND turn = 0", "turns: train-0-1");
}

Test(audit, I2_a_group_used_by_another_step_than_recorded_is_found)
{
    plant("UPDATE groups SET step = 1 WHERE idx = 1", "lineage");
}

Test(audit, I8_an_invalid_verdict_and_another_reward_are_found)
{
    plant("UPDATE trajectories SET kind = 2 WHERE id = 'train-1-0'", "scores: consumed group 1");
    plant("UPDATE trajectories SET kind = 1, reward = 0.5 WHERE id = 'train-1-0'", "lineage");
}

Test(audit, a_cursor_that_differs_is_found)
{
    plant("UPDATE groups SET idx = 7 WHERE idx = 1", "checkpoint: step-000007 says cursor 2");
}

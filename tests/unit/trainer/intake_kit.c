#include "intake_kit.h"

static char dir[] = "/tmp/trainer-intake-XXXXXX";
char intake_endpoint[128];
static char ledger_dir[128];
static struct plan_split tasks;
static struct ledger *ledger;
struct intake *intake;
static int silence_ms = 60000;

void start_intake(void)
{
    struct lh_error err = {0};
    struct intake_options o = {.endpoint = intake_endpoint,
                               .job_id = JOB,
                               .job_seed = 1,
                               .infra_retries = RETRIES,
                               .silence_ms = silence_ms,
                               .lost_ms = 400,
                               .max_message = MAX_MESSAGE,
                               .repeat_ms = 150,
                               .budgets = LONGHAUL__EXPERIENCE__V1__BUDGETS__INIT};
    const struct intake_round round = {.name = "train",
                                       .mode = LONGHAUL__EXPERIENCE__V1__MODE__MODE_SAMPLE,
                                       .members = MEMBERS,
                                       .tasks = &tasks,
                                       .temperature = 1};

    ledger = ledger_open(ledger_dir, JOB, 1, &err);
    cr_assert(ledger != NULL, "%s", err.message);
    o.ledger = ledger;
    intake = intake_create(&o, &err);
    cr_assert(intake != NULL, "%s", err.message);
    intake_set_version(intake, 4, version_id);
    FINE(intake_open_round(intake, &round, &err));
}

void stop_intake(void)
{
    intake_destroy(intake);
    ledger_close(ledger);
}

void intake_setup(void)
{
    static const char *const names[] = {"t/a1", "t/a2", "t/b1", "t/b2"};
    const uint8_t digest[16] = {1};
    struct lh_error err = {0};

    cr_assert(mkdtemp(dir) != NULL);
    snprintf(intake_endpoint, sizeof intake_endpoint, "ipc://%s/experience.sock", dir);
    snprintf(ledger_dir, sizeof ledger_dir, "%s/ledger", dir);
    for (int i = 0; i < 4; i++)
        FINE(plan_add(&tasks, names[i], i < 2 ? "a" : "b", digest, 16, &err));
    FINE(plan_sort(&tasks, &err));
    start_intake();
}

void intake_teardown(void)
{
    struct lh_error err = {0};

    stop_intake();
    plan_finish(&tasks);
    FINE(lh_remove_tree(dir, &err));
}

void raise_to(int64_t groups)
{
    struct lh_error err = {0};

    FINE(intake_raise(intake, "train", groups, &err));
}

void collect_assigns(struct fake *f, struct channel_message **m, size_t n)
{
    for (size_t i = 0; i < n; i++)
        m[i] = next_new_assign(f, m, i);
}

void free_all(struct channel_message **m, size_t n)
{
    for (size_t i = 0; i < n; i++)
        channel_message_free(m[i]);
}

void check_resumed(const struct channel_message *m)
{
    const assign *a = m->envelope->assign;

    cr_assert(eq(u32, a->attempt, 2));
    cr_assert(eq(u32, a->resume_turn, 1));
    cr_assert(eq(u32, a->resume_tokens, TURN_TOKENS));
    cr_assert(eq(str, a->resume_snapshot, (char *)"01SNAPSHOT"));
    cr_assert(eq(u64, a->resume_agent_ms, 1000), "its clock goes on");
    cr_assert(eq(sz, m->n_frames, 3));
    cr_assert(eq(i32, ((const int32_t *)m->frames[0].data)[2], 2));
    cr_assert(eq(sz, a->n_resume_versions, 1));
}

void intake_setup_short_silence(void)
{
    silence_ms = 500;
    intake_setup();
}

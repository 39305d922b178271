#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ledger_fixture.h"
#include "tests/must_work.h"

static char dir[] = "/tmp/trainer-ledger-XXXXXX";

static void make_dir(void)
{
    cr_assert(mkdtemp(dir) != NULL);
}

static void remove_dir(void)
{
    struct lh_error err = {0};

    FINE(lh_remove_tree(dir, &err));
}

TestSuite(ledger, .init = make_dir, .fini = remove_dir, .timeout = 120);

static struct ledger *reopen(struct ledger *l)
{
    struct lh_error err = {0};

    ledger_close(l);
    l = ledger_open(dir, JOB, 1, &err);
    cr_assert(l != NULL, "%s", err.message);
    return l;
}

static off_t size_of_first_file(void)
{
    lh_autofree char *path = lh_format("%s/segments/000001.seg", dir);
    struct stat st;

    return stat(path, &st) < 0 ? -1 : st.st_size;
}

static void change_first_file(off_t at, const void *data, size_t len)
{
    lh_autofree char *path = lh_format("%s/segments/000001.seg", dir);
    lh_autoclose int fd = open(path, O_RDWR);

    cr_assert(pwrite(fd, data, len, at) == (ssize_t)len);
}

Test(ledger, history_comes_back_after_reopening)
{
    struct lh_error err = {0};
    struct ledger_history h;
    struct ledger *l = reopen(NULL);

    add_group(l, "train", 0, 1);
    for (uint32_t turn = 0; turn < 3; turn++)
        append(l, "train-0-0", 1, turn);
    l = reopen(l);
    FINE(ledger_read_history(l, "train-0-0", &h, &err));
    cr_assert(eq(u32, h.n, 3 * TURN_TOKENS));
    cr_assert(eq(u32, h.turns, 3));
    cr_assert(eq(i32, h.token[TURN_TOKENS + 2], 1002));
    cr_assert(h.logprob[2 * TURN_TOKENS + 1] == -0.75f);
    cr_assert(eq(u32, h.mask[1], 1));
    cr_assert(eq(u32, h.spans[2].first, 2 * TURN_TOKENS));
    cr_assert(eq(u32, h.spans[2].id[15], 0xab));
    ledger_history_finish(&h);
    ledger_close(l);
}

Test(ledger, receipt_is_idempotent_and_in_order)
{
    struct lh_error err = {0};
    struct test_segment t;
    struct ledger *l = reopen(NULL);

    add_group(l, "train", 0, 1);
    append(l, "train-0-0", 1, 0);
    off_t size = size_of_first_file();
    FINE(ledger_begin(l, &err));
    WRONG(ledger_append(l, make_segment(&t, "train-0-0", 1, 0), &err), 1);
    t.token[3] = 9;
    WRONG(ledger_append(l, &t.s, &err), LH_ALREADY_EXISTS);
    WRONG(ledger_append(l, make_segment(&t, "train-0-0", 1, 2), &err), LH_OUT_OF_RANGE);
    WRONG(ledger_append(l, make_segment(&t, "nobody", 1, 0), &err), LH_NOT_FOUND);
    FINE(ledger_commit(l, &err));
    cr_assert(eq(i64, size_of_first_file(), size), "nothing was written twice");
    ledger_close(l);
}

Test(ledger, I3_lower_attempt_changes_nothing_and_the_next_resumes_at_a_snapshot)
{
    struct lh_error err = {0};
    struct ledger_trajectory row;
    struct test_segment t;
    struct ledger *l = reopen(NULL);
    struct ledger_done done = {
        .trajectory = "train-0-0", .attempt = 1, .kind = 1, .turns = 4, .tokens = 4 * TURN_TOKENS};

    add_group(l, "train", 0, 1);
    for (uint32_t turn = 0; turn < 4; turn++)
        append(l, "train-0-0", 1, turn); /* turns 0 and 2 have a snapshot */
    FINE(ledger_begin(l, &err));
    FINE(ledger_next_attempt(l, "train-0-0", 2, 0, false, &err));
    WRONG(ledger_append(l, make_segment(&t, "train-0-0", 1, 4), &err), LH_ABORTED);
    WRONG(ledger_finish_trajectory(l, &done, &err), LH_ABORTED);
    FINE(ledger_find_trajectory(l, "train-0-0", &row, &err));
    cr_assert(eq(u32, row.turns, 3), "turn 3 had no snapshot to go on from");
    FINE(ledger_append(l, make_segment(&t, "train-0-0", 2, 3), &err));
    FINE(ledger_next_attempt(l, "train-0-0", 3, 1, true, &err));
    FINE(ledger_find_trajectory(l, "train-0-0", &row, &err));
    cr_assert(eq(u32, row.tokens, 0), "a restart builds on nothing");
    FINE(ledger_commit(l, &err));
    ledger_close(l);
}

Test(ledger, I2_roll_back_returns_later_groups_in_recorded_order)
{
    struct lh_error err = {0};
    struct ledger *l = reopen(NULL);
    int64_t a = add_group(l, "train", 0, 1), b = add_group(l, "train", 1, 1), n;

    FINE(ledger_begin(l, &err));
    FINE(ledger_set_group(l, a, GROUP_CONSUMED, 1, &err));
    FINE(ledger_set_group(l, b, GROUP_CONSUMED, 2, &err));
    FINE(ledger_roll_back(l, 1, &err));
    FINE(ledger_commit(l, &err));
    FINE(db_integer(ledger_db(l), &err, -1, &n,
                    "SELECT planned FROM groups WHERE state = 2 AND step IS NULL AND idx = 1", ""));
    cr_assert(eq(i64, n, 2), "it remembers the step that took it");
    FINE(db_integer(ledger_db(l), &err, -1, &n, "SELECT step FROM groups WHERE idx = 0", ""));
    cr_assert(eq(i64, n, 1));
    ledger_close(l);
}

Test(ledger, torn_tail_is_cut_and_lost_or_changed_bytes_are_refused)
{
    struct lh_error err = {0};
    struct ledger_history h;
    struct ledger *l = reopen(NULL);

    add_group(l, "train", 0, 1);
    append(l, "train-0-0", 1, 0);
    off_t size = size_of_first_file();
    change_first_file(size, "torn", 4);
    l = reopen(l);
    cr_assert(eq(i64, size_of_first_file(), size));

    change_first_file(5, "\xff", 1);
    WRONG(ledger_read_history(l, "train-0-0", &h, &err), LH_DATA_LOSS);
    ledger_close(l);

    lh_autofree char *path = lh_format("%s/segments/000001.seg", dir);
    cr_assert(truncate(path, size - 1) == 0);
    cr_assert(ledger_open(dir, JOB, 1, &err) == NULL);
    cr_assert(eq(int, err.code, LH_DATA_LOSS));
}

Test(ledger, another_job_seed_or_version_is_refused)
{
    struct lh_error err = {0};
    struct ledger *l = reopen(NULL);

    FINE(db_script(ledger_db(l), "SELECT 1", &err));
    ledger_close(l);
    cr_assert(ledger_open(dir, "01HQ0000000000000000000001", 1, &err) == NULL);
    cr_assert(eq(int, err.code, LH_FAILED_PRECONDITION));
    cr_assert(ledger_open(dir, JOB, 2, &err) == NULL);
    l = reopen(NULL);
    FINE(db_script(ledger_db(l), "UPDATE job SET version = '0.0.1'", &err));
    ledger_close(l);
    cr_assert(ledger_open(dir, JOB, 1, &err) == NULL);
    cr_assert(strstr(err.message, "0.0.1") != NULL, "%s", err.message);
}

/* ---- SIGKILL at random instants (I1) ---- */

/* Appends turns of 16 trajectories for ever; counts in shared memory what it would have
 * acknowledged. */
static void append_until_killed(volatile uint32_t *acknowledged)
{
    struct lh_error err = {0};
    struct ledger *l = ledger_open(dir, JOB, 1, &err);
    struct test_segment t;
    char id[LH_ID_SIZE];

    for (;;) {
        if (!l || ledger_begin(l, &err) < 0)
            _exit(1);
        for (int i = 0; i < 16; i++) {
            snprintf(id, sizeof id, "train-0-%d", i);
            if (ledger_append(l, make_segment(&t, id, 1, acknowledged[i]), &err) < 0)
                _exit(1);
        }
        if (ledger_commit(l, &err) < 0)
            _exit(1);
        for (int i = 0; i < 16; i++)
            acknowledged[i]++;
    }
}

static void check_after_kill(const volatile uint32_t *acknowledged)
{
    struct lh_error err = {0};
    struct ledger *l = reopen(NULL);
    char id[LH_ID_SIZE];

    for (int i = 0; i < 16; i++) {
        struct ledger_history h;
        snprintf(id, sizeof id, "train-0-%d", i);
        FINE(ledger_read_history(l, id, &h, &err));
        cr_assert(h.turns == acknowledged[i] || h.turns == acknowledged[i] + 1,
                  "%u turns acknowledged, %u there", acknowledged[i], h.turns);
        for (uint32_t k = 0; k < h.n; k++)
            cr_assert(h.token[k] == (int32_t)(k / TURN_TOKENS * 1000 + k % TURN_TOKENS));
        ledger_history_finish(&h);
    }
    ledger_close(l);
}

Test(ledger, I1_sigkill_loses_nothing_acknowledged)
{
    volatile uint32_t *acknowledged =
        mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct ledger *l = reopen(NULL);
    uint32_t seen = 0;

    add_group(l, "train", 0, 16);
    ledger_close(l);
    for (unsigned round = 0; round < 12; round++) {
        pid_t pid = fork();
        if (pid == 0)
            append_until_killed(acknowledged);
        for (int i = 0; i < 10000 && acknowledged[0] < seen + 2; i++)
            usleep(1000);
        usleep(7919 * round % 30011);
        kill(pid, SIGKILL);
        cr_assert(waitpid(pid, NULL, 0) == pid);
        check_after_kill(acknowledged);
        /* What was stored but not yet counted is the next round's first duplicate. */
        struct lh_error err = {0};
        struct ledger_trajectory row;
        l = reopen(NULL);
        for (int i = 0; i < 16; i++) {
            char id[LH_ID_SIZE];
            snprintf(id, sizeof id, "train-0-%d", i);
            FINE(ledger_find_trajectory(l, id, &row, &err));
            acknowledged[i] = row.turns;
        }
        ledger_close(l);
        seen = acknowledged[0];
    }
    cr_assert(gt(u32, seen, 12), "the children did get to append");
}

/* ---- a full disk ---- */

Test(ledger, full_disk_is_an_error_and_the_job_goes_on_after_space_is_freed)
{
    struct lh_error err = {0};
    struct test_segment t;
    uint32_t turn = 0;

    NEEDS("tmpfs", mount("tmpfs", dir, "tmpfs", 0, "size=1m") == 0, "cannot mount one");
    lh_autofree char *ballast = lh_format("%s/ballast", dir);
    lh_autoclose int fd = open(ballast, O_CREAT | O_RDWR, 0600);
    cr_assert(posix_fallocate(fd, 0, 600 << 10) == 0);
    struct ledger *l = reopen(NULL);
    add_group(l, "train", 0, 1);
    for (;;) {
        int r = ledger_begin(l, &err);
        if (r == 0 && (r = ledger_append(l, make_segment(&t, "train-0-0", 1, turn), &err)) == 0)
            r = ledger_commit(l, &err);
        if (r < 0)
            break;
        turn++;
        cr_assert(lt(u32, turn, 100000));
    }
    cr_assert(eq(int, err.code, LH_RESOURCE_EXHAUSTED), "%s", err.message);
    cr_assert(strstr(err.message, "free") != NULL, "%s", err.message);
    ledger_rollback(l);

    cr_assert(ftruncate(fd, 0) == 0);
    l = reopen(l);
    struct ledger_trajectory row;
    FINE(ledger_find_trajectory(l, "train-0-0", &row, &err));
    cr_assert(eq(u32, row.turns, turn), "exactly what was committed");
    append(l, "train-0-0", 1, turn);
    ledger_close(l);
    cr_assert(umount2(dir, MNT_DETACH) == 0);
}

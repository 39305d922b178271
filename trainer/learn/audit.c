#include "trainer/learn/audit.h"

#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "longhaul/task/v1/task.pb-c.h"
#include "proto/file.h"
#include "proto/parse.h"
#include "trainer/intake/ledger.h"
#include "trainer/intake/segment_file.h"
#include "trainer/learn/checkpoint.h"
#include "trainer/learn/control.h"

enum { JOB_MAX = 1 << 20, SHOWN = 20 };

struct audit {
    const char *job_dir;
    Longhaul__Job__V1__Job *job;
    struct ledger *ledger;
    sqlite3 *db;
    bool has_checkpoint;
    char latest[CHECKPOINT_NAME];
    struct checkpoint_state state; /* of the latest */
    FILE *problems;
    int wrong;
};

__attribute__((format(printf, 2, 3))) static void problem(struct audit *a, const char *fmt, ...)
{
    va_list ap;

    if (a->wrong++ >= SHOWN)
        return;
    va_start(ap, fmt);
    vfprintf(a->problems, fmt, ap);
    va_end(ap);
    fputc('\n', a->problems);
}

/* ---- nothing acknowledged is lost ---- */

/* Every row, of superseded attempts too: its bytes are there, with the right checksum. */
static int64_t check_segments(struct audit *a, struct lh_error *err)
{
    db_autostmt sqlite3_stmt *s =
        db_prepare(a->db, err,
                   "SELECT file, offset, length, crc, trajectory, turn FROM segments"
                   " ORDER BY file, offset",
                   "");
    lh_autofree char *dir = lh_format("%s/ledger/segments", a->job_dir);
    int64_t n = 0;
    int r = s && dir ? 1 : LH_INTERNAL;

    for (; r > 0 && (r = db_step(s, err)) > 0; n++) {
        const struct segment_place at = {
            .file = (uint32_t)sqlite3_column_int64(s, 0),
            .offset = (uint64_t)sqlite3_column_int64(s, 1),
            .length = (uint64_t)sqlite3_column_int64(s, 2),
            .crc = (uint32_t)sqlite3_column_int64(s, 3),
        };
        struct lh_error why = {0};
        lh_autofree char *bytes = malloc(at.length + 1);
        if (!bytes)
            return lh_fail_errno(err, ENOMEM, "a segment of %llu bytes",
                                 (unsigned long long)at.length);
        if (segment_files_read(dir, &at, bytes, &why) < 0)
            problem(a, "segment: turn %lld of %s: %s", (long long)sqlite3_column_int64(s, 5),
                    (const char *)sqlite3_column_text(s, 4), why.message);
    }
    return r < 0 ? r : n;
}

/* Runs a query whose rows are problems: columns name, text. */
static int each_problem(struct audit *a, const char *what, const char *sql, struct lh_error *err)
{
    db_autostmt sqlite3_stmt *s = db_prepare(a->db, err, sql, "");
    int r = s ? 1 : LH_INTERNAL;

    while (r > 0 && (r = db_step(s, err)) > 0)
        problem(a, "%s: %s: %s", what, (const char *)sqlite3_column_text(s, 0),
                (const char *)sqlite3_column_text(s, 1));
    return r;
}

static int64_t check_turns(struct audit *a, struct lh_error *err)
{
    int64_t n;
    int r = each_problem(
        a, "turns",
        "SELECT trajectory, 'turn ' || turn || ' from token ' || first_token || ' is number ' || k"
        " || ' and should begin at ' || before FROM (SELECT trajectory, turn, first_token,"
        " ROW_NUMBER() OVER w - 1 AS k, SUM(tokens) OVER w - tokens AS before FROM segments"
        " WHERE dead = 0 WINDOW w AS (PARTITION BY trajectory ORDER BY turn))"
        " WHERE turn != k OR first_token != before",
        err);

    if (r == 0)
        r = each_problem(
            a, "turns",
            "SELECT t.id, 'ended with ' || t.turns || ' turns and ' || t.tokens || ' tokens, has '"
            " || COUNT(s.turn) || ' and ' || COALESCE(SUM(s.tokens), 0) FROM trajectories t"
            " LEFT JOIN segments s ON s.trajectory = t.id AND s.dead = 0 WHERE t.state = 2"
            " GROUP BY t.id HAVING COUNT(s.turn) != t.turns OR"
            " COALESCE(SUM(s.tokens), 0) != t.tokens",
            err);
    if (r == 0)
        r = db_integer(a->db, err, 0, &n, "SELECT COUNT(*) FROM trajectories", "");
    return r < 0 ? r : n;
}

/* ---- what was trained on ---- */

/* TIMEOUT is the agent's failure by the task's rule, and earns nothing; INVALID is nobody's reward.
 */
static int64_t check_scores(struct audit *a, struct lh_error *err)
{
    const int64_t scored = LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_SCORED;
    const int64_t timeout = LONGHAUL__TASK__V1__VERDICT_KIND__VERDICT_TIMEOUT;
    db_autostmt sqlite3_stmt *s = db_prepare(
        a->db, err,
        "SELECT g.idx, SUM(t.state = 2 AND (t.kind = ? OR (t.kind = ? AND t.reward = 0)))"
        ", COUNT(t.id) FROM groups g LEFT JOIN trajectories t ON t.grp = g.id"
        " WHERE g.state = 3 GROUP BY g.id",
        "ii", scored, timeout);
    const int64_t members = a->job->train->group_size;
    int64_t n = 0;
    int r = s ? 1 : LH_INTERNAL;

    for (; r > 0 && (r = db_step(s, err)) > 0; n++)
        if (sqlite3_column_int64(s, 1) != members || sqlite3_column_int64(s, 2) != members)
            problem(a,
                    "scores: consumed group %lld has %lld members, %lld of them scored, not %lld",
                    (long long)sqlite3_column_int64(s, 0), (long long)sqlite3_column_int64(s, 2),
                    (long long)sqlite3_column_int64(s, 1), (long long)members);
    return r < 0 ? r : n;
}

/* ---- the chain of versions ---- */

struct step_batch {
    struct ledger_history *histories;
    double *rewards;
    size_t n, room;
};

static void step_batch_finish(struct step_batch *b)
{
    for (size_t i = 0; i < b->n; i++)
        ledger_history_finish(&b->histories[i]);
    free(b->histories);
    free(b->rewards);
}

static int add_trajectory(struct audit *a, struct step_batch *b, const char *id, double reward,
                          struct lh_error *err)
{
    if (b->n == b->room)
        return lh_fail(err, LH_DATA_LOSS, "a step has more than %zu trajectories", b->room);
    int r = ledger_read_history(a->ledger, id, &b->histories[b->n], err);
    b->rewards[b->n] = reward;
    b->n += r == 0;
    return r;
}

/* The batch of a step as the ledger has it, in (group, member) order. */
static int read_step(struct audit *a, int64_t step, struct step_batch *b, struct lh_error *err)
{
    int64_t n;
    int r = db_integer(a->db, err, 0, &n,
                       "SELECT COUNT(*) FROM groups g JOIN trajectories t ON t.grp = g.id"
                       " WHERE g.step = ?",
                       "i", step);

    if (r < 0)
        return r;
    b->room = (size_t)n;
    b->histories = calloc((size_t)n + 1, sizeof *b->histories);
    b->rewards = calloc((size_t)n + 1, sizeof *b->rewards);
    db_autostmt sqlite3_stmt *s =
        db_prepare(a->db, err,
                   "SELECT t.id, t.reward FROM groups g JOIN trajectories t ON t.grp = g.id"
                   " WHERE g.step = ? ORDER BY g.idx, t.member",
                   "i", step);
    if (!b->histories || !b->rewards || !s)
        return lh_fail_errno(err, ENOMEM, "the batch of step %lld", (long long)step);
    while ((r = db_step(s, err)) > 0) {
        int f = add_trajectory(a, b, (const char *)sqlite3_column_text(s, 0),
                               sqlite3_column_double(s, 1), err);
        if (f < 0)
            return f;
    }
    return r;
}

/* What `parent` becomes by the recorded batch of `step`. */
static int replay_step(struct audit *a, int64_t step, struct version *v, struct lh_error *err)
{
    struct step_batch b = {0};
    struct version_digest *d = version_digest_create();
    uint8_t batch[16];
    int r = d ? read_step(a, step, &b, err) : lh_fail_errno(err, ENOMEM, "the audit");

    if (r == 0)
        control_rewards(a->job, step, b.rewards, b.n);
    for (size_t i = 0; r == 0 && i < b.n; i++)
        version_digest_trajectory(d, b.histories[i].token, b.histories[i].logprob,
                                  b.histories[i].mask, b.histories[i].n, b.rewards[i]);
    step_batch_finish(&b);
    if (r < 0) {
        version_digest_destroy(d);
        return r;
    }
    *v = version_next(v, d, batch);
    return 0;
}

/* The version of a step as recorded; false when there is none. */
static int recorded_version(struct audit *a, uint64_t step, struct version *v, struct lh_error *err)
{
    db_autostmt sqlite3_stmt *s =
        db_prepare(a->db, err, "SELECT id FROM versions WHERE step = ?", "i", (int64_t)step);
    int r = s ? db_step(s, err) : LH_INTERNAL;

    if (r > 0 && sqlite3_column_bytes(s, 0) == 16) {
        v->step = step;
        memcpy(v->id, sqlite3_column_blob(s, 0), 16);
    }
    return r;
}

static int64_t check_lineage(struct audit *a, struct lh_error *err)
{
    struct version v = {0};
    int64_t step = 0;

    if (!a->has_checkpoint || a->state.steps == 0)
        return 0;
    int r = recorded_version(a, a->state.version.step - a->state.steps, &v, err);
    if (r == 0)
        problem(a, "lineage: the ledger has no version before step 1");
    while (r > 0 && step < (int64_t)a->state.steps) {
        struct lh_error why = {0};
        if (replay_step(a, ++step, &v, &why) < 0) {
            problem(a, "lineage: step %lld: %s", (long long)step, why.message);
            return step;
        }
    }
    if (r > 0 && memcmp(v.id, a->state.version.id, 16))
        problem(a,
                "lineage: the batches of the ledger do not lead to the weights of %s: a group "
                "was used twice, or other tokens or rewards were",
                a->latest);
    return r < 0 ? r : step;
}

/* ---- checkpoints ---- */

static void check_files(struct audit *a, const char *name)
{
    static const char *const files[] = {"config.json", "model.safetensors",
                                        "optimizer.safetensors"};

    for (size_t i = 0; i < LH_ARRAY_SIZE(files); i++) {
        lh_autofree char *path = lh_format("%s/checkpoints/%s/%s", a->job_dir, name, files[i]);
        if (!path || access(path, R_OK) < 0)
            problem(a, "checkpoint: %s has no %s", name, files[i]);
    }
}

static int check_cursor(struct audit *a, const char *name, struct lh_error *err)
{
    struct checkpoint_state s;
    struct lh_error why = {0};
    int64_t cursor, groups;

    if (checkpoint_read_state(a->job_dir, name, &s, &why) < 0) {
        problem(a, "checkpoint: %s", why.message);
        return 0;
    }
    int r = db_integer(a->db, err, 0, &cursor, "SELECT MAX(idx) + 1 FROM groups WHERE step <= ?",
                       "i", (int64_t)s.steps);
    if (r == 0)
        r = db_integer(a->db, err, 0, &groups, "SELECT COUNT(*) FROM groups WHERE step <= ?", "i",
                       (int64_t)s.steps);
    if (r == 0 && (cursor != s.cursor || groups != s.groups))
        problem(a, "checkpoint: %s says cursor %lld after %lld groups, the ledger %lld after %lld",
                name, (long long)s.cursor, (long long)s.groups, (long long)cursor,
                (long long)groups);
    return r;
}

/* Later steps than the latest checkpoint's are rolled back by the next resume, and need none. */
static int64_t check_checkpoints(struct audit *a, struct lh_error *err)
{
    lh_autofree char *parent = lh_format("%s/checkpoints", a->job_dir);
    lh_autoclosedir DIR *d = parent ? opendir(parent) : NULL;
    int64_t n = 0;

    for (struct dirent *e; d && (e = readdir(d));) {
        if (strncmp(e->d_name, "step-", 5))
            continue;
        check_files(a, e->d_name);
        int r = check_cursor(a, e->d_name, err);
        if (r < 0)
            return r;
        n++;
    }
    return n;
}

/* ---- all of it ---- */

static int open_job(struct audit *a, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/job.pb", a->job_dir);
    lh_autofree char *ledger = lh_format("%s/ledger", a->job_dir);
    size_t len;
    lh_autofree char *bytes = path ? lh_read_file(path, JOB_MAX, &len, err) : NULL;
    struct lh_error none = {0};

    if (!bytes || !ledger)
        return lh_wrap(err, "not a job directory");
    a->job = (Longhaul__Job__V1__Job *)lh_parse(&longhaul__job__v1__job__descriptor, bytes, len,
                                                (struct lh_parse_limits){0}, err);
    if (!a->job)
        return lh_wrap(err, "%s", path);
    a->ledger = ledger_open_read_only(ledger, err);
    if (!a->ledger)
        return err->code;
    a->db = ledger_db(a->ledger);
    int r = checkpoint_latest(a->job_dir, a->latest, &none);
    if (r == LH_NOT_FOUND)
        return 0;
    a->has_checkpoint = true;
    return r < 0 ? lh_fail(err, r, "%s", none.message)
                 : checkpoint_read_state(a->job_dir, a->latest, &a->state, err);
}

static int run_checks(struct audit *a, FILE *out, struct lh_error *err)
{
    static const struct {
        const char *name, *what;
        int64_t (*run)(struct audit *, struct lh_error *);
    } checks[] = {
        {"segments", "acknowledged turns are there, with the right checksum", check_segments},
        {"turns", "trajectories are whole, their turns consecutive", check_turns},
        {"scores", "groups trained on are complete and scored", check_scores},
        {"lineage", "steps that lead to the weights used each group once", check_lineage},
        {"checkpoints", "files are whole, cursors agree with the ledger", check_checkpoints},
    };

    fprintf(out, "%-12s %9s %6s  %s\n", "check", "examined", "wrong", "that");
    for (size_t i = 0; i < LH_ARRAY_SIZE(checks); i++) {
        int before = a->wrong;
        int64_t n = checks[i].run(a, err);
        if (n < 0)
            return lh_wrap(err, "check %s", checks[i].name);
        fprintf(out, "%-12s %9lld %6d  %s\n", checks[i].name, (long long)n, a->wrong - before,
                checks[i].what);
    }
    return a->wrong;
}

int audit_job(const char *job_dir, FILE *out, FILE *problems, struct lh_error *err)
{
    struct audit a = {.job_dir = job_dir, .problems = problems};
    int r = open_job(&a, err);

    if (r == 0)
        r = run_checks(&a, out, err);
    if (a.wrong > SHOWN)
        fprintf(problems, "... and %d more\n", a.wrong - SHOWN);
    ledger_close(a.ledger);
    lh_message_free((ProtobufCMessage *)a.job);
    return r;
}

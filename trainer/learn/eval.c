/* Evaluation: greedy episodes over held-out tasks, spread evenly over families.
 *
 * An evaluation is a round of the ledger named after the version, so a killed one goes on where it
 * was, and after a roll back the same version is not evaluated twice. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "proto/log.h"
#include "trainer/learn/trainer.h"

LH_LOG_COMPONENT("trainer");

struct counts {
    json_t *line; /* the metrics line being made */
    const char *round, *turns_of;
};

static void name_round(const struct trainer *t, const char *name, const char *unique,
                       char round[LEDGER_ROUND])
{
    char version[VERSION_TEXT];

    version_print(&t->state.version, version);
    snprintf(round, LEDGER_ROUND, "eval/%s/%s%s", name, version, unique);
}

/* ---- reading the result out of the ledger ---- */

static double share(int64_t part, int64_t of)
{
    return of ? (double)part / (double)of : 0;
}

static int count_families(struct counts *c, struct ledger *l, struct lh_error *err)
{
    db_autostmt sqlite3_stmt *s =
        db_prepare(ledger_db(l), err,
                   "SELECT g.family, COUNT(*), SUM(t.passed), SUM(t.turns > 1) FROM groups g"
                   " JOIN trajectories t ON t.grp = g.id WHERE g.round = ? AND g.state = ?"
                   " GROUP BY g.family ORDER BY g.family",
                   "ti", c->round, (int64_t)GROUP_READY);
    json_t *families = json_object();
    int64_t episodes = 0, passed = 0, second = 0;
    int r = s ? 1 : LH_INTERNAL;

    while (r > 0 && (r = db_step(s, err)) > 0) {
        int64_t n = sqlite3_column_int64(s, 1), p = sqlite3_column_int64(s, 2);
        json_object_set_new(
            families, (const char *)sqlite3_column_text(s, 0),
            json_pack("{sI sf}", "episodes", (json_int_t)n, "success", share(p, n)));
        episodes += n;
        passed += p;
        second += sqlite3_column_int64(s, 3);
    }
    json_object_set_new(c->line, "families", families);
    json_object_set_new(c->line, "episodes", json_integer(episodes));
    json_object_set_new(c->line, "success", json_real(share(passed, episodes)));
    json_object_set_new(c->line, "second_turn_share", json_real(share(second, episodes)));
    return r;
}

/* Success on the episodes that took a second turn in the evaluation `turns_of`. */
static int count_second_turns(struct counts *c, struct ledger *l, struct lh_error *err)
{
    db_autostmt sqlite3_stmt *s = db_prepare(
        ledger_db(l), err,
        "SELECT COUNT(*), SUM(t.passed) FROM groups g JOIN trajectories t ON t.grp = g.id"
        " JOIN groups h ON h.idx = g.idx AND h.round = ? JOIN trajectories u ON"
        " u.grp = h.id WHERE g.round = ? AND g.state = ? AND h.state = ? AND u.turns > 1",
        "ttii", c->turns_of, c->round, (int64_t)GROUP_READY, (int64_t)GROUP_READY);
    int r = s ? db_step(s, err) : LH_INTERNAL;

    if (r < 0)
        return r;
    json_object_set_new(c->line, "second_turn_success",
                        json_real(share(sqlite3_column_int64(s, 1), sqlite3_column_int64(s, 0))));
    return 0;
}

static int count(void *ctx, struct ledger *l, struct lh_error *err)
{
    int r = count_families(ctx, l, err);

    return r < 0 ? r : count_second_turns(ctx, l, err);
}

/* ---- results that stand ---- */

struct record {
    const struct trainer *t;
    const char *name;
    json_t *line; /* to store, or found */
};

static int find_record(void *ctx, struct ledger *l, struct lh_error *err)
{
    struct record *r = ctx;
    db_autostmt sqlite3_stmt *s =
        db_prepare(ledger_db(l), err, "SELECT result FROM evals WHERE name = ? AND version = ?",
                   "tb", r->name, r->t->state.version.id, (size_t)16);
    int e = s ? db_step(s, err) : LH_INTERNAL;

    if (e > 0)
        r->line = json_loads((const char *)sqlite3_column_text(s, 0), 0, NULL);
    return e < 0 ? e : 0;
}

static int store_record(void *ctx, struct ledger *l, struct lh_error *err)
{
    const struct record *r = ctx;
    lh_autofree char *text = json_dumps(r->line, JSON_COMPACT);

    if (!text)
        return lh_fail_errno(err, ENOMEM, "recording evaluation %s", r->name);
    return db_run(ledger_db(l), err,
                  "INSERT OR REPLACE INTO evals (name, version, step, result) VALUES (?, ?, ?, ?)",
                  "tbit", r->name, r->t->state.version.id, (size_t)16, (int64_t)r->t->state.steps,
                  text);
}

/* ---- running one ---- */

static int run(struct trainer *t, const struct eval *e, json_t *line, struct lh_error *err)
{
    struct intake_round round = {
        .mode = LONGHAUL__EXPERIENCE__V1__MODE__MODE_GREEDY,
        .members = 1,
        .tasks = &t->eval_tasks,
        .even_total = e->episodes,
        .blank_first_observation = e->blank,
        .temperature = 1,
    };
    char turns_of[LEDGER_ROUND];
    struct counts c = {line, round.name, turns_of};

    name_round(t, e->name, e->unique, round.name);
    name_round(t, e->turns_of ? e->turns_of : e->name, e->turns_of ? "" : e->unique, turns_of);
    int r = trainer_collect(t, &round, e->episodes, e->episodes, err);
    intake_close_round(t->intake, round.name);
    return r < 0 ? r : intake_with_ledger(t->intake, count, &c, err);
}

static int run_or_recall(struct trainer *t, const struct eval *e, json_t **line,
                         struct lh_error *err)
{
    struct record record = {.t = t, .name = e->name};
    int r = e->unique[0] ? 0 : intake_with_ledger(t->intake, find_record, &record, err);

    if (r < 0 || record.line) {
        *line = record.line;
        return r;
    }
    *line = record.line = json_pack("{ss sI ss}", "kind", "eval", "step",
                                    (json_int_t)t->state.steps, "name", e->name);
    if (!record.line)
        return lh_fail_errno(err, ENOMEM, "evaluation %s", e->name);
    r = run(t, e, record.line, err);
    if (r == 0 && !e->unique[0])
        r = intake_with_ledger(t->intake, store_record, &record, err);
    return r;
}

int trainer_eval(struct trainer *t, const struct eval *e, double *success, struct lh_error *err)
{
    json_t *line = NULL;

    if (!e->episodes)
        return 0;
    status_phase(t, "eval", t->state.steps, t->job->train->steps);
    int r = run_or_recall(t, e, &line, err);
    if (r == 0) {
        double found = json_number_value(json_object_get(line, "success"));
        lh_info("eval", "name=%s success=%.3f", e->name, found);
        pthread_mutex_lock(&t->progress.lock);
        t->progress.success = found;
        pthread_mutex_unlock(&t->progress.lock);
        if (success)
            *success = found;
        if (e->unique[0] || !metrics_has_eval(t->metrics, e->name, t->state.steps))
            metrics_write(t->metrics, json_incref(line));
    }
    json_decref(line);
    return r < 0 ? lh_wrap(err, "evaluation %s", e->name) : 0;
}

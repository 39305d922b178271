/* Groups and trajectories of the ledger: rows, their order, their next attempts. */
#include <string.h>

#include "trainer/intake/ledger_private.h"

int ledger_add_group(struct ledger *l, struct ledger_group *g, struct lh_error *err)
{
    int r = db_run(l->db, err,
                   "INSERT INTO groups (round, idx, task, family, state) VALUES (?, ?, ?, ?, ?)",
                   "titti", g->round, g->index, g->task, g->family, (int64_t)g->state);

    if (r == 0)
        g->id = sqlite3_last_insert_rowid(l->db);
    g->step = g->planned = -1;
    return r;
}

int ledger_add_trajectory(struct ledger *l, const struct ledger_trajectory *t, struct lh_error *err)
{
    return db_run(l->db, err,
                  "INSERT INTO trajectories (id, grp, member, attempt, invalid, state, seed)"
                  " VALUES (?, ?, ?, ?, ?, ?, ?)",
                  "tiiiiii", t->id, t->group, (int64_t)t->member, (int64_t)t->attempt,
                  (int64_t)t->invalid, (int64_t)t->state, (int64_t)t->seed);
}

int ledger_set_group(struct ledger *l, int64_t group, enum ledger_group_state state, int64_t step,
                     struct lh_error *err)
{
    int r = db_run(l->db, err,
                   "UPDATE groups SET state = ?, step = CASE WHEN ?2 < 0 THEN NULL ELSE ?2 END,"
                   " planned = NULL WHERE id = ?",
                   "iii", (int64_t)state, step, group);

    if (r == 0 && state == GROUP_DROPPED)
        r = db_run(l->db, err, "UPDATE trajectories SET state = ? WHERE grp = ? AND state != ?",
                   "iii", (int64_t)TRAJECTORY_DROPPED, group, (int64_t)TRAJECTORY_DONE);
    return r;
}

/* The last turn whose snapshot exists.  The `last` turn is never it: what follows it is the
 * verdict, and the worker that resumes must come to it by itself. */
static int resume_turn(struct ledger *l, const char *trajectory, int64_t *turn,
                       struct lh_error *err)
{
    return db_integer(l->db, err, -1, turn,
                      "SELECT MAX(turn) FROM segments WHERE trajectory = ? AND dead = 0"
                      " AND last = 0 AND snapshot != ''",
                      "t", trajectory);
}

int ledger_next_attempt(struct ledger *l, const char *trajectory, uint32_t attempt,
                        uint32_t invalid, bool restart, struct lh_error *err)
{
    int64_t turn = -1;
    int r = restart ? 0 : resume_turn(l, trajectory, &turn, err);

    if (r == 0)
        r = db_run(l->db, err,
                   "UPDATE segments SET dead = 1 WHERE trajectory = ? AND turn > ? AND dead = 0",
                   "ti", trajectory, turn);
    if (r == 0)
        r = db_run(
            l->db, err, "UPDATE trajectories SET attempt = ?, invalid = ?, state = ? WHERE id = ?",
            "iiit", (int64_t)attempt, (int64_t)invalid, (int64_t)TRAJECTORY_OPEN, trajectory);
    return r;
}

int ledger_next_attempt_of_all(struct ledger *l, struct lh_error *err)
{
    int r = db_script(l->db,
                      "UPDATE segments SET dead = 1 WHERE dead = 0 AND trajectory IN"
                      " (SELECT id FROM trajectories WHERE state = 1) AND turn > COALESCE("
                      "(SELECT MAX(turn) FROM segments s WHERE s.trajectory = segments.trajectory"
                      " AND s.dead = 0 AND s.last = 0 AND s.snapshot != ''), -1)",
                      err);

    return r < 0 ? r
                 : db_script(l->db, "UPDATE trajectories SET attempt = attempt + 1 WHERE state = 1",
                             err);
}

static void read_group(sqlite3_stmt *s, struct ledger_group *g)
{
    *g = (struct ledger_group){
        .id = sqlite3_column_int64(s, 0),
        .index = sqlite3_column_int64(s, 2),
        .task = column_text(s, 3),
        .family = column_text(s, 4),
        .state = (enum ledger_group_state)sqlite3_column_int(s, 5),
        .step = sqlite3_column_type(s, 6) == SQLITE_NULL ? -1 : sqlite3_column_int64(s, 6),
        .planned = sqlite3_column_type(s, 7) == SQLITE_NULL ? -1 : sqlite3_column_int64(s, 7),
    };
    strncpy(g->round, column_text(s, 1), sizeof g->round - 1);
}

int ledger_each_group(struct ledger *l, const char *round, unsigned states, ledger_group_fn *fn,
                      void *ctx, struct lh_error *err)
{
    db_autostmt sqlite3_stmt *s =
        db_prepare(l->db, err,
                   "SELECT id, round, idx, task, family, state, step, planned FROM groups"
                   " WHERE round = ? AND (?2 >> state) & 1 ORDER BY idx",
                   "ti", round, (int64_t)states);
    struct ledger_group g;
    int r = s ? 1 : LH_INTERNAL;

    while (r > 0 && (r = db_step(s, err)) > 0) {
        read_group(s, &g);
        int f = fn(ctx, &g, err);
        if (f < 0)
            return f;
    }
    return r;
}

#define TRAJECTORY_COLUMNS                                                                         \
    "SELECT t.id, t.grp, t.member, t.attempt, t.invalid, t.state, t.seed,"                         \
    " (SELECT COUNT(*) FROM segments s WHERE s.trajectory = t.id AND dead = 0),"                   \
    " (SELECT SUM(tokens) FROM segments s WHERE s.trajectory = t.id AND dead = 0)"                 \
    " FROM trajectories t "

static void read_trajectory(sqlite3_stmt *s, struct ledger_trajectory *t)
{
    *t = (struct ledger_trajectory){
        .group = sqlite3_column_int64(s, 1),
        .member = (uint32_t)sqlite3_column_int64(s, 2),
        .attempt = (uint32_t)sqlite3_column_int64(s, 3),
        .invalid = (uint32_t)sqlite3_column_int64(s, 4),
        .state = (enum ledger_trajectory_state)sqlite3_column_int(s, 5),
        .seed = (uint64_t)sqlite3_column_int64(s, 6),
        .turns = (uint32_t)sqlite3_column_int64(s, 7),
        .tokens = (uint32_t)sqlite3_column_int64(s, 8),
    };
    strncpy(t->id, column_text(s, 0), sizeof t->id - 1);
}

int ledger_each_trajectory(struct ledger *l, int64_t group, ledger_trajectory_fn *fn, void *ctx,
                           struct lh_error *err)
{
    db_autostmt sqlite3_stmt *s =
        db_prepare(l->db, err, TRAJECTORY_COLUMNS "WHERE t.grp = ? ORDER BY t.member", "i", group);
    struct ledger_trajectory t;
    int r = s ? 1 : LH_INTERNAL;

    while (r > 0 && (r = db_step(s, err)) > 0) {
        read_trajectory(s, &t);
        int f = fn(ctx, &t, err);
        if (f < 0)
            return f;
    }
    return r;
}

int ledger_find_trajectory(struct ledger *l, const char *id, struct ledger_trajectory *out,
                           struct lh_error *err)
{
    db_autostmt sqlite3_stmt *s =
        db_prepare(l->db, err, TRAJECTORY_COLUMNS "WHERE t.id = ?", "t", id);
    int r = s ? db_step(s, err) : LH_INTERNAL;

    if (r < 0)
        return r;
    if (r == 0)
        return lh_fail(err, LH_NOT_FOUND, "the ledger has no trajectory %s", id);
    read_trajectory(s, out);
    return 0;
}

int ledger_round_extent(struct ledger *l, const char *round, int64_t *next, int64_t *kept,
                        struct lh_error *err)
{
    int r = db_integer(l->db, err, 0, next, "SELECT MAX(idx) + 1 FROM groups WHERE round = ?", "t",
                       round);

    if (r == 0)
        r = db_integer(l->db, err, 0, kept,
                       "SELECT COUNT(*) FROM groups WHERE round = ? AND state != ?", "ti", round,
                       (int64_t)GROUP_DROPPED);
    return r;
}

int ledger_roll_back(struct ledger *l, int64_t step, struct lh_error *err)
{
    return db_run(l->db, err,
                  "UPDATE groups SET state = ?, planned = step, step = NULL WHERE step > ?", "ii",
                  (int64_t)GROUP_READY, step);
}

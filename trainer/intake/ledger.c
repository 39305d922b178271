#include "trainer/intake/ledger.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/file.h"
#include "trainer/intake/ledger_private.h"

static const char schema[] =
    "CREATE TABLE IF NOT EXISTS job (format INTEGER NOT NULL, id TEXT NOT NULL,"
    " version TEXT NOT NULL, seed INTEGER NOT NULL);"
    /* What the job draws from, fixed at its first start: later registrations change nothing. */
    "CREATE TABLE IF NOT EXISTS tasks (split INTEGER NOT NULL, name TEXT NOT NULL,"
    " family TEXT NOT NULL, digest BLOB NOT NULL, PRIMARY KEY (split, name)) WITHOUT ROWID;"
    "CREATE TABLE IF NOT EXISTS groups (id INTEGER PRIMARY KEY, round TEXT NOT NULL,"
    " idx INTEGER NOT NULL, task TEXT NOT NULL, family TEXT NOT NULL, state INTEGER NOT NULL,"
    " step INTEGER, planned INTEGER, UNIQUE (round, idx));"
    "CREATE INDEX IF NOT EXISTS groups_step ON groups (step) WHERE step IS NOT NULL;"
    "CREATE TABLE IF NOT EXISTS trajectories (id TEXT PRIMARY KEY, grp INTEGER NOT NULL REFERENCES"
    " groups, member INTEGER NOT NULL, attempt INTEGER NOT NULL, invalid INTEGER NOT NULL,"
    " state INTEGER NOT NULL, seed INTEGER NOT NULL, kind INTEGER, reward REAL, passed INTEGER,"
    " code TEXT, message TEXT, finish INTEGER, turns INTEGER, tokens INTEGER, sampled INTEGER,"
    " wall_ms INTEGER, UNIQUE (grp, member)) WITHOUT ROWID;"
    "CREATE INDEX IF NOT EXISTS trajectories_open ON trajectories (state) WHERE state = 1;"
    /* dead: history that a later attempt does not build on; its bytes stay accounted for. */
    "CREATE TABLE IF NOT EXISTS segments (trajectory TEXT NOT NULL, attempt INTEGER NOT NULL,"
    " turn INTEGER NOT NULL, first_token INTEGER NOT NULL, tokens INTEGER NOT NULL,"
    " spans INTEGER NOT NULL, file INTEGER NOT NULL, offset INTEGER NOT NULL,"
    " length INTEGER NOT NULL, crc INTEGER NOT NULL, snapshot TEXT NOT NULL,"
    " temperature REAL NOT NULL, agent_ms INTEGER NOT NULL, last INTEGER NOT NULL,"
    " dead INTEGER NOT NULL DEFAULT 0,"
    " PRIMARY KEY (trajectory, attempt, turn)) WITHOUT ROWID;"
    "CREATE INDEX IF NOT EXISTS segments_snapshot ON segments (snapshot) WHERE snapshot != '';"
    "CREATE INDEX IF NOT EXISTS segments_place ON segments (file, offset);"
    "CREATE TABLE IF NOT EXISTS versions (step INTEGER NOT NULL, id BLOB PRIMARY KEY,"
    " parent BLOB, batch BLOB) WITHOUT ROWID;"
    "CREATE TABLE IF NOT EXISTS evals (name TEXT NOT NULL, version BLOB NOT NULL,"
    " step INTEGER NOT NULL, result TEXT NOT NULL, PRIMARY KEY (name, version)) WITHOUT ROWID;"
    "CREATE VIEW IF NOT EXISTS demonstrations AS SELECT g.idx, g.task, g.family, t.id, t.reward,"
    " t.turns, t.tokens FROM groups g JOIN trajectories t ON t.grp = g.id"
    " WHERE g.round = 'demo' AND t.state = 2;";

static int write_identity(struct ledger *l, const char *job_id, uint64_t seed, struct lh_error *err)
{
    return db_run(l->db, err, "INSERT INTO job VALUES (?, ?, ?, ?)", "itti", (int64_t)LEDGER_FORMAT,
                  job_id, LONGHAUL_VERSION, (int64_t)seed);
}

static int check_identity(struct ledger *l, const char *job_id, uint64_t seed, struct lh_error *err)
{
    db_autostmt sqlite3_stmt *s =
        db_prepare(l->db, err, "SELECT format, id, version, seed FROM job", "");
    int r = s ? db_step(s, err) : LH_INTERNAL;

    if (r < 0)
        return r;
    if (r == 0)
        return write_identity(l, job_id, seed, err);
    if (sqlite3_column_int64(s, 0) != LEDGER_FORMAT || strcmp(column_text(s, 2), LONGHAUL_VERSION))
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "the ledger was written by longhaul %s (format %lld), this is %s (format "
                       "%d); resume with that version",
                       column_text(s, 2), (long long)sqlite3_column_int64(s, 0), LONGHAUL_VERSION,
                       LEDGER_FORMAT);
    if (strcmp(column_text(s, 1), job_id) || (uint64_t)sqlite3_column_int64(s, 3) != seed)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "the ledger belongs to job %s with seed %llu, not to %s with seed %llu; use "
                       "another job directory",
                       column_text(s, 1), (unsigned long long)sqlite3_column_int64(s, 3), job_id,
                       (unsigned long long)seed);
    return 0;
}

/* The last row in file order says where acknowledged bytes end. */
static int open_segments(struct ledger *l, struct lh_error *err)
{
    db_autostmt sqlite3_stmt *s =
        db_prepare(l->db, err,
                   "SELECT file, offset + length FROM segments ORDER BY file DESC, offset DESC"
                   " LIMIT 1",
                   "");
    int r = s ? db_step(s, err) : LH_INTERNAL;

    if (r < 0)
        return r;
    return segment_files_open(&l->files, l->segments_dir,
                              r ? (uint32_t)sqlite3_column_int64(s, 0) : 0,
                              r ? (uint64_t)sqlite3_column_int64(s, 1) : 0, err);
}

static struct ledger *ledger_new(const char *dir, bool read_only, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/ledger.db", dir);
    lh_auto(ledger) l = calloc(1, sizeof *l);

    if (!l || !path || !(l->segments_dir = lh_format("%s/segments", dir)))
        return lh_fail_errno(err, ENOMEM, "opening the ledger"), NULL;
    l->files.fd = -1;
    l->db = db_open(path, read_only, err);
    return l->db ? lh_steal(&l) : NULL;
}

struct ledger *ledger_open(const char *dir, const char *job_id, uint64_t seed, struct lh_error *err)
{
    if (lh_make_dirs(dir, 0700, err) < 0)
        return lh_wrap(err, "ledger"), NULL;
    lh_auto(ledger) l = ledger_new(dir, false, err);
    if (!l || db_script(l->db, "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;", err) < 0 ||
        ledger_begin(l, err) < 0 || db_script(l->db, schema, err) < 0 ||
        check_identity(l, job_id, seed, err) < 0 || open_segments(l, err) < 0 ||
        ledger_commit(l, err) < 0)
        return lh_wrap(err, "ledger %s", dir), NULL;
    return lh_steal(&l);
}

struct ledger *ledger_open_read_only(const char *dir, struct lh_error *err)
{
    return ledger_new(dir, true, err);
}

void ledger_close(struct ledger *l)
{
    if (!l)
        return;
    ledger_rollback(l);
    sqlite3_close(l->db);
    if (l->files.fd >= 0)
        segment_files_close(&l->files);
    free(l->segments_dir);
    free(l);
}

sqlite3 *ledger_db(struct ledger *l)
{
    return l->db;
}

int ledger_begin(struct ledger *l, struct lh_error *err)
{
    int r = db_script(l->db, "BEGIN IMMEDIATE", err);

    l->in_transaction = r == 0;
    return r;
}

int ledger_commit(struct ledger *l, struct lh_error *err)
{
    int r = segment_files_sync(&l->files, err);

    if (r == 0)
        r = db_script(l->db, "COMMIT", err);
    if (r < 0) {
        ledger_rollback(l);
        return r;
    }
    l->in_transaction = false;
    segment_files_committed(&l->files);
    return 0;
}

void ledger_rollback(struct ledger *l)
{
    if (!l->in_transaction)
        return;
    l->in_transaction = false;
    /* After a full disk SQLite has rolled back by itself; then this fails, and is right to. */
    sqlite3_exec(l->db, "ROLLBACK", NULL, NULL, NULL);
    segment_files_rollback(&l->files);
}

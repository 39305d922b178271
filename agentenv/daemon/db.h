/* The registry's database: one SQLite connection (WAL) behind one mutex.
 *
 * Two strengths of "recorded" (docs/DESIGN.md 3.1).  A commit alone is written, not synced: it
 * survives the death of the process, which is all a running sandbox can use.  db_flush() makes
 * every commit so far survive the host; callers that arrive together share one fdatasync. Rejected:
 * two databases (a snapshot and its sandbox's layers change in one transaction), and PRAGMA
 * synchronous=FULL (it would sync with the lock held, and everybody would wait).
 *
 * Parameters are given by a string with one letter for each `?`:
 *   s const char * (NULL is SQL NULL)   i int   l int64_t   b const void *, size_t */
#ifndef AGENTENV_DAEMON_DB_H
#define AGENTENV_DAEMON_DB_H

#include <sqlite3.h>
#include <stdint.h>

#include "proto/cleanup.h"
#include "proto/error.h"

struct db;

struct db *db_open(const char *path, struct lh_error *err);
void db_close(struct db *db); /* NULL is fine */
LH_DEFINE_AUTO(db, db_close)

/* One statement.  ALREADY_EXISTS when a uniqueness constraint refuses it, RESOURCE_EXHAUSTED when
 * the disk is full. */
int db_run(struct db *db, struct lh_error *err, const char *sql, const char *types, ...);

/* Each row; a negative return of `row` ends it and is returned.  The lock is held: `row` reads
 * columns (sqlite3_column_*, db_text) and does not wait. */
typedef int db_row_fn(void *ctx, sqlite3_stmt *row, struct lh_error *err);
int db_each(struct db *db, struct lh_error *err, db_row_fn *row, void *ctx, const char *sql,
            const char *types, ...);
/* First column of the first row; NOT_FOUND without one. */
int db_int(struct db *db, struct lh_error *err, int64_t *out, const char *sql, const char *types,
           ...);
/* The same as text, into a new string. */
char *db_string(struct db *db, struct lh_error *err, const char *sql, const char *types, ...);
/* Column as text, "" when NULL; valid until the row function returns. */
const char *db_text(sqlite3_stmt *row, int column);
/* Rows the last db_run() changed; meaningful inside a transaction. */
int db_changes(struct db *db);

/* A transaction holds the lock from begin to end:
 *     int r = db_begin(db, err);
 *     if (r < 0) return r;
 *     r = db_run(...); if (r == 0) r = db_run(...);
 *     return db_end(db, r, err);       // commits when r is 0, else rolls back and returns r */
int db_begin(struct db *db, struct lh_error *err);
int db_end(struct db *db, int result, struct lh_error *err);

/* Everything committed before the call survives the host when it returns. */
int db_flush(struct db *db, struct lh_error *err);

#endif

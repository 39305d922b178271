/* SQLite in the project's error contract: bind by a string of types, step, done.
 *
 *     db_autostmt sqlite3_stmt *s = db_prepare(db, err, "SELECT n FROM t WHERE id = ?", "t", id);
 *     while ((r = db_step(s, err)) > 0)
 *         use(sqlite3_column_int64(s, 0));
 *
 * Types: i = int64_t, d = double, t = const char * (NULL is NULL), b = const void *, size_t. */
#ifndef TRAINER_INTAKE_DB_H
#define TRAINER_INTAKE_DB_H

#include <sqlite3.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/error.h"

sqlite3 *db_open(const char *path, bool read_only, struct lh_error *err);
/* Statements without parameters, separated by semicolons. */
int db_script(sqlite3 *db, const char *sql, struct lh_error *err);
sqlite3_stmt *db_prepare(sqlite3 *db, struct lh_error *err, const char *sql, const char *types,
                         ...);
/* 1 = a row, 0 = no more, negative = error. */
int db_step(sqlite3_stmt *s, struct lh_error *err);
/* Prepare, bind, run to the end, drop. */
int db_run(sqlite3 *db, struct lh_error *err, const char *sql, const char *types, ...);
/* The one integer a query yields into *out; `none` when there is no row or it is NULL. */
int db_integer(sqlite3 *db, struct lh_error *err, int64_t none, int64_t *out, const char *sql,
               const char *types, ...);

static inline void db_cleanup_stmt(sqlite3_stmt **s)
{
    sqlite3_finalize(*s);
}
#define db_autostmt __attribute__((cleanup(db_cleanup_stmt)))

#endif

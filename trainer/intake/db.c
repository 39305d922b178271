#include "trainer/intake/db.h"

#include <stdarg.h>
#include <stddef.h>

enum { BUSY_MS = 5000 };

static int fail_db(sqlite3 *db, const char *doing, struct lh_error *err)
{
    int code = sqlite3_errcode(db) & 0xff;
    const char *file = sqlite3_db_filename(db, "main");

    if (code == SQLITE_FULL || code == SQLITE_IOERR)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED,
                       "%s: %s: %s; free space there, then resume the job", doing, file,
                       sqlite3_errmsg(db));
    int status = code == SQLITE_CORRUPT || code == SQLITE_NOTADB ? LH_DATA_LOSS
                 : code == SQLITE_BUSY                           ? LH_UNAVAILABLE
                 : code == SQLITE_CONSTRAINT                     ? LH_FAILED_PRECONDITION
                                                                 : LH_INTERNAL;
    return lh_fail(err, status, "%s: %s: %s", doing, file, sqlite3_errmsg(db));
}

sqlite3 *db_open(const char *path, bool read_only, struct lh_error *err)
{
    sqlite3 *db = NULL;
    int flags = read_only ? SQLITE_OPEN_READONLY : SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE;

    if (sqlite3_open_v2(path, &db, flags, NULL) != SQLITE_OK) {
        lh_fail(err, read_only ? LH_NOT_FOUND : LH_INTERNAL, "cannot open %s: %s", path,
                db ? sqlite3_errmsg(db) : "out of memory");
        sqlite3_close(db);
        return NULL;
    }
    sqlite3_busy_timeout(db, BUSY_MS);
    return db;
}

int db_script(sqlite3 *db, const char *sql, struct lh_error *err)
{
    return sqlite3_exec(db, sql, NULL, NULL, NULL) == SQLITE_OK ? 0 : fail_db(db, sql, err);
}

static int bind_one(sqlite3_stmt *s, int at, char type, va_list *ap)
{
    switch (type) {
    case 'i':
        return sqlite3_bind_int64(s, at, va_arg(*ap, int64_t));
    case 'd':
        return sqlite3_bind_double(s, at, va_arg(*ap, double));
    case 't':
        return sqlite3_bind_text(s, at, va_arg(*ap, const char *), -1, SQLITE_TRANSIENT);
    case 'b': {
        const void *data = va_arg(*ap, const void *);
        return sqlite3_bind_blob64(s, at, data, va_arg(*ap, size_t), SQLITE_TRANSIENT);
    }
    default:
        return SQLITE_MISUSE;
    }
}

static sqlite3_stmt *prepare(sqlite3 *db, struct lh_error *err, const char *sql, const char *types,
                             va_list *ap)
{
    sqlite3_stmt *s = NULL;
    int r = sqlite3_prepare_v2(db, sql, -1, &s, NULL);

    for (int i = 0; r == SQLITE_OK && types[i]; i++)
        r = bind_one(s, i + 1, types[i], ap);
    if (r != SQLITE_OK) {
        fail_db(db, sql, err);
        sqlite3_finalize(s);
        return NULL;
    }
    return s;
}

sqlite3_stmt *db_prepare(sqlite3 *db, struct lh_error *err, const char *sql, const char *types, ...)
{
    va_list ap;

    va_start(ap, types);
    sqlite3_stmt *s = prepare(db, err, sql, types, &ap);
    va_end(ap);
    return s;
}

int db_step(sqlite3_stmt *s, struct lh_error *err)
{
    switch (sqlite3_step(s)) {
    case SQLITE_ROW:
        return 1;
    case SQLITE_DONE:
        return 0;
    default:
        return fail_db(sqlite3_db_handle(s), sqlite3_sql(s), err);
    }
}

int db_run(sqlite3 *db, struct lh_error *err, const char *sql, const char *types, ...)
{
    va_list ap;

    va_start(ap, types);
    db_autostmt sqlite3_stmt *s = prepare(db, err, sql, types, &ap);
    va_end(ap);
    if (!s)
        return err ? err->code : LH_INTERNAL;
    int r = db_step(s, err);
    return r < 0 ? r : 0;
}

int db_integer(sqlite3 *db, struct lh_error *err, int64_t none, int64_t *out, const char *sql,
               const char *types, ...)
{
    va_list ap;

    va_start(ap, types);
    db_autostmt sqlite3_stmt *s = prepare(db, err, sql, types, &ap);
    va_end(ap);
    int r = s ? db_step(s, err) : LH_INTERNAL;
    if (r < 0)
        return r;
    *out = r && sqlite3_column_type(s, 0) != SQLITE_NULL ? sqlite3_column_int64(s, 0) : none;
    return 0;
}

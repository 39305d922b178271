#include "agentenv/daemon/db.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "proto/file.h"

enum { STATEMENTS = 256, PLACES = 4, BUSY_MS = 10000 };

struct db {
    sqlite3 *handle;
    pthread_mutex_t lock; /* recursive: a transaction calls db_run() */
    sqlite3_stmt *cache[STATEMENTS];

    /* Group flush: `committed` counts commits, `flushed` is how many of them are on disk. */
    int wal_fd;
    pthread_mutex_t flush_lock;
    uint64_t committed, flushed;
};

static int fail(struct db *db, struct lh_error *err, const char *sql)
{
    int code = sqlite3_extended_errcode(db->handle), status = LH_INTERNAL;

    if (code == SQLITE_CONSTRAINT_UNIQUE || code == SQLITE_CONSTRAINT_PRIMARYKEY)
        status = LH_ALREADY_EXISTS;
    else if ((code & 0xff) == SQLITE_FULL || (code & 0xff) == SQLITE_NOMEM)
        status = LH_RESOURCE_EXHAUSTED;
    else if ((code & 0xff) == SQLITE_CORRUPT || (code & 0xff) == SQLITE_NOTADB)
        status = LH_DATA_LOSS;
    return lh_fail(err, status, "registry: %s (in \"%.60s\")", sqlite3_errmsg(db->handle), sql);
}

static void init_lock(pthread_mutex_t *lock, int kind)
{
    pthread_mutexattr_t attr;

    pthread_mutexattr_init(&attr);
    pthread_mutexattr_settype(&attr, kind);
    pthread_mutex_init(lock, &attr);
    pthread_mutexattr_destroy(&attr);
}

static int configure(struct db *db, const char *path, struct lh_error *err)
{
    sqlite3_busy_timeout(db->handle, BUSY_MS);
    sqlite3_extended_result_codes(db->handle, 1);
    if (sqlite3_exec(db->handle,
                     "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA foreign_keys=ON;"
                     "PRAGMA locking_mode=NORMAL; BEGIN IMMEDIATE; COMMIT;",
                     NULL, NULL, NULL) != SQLITE_OK)
        return fail(db, err, path);
    /* Closing another descriptor of the database file would drop SQLite's locks on it; the WAL
     * carries none. */
    lh_autofree char *wal = lh_format("%s-wal", path);
    if (!wal)
        return lh_fail_errno(err, ENOMEM, "opening %s", path);
    db->wal_fd = open(wal, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (db->wal_fd < 0)
        return lh_fail_errno(err, errno, "opening %s", wal);
    return 0;
}

struct db *db_open(const char *path, struct lh_error *err)
{
    struct db *db = calloc(1, sizeof *db);

    if (!db)
        return lh_fail_errno(err, ENOMEM, "opening %s", path), NULL;
    db->wal_fd = -1;
    init_lock(&db->lock, PTHREAD_MUTEX_RECURSIVE);
    init_lock(&db->flush_lock, PTHREAD_MUTEX_NORMAL);
    if (sqlite3_open_v2(path, &db->handle,
                        SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_FULLMUTEX,
                        NULL) != SQLITE_OK) {
        fail(db, err, path);
        db_close(db);
        return NULL;
    }
    if (configure(db, path, err) < 0) {
        db_close(db);
        return NULL;
    }
    return db;
}

void db_close(struct db *db)
{
    if (!db)
        return;
    for (size_t i = 0; i < STATEMENTS; i++)
        sqlite3_finalize(db->cache[i]);
    sqlite3_close(db->handle);
    if (db->wal_fd >= 0)
        close(db->wal_fd);
    pthread_mutex_destroy(&db->lock);
    pthread_mutex_destroy(&db->flush_lock);
    free(db);
}

/* Prepared statements are kept by the address of their text, which is a literal, in one of a few
 * places; the text is compared, so a reused buffer is only slower.  One in use (a row function that
 * asks again) is out of the cache, and a private one is made.  To parse anew what has lost its
 * place to another took longer than most statements take. */
static sqlite3_stmt **places_of(struct db *db, const char *sql)
{
    return &db->cache[((uintptr_t)sql >> 4) % (STATEMENTS / PLACES) * PLACES];
}

static sqlite3_stmt *take_statement(struct db *db, const char *sql, struct lh_error *err)
{
    sqlite3_stmt **places = places_of(db, sql), *s = NULL;

    for (int i = 0; i < PLACES; i++)
        if (places[i] && !strcmp(sqlite3_sql(places[i]), sql)) {
            s = places[i];
            places[i] = NULL;
            return s;
        }
    if (sqlite3_prepare_v2(db->handle, sql, -1, &s, NULL) != SQLITE_OK)
        return fail(db, err, sql), NULL;
    return s;
}

static void give_statement(struct db *db, const char *sql, sqlite3_stmt *s)
{
    sqlite3_stmt **places = places_of(db, sql), **at = places;

    sqlite3_reset(s);
    sqlite3_clear_bindings(s);
    for (int i = 0; i < PLACES; i++)
        if (!places[i])
            at = &places[i];
    sqlite3_finalize(*at);
    *at = s;
}

static void bind_all(sqlite3_stmt *s, const char *types, va_list *ap)
{
    for (int i = 1; *types; i++, types++) {
        if (*types == 's') {
            sqlite3_bind_text(s, i, va_arg(*ap, const char *), -1, SQLITE_TRANSIENT);
        } else if (*types == 'i') {
            sqlite3_bind_int(s, i, va_arg(*ap, int));
        } else if (*types == 'l') {
            sqlite3_bind_int64(s, i, va_arg(*ap, int64_t));
        } else {
            const void *data = va_arg(*ap, const void *);
            sqlite3_bind_blob64(s, i, data, va_arg(*ap, size_t), SQLITE_TRANSIENT);
        }
    }
}

static int each(struct db *db, struct lh_error *err, db_row_fn *row, void *ctx, const char *sql,
                const char *types, va_list *ap)
{
    LH_LOCKED(&db->lock);
    sqlite3_stmt *s = take_statement(db, sql, err);
    int step, r = 0;

    if (!s)
        return LH_INTERNAL;
    bind_all(s, types, ap);
    while (r == 0 && (step = sqlite3_step(s)) == SQLITE_ROW)
        r = row ? row(ctx, s, err) : 0;
    if (r == 0 && step != SQLITE_DONE)
        r = fail(db, err, sql);
    if (r == 0 && !sqlite3_stmt_readonly(s) && sqlite3_get_autocommit(db->handle))
        __atomic_add_fetch(&db->committed, 1, __ATOMIC_RELEASE);
    give_statement(db, sql, s);
    return r;
}

int db_run(struct db *db, struct lh_error *err, const char *sql, const char *types, ...)
{
    va_list ap;

    va_start(ap, types);
    int r = each(db, err, NULL, NULL, sql, types, &ap);
    va_end(ap);
    return r;
}

int db_each(struct db *db, struct lh_error *err, db_row_fn *row, void *ctx, const char *sql,
            const char *types, ...)
{
    va_list ap;

    va_start(ap, types);
    int r = each(db, err, row, ctx, sql, types, &ap);
    va_end(ap);
    return r;
}

struct first_int {
    int64_t value;
    int rows;
};

static int take_int(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct first_int *f = ctx;

    (void)err;
    if (f->rows++ == 0)
        f->value = sqlite3_column_int64(row, 0);
    return 0;
}

int db_int(struct db *db, struct lh_error *err, int64_t *out, const char *sql, const char *types,
           ...)
{
    struct first_int f = {0};
    va_list ap;

    va_start(ap, types);
    int r = each(db, err, take_int, &f, sql, types, &ap);
    va_end(ap);
    if (r < 0)
        return r;
    if (f.rows == 0)
        return lh_fail(err, LH_NOT_FOUND, "registry: no such row");
    *out = f.value;
    return 0;
}

static int take_string(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    char **out = ctx;

    if (*out)
        return 0;
    *out = strdup(db_text(row, 0));
    return *out ? 0 : lh_fail_errno(err, ENOMEM, "reading the registry");
}

char *db_string(struct db *db, struct lh_error *err, const char *sql, const char *types, ...)
{
    lh_autofree char *s = NULL;
    va_list ap;

    va_start(ap, types);
    int r = each(db, err, take_string, &s, sql, types, &ap);
    va_end(ap);
    if (r == 0 && !s)
        lh_fail(err, LH_NOT_FOUND, "registry: no such row");
    return r < 0 ? NULL : lh_steal(&s);
}

const char *db_text(sqlite3_stmt *row, int column)
{
    const char *s = (const char *)sqlite3_column_text(row, column);

    return s ? s : "";
}

int db_changes(struct db *db)
{
    LH_LOCKED(&db->lock);

    return sqlite3_changes(db->handle);
}

int db_begin(struct db *db, struct lh_error *err)
{
    pthread_mutex_lock(&db->lock);
    int r = db_run(db, err, "BEGIN IMMEDIATE", "");
    if (r < 0)
        pthread_mutex_unlock(&db->lock);
    return r;
}

int db_end(struct db *db, int result, struct lh_error *err)
{
    int r = result;

    if (r == 0)
        r = db_run(db, err, "COMMIT", "");
    if (r == 0)
        __atomic_add_fetch(&db->committed, 1, __ATOMIC_RELEASE);
    if (r < 0)
        db_run(db, NULL, "ROLLBACK", "");
    pthread_mutex_unlock(&db->lock);
    return r;
}

int db_flush(struct db *db, struct lh_error *err)
{
    uint64_t mine = __atomic_load_n(&db->committed, __ATOMIC_ACQUIRE);

    LH_LOCKED(&db->flush_lock);
    if (db->flushed >= mine) /* somebody who waited for the lock with us did it */
        return 0;
    uint64_t covers = __atomic_load_n(&db->committed, __ATOMIC_ACQUIRE);
    if (fdatasync(db->wal_fd) < 0)
        return lh_fail_errno(err, errno, "flushing the registry");
    db->flushed = covers;
    return 0;
}

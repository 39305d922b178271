#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agentenv/daemon/db.h"
#include "proto/file.h"

static char dir[64], path[96];

static void setup(void)
{
    strcpy(dir, "/tmp/agentenvd-db-XXXXXX");
    cr_assert(mkdtemp(dir) != NULL);
    snprintf(path, sizeof path, "%s/registry.db", dir);
}

static void teardown(void)
{
    lh_remove_tree(dir, NULL);
}

TestSuite(db, .init = setup, .fini = teardown);

static struct db *open_table(void)
{
    struct lh_error e = {0};
    struct db *db = db_open(path, &e);

    cr_assert(db != NULL, "%s", e.message);
    cr_assert(eq(int, db_run(db, &e, "CREATE TABLE t(k TEXT PRIMARY KEY, n INT)", ""), 0));
    return db;
}

Test(db, parameters_and_rows)
{
    struct lh_error e = {0};
    lh_auto(db) db = open_table();
    int64_t n = 0;

    cr_assert(eq(int, db_run(db, &e, "INSERT INTO t VALUES(?,?)", "sl", "a", INT64_C(1) << 40), 0));
    cr_assert(
        eq(int, db_run(db, &e, "INSERT INTO t VALUES(?,?)", "si", "a", 2), LH_ALREADY_EXISTS));
    cr_assert(eq(int, db_int(db, &e, &n, "SELECT n FROM t WHERE k=?", "s", "a"), 0));
    cr_assert(eq(i64, n, INT64_C(1) << 40));
    cr_assert(eq(int, db_int(db, &e, &n, "SELECT n FROM t WHERE k=?", "s", "b"), LH_NOT_FOUND));
    lh_autofree char *k = db_string(db, &e, "SELECT k FROM t", "");
    cr_assert(eq(str, k, (char *)"a"));
    cr_assert(lt(int, db_run(db, &e, "SELEC", ""), 0));
}

static int ask_again(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct db *db = ctx;
    int64_t n;

    (void)row;
    return db_int(db, err, &n, "SELECT k, n FROM t", "");
}

Test(db, a_row_function_may_run_the_same_statement)
{
    struct lh_error e = {0};
    lh_auto(db) db = open_table();

    db_run(db, &e, "INSERT INTO t VALUES('a', 1)", "");
    db_run(db, &e, "INSERT INTO t VALUES('b', 1)", "");
    for (int i = 0; i < 3; i++)
        cr_assert(eq(int, db_each(db, &e, ask_again, db, "SELECT k, n FROM t", ""), 0));
}

Test(db, a_failed_transaction_leaves_nothing_and_frees_the_lock)
{
    struct lh_error e = {0};
    lh_auto(db) db = open_table();
    int64_t n = 9;

    cr_assert(eq(int, db_begin(db, &e), 0));
    cr_assert(eq(int, db_run(db, &e, "INSERT INTO t VALUES('a', 1)", ""), 0));
    cr_assert(eq(int, db_end(db, LH_ABORTED, &e), LH_ABORTED));
    cr_assert(eq(int, db_int(db, &e, &n, "SELECT count(*) FROM t", ""), 0));
    cr_assert(eq(i64, n, 0));
}

struct writer {
    struct db *db;
    int base, failures;
};

static void *write_and_flush(void *arg)
{
    struct writer *w = arg;

    for (int i = 0; i < 50; i++) {
        lh_autofree char *key = lh_format("%d", w->base + i);
        w->failures += db_run(w->db, NULL, "INSERT INTO t VALUES(?, 1)", "s", key) < 0;
        w->failures += db_flush(w->db, NULL) < 0;
    }
    return NULL;
}

Test(db, threads_write_flush_and_a_reader_after_reopening_sees_all)
{
    struct lh_error e = {0};
    struct db *db = open_table();
    struct writer w[4];
    pthread_t t[4];
    int64_t n = 0;

    for (int i = 0; i < 4; i++) {
        w[i] = (struct writer){.db = db, .base = i * 1000};
        pthread_create(&t[i], NULL, write_and_flush, &w[i]);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(t[i], NULL);
        cr_assert(eq(int, w[i].failures, 0));
    }
    db_close(db);
    lh_auto(db) again = db_open(path, &e);
    cr_assert(eq(int, db_int(again, &e, &n, "SELECT count(*) FROM t", ""), 0));
    cr_assert(eq(i64, n, 200));
}

#include "agentenv/task/registry.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/parse.h"

enum { HEAP_MAX = 256 << 20 }; /* of one task; its row passed the bounds once */

int task_table_create(struct daemon *d, struct lh_error *err)
{
    return db_run(daemon_db(d), err,
                  "CREATE TABLE IF NOT EXISTS tasks("
                  " name TEXT PRIMARY KEY, revision INTEGER NOT NULL, split INTEGER NOT NULL,"
                  " family TEXT NOT NULL, image TEXT NOT NULL, digest BLOB NOT NULL,"
                  " body BLOB NOT NULL, verified INTEGER NOT NULL, registered_ms INTEGER NOT NULL,"
                  " infra_failures INTEGER NOT NULL, quarantined INTEGER NOT NULL) WITHOUT ROWID",
                  "");
}

/* ---- candidates ---- */

static struct {
    pthread_mutex_t lock;
    struct candidate *first;
} candidates = {.lock = PTHREAD_MUTEX_INITIALIZER};

void candidate_add(struct candidate *c, const Task *task)
{
    char id[LH_ID_SIZE];

    lh_id_new_text(id);
    snprintf(c->key, sizeof c->key, "%s+%s", task->name, id); /* a name has no + */
    c->task = task;
    LH_LOCKED(&candidates.lock);
    c->next = candidates.first;
    candidates.first = c;
}

void candidate_remove(struct candidate *c)
{
    LH_LOCKED(&candidates.lock);
    for (struct candidate **p = &candidates.first; *p; p = &(*p)->next)
        if (*p == c) {
            *p = c->next;
            return;
        }
}

static uint8_t *pack_candidate(const char *key, size_t *len, struct lh_error *err)
{
    LH_LOCKED(&candidates.lock);
    for (const struct candidate *c = candidates.first; c; c = c->next)
        if (!strcmp(c->key, key))
            return lh_pack(&c->task->base, len, err);
    lh_fail(err, LH_NOT_FOUND, "candidate task %s is gone", key);
    return NULL;
}

/* ---- rows ---- */

static Task *parse_task(const void *data, size_t len, struct lh_error *err)
{
    struct lh_parse_limits limits = {.heap = HEAP_MAX};

    return (Task *)lh_parse(&longhaul__task__v1__task__descriptor, data, len, limits, err);
}

static RegisteredTask *registered_new(struct lh_error *err)
{
    static const RegisteredTask empty = LONGHAUL__TASK__V1__REGISTERED_TASK__INIT;
    RegisteredTask *t = malloc(sizeof *t);

    if (!t)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a task"), NULL;
    *t = empty;
    return t;
}

static int copy_digest(RegisteredTask *to, const void *digest, struct lh_error *err)
{
    to->digest.data = malloc(TASK_DIGEST);
    if (!to->digest.data)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a task");
    memcpy(to->digest.data, digest, TASK_DIGEST);
    to->digest.len = TASK_DIGEST;
    return 0;
}

static int read_row(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    RegisteredTask *t = ctx;

    if (sqlite3_column_bytes(row, 1) != TASK_DIGEST)
        return lh_fail(err, LH_DATA_LOSS, "its digest in the registry is damaged");
    t->task = parse_task(sqlite3_column_blob(row, 0), (size_t)sqlite3_column_bytes(row, 0), err);
    if (!t->task)
        return err ? err->code : LH_DATA_LOSS;
    t->registered_ms = sqlite3_column_int64(row, 2);
    t->verified = sqlite3_column_int(row, 3);
    t->infra_failures = (uint32_t)sqlite3_column_int(row, 4);
    t->quarantined = sqlite3_column_int(row, 5);
    return copy_digest(t, sqlite3_column_blob(row, 1), err);
}

static int fetch_row(struct daemon *d, const char *name, RegisteredTask *t, struct lh_error *err)
{
    int r = db_each(daemon_db(d), err, read_row, t,
                    "SELECT body, digest, registered_ms, verified, infra_failures, quarantined"
                    " FROM tasks WHERE name = ?",
                    "s", name);

    if (r == 0 && !t->task)
        return lh_fail(err, LH_NOT_FOUND, "no task %s is registered; see agentenv task ls", name);
    return r < 0 ? lh_wrap(err, "task %s", name) : 0;
}

static int fetch_candidate(const char *key, RegisteredTask *t, struct lh_error *err)
{
    size_t len;
    lh_autofree uint8_t *bytes = pack_candidate(key, &len, err);

    if (!bytes)
        return err ? err->code : LH_NOT_FOUND;
    t->task = parse_task(bytes, len, err);
    return t->task ? 0 : err ? err->code : LH_INTERNAL;
}

RegisteredTask *task_fetch(struct daemon *d, const char *name, struct lh_error *err)
{
    lh_automsg(RegisteredTask) t = registered_new(err);

    if (!t)
        return NULL;
    int r = strchr(name, '+') ? fetch_candidate(name, t, err) : fetch_row(d, name, t, err);
    return r < 0 ? NULL : lh_steal(&t);
}

int task_store(struct daemon *d, const Task *task, const uint8_t digest[TASK_DIGEST], bool verified,
               struct lh_error *err)
{
    size_t len;
    lh_autofree uint8_t *body = lh_pack(&task->base, &len, err);

    if (!body)
        return err ? err->code : LH_RESOURCE_EXHAUSTED;
    return db_run(daemon_db(d), err,
                  "INSERT OR REPLACE INTO tasks(name, revision, split, family, image, digest, body,"
                  " verified, registered_ms, infra_failures, quarantined)"
                  " VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0)",
                  "slissbbil", task->name, (int64_t)task->revision, (int)task->split, task->family,
                  task->environment->image, digest, (size_t)TASK_DIGEST, body, len, (int)verified,
                  lh_unix_ms());
}

bool task_is_registered(struct daemon *d, const Task *task, const uint8_t digest[TASK_DIGEST],
                        bool verified)
{
    int64_t n;

    return db_int(daemon_db(d), NULL, &n,
                  "SELECT count(*) FROM tasks WHERE name = ? AND digest = ? AND verified >= ?",
                  "sbi", task->name, digest, (size_t)TASK_DIGEST, (int)verified) == 0 &&
           n > 0;
}

/* A sandbox of the task still asks it for variables and to be judged. */
static int refuse_if_used(struct db *db, const char *name, struct lh_error *err)
{
    int64_t n;
    int r = db_int(db, err, &n, "SELECT count(*) FROM sandboxes WHERE task = ?", "s", name);

    if (r == 0 && n)
        r = lh_fail(err, LH_FAILED_PRECONDITION,
                    "task %s has sandboxes: %lld; remove them first, see agentenv ls --all", name,
                    (long long)n);
    return r;
}

int task_delete(struct daemon *d, const char *name, struct lh_error *err)
{
    struct db *db = daemon_db(d);
    int r = db_begin(db, err);

    if (r < 0)
        return r;
    r = refuse_if_used(db, name, err);
    if (r == 0)
        r = db_run(db, err, "DELETE FROM tasks WHERE name = ?", "s", name);
    if (r == 0 && db_changes(db) == 0)
        r = lh_fail(err, LH_NOT_FOUND, "no task %s is registered", name);
    return db_end(db, r, err);
}

int task_release(struct daemon *d, const char *name, struct lh_error *err)
{
    int r =
        db_run(daemon_db(d), err,
               "UPDATE tasks SET infra_failures = 0, quarantined = 0 WHERE name = ?", "s", name);

    if (r == 0 && db_changes(daemon_db(d)) == 0)
        r = lh_fail(err, LH_NOT_FOUND, "no task %s is registered", name);
    return r;
}

int task_note_verdict(struct daemon *d, const RegisteredTask *t, bool infra_failed,
                      struct lh_error *err)
{
    const Longhaul__Task__V1__RetryPolicy *retry = t->task->retry;
    int limit = retry && retry->quarantine_after ? (int)retry->quarantine_after : 5;

    if (!infra_failed && !t->infra_failures)
        return 0; /* the usual case writes nothing */
    if (!infra_failed)
        return db_run(daemon_db(d), err, "UPDATE tasks SET infra_failures = 0 WHERE name = ?", "s",
                      t->task->name);
    return db_run(daemon_db(d), err,
                  "UPDATE tasks SET infra_failures = infra_failures + 1,"
                  " quarantined = quarantined OR infra_failures + 1 >= ? WHERE name = ?",
                  "is", limit, t->task->name);
}

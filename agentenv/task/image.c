/* Images come and go: what is on disk and what the rows say of it move in an order that a crash may
 * cut anywhere.  A row stands before its tree is begun and until its tree is gone, so that no tree
 * is ever without a row; a name passes from the old row to the new one in one transaction, after
 * the new tree is on the disk.  Rejected: replacing a tree in place, while sandboxes use it. */
#include "agentenv/task/image.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/sandbox/box.h"
#include "agentenv/task/task.h"
#include "agentenv/task/tree.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/hex.h"
#include "proto/log.h"
#include "proto/parse.h"

LH_LOG_COMPONENT("task");

typedef Longhaul__Sandbox__V1__ImageInfo ImageInfo;

enum image_state { IMPORTING, READY, RETIRED };

static char *tree_path(struct daemon *d, const char *id, struct lh_error *err)
{
    char *path = lh_format("%s/images/%s", daemon_state_dir(d), id);

    if (!path)
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a path");
    return path;
}

/* ---- removal ---- */

/* Ids in a list of their own: rows are read under the database's lock, trees removed without it. */
struct ids {
    char (*id)[LH_ID_SIZE];
    size_t n;
};

static int add_id(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct ids *ids = ctx;
    void *more = reallocarray(ids->id, ids->n + 1, LH_ID_SIZE);

    if (!more)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a list of images");
    ids->id = more;
    snprintf(ids->id[ids->n++], LH_ID_SIZE, "%s", db_text(row, 0));
    return 0;
}

/* The tree, then the row: whatever happens between, the row still leads to what is left. */
static int remove_image(struct daemon *d, const char *id, struct lh_error *err)
{
    lh_autofree char *path = tree_path(d, id, err);
    int r = path ? lh_remove_tree(path, err) : LH_RESOURCE_EXHAUSTED;

    return r < 0 ? r : db_run(daemon_db(d), err, "DELETE FROM images WHERE id = ?", "s", id);
}

static int remove_all(struct daemon *d, const char *sql, struct lh_error *err)
{
    struct ids ids = {0};
    int r = db_each(daemon_db(d), err, add_id, &ids, sql, "");

    for (size_t i = 0; r == 0 && i < ids.n; i++)
        r = remove_image(d, ids.id[i], err);
    free(ids.id);
    return r;
}

static int collect(struct daemon *d, struct lh_error *err)
{
    return remove_all(d,
                      "SELECT id FROM images WHERE state = 2"
                      " AND id NOT IN (SELECT image_id FROM sandboxes)"
                      " AND id NOT IN (SELECT image_id FROM snapshots)",
                      err);
}

static void collect_or_warn(struct daemon *d)
{
    struct lh_error err = {0};

    if (collect(d, &err) < 0)
        lh_warn("a retired image stays for now", "error=%s", err.message);
}

int image_start(struct daemon *d, struct lh_error *err)
{
    lh_autofree char *dir = tree_path(d, "", err);
    int r = dir ? lh_make_dirs(dir, 0755, err) : LH_RESOURCE_EXHAUSTED;

    if (r == 0)
        r = db_run(daemon_db(d), err,
                   "CREATE TABLE IF NOT EXISTS images("
                   " id TEXT PRIMARY KEY, name TEXT NOT NULL, state INTEGER NOT NULL,"
                   " digest TEXT NOT NULL, bytes INTEGER NOT NULL, created_ms INTEGER NOT NULL)"
                   " WITHOUT ROWID",
                   "");
    if (r == 0)
        r = db_run(daemon_db(d), err,
                   "CREATE TABLE IF NOT EXISTS image_configs(image TEXT PRIMARY KEY"
                   " REFERENCES images(id) ON DELETE CASCADE, info BLOB NOT NULL) WITHOUT ROWID",
                   "");
    if (r == 0)
        r = remove_all(d, "SELECT id FROM images WHERE state = 0", err);
    return r == 0 ? collect(d, err) : r;
}

/* ---- import ---- */

static int sync_tree(const char *path, struct lh_error *err)
{
    lh_autoclose int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    return fd < 0 || syncfs(fd) < 0 ? lh_fail_errno(err, errno, "syncing %s", path) : 0;
}

/* What had the name so far keeps its tree as long as somebody uses it. */
static int take_name(struct daemon *d, const char *id, const char *name, const char *digest,
                     uint64_t bytes, struct lh_error *err)
{
    struct db *db = daemon_db(d);
    int r = db_begin(db, err);

    if (r < 0)
        return r;
    r = db_run(db, err, "UPDATE images SET state = 2 WHERE name = ? AND state = 1", "s", name);
    if (r == 0)
        r = db_run(db, err, "UPDATE images SET state = 1, digest = ?, bytes = ? WHERE id = ?",
                   "sls", digest, (int64_t)bytes, id);
    r = db_end(db, r, err);
    return r == 0 ? db_flush(db, err) : r;
}

/* The id of the image that has the name and is the same tree; NULL: there is none. */
static char *find_same(struct daemon *d, const char *name, const char *digest)
{
    return db_string(daemon_db(d), NULL,
                     "SELECT id FROM images WHERE name = ? AND digest = ? AND state = 1", "ss",
                     name, digest);
}

/* Beside the row of the image; goes with it. */
static int keep_config(struct daemon *d, const char *id, const struct image_config *c,
                       struct lh_error *err)
{
    ImageInfo info = LONGHAUL__SANDBOX__V1__IMAGE_INFO__INIT;
    size_t len;

    if (!c)
        return 0;
    info.n_env = c->n_env;
    info.env = c->env;
    info.workdir = (char *)c->workdir;
    info.user = (char *)c->user;
    info.warm_up = (char *)c->warm_up;
    lh_autofree uint8_t *bytes = lh_pack(&info.base, &len, err);
    return bytes ? db_run(daemon_db(d), err, "INSERT OR REPLACE INTO image_configs VALUES(?, ?)",
                          "sb", id, bytes, len)
                 : LH_RESOURCE_EXHAUSTED;
}

/* The one that another warm-up made, whose last line in `made_with` that is (daemon/zygote.c). */
static int forget_zygote(struct daemon *d, const char *id, const struct image_config *c,
                         struct lh_error *err)
{
    return c ? db_run(daemon_db(d), err,
                      "DELETE FROM zygotes WHERE image=?1"
                      " AND substr(made_with, -1 - length(?2)) <> char(10) || ?2",
                      "ss", id, c->warm_up)
             : 0;
}

static int import_tree(struct daemon *d, const char *id, const struct image_source *s,
                       struct lh_error *err)
{
    lh_autofree char *path = tree_path(d, id, err);
    const char *name = s->name;
    uint8_t digest[TREE_DIGEST];
    char text[2 * TREE_DIGEST + 1];
    uint64_t bytes = 0;

    if (!path)
        return LH_RESOURCE_EXHAUSTED;
    if (mkdir(path, 0755) < 0)
        return lh_fail_errno(err, errno, "making %s", path);
    int r =
        tree_import(&(struct tree_source){s->path, s->oci, s->uid_base}, path, digest, &bytes, err);
    if (r < 0)
        return r;
    lh_hex_print(digest, TREE_DIGEST, text);
    if (s->digest) /* which was read without what every tree is given */
        snprintf(text, sizeof text, "%s", s->digest);
    lh_autofree char *same = find_same(d, name, text);
    if (same) { /* its tree stays; how it runs may have changed */
        r = forget_zygote(d, same, s->config, err);
        if (r == 0)
            r = keep_config(d, same, s->config, err);
        return r < 0 ? r : remove_image(d, id, err);
    }
    if ((r = keep_config(d, id, s->config, err)) < 0)
        return r;
    r = tree_add_skeleton(path, err);
    if (r == 0)
        r = box_own_tree(path, err);
    if (r == 0)
        r = sync_tree(path, err);
    return r == 0 ? take_name(d, id, name, text, bytes, err) : r;
}

int image_add(struct daemon *d, const struct image_source *s, struct lh_error *err)
{
    char id[LH_ID_SIZE];
    struct lh_error ignored = {0};

    lh_id_new_text(id);
    int r = db_run(daemon_db(d), err,
                   "INSERT INTO images(id, name, state, digest, bytes, created_ms)"
                   " VALUES(?, ?, 0, '', 0, ?)",
                   "ssl", id, s->name, lh_unix_ms());
    if (r < 0)
        return r;
    r = import_tree(d, id, s, err);
    if (r < 0 && remove_image(d, id, &ignored) < 0)
        lh_warn("what an import left goes at the next start", "image=%s error=%s", id,
                ignored.message);
    return r < 0 ? lh_wrap(err, "image %s", s->name) : 0;
}

static int import_image(struct daemon *d, const Longhaul__Sandbox__V1__ImportImageRequest *req,
                        struct lh_error *err)
{
    struct oci *opened = NULL;
    int r = oci_open(req->path, &opened, err);
    lh_auto(oci) oci = opened;
    struct image_config config = {.workdir = "", .user = "", .warm_up = req->warm_up};
    struct image_source s = {.name = req->name, .path = req->path, .oci = oci, .config = &config};

    if (r < 0)
        return lh_wrap(err, "image %s", req->name);
    if (oci) {
        const struct oci_config *c = oci_config(oci);
        config = (struct image_config){c->env, c->n_env, c->workdir, c->user, req->warm_up};
    }
    return image_add(d, &s, err);
}

static bool holds_store(struct daemon *d, const char *path)
{
    lh_autofree char *real = realpath(path, NULL);
    const char *state = daemon_state_dir(d);
    size_t n = real ? strlen(real) : 0;

    return real && !strncmp(state, real, n) && (n == 1 || state[n] == '/' || !state[n]);
}

int image_import_rpc(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                     ProtobufCMessage **reply, struct lh_error *err)
{
    const Longhaul__Sandbox__V1__ImportImageRequest *req = (const void *)request;

    if (!task_image_name_valid(req->name))
        return lh_fail(err, LH_INVALID_ARGUMENT, "'%.128s' is not an image name, [a-z0-9._/-]",
                       req->name);
    if (*req->path != '/')
        return lh_fail(err, LH_INVALID_ARGUMENT, "the path '%.200s' is not absolute", req->path);
    if (holds_store(ctx, req->path))
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s holds the store that it would be copied into",
                       req->path);
    int r = import_image(ctx, req, err);
    if (r < 0)
        return r;
    zygotes_sweep(ctx);
    collect_or_warn(ctx);
    if (*req->warm_up && (r = daemon_warm_up(ctx, req->name, err)) < 0)
        return lh_wrap(err, "image %s is there, but its warm-up fails", req->name);
    ImageInfo *info = image_show(ctx, req->name, err);
    *reply = info ? &info->base : NULL;
    return info ? 0 : err->code;
}

/* ---- remove ---- */

/* Inside the transaction that retires it: nobody starts to use it in between. */
static int refuse_if_used(struct db *db, const char *name, struct lh_error *err)
{
    static const struct {
        const char *who, *sql;
    } users[] = {
        {"task", "SELECT count(*) FROM tasks WHERE image = ?"},
        {"sandbox", "SELECT count(*) FROM sandboxes WHERE image_id ="
                    " (SELECT id FROM images WHERE name = ? AND state = 1)"},
        {"snapshot", "SELECT count(*) FROM snapshots WHERE image_id ="
                     " (SELECT id FROM images WHERE name = ? AND state = 1)"
                     " AND id NOT IN (SELECT snapshot FROM zygotes)"},
    };

    for (size_t i = 0; i < LH_ARRAY_SIZE(users); i++) {
        int64_t n;
        int r = db_int(db, err, &n, users[i].sql, "s", name);

        if (r < 0)
            return r;
        if (n)
            return lh_fail(err, LH_FAILED_PRECONDITION,
                           "image %s is used, %s: %lld; remove what uses it first", name,
                           users[i].who, (long long)n);
    }
    return 0;
}

int image_remove_rpc(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                     ProtobufCMessage **reply, struct lh_error *err)
{
    static const Longhaul__Sandbox__V1__Empty empty = LONGHAUL__SANDBOX__V1__EMPTY__INIT;
    const char *name = ((const Longhaul__Sandbox__V1__ImageName *)request)->name;
    struct db *db = daemon_db(ctx);
    int r = db_begin(db, err);

    if (r < 0)
        return r;
    r = refuse_if_used(db, name, err);
    if (r == 0)
        r = db_run(db, err, "UPDATE images SET state = 2 WHERE name = ? AND state = 1", "s", name);
    if (r == 0 && db_changes(db) == 0)
        r = lh_fail(err, LH_NOT_FOUND, "no image %s; see agentenv image ls", name);
    r = db_end(db, r, err);
    if (r == 0)
        zygotes_sweep(ctx);
    if (r == 0)
        r = collect(ctx, err);
    Longhaul__Sandbox__V1__Empty *done = r == 0 ? malloc(sizeof *done) : NULL;
    if (r == 0 && !done)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a reply");
    if (done) {
        *done = empty;
        *reply = &done->base;
    }
    return r;
}

/* ---- audit ---- */

struct auditor {
    struct daemon *d;
    void (*problem)(void *ctx, const char *text);
    void *ctx;
};

static int audit_row(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    const struct auditor *a = ctx;
    lh_autofree char *path = tree_path(a->d, db_text(row, 0), err);
    lh_autofree char *text = NULL;

    if (path && access(path, F_OK) == 0)
        return 0;
    text = lh_format("image %s (%s) has no tree", db_text(row, 1), db_text(row, 0));
    if (text)
        a->problem(a->ctx, text);
    return 0;
}

static int audit_tree(const struct auditor *a, const char *id, struct lh_error *err)
{
    int64_t n;
    int r = db_int(daemon_db(a->d), err, &n, "SELECT count(*) FROM images WHERE id = ?", "s", id);
    lh_autofree char *text = NULL;

    if (r < 0 || n)
        return r;
    text = lh_format("images/%s belongs to no image", id);
    if (text)
        a->problem(a->ctx, text);
    return 0;
}

int image_audit(struct daemon *d, void (*problem)(void *ctx, const char *text), void *ctx,
                struct lh_error *err)
{
    struct auditor a = {d, problem, ctx};
    lh_autofree char *path = tree_path(d, "", err);
    lh_autoclosedir DIR *dir = path ? opendir(path) : NULL;
    struct dirent *e;

    if (!dir)
        return lh_fail_errno(err, errno, "reading %s", path ? path : "images");
    int r = db_each(daemon_db(d), err, audit_row, &a, "SELECT id, name FROM images WHERE state > 0",
                    "");
    while (r == 0 && (e = readdir(dir)))
        if (*e->d_name != '.')
            r = audit_tree(&a, e->d_name, err);
    return r;
}

/* What nobody needs any more, and whether everything that exists is accounted for.  gc and audit
 * agree: right after a gc without grace the audit has nothing to say, and the audit never names
 * what a later gc would take. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/criu/share.h"
#include "agentenv/snapshot/contents.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/file.h"

static const int64_t KEYS_KEPT_MS = INT64_C(24) * 3600 * 1000;

static int drop_expired(struct daemon *d, int64_t before_ms, struct gc_result *done,
                        struct lh_error *err)
{
    int r = 0;

    while (r == 0) {
        struct lh_error none = {0};
        lh_autofree char *id =
            db_string(d->db, &none,
                      "SELECT id FROM snapshots WHERE ready=1 AND unowned_ms<=?"
                      " AND id NOT IN (SELECT snapshot FROM snapshot_owners) LIMIT 1",
                      "l", before_ms);
        if (!id)
            return none.code == LH_NOT_FOUND ? 0 : lh_fail(err, none.code, "%s", none.message);
        /* Asked again inside the deletion's statements: it may have been retained since. */
        r = db_begin(d->db, err);
        if (r < 0)
            return r;
        r = db_run(d->db, err,
                   "DELETE FROM snapshots WHERE id=?"
                   " AND id NOT IN (SELECT snapshot FROM snapshot_owners)",
                   "s", id);
        int dropped = r == 0 ? db_changes(d->db) : 0;
        if (dropped)
            r = layers_condemn_of(d, id, err);
        if (r == 0 && dropped)
            r = db_run(d->db, err, "DELETE FROM snapshot_layers WHERE snapshot=?", "s", id);
        r = db_end(d->db, r, err);
        if (r == 0 && dropped)
            r = images_remove(d, id, err);
        done->snapshots += (uint32_t)dropped;
    }
    return r;
}

static int drop_old_keys(struct daemon *d, struct lh_error *err)
{
    return db_run(d->db, err,
                  "DELETE FROM keys WHERE created_ms<? AND object NOT IN (SELECT id FROM sandboxes)"
                  " AND object NOT IN (SELECT id FROM snapshots)",
                  "l", lh_unix_ms() - KEYS_KEPT_MS);
}

int snapshot_gc(struct daemon *d, int64_t grace_ms, struct gc_result *done, struct lh_error *err)
{
    zygotes_sweep(d);
    int r = drop_expired(d, lh_unix_ms() - grace_ms, done, err);

    if (r == 0)
        r = layers_sweep(d, done);
    return r == 0 ? drop_old_keys(d, err) : r;
}

/* ---- audit ---- */

struct auditing {
    V1(AuditReply) * reply;
    int status;
};

static void problem(void *ctx, const char *text)
{
    struct auditing *a = ctx;
    char **more = realloc(a->reply->problems, (a->reply->n_problems + 1) * sizeof *more);
    char *copy = strdup(text);

    if (more)
        a->reply->problems = more;
    if (!more || !copy) {
        free(copy);
        a->status = LH_RESOURCE_EXHAUSTED;
        return;
    }
    a->reply->problems[a->reply->n_problems++] = copy;
}

__attribute__((format(printf, 2, 3))) static void problemf(struct auditing *a, const char *fmt, ...)
{
    char text[512];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    problem(a, text);
}

/* Things without a record. */
static int audit_dir(struct daemon *d, struct auditing *a, const char *kind, const char *query,
                     struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/%s", d->state_dir, kind);
    lh_autoclosedir DIR *dir = path ? opendir(path) : NULL;
    int64_t known;

    if (!dir)
        return lh_fail_errno(err, errno, "listing %s/%s", d->state_dir, kind);
    for (struct dirent *e; (e = readdir(dir));) {
        if (e->d_name[0] == '.')
            continue;
        int r = db_int(d->db, err, &known, query, "s", e->d_name);
        if (r < 0)
            return r;
        if (!known && faccessat(dirfd(dir), e->d_name, F_OK, AT_SYMLINK_NOFOLLOW) == 0) /* still */
            problemf(a, "%s/%s has no record", kind, e->d_name);
    }
    return 0;
}

struct missing {
    struct daemon *d;
    struct auditing *a;
};

/* Records without a thing. */
static int check_layer(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct missing *m = ctx;
    lh_autofree char *path = layer_dir(m->d, db_text(row, 0));
    struct stat st;

    if (!path)
        return lh_fail_errno(err, ENOMEM, "audit");
    m->a->reply->layers++;
    m->a->reply->bytes += (uint64_t)sqlite3_column_int64(row, 1);
    if (stat(path, &st) < 0 || !S_ISDIR(st.st_mode))
        problemf(m->a, "layer %s is recorded, but not there", db_text(row, 0));
    return 0;
}

static int report_row(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct missing *m = ctx;

    (void)err;
    problemf(m->a, "%s", db_text(row, 0));
    return 0;
}

/* Ids in a list of their own: images are read without the database's lock. */
struct ids {
    char (*id)[LH_ID_SIZE];
    size_t n;
};

static int add_id(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct ids *ids = ctx;
    void *more = reallocarray(ids->id, ids->n + 1, LH_ID_SIZE);

    if (!more)
        return lh_fail_errno(err, ENOMEM, "audit");
    ids->id = more;
    snprintf(ids->id[ids->n++], LH_ID_SIZE, "%s", db_text(row, 0));
    return 0;
}

/* Every page that they tell of is there, in them or in what they share. */
static void check_images(struct daemon *d, struct auditing *a, const char *id)
{
    struct lh_error why = {0};
    int dir = images_open(d, id, &why);
    bool whole = dir >= 0 && criu_check(dir, &why) == 0;

    images_close(d, dir);
    if (!whole && snapshot_is_ready(d, id)) /* still */
        problemf(a, "the processes of snapshot %s are recorded, but not there: %s", id,
                 why.message);
}

static int audit_images(struct daemon *d, struct auditing *a, struct lh_error *err)
{
    struct ids ids = {0};
    int r = db_each(d->db, err, add_id, &ids,
                    "SELECT id FROM snapshots WHERE ready=1 AND engine='criu'", "");

    for (size_t i = 0; r == 0 && i < ids.n; i++)
        check_images(d, a, ids.id[i]);
    free(ids.id);
    return r < 0 ? r
                 : audit_dir(d, a, "sharing",
                             "SELECT count(*) FROM sharing WHERE snapshot=? AND done=0", err);
}

static int audit_checkpoints(struct daemon *d, struct auditing *a, struct lh_error *err)
{
    struct missing m = {d, a};

    return db_each(d->db, err, report_row, &m,
                   "SELECT 'snapshot ' || snapshot || ' is the ' || owner || ', which is gone'"
                   " FROM snapshot_owners WHERE owner LIKE 'checkpoint/%'"
                   " AND substr(owner, 12) NOT IN (SELECT id FROM sandboxes)",
                   "");
}

static int audit_layers(struct daemon *d, struct auditing *a, struct lh_error *err)
{
    struct missing m = {d, a};
    int r = db_each(d->db, err, check_layer, &m, "SELECT id, bytes FROM layers WHERE sealed=1", "");

    if (r == 0)
        r = db_each(
            d->db, err, report_row, &m,
            "SELECT 'snapshot ' || snapshot || ' names layer ' || layer || ', which is gone'"
            " FROM snapshot_layers WHERE layer NOT IN (SELECT id FROM layers)",
            "");
    if (r == 0)
        r = db_each(d->db, err, report_row, &m,
                    "SELECT 'layer ' || id || ' is named by nothing' FROM layers WHERE sealed=1"
                    " AND id NOT IN (SELECT layer FROM sandbox_layers)"
                    " AND id NOT IN (SELECT layer FROM snapshot_layers)",
                    "");
    if (r == 0)
        r = db_each(d->db, err, report_row, &m,
                    "SELECT 'sandbox ' || sandbox || ' names layer ' || layer || ', which is gone'"
                    " FROM sandbox_layers WHERE layer NOT IN (SELECT id FROM layers)",
                    "");
    return r;
}

static int audit_sandboxes(struct daemon *d, struct auditing *a, struct lh_error *err)
{
    struct sandbox **list;
    struct stat st;
    size_t n = sandbox_list(d, "", true, &list, err);
    int r = 0;

    for (size_t i = 0; i < n; i++) {
        lh_autofree char *dir = sandbox_dir(d, list[i]->id);
        if (!dir)
            r = lh_fail_errno(err, ENOMEM, "audit");
        else if (!list[i]->busy && !list[i]->gone && !list[i]->transient && stat(dir, &st) < 0)
            problemf(a, "sandbox %s has no directory", list[i]->id);
        sandbox_unref(d, list[i]);
    }
    free(list);
    a->reply->sandboxes = (uint32_t)n;
    return r;
}

int daemon_audit(struct daemon *d, bool content, V1(AuditReply) * reply, struct lh_error *err)
{
    struct auditing a = {.reply = reply};
    int64_t snapshots = 0;
    int r = audit_sandboxes(d, &a, err);

    if (r == 0)
        r = audit_dir(d, &a, "boxes", "SELECT count(*) FROM sandboxes WHERE id=?", err);
    if (r == 0)
        r = audit_dir(d, &a, "layers", "SELECT count(*) FROM layers WHERE id=?", err);
    if (r == 0)
        r = audit_dir(d, &a, "checkpoints",
                      "SELECT count(*) FROM snapshots WHERE id=? AND engine='criu'", err);
    if (r == 0)
        r = audit_images(d, &a, err);
    if (r == 0)
        r = audit_checkpoints(d, &a, err);
    if (r == 0)
        r = audit_layers(d, &a, err);
    if (r == 0 && content)
        r = contents_audit(d, problem, &a, err);
    if (r == 0)
        r = db_int(d->db, err, &snapshots, "SELECT count(*) FROM snapshots WHERE ready=1", "");
    reply->snapshots = (uint32_t)snapshots;
    if (r == 0 && d->hooks->audit)
        r = d->hooks->audit(d, problem, &a, err);
    return r < 0 ? r : a.status < 0 ? lh_fail(err, a.status, "no memory for the audit") : 0;
}

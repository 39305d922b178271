/* Who retains a snapshot.  A snapshot without owners may be taken by gc once its grace period is
 * over, counted from `unowned_ms`: its creation or the last release. */
#include <errno.h>
#include <string.h>

#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/parse.h"

enum { OWNER_MAX = 256 };

int snapshot_check_owner(const char *owner, struct lh_error *err)
{
    size_t len = strlen(owner);

    if (len < 1 || len > OWNER_MAX)
        return lh_fail(err, LH_INVALID_ARGUMENT, "owner must have 1 to %d characters, not %zu",
                       OWNER_MAX, len);
    return 0;
}

int snapshot_retain(struct daemon *d, const char *id, const char *owner, struct lh_error *err)
{
    int64_t there = 0;
    int r = snapshot_check_owner(owner, err);

    if (r < 0 || (r = db_begin(d->db, err)) < 0)
        return r;
    r = db_int(d->db, err, &there, "SELECT count(*) FROM snapshots WHERE id=? AND ready=1", "s",
               id);
    if (r == 0 && !there)
        r = lh_fail(err, LH_NOT_FOUND, "no snapshot \"%s\"", id);
    if (r == 0)
        r = db_run(d->db, err, "INSERT OR IGNORE INTO snapshot_owners VALUES(?,?)", "ss", id,
                   owner);
    r = db_end(d->db, r, err);
    return r < 0 ? r : db_flush(d->db, err);
}

/* Inside a transaction; *changed is 1 when it was retained by this owner. */
static int release(struct daemon *d, const char *id, const char *owner, int *changed,
                   struct lh_error *err)
{
    int r = db_run(d->db, err, "DELETE FROM snapshot_owners WHERE snapshot=? AND owner=?", "ss", id,
                   owner);

    *changed = r == 0 ? db_changes(d->db) : 0;
    if (*changed)
        r = db_run(d->db, err, "UPDATE snapshots SET unowned_ms=? WHERE id=?", "ls", lh_unix_ms(),
                   id);
    return r;
}

int snapshot_release(struct daemon *d, const char *id, const char *owner, struct lh_error *err)
{
    int64_t there = 0;
    int changed, r = snapshot_check_owner(owner, err);

    if (r < 0 || (r = db_begin(d->db, err)) < 0)
        return r;
    r = db_int(d->db, err, &there, "SELECT count(*) FROM snapshots WHERE id=?", "s", id);
    if (r == 0 && !there)
        r = lh_fail(err, LH_NOT_FOUND, "no snapshot \"%s\"", id);
    if (r == 0)
        r = release(d, id, owner, &changed, err); /* not retained by it: fine, as if done before */
    r = db_end(d->db, r, err);
    /* Not flushed: a release that the host forgets only keeps a snapshot longer, until the next
     * reconcile. */
    return r;
}

static bool listed(const V1(ReconcileRequest) * req, const char *snapshot, const char *owner)
{
    for (size_t i = 0; i < req->n_keep; i++)
        if (!strcmp(req->keep[i]->snapshot, snapshot) && !strcmp(req->keep[i]->owner, owner))
            return true;
    return false;
}

struct owner_row {
    char snapshot[LH_ID_SIZE], owner[OWNER_MAX + 1];
};
struct owner_list {
    struct owner_row *rows;
    size_t n;
};

static int collect_owner(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct owner_list *l = ctx;
    struct owner_row *more = realloc(l->rows, (l->n + 1) * sizeof *more);

    if (!more)
        return lh_fail_errno(err, ENOMEM, "listing owners");
    l->rows = more;
    snprintf(l->rows[l->n].snapshot, LH_ID_SIZE, "%s", db_text(row, 0));
    snprintf(l->rows[l->n++].owner, OWNER_MAX + 1, "%s", db_text(row, 1));
    return 0;
}

static int add_missing(V1(ReconcileReply) * reply, const V1(SnapshotOwner) * o,
                       struct lh_error *err)
{
    lh_automsg(V1(SnapshotOwner)) copy = calloc(1, sizeof *copy);
    V1(SnapshotOwner) **more = realloc(reply->missing, (reply->n_missing + 1) * sizeof *more);

    if (more)
        reply->missing = more;
    if (!copy || !more)
        return lh_fail_errno(err, ENOMEM, "reconciling");
    longhaul__sandbox__v1__snapshot_owner__init(copy);
    copy->snapshot = strdup(o->snapshot);
    copy->owner = strdup(o->owner);
    if (!copy->snapshot || !copy->owner)
        return lh_fail_errno(err, ENOMEM, "reconciling");
    reply->missing[reply->n_missing++] = lh_steal(&copy);
    return 0;
}

static int check_kept(struct daemon *d, const V1(ReconcileRequest) * req,
                      V1(ReconcileReply) * reply, struct lh_error *err)
{
    for (size_t i = 0; i < req->n_keep; i++) {
        int r = snapshot_retain(d, req->keep[i]->snapshot, req->keep[i]->owner, err);
        if (r == LH_NOT_FOUND)
            r = add_missing(reply, req->keep[i], err);
        if (r < 0)
            return r;
    }
    return 0;
}

int snapshot_reconcile(struct daemon *d, const V1(ReconcileRequest) * req,
                       V1(ReconcileReply) * reply, struct lh_error *err)
{
    struct owner_list l = {0};
    size_t prefix = strlen(req->owner_prefix);
    int r = prefix ? 0 : lh_fail(err, LH_INVALID_ARGUMENT, "owner_prefix must not be empty");

    for (size_t i = 0; r == 0 && i < req->n_keep; i++)
        if (strncmp(req->keep[i]->owner, req->owner_prefix, prefix))
            r = lh_fail(err, LH_INVALID_ARGUMENT, "owner \"%s\" does not begin with \"%s\"",
                        req->keep[i]->owner, req->owner_prefix);
    if (r == 0)
        r = check_kept(d, req, reply, err);
    if (r < 0 || (r = db_begin(d->db, err)) < 0)
        return r;
    r = db_each(d->db, err, collect_owner, &l,
                "SELECT snapshot, owner FROM snapshot_owners WHERE substr(owner, 1, ?)=?", "is",
                (int)prefix, req->owner_prefix);
    for (size_t i = 0; r == 0 && i < l.n; i++) {
        int changed = 0;
        if (!listed(req, l.rows[i].snapshot, l.rows[i].owner))
            r = release(d, l.rows[i].snapshot, l.rows[i].owner, &changed, err);
        reply->released += (uint32_t)changed;
    }
    free(l.rows);
    return db_end(d->db, r, err);
}

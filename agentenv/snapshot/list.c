/* Snapshots as messages. */
#include <errno.h>
#include <string.h>

#include "agentenv/snapshot/snapshot.h"
#include "proto/parse.h"

#define COLUMNS "id, parent, sandbox, image, task, engine, created_ms, bytes"

struct strings {
    char ***list;
    size_t *n;
};

static int append_string(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct strings *s = ctx;
    char **more = realloc(*s->list, (*s->n + 1) * sizeof *more);
    char *copy = strdup(db_text(row, 0));

    if (more)
        *s->list = more;
    if (!more || !copy) {
        free(copy);
        return lh_fail_errno(err, ENOMEM, "reading snapshots");
    }
    (*s->list)[(*s->n)++] = copy;
    return 0;
}

static int read_parts(struct daemon *d, V1(Snapshot) * m, struct lh_error *err)
{
    struct strings layers = {&m->layers, &m->n_layers}, owners = {&m->owners, &m->n_owners};
    struct strings contents = {&m->contents, &m->n_contents};
    int r = db_each(d->db, err, append_string, &layers,
                    "SELECT layer FROM snapshot_layers WHERE snapshot=? ORDER BY pos", "s", m->id);

    if (r == 0)
        r = db_each(d->db, err, append_string, &contents,
                    "SELECT c.content FROM snapshot_layers s LEFT JOIN layer_contents c"
                    " ON c.layer=s.layer WHERE s.snapshot=? ORDER BY s.pos",
                    "s", m->id);
    return r < 0 ? r
                 : db_each(d->db, err, append_string, &owners,
                           "SELECT owner FROM snapshot_owners WHERE snapshot=?", "s", m->id);
}

struct reading {
    struct daemon *d;
    V1(ListSnapshotsReply) * out;
};

static int read_snapshot(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct reading *r = ctx;
    lh_automsg(V1(Snapshot)) m = calloc(1, sizeof *m);
    V1(Snapshot) **more = realloc(r->out->snapshots, (r->out->n_snapshots + 1) * sizeof *more);

    if (more)
        r->out->snapshots = more;
    if (!m || !more)
        return lh_fail_errno(err, ENOMEM, "reading snapshots");
    longhaul__sandbox__v1__snapshot__init(m);
    char **strings[] = {&m->id, &m->parent, &m->sandbox, &m->image, &m->task, &m->engine};
    for (int i = 0; i < (int)LH_ARRAY_SIZE(strings); i++)
        if (!(*strings[i] = strdup(db_text(row, i))))
            return lh_fail_errno(err, ENOMEM, "reading snapshots");
    m->created_ms = sqlite3_column_int64(row, 6);
    m->bytes = (uint64_t)sqlite3_column_int64(row, 7);
    int status = read_parts(r->d, m, err);
    if (status == 0)
        r->out->snapshots[r->out->n_snapshots++] = lh_steal(&m);
    return status;
}

static V1(ListSnapshotsReply) * new_list(struct lh_error *err)
{
    V1(ListSnapshotsReply) *out = calloc(1, sizeof *out);

    if (out)
        longhaul__sandbox__v1__list_snapshots_reply__init(out);
    else
        lh_fail_errno(err, ENOMEM, "reading snapshots");
    return out;
}

V1(ListSnapshotsReply) *
    snapshot_list(struct daemon *d, const char *owner_prefix, struct lh_error *err)
{
    lh_automsg(V1(ListSnapshotsReply)) out = new_list(err);
    struct reading reading = {d, out};

    if (!out)
        return NULL;
    int r = *owner_prefix
                ? db_each(d->db, err, read_snapshot, &reading,
                          "SELECT " COLUMNS " FROM snapshots WHERE ready=1 AND id IN (SELECT"
                          " snapshot FROM snapshot_owners WHERE substr(owner, 1, ?)=?) ORDER BY id",
                          "is", (int)strlen(owner_prefix), owner_prefix)
                : db_each(d->db, err, read_snapshot, &reading,
                          "SELECT " COLUMNS " FROM snapshots WHERE ready=1 ORDER BY id", "");
    return r < 0 ? NULL : lh_steal(&out);
}

V1(Snapshot) * snapshot_show(struct daemon *d, const char *id, struct lh_error *err)
{
    lh_automsg(V1(ListSnapshotsReply)) out = new_list(err);
    struct reading reading = {d, out};

    if (!out || db_each(d->db, err, read_snapshot, &reading,
                        "SELECT " COLUMNS " FROM snapshots WHERE ready=1 AND id=?", "s", id) < 0)
        return NULL;
    if (out->n_snapshots != 1)
        return lh_fail(err, LH_NOT_FOUND, "no snapshot \"%s\"", id), NULL;
    out->n_snapshots = 0;
    return out->snapshots[0];
}

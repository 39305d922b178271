/* Layers on disk: flushing them, removing those that nobody names, and what a crash left.
 *
 * Flushing.  Up to PER_FILE files each file and directory is fsynced, which waits for their bytes
 * alone; a larger layer gets one syncfs, which waits for whatever else is dirty on the file system
 * but not once per file. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/snapshot/snapshot.h"
#include "proto/file.h"
#include "proto/log.h"

LH_LOG_COMPONENT("agentenvd");

enum { PER_FILE = 48 };

typedef int entry_fn(void *ctx, const FTSENT *e, struct lh_error *err);

static int walk(const char *path, entry_fn *fn, void *ctx, struct lh_error *err)
{
    char *const roots[] = {(char *)path, NULL};
    FTS *fts = fts_open(roots, FTS_PHYSICAL | FTS_NOCHDIR | FTS_XDEV, NULL);
    int r = 0;

    if (!fts)
        return lh_fail_errno(err, errno, "walking %s", path);
    for (FTSENT *e; r == 0 && (e = fts_read(fts));)
        r = e->fts_info == FTS_ERR || e->fts_info == FTS_DNR
                ? lh_fail_errno(err, e->fts_errno, "walking %s", e->fts_path)
                : fn(ctx, e, err);
    fts_close(fts);
    return r;
}

struct totals {
    uint64_t bytes;
    unsigned entries;
};

static int count(void *ctx, const FTSENT *e, struct lh_error *err)
{
    struct totals *t = ctx;

    (void)err;
    if (e->fts_info == FTS_F)
        t->bytes += (uint64_t)e->fts_statp->st_blocks * 512;
    t->entries += e->fts_info == FTS_F || e->fts_info == FTS_DP;
    return 0;
}

static int sync_entry(void *ctx, const FTSENT *e, struct lh_error *err)
{
    (void)ctx;
    if (e->fts_info != FTS_F && e->fts_info != FTS_DP)
        return 0; /* links and whiteouts are in their directory */
    lh_autoclose int fd = open(e->fts_path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fsync(fd) < 0)
        return lh_fail_errno(err, errno, "flushing %s", e->fts_path);
    return 0;
}

static int sync_all(const char *path, struct lh_error *err)
{
    lh_autoclose int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd < 0 || syncfs(fd) < 0)
        return lh_fail_errno(err, errno, "flushing %s", path);
    return 0;
}

int layer_settle(const char *path, bool durable, uint64_t *bytes, struct lh_error *err)
{
    struct totals t = {0};
    int r = walk(path, count, &t, err);

    *bytes = t.bytes;
    if (r < 0 || !durable)
        return r;
    if (t.entries > PER_FILE)
        return sync_all(path, err);
    r = walk(path, sync_entry, NULL, err);
    return r < 0 ? r : lh_sync_dir_of(path, err);
}

/* ---- removal ---- */

struct id_list {
    char (*ids)[LH_ID_SIZE];
    size_t n;
};

static int collect_id(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct id_list *l = ctx;
    char(*more)[LH_ID_SIZE] = realloc(l->ids, (l->n + 1) * sizeof *more);

    if (!more)
        return lh_fail_errno(err, ENOMEM, "listing layers");
    l->ids = more;
    snprintf(l->ids[l->n++], LH_ID_SIZE, "%s", db_text(row, 0));
    return 0;
}

/* Condemned in one statement (sealed = -1), so that nobody can take a reference in between: whoever
 * starts from a layer copies it from a row that names it. */
static int remove_layer(struct daemon *d, const char *id, struct gc_result *done,
                        struct lh_error *err)
{
    lh_autofree char *path = layer_dir(d, id);
    int64_t bytes = 0;

    if (!path)
        return lh_fail_errno(err, ENOMEM, "removing layer %s", id);
    db_int(d->db, NULL, &bytes, "SELECT bytes FROM layers WHERE id=?", "s", id);
    int r = lh_remove_tree(path, err);
    if (r == 0)
        r = db_run(d->db, err, "DELETE FROM layers WHERE id=?", "s", id);
    if (r == 0 && done) {
        done->layers++;
        done->bytes += (uint64_t)bytes;
    }
    return r;
}

int layers_condemn_of(struct daemon *d, const char *holder, struct lh_error *err)
{
    return db_run(d->db, err,
                  "UPDATE layers SET sealed=-1"
                  " WHERE id IN (SELECT layer FROM sandbox_layers WHERE sandbox=?1"
                  " UNION SELECT layer FROM snapshot_layers WHERE snapshot=?1)"
                  " AND NOT EXISTS (SELECT 1 FROM sandbox_layers"
                  " WHERE layer=layers.id AND sandbox<>?1)"
                  " AND NOT EXISTS (SELECT 1 FROM snapshot_layers"
                  " WHERE layer=layers.id AND snapshot<>?1)",
                  "s", holder);
}

int layers_remove_condemned(struct daemon *d, struct gc_result *done)
{
    struct id_list l = {0};
    struct lh_error err = {0};
    int r = db_each(d->db, &err, collect_id, &l, "SELECT id FROM layers WHERE sealed=-1", "");

    for (size_t i = 0; r == 0 && i < l.n; i++)
        r = remove_layer(d, l.ids[i], done, &err);
    free(l.ids);
    if (r < 0)
        lh_warn("layers not removed", "why=%s", err.message);
    return r;
}

int layers_sweep(struct daemon *d, struct gc_result *done)
{
    struct lh_error err = {0};
    int r = db_run(d->db, &err,
                   "UPDATE layers SET sealed=-1"
                   " WHERE id NOT IN (SELECT layer FROM sandbox_layers)"
                   " AND id NOT IN (SELECT layer FROM snapshot_layers)",
                   "");

    if (r < 0)
        lh_warn("layers not removed", "why=%s", err.message);
    return r < 0 ? r : layers_remove_condemned(d, done);
}

/* ---- recovery ---- */

struct pending {
    char snapshot[LH_ID_SIZE], layer[LH_ID_SIZE], sandbox[LH_ID_SIZE];
    int init_pid;
};
/* Lower directories of the sandbox's root, as its mount table has them; 0 = it has none. */
static int mounted_layers(pid_t init_pid)
{
    lh_autofree char *path = lh_format("/proc/%d/mountinfo", init_pid), *line = NULL;
    lh_autofclose FILE *f = path ? fopen(path, "re") : NULL;
    size_t room = 0;
    int n = 0;

    while (f && n == 0 && getline(&line, &room, f) > 0) {
        if (!strstr(line, " / / ") || !strstr(line, " - overlay "))
            continue;
        for (const char *p = line; (p = strstr(p, "lowerdir+=")); p++)
            n++;
    }
    return n;
}

/* A live seal whose record the crash cut off: the layer is there, and the sandbox runs on exactly
 * as many layers as the snapshot names (one more than before; after a merge far fewer). */
static int ended_live(struct daemon *d, const struct pending *p, bool *live, struct lh_error *err)
{
    lh_autofree char *path = layer_dir(d, p->layer);
    int64_t expected = 0;

    if (!path)
        return lh_fail_errno(err, ENOMEM, "recovery");
    int r = db_int(d->db, err, &expected,
                   "SELECT (SELECT count(*) FROM snapshot_layers WHERE snapshot=?)"
                   " + (top_layer<>'') + 1 FROM sandboxes WHERE id=?",
                   "ss", p->snapshot, p->sandbox);
    *live = r == 0 && access(path, F_OK) == 0 && mounted_layers(p->init_pid) == expected;
    return r;
}

struct pending_list {
    struct pending *items;
    size_t n;
};

static int collect_pending(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct pending_list *l = ctx;
    struct pending *more = realloc(l->items, (l->n + 1) * sizeof *more), *p;

    if (!more)
        return lh_fail_errno(err, ENOMEM, "listing snapshots");
    l->items = more;
    p = &l->items[l->n++];
    snprintf(p->snapshot, sizeof p->snapshot, "%s", db_text(row, 0));
    snprintf(p->layer, sizeof p->layer, "%s", db_text(row, 1));
    snprintf(p->sandbox, sizeof p->sandbox, "%s", db_text(row, 2));
    p->init_pid = sqlite3_column_int(row, 3);
    return 0;
}

static int settle_pending(struct daemon *d, const struct pending *p, struct lh_error *err)
{
    int64_t known = 0;
    bool live = false;
    int r = db_int(d->db, err, &known,
                   "SELECT count(*) FROM sandbox_layers WHERE sandbox=? AND layer=?", "ss",
                   p->sandbox, p->layer);

    if (r == 0 && !known && p->init_pid)
        r = ended_live(d, p, &live, err);
    if (r == 0 && live)
        r = snapshot_adopt_chain(d, p->sandbox, p->snapshot, false, err);
    return r == 0 ? snapshot_drop(d, p->snapshot, true, err) : r;
}

/* Removes directories of STATE/`kind` without a row in `table`. */
static int remove_unknown(struct daemon *d, const char *kind, const char *query,
                          struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/%s", d->state_dir, kind);
    lh_autoclosedir DIR *dir = path ? opendir(path) : NULL;
    int64_t known;

    if (!dir)
        return lh_fail_errno(err, errno, "listing %s/%s", d->state_dir, kind);
    for (struct dirent *e; (e = readdir(dir));) {
        if (!lh_id_text_valid(e->d_name))
            continue; /* not ours */
        int r = db_int(d->db, err, &known, query, "s", e->d_name);
        if (r < 0)
            return r;
        if (known)
            continue;
        lh_autofree char *orphan = lh_format("%s/%s", path, e->d_name);
        lh_warn("orphan removed", "path=%s", orphan ? orphan : e->d_name);
        if (!orphan || (r = lh_remove_tree(orphan, err)) < 0)
            return LH_INTERNAL;
    }
    return 0;
}

int layers_recover(struct daemon *d, struct lh_error *err)
{
    struct pending_list l = {0};
    int r = db_each(d->db, err, collect_pending, &l,
                    "SELECT s.id, l.layer, s.sandbox, coalesce(b.init_pid, 0) FROM snapshots s"
                    " JOIN snapshot_layers l ON l.snapshot=s.id AND l.pos=-1"
                    " LEFT JOIN sandboxes b ON b.id=s.sandbox AND b.boot=? WHERE s.ready=0",
                    "s", d->boot);

    for (size_t i = 0; r == 0 && i < l.n; i++)
        r = settle_pending(d, &l.items[i], err);
    free(l.items);
    if (r == 0)
        r = sharing_recover(d, err);
    if (r == 0) /* of rows that a power cut took */
        r = remove_unknown(d, "sharing", "SELECT count(*) FROM sharing WHERE snapshot=? AND done=0",
                           err);
    if (r == 0)
        r = remove_unknown(d, "layers", "SELECT count(*) FROM layers WHERE id=?", err);
    if (r == 0)
        r = remove_unknown(d, "checkpoints", "SELECT count(*) FROM snapshots WHERE id=?", err);
    if (r == 0)
        r = remove_unknown(d, "boxes", "SELECT count(*) FROM sandboxes WHERE id=?", err);
    return r < 0 ? r : layers_sweep(d, NULL);
}

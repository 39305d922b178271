/* The processes of a snapshot, beside its layers: STATE/checkpoints/ID, made by the engine criu.
 * The directory is there as long as the row of the snapshot, and goes after it; what a crash leaves
 * in between has no row, and recovery removes it.
 *
 * A sandbox's *checkpoint* is the snapshot that it would be resumed from, retained by it under a
 * name of its own.  It is replaced by the next one only when that is complete, and not dropped by a
 * resume: whatever happens to the sandbox later, the last one is there. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/file.h"

int snapshot_images(struct daemon *d, const char *id, char **path, struct lh_error *err)
{
    struct lh_error none = {0};
    lh_autofree char *engine =
        db_string(d->db, &none, "SELECT engine FROM snapshots WHERE id=? AND ready=1", "s", id);

    *path = NULL;
    if (!engine)
        return none.code == LH_NOT_FOUND ? lh_fail(err, LH_NOT_FOUND, "no snapshot \"%s\"", id)
                                         : lh_fail(err, none.code, "%s", none.message);
    if (strcmp(engine, "criu"))
        return 0;
    *path = images_dir(d, id);
    return *path ? 0 : lh_fail_errno(err, ENOMEM, "snapshot %s", id);
}

int images_dump(struct daemon *d, struct sandbox *s, const char *id, struct lh_error *err)
{
    lh_autofree char *path = images_dir(d, id);

    if (!path || mkdir(path, 0700) < 0)
        return lh_fail_errno(err, path ? errno : ENOMEM, "directory for the processes of %s",
                             s->id);
    return box_checkpoint(s->box, path, err);
}

int images_settle(struct daemon *d, const char *id, bool durable, uint64_t *bytes,
                  struct lh_error *err)
{
    lh_autofree char *path = images_dir(d, id);
    uint64_t of_images = 0;
    int r = path ? layer_settle(path, durable, &of_images, err)
                 : lh_fail_errno(err, ENOMEM, "snapshot %s", id);

    *bytes += of_images;
    return r;
}

int images_remove(struct daemon *d, const char *id, struct lh_error *err)
{
    lh_autofree char *path = images_dir(d, id);

    return path ? lh_remove_tree(path, err) : lh_fail_errno(err, ENOMEM, "snapshot %s", id);
}

static void count_readers(struct daemon *d, int n)
{
    LH_LOCKED(&d->lock);
    d->readers += (unsigned)n;
}

int images_restore(struct daemon *d, struct box *box, const char *images, struct lh_error *err)
{
    count_readers(d, 1);
    int r = box_restore(box, images, err);
    count_readers(d, -1);
    return r;
}

int images_open(struct daemon *d, const char *id, struct lh_error *err)
{
    lh_autofree char *path = images_dir(d, id);

    count_readers(d, 1);
    int fd = path ? open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (fd >= 0)
        return fd;
    count_readers(d, -1);
    return lh_fail_errno(err, path ? errno : ENOMEM, "the processes of snapshot %s", id);
}

void images_close(struct daemon *d, int fd)
{
    if (fd < 0)
        return;
    close(fd);
    count_readers(d, -1);
}

/* ---- checkpoints ---- */

static char *owner_name(const char *sandbox)
{
    return lh_format("checkpoint/%s", sandbox);
}

int checkpoint_of(struct daemon *d, const char *sandbox, char id[LH_ID_SIZE], struct lh_error *err)
{
    lh_autofree char *owner = owner_name(sandbox);
    struct lh_error none = {0};

    id[0] = 0;
    if (!owner)
        return lh_fail_errno(err, ENOMEM, "checkpoint of %s", sandbox);
    lh_autofree char *found =
        db_string(d->db, &none,
                  "SELECT o.snapshot FROM snapshot_owners o JOIN snapshots s ON s.id=o.snapshot"
                  " WHERE o.owner=? AND s.ready=1",
                  "s", owner);
    if (found)
        snprintf(id, LH_ID_SIZE, "%s", found);
    return found || none.code == LH_NOT_FOUND ? 0 : lh_fail(err, none.code, "%s", none.message);
}

int checkpoint_name(struct daemon *d, const char *sandbox, const char *snapshot,
                    struct lh_error *err)
{
    lh_autofree char *owner = owner_name(sandbox);
    int r = owner ? db_run(d->db, err,
                           "UPDATE snapshots SET unowned_ms=? WHERE id IN"
                           " (SELECT snapshot FROM snapshot_owners WHERE owner=?)",
                           "ls", lh_unix_ms(), owner)
                  : lh_fail_errno(err, ENOMEM, "checkpoint of %s", sandbox);

    if (r == 0)
        r = db_run(d->db, err, "DELETE FROM snapshot_owners WHERE owner=?", "s", owner);
    if (r == 0 && snapshot)
        r = db_run(d->db, err, "INSERT INTO snapshot_owners VALUES(?,?)", "ss", snapshot, owner);
    return r;
}

int checkpoint_drop(struct daemon *d, const char *snapshot, struct lh_error *err)
{
    int64_t owners = 0;
    int r = db_int(d->db, err, &owners, "SELECT count(*) FROM snapshot_owners WHERE snapshot=?",
                   "s", snapshot);

    return r < 0 || owners ? r : snapshot_drop(d, snapshot, false, err);
}

int checkpoint_set(struct daemon *d, const char *sandbox, const char *snapshot,
                   struct lh_error *err)
{
    char before[LH_ID_SIZE];
    int r = checkpoint_of(d, sandbox, before, err);

    if (r < 0 || (!before[0] && !snapshot))
        return r;
    if ((r = db_begin(d->db, err)) < 0)
        return r;
    r = db_end(d->db, checkpoint_name(d, sandbox, snapshot, err), err);
    if (r == 0 && before[0] && (!snapshot || strcmp(before, snapshot)))
        r = checkpoint_drop(d, before, err);
    return r;
}

/* ---- flushing ---- */

static int flush_one(struct daemon *d, const char *snapshot, struct lh_error *err)
{
    lh_autofree char *layer = db_string(
        d->db, err, "SELECT layer FROM snapshot_layers WHERE snapshot=? ORDER BY pos LIMIT 1", "s",
        snapshot);
    lh_autofree char *path = layer ? layer_dir(d, layer) : NULL;
    uint64_t bytes = 0;
    int r = path ? layer_settle(path, true, &bytes, err) : LH_NOT_FOUND;

    if (r == 0)
        r = images_settle(d, snapshot, true, &bytes, err);
    if (r == 0)
        r = db_run(d->db, err, "UPDATE layers SET durable=1 WHERE id=?", "s", layer);
    /* The layers below it may be a fork's, which nobody flushed either. */
    if (r == 0)
        r = db_run(d->db, err,
                   "UPDATE snapshots SET durable=1 WHERE id=?1 AND NOT EXISTS (SELECT 1 FROM"
                   " snapshot_layers JOIN layers ON id=layer WHERE snapshot=?1 AND durable=0)",
                   "s", snapshot);
    return r == 0 ? db_flush(d->db, err) : r;
}

int checkpoints_flush(struct daemon *d, struct lh_error *err)
{
    int r = 0;
    lh_autofree char *last = strdup("");

    while (r == 0 && last) { /* by id, so that one which cannot be made durable is not met again */
        struct lh_error none = {0};
        char *next =
            db_string(d->db, &none,
                      "SELECT o.snapshot FROM snapshot_owners o JOIN snapshots s ON"
                      " s.id=o.snapshot WHERE o.owner LIKE 'checkpoint/%' AND s.ready=1 AND"
                      " s.durable=0 AND s.id>? ORDER BY s.id LIMIT 1",
                      "s", last);
        free(last);
        last = next;
        if (last)
            r = flush_one(d, last, err);
        else if (none.code != LH_NOT_FOUND)
            r = lh_fail(err, none.code, "%s", none.message);
    }
    return r;
}

/* Putting a sandbox away.
 *
 * The moment at which it is put away is one transaction: the snapshot is ready, retained as the
 * sandbox's checkpoint, and the sandbox HIBERNATED.  Before it the processes are whole, only
 * frozen, and a daemon that is killed leaves them to the next one, which lets them go on.  After it
 * they are no more than leftovers, to be killed by whoever finds them; and the upper directory,
 * which nobody can write any more, is renamed to the layer that the snapshot already names: by us,
 * or by the next daemon.  Nothing is copied.
 *
 * It is not flushed (a sandbox that runs would not survive the host either); the janitor does that
 * within a minute, and from then on it survives that as well. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"

LH_LOG_COMPONENT("agentenvd");

static int top_layer_path(struct daemon *d, const char *sandbox, char **path, struct lh_error *err)
{
    lh_autofree char *layer = db_string(
        d->db, err, "SELECT layer FROM sandbox_layers WHERE sandbox=? ORDER BY pos LIMIT 1", "s",
        sandbox);

    *path = layer ? layer_dir(d, layer) : NULL;
    return *path ? 0 : lh_wrap(err, "the layers of sandbox %s", sandbox);
}

int snapshot_settle_hibernated(struct daemon *d, struct sandbox *s, struct lh_error *err)
{
    lh_autofree char *dir = sandbox_dir(d, s->id), *layer = NULL;
    int r = dir ? top_layer_path(d, s->id, &layer, err) : lh_fail_errno(err, ENOMEM, "%s", s->id);

    if (r < 0 || access(layer, F_OK) == 0)
        return r;
    return box_take_upper(dir, layer, err);
}

/* The moment.  *before: the checkpoint that it had. */
static int commit(struct daemon *d, struct sandbox *s, const char *id, const char *layer,
                  bool merged, uint64_t bytes, struct lh_error *err)
{
    int r = db_begin(d->db, err);

    if (r < 0)
        return r;
    r = db_run(d->db, err, "UPDATE layers SET sealed=1, bytes=? WHERE id=?", "ls", (int64_t)bytes,
               layer);
    if (r == 0)
        r = db_run(d->db, err, "UPDATE snapshots SET ready=1, bytes=? WHERE id=?", "ls",
                   (int64_t)bytes, id);
    if (r == 0)
        r = checkpoint_name(d, s->id, id, err);
    if (r == 0)
        r = snapshot_take_chain(d, s->id, id, merged, err);
    if (r == 0)
        r = registry_set_state(d, s->id, SB_HIBERNATED, 0, err);
    return db_end(d->db, r, err);
}

static int dump(struct daemon *d, struct sandbox *s, const char *id, const char *merged,
                uint64_t *bytes, struct lh_error *err)
{
    struct box_usage usage = {0};
    int r = merged ? snapshot_merge_chain(d, s, merged, false, err) : 0;

    if (r == 0)
        r = images_dump(d, s, id, err);
    if (r < 0)
        return r;
    if (box_usage(s->box, &usage, NULL) == 0) /* of the upper directory, which becomes the layer */
        *bytes = usage.disk_bytes;
    return images_settle(d, id, false, bytes, err);
}

/* After the moment. */
static int end_processes(struct daemon *d, struct sandbox *s, struct lh_error *err)
{
    pthread_mutex_lock(&d->lock);
    s->ending = true;
    pthread_mutex_unlock(&d->lock);
    network_close(d, s);
    int r = box_put_away(s->box, err);
    if (r == 0)
        r = snapshot_settle_hibernated(d, s, err);
    if (r == 0)
        r = snapshot_set_box_chain(d, s, NULL, err);
    return r;
}

static void undo(struct daemon *d, struct sandbox *s, const char *id, bool dumped)
{
    struct lh_error err = {0};

    if (dumped && box_go_on(s->box, &err) < 0)
        lh_warn("sandbox stands still after a failed hibernation", "sandbox=%s why=%s", s->id,
                err.message);
    if (snapshot_drop(d, id, true, &err) < 0)
        lh_warn("snapshot not undone", "snapshot=%s why=%s", id, err.message);
}

static int hibernate(struct daemon *d, struct sandbox *s, const char *id, const char *layer,
                     const char *merged, struct lh_error *err)
{
    uint64_t bytes = 0;
    bool dumped = false;
    int r = dump(d, s, id, merged, &bytes, err);

    if (r == 0) {
        dumped = true;
        r = commit(d, s, id, layer, merged != NULL, bytes, err);
    }
    if (r < 0) {
        undo(d, s, id, dumped);
        return r;
    }
    r = end_processes(d, s, err);
    if (r < 0) /* the records say what is true of its checkpoint; a restart settles the rest */
        lh_err("hibernated, but not settled", "sandbox=%s why=%s", s->id, err->message);
    return r;
}

int snapshot_hibernate(struct daemon *d, struct sandbox *s, struct lh_error *err)
{
    const struct snapshot_options o = {.state = SB_SNAPSHOTTING, .processes = true};
    char id[LH_ID_SIZE], layer[LH_ID_SIZE], merged[LH_ID_SIZE], before[LH_ID_SIZE];
    bool merge = snapshot_chain_is_long(d, s->id);
    int was = s->state;

    if (s->top_layer[0])
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "sandbox %s has a verifier's layer, which belongs in no snapshot", s->id);
    lh_id_new_text(id);
    lh_id_new_text(layer);
    lh_id_new_text(merged);
    int r = quota_check(d, err);
    if (r == 0)
        r = checkpoint_of(d, s->id, before, err);
    if (r == 0)
        r = snapshot_record(d, s, &o, id, layer, merge ? merged : NULL, err);
    if (r < 0)
        return r;
    sandbox_set_state(d, s, SB_SNAPSHOTTING, 0);
    r = hibernate(d, s, id, layer, merge ? merged : NULL, err);
    s->had_layers |= r == 0;
    if (s->state == SB_SNAPSHOTTING) /* unless it died meanwhile */
        sandbox_set_state(d, s, r == 0 ? SB_HIBERNATED : was, 0);
    struct lh_error drop = {0};
    if (r == 0 && before[0] && checkpoint_drop(d, before, &drop) < 0)
        lh_warn("the checkpoint before stays", "snapshot=%s why=%s", before, drop.message);
    if (r == 0 && merge)
        layers_sweep(d, NULL);
    return r;
}

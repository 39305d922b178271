/* Taking a snapshot.
 *
 * Order, so that a crash anywhere loses nothing that was acknowledged and leaves nothing unknown:
 * rows first (layer and snapshot, not ready), then the seal, then, if it was live, the sandbox's
 * chain grows by the layer; then the files are flushed, then the snapshot becomes ready and
 * retained in one transaction, then the registry is flushed.  Recovery (layers.c) drops what is not
 * ready, except a layer that the sandbox already runs on.
 *
 * The sandbox is held throughout: a turn's snapshot is over before its next command in any case,
 * and a second request under the same key simply finds the first one's result. */
#include "agentenv/snapshot/snapshot.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/parse.h"

LH_LOG_COMPONENT("agentenvd");

static int record_merged(struct daemon *d, const char *id, const char *merged, int64_t now,
                         struct lh_error *err)
{
    int r = db_run(d->db, err, "INSERT INTO layers VALUES(?,0,0,0,?)", "sl", merged, now);

    return r < 0
               ? r
               : db_run(d->db, err, "INSERT INTO snapshot_layers VALUES(?,0,?)", "ss", id, merged);
}

/* The pending snapshot: a new layer on top of the sandbox's chain, or of `merged` (NULL = none),
 * which stands for the whole of it. */
int snapshot_record(struct daemon *d, const struct sandbox *s, const struct snapshot_options *o,
                    const char *id, const char *layer, const char *merged, struct lh_error *err)
{
    size_t len;
    lh_autofree uint8_t *limits = lh_pack(&s->limits.base, &len, err);
    int64_t now = lh_unix_ms();

    if (!limits)
        return LH_RESOURCE_EXHAUSTED;
    int r = db_begin(d->db, err);
    if (r < 0)
        return r;
    r = db_run(d->db, err, "INSERT INTO layers VALUES(?,0,0,0,?)", "sl", layer, now);
    if (r == 0)
        r = db_run(d->db, err,
                   "INSERT INTO snapshots(id, ready, durable, parent, sandbox, image, image_id,"
                   " image_path, task, engine, limits, network, created_ms, unowned_ms)"
                   " VALUES(?,0,?,?,?,?,?,?,?,?,?,?,?,?)",
                   "sisssssssbill", id, (int)o->durable, s->snapshot, s->id, s->image, s->image_id,
                   s->image_path, s->task, o->processes ? "criu" : "fsonly", limits, len,
                   (int)s->network, now, now);
    if (r == 0)
        r = db_run(d->db, err, "INSERT INTO snapshot_layers VALUES(?,-1,?)", "ss", id, layer);
    if (r == 0 && merged)
        r = record_merged(d, id, merged, now, err);
    else if (r == 0)
        r = db_run(d->db, err,
                   "INSERT INTO snapshot_layers SELECT ?, pos, layer FROM sandbox_layers"
                   " WHERE sandbox=?",
                   "ss", id, s->id);
    if (r == 0 && s->rules)
        r = db_run(d->db, err,
                   "INSERT INTO snapshot_rules SELECT ?, rules FROM network_rules WHERE sandbox=?",
                   "ss", id, s->id);
    if (r == 0 && o->key)
        r = registry_bind_key(d, o->key_kind, o->key, id, err);
    return db_end(d->db, r, err);
}

int snapshot_take_chain(struct daemon *d, const char *sandbox, const char *snapshot, bool merged,
                        struct lh_error *err)
{
    int r = merged ? layers_condemn_of(d, sandbox, err) : 0;

    if (r == 0)
        r = db_run(d->db, err, "DELETE FROM sandbox_layers WHERE sandbox=?", "s", sandbox);
    if (r == 0) /* positions from 0 on, so that the next layer finds its place on top */
        r = db_run(
            d->db, err,
            "INSERT INTO sandbox_layers SELECT ?, row_number() OVER (ORDER BY pos) - 1, layer"
            " FROM snapshot_layers WHERE snapshot=?",
            "ss", sandbox, snapshot);
    return r;
}

int snapshot_adopt_chain(struct daemon *d, const char *sandbox, const char *snapshot, bool merged,
                         struct lh_error *err)
{
    int r = db_begin(d->db, err);

    return r < 0 ? r : db_end(d->db, snapshot_take_chain(d, sandbox, snapshot, merged, err), err);
}

/* A fork's layer was never flushed; a snapshot that stands on it needs it to be. */
struct unflushed {
    char (*ids)[LH_ID_SIZE];
    size_t n;
};

static int note_unflushed(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct unflushed *u = ctx;
    char(*more)[LH_ID_SIZE] = realloc(u->ids, (u->n + 1) * sizeof *more);

    if (!more)
        return lh_fail_errno(err, ENOMEM, "layers of a snapshot");
    u->ids = more;
    snprintf(u->ids[u->n++], LH_ID_SIZE, "%s", db_text(row, 0));
    return 0;
}

static int settle_layer(struct daemon *d, const char *layer, bool durable, uint64_t *bytes,
                        struct lh_error *err)
{
    lh_autofree char *path = layer_dir(d, layer);

    if (!path)
        return lh_fail_errno(err, ENOMEM, "layer %s", layer);
    int r = layer_settle(path, durable, bytes, err);
    if (r < 0)
        return r;
    return db_run(d->db, err, "UPDATE layers SET sealed=1, durable=?, bytes=? WHERE id=?", "ils",
                  (int)durable, (int64_t)*bytes, layer);
}

static int settle_chain(struct daemon *d, const char *id, bool durable, struct lh_error *err)
{
    struct unflushed u = {0};
    uint64_t bytes;
    int r = 0;

    if (durable)
        r = db_each(d->db, err, note_unflushed, &u,
                    "SELECT l.id FROM snapshot_layers s JOIN layers l ON l.id=s.layer"
                    " WHERE s.snapshot=? AND s.pos>=0 AND l.durable=0",
                    "s", id);
    for (size_t i = 0; r == 0 && i < u.n; i++)
        r = settle_layer(d, u.ids[i], true, &bytes, err);
    free(u.ids);
    return r;
}

static int make_ready(struct daemon *d, const struct snapshot_options *o, const char *id,
                      uint64_t bytes, struct lh_error *err)
{
    int r = db_begin(d->db, err);

    if (r < 0)
        return r;
    r = db_run(d->db, err, "UPDATE snapshots SET ready=1, bytes=? WHERE id=?", "ls", (int64_t)bytes,
               id);
    if (r == 0 && o->owner && o->owner[0])
        r = db_run(d->db, err, "INSERT INTO snapshot_owners VALUES(?,?)", "ss", id, o->owner);
    r = db_end(d->db, r, err);
    return r == 0 && o->durable ? db_flush(d->db, err) : r;
}

/* *moved: the sandbox's upper directory has become the layer, whatever happened after. */
static int seal(struct daemon *d, struct sandbox *s, const char *id, const char *layer, bool merged,
                bool *moved, struct lh_error *err)
{
    lh_autofree char *path = layer_dir(d, layer);
    bool live = false;

    if (!path)
        return lh_fail_errno(err, ENOMEM, "layer %s", layer);
    int r = box_seal(s->box, path, &live, err);
    if (r == 0 && live)
        r = snapshot_adopt_chain(d, s->id, id, merged, err);
    s->had_layers |= live;
    *moved = r < 0 && access(path, F_OK) == 0;
    return r;
}

int snapshot_set_box_chain(struct daemon *d, struct sandbox *s, const char *merged,
                           struct lh_error *err)
{
    struct chain chain;
    int r = chain_load(d, s, merged, &chain, err);

    if (r == 0) {
        r = box_set_layers(s->box, chain.layers, chain.n, err);
        chain_finish(&chain);
    }
    return r;
}

int snapshot_merge_chain(struct daemon *d, struct sandbox *s, const char *merged, bool durable,
                         struct lh_error *err)
{
    lh_autofree char *target = layer_dir(d, merged);
    struct chain chain;
    uint64_t bytes;

    if (!target)
        return lh_fail_errno(err, ENOMEM, "merging layers");
    int r = chain_load(d, s, NULL, &chain, err);
    if (r < 0)
        return r;
    lh_autofree char **paths = calloc(chain.n, sizeof *paths);
    for (size_t i = 0; paths && i < chain.n; i++)
        paths[i] = (char *)chain.layers[i].path;
    r = paths ? layers_merge(paths, chain.n - 1, target, err) /* without the image */
              : lh_fail_errno(err, ENOMEM, "merging layers");
    chain_finish(&chain);
    return r < 0 ? r : settle_layer(d, merged, durable, &bytes, err);
}

/* The sandbox stands on a layer that no record gives it, or cannot write any more: it must not go
 * on, and the layer must not be swept from under it. */
static void give_up(struct sandbox *s, const char *layer)
{
    struct lh_error err = {0};

    lh_err("sandbox ended: its new layer could not be put to use", "sandbox=%s layer=%s", s->id,
           layer);
    if (box_kill(s->box, &err) < 0)
        lh_err("nor could it be killed", "sandbox=%s why=%s", s->id, err.message);
}

static int seal_on(struct daemon *d, struct sandbox *s, const struct snapshot_options *o,
                   const char *id, const char *layer, const char *merged, bool *moved,
                   struct lh_error *err)
{
    int r = 0;

    if (merged) {
        r = snapshot_merge_chain(d, s, merged, o->durable, err);
        if (r == 0)
            r = snapshot_set_box_chain(d, s, merged, err);
    }
    if (r == 0)
        r = seal(d, s, id, layer, merged, moved, err);
    if (merged && !*moved) /* it was copied, and goes on above what it had; or as adopted */
        snapshot_set_box_chain(d, s, NULL, NULL);
    return r;
}

/* With the processes: these first, then the files, which cannot change in between. */
static int seal_with(struct daemon *d, struct sandbox *s, const struct snapshot_options *o,
                     const char *id, const char *layer, const char *merged, bool *moved,
                     struct lh_error *err)
{
    struct lh_error on = {0};
    int r = o->processes ? images_dump(d, s, id, err) : 0;

    if (r < 0)
        return r;
    r = seal_on(d, s, o, id, layer, merged, moved, err);
    if (o->processes && box_go_on(s->box, &on) < 0 && r == 0)
        r = lh_fail(err, on.code, "%s", on.message);
    return r;
}

bool snapshot_chain_is_long(struct daemon *d, const char *sandbox)
{
    int64_t n = 0;

    return db_int(d->db, NULL, &n, "SELECT count(*) FROM sandbox_layers WHERE sandbox=?", "s",
                  sandbox) == 0 &&
           n >= CHAIN_MAX;
}

static int take(struct daemon *d, struct sandbox *s, const struct snapshot_options *o,
                const char *id, const char *layer, const char *merged, bool *moved,
                struct lh_error *err)
{
    uint64_t bytes = 0;
    int64_t start_us = lh_now_us();
    int r = seal_with(d, s, o, id, layer, merged, moved, err);
    int64_t sealed_us = lh_now_us();

    if (r == 0)
        r = settle_layer(d, layer, o->durable, &bytes, err);
    if (r == 0)
        r = settle_chain(d, id, o->durable, err);
    if (r == 0 && o->processes)
        r = images_settle(d, id, o->durable, &bytes, err);
    if (r == 0)
        r = make_ready(d, o, id, bytes, err);
    lh_debug("snapshot", "sandbox=%s seal_us=%lld flush_us=%lld", s->id,
             (long long)(sealed_us - start_us), (long long)(lh_now_us() - sealed_us));
    return r;
}

int snapshot_take(struct daemon *d, struct sandbox *s, const struct snapshot_options *o,
                  char id[LH_ID_SIZE], struct lh_error *err)
{
    char layer[LH_ID_SIZE], merged[LH_ID_SIZE];
    bool moved = false, merge = snapshot_chain_is_long(d, s->id);
    int before = s->state;

    if (!s->box)
        return sandbox_has_no_files(s, err);
    if (s->cause == LONGHAUL__SANDBOX__V1__DEATH_CAUSE__DEATH_HOST_RESTART)
        return lh_fail(err, LH_DATA_LOSS,
                       "sandbox %s ended with the host, and what it wrote last may not be on disk; "
                       "copy out what is there, or resume from its last snapshot",
                       s->id);
    if (s->top_layer[0])
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "sandbox %s has a verifier's layer, which belongs in no snapshot", s->id);
    lh_id_new_text(id);
    lh_id_new_text(layer);
    lh_id_new_text(merged);
    int r = quota_check(d, err);
    if (r == 0)
        r = snapshot_record(d, s, o, id, layer, merge ? merged : NULL, err);
    if (r < 0)
        return lh_wrap(err, "snapshot of sandbox %s", s->id);
    sandbox_set_state(d, s, o->state, 0);
    r = take(d, s, o, id, layer, merge ? merged : NULL, &moved, err);
    if (s->state == o->state) /* unless it died meanwhile */
        sandbox_set_state(d, s, before, 0);
    struct lh_error undo = {0};
    if (r == 0 && merge)
        layers_sweep(d, NULL);
    else if (moved)
        give_up(s, layer);
    else if (r < 0 && snapshot_drop(d, id, true, &undo) < 0)
        lh_warn("snapshot not undone", "snapshot=%s why=%s", id, undo.message);
    return r < 0 ? lh_wrap(err, "snapshot of sandbox %s", s->id) : 0;
}

int snapshot_drop(struct daemon *d, const char *id, bool key_too, struct lh_error *err)
{
    static const char *const statements[] = {
        "DELETE FROM snapshot_layers WHERE snapshot=?",
        "DELETE FROM snapshot_owners WHERE snapshot=?",
        "DELETE FROM snapshots WHERE id=?",
        "DELETE FROM keys WHERE object=?",
    };
    int r = db_begin(d->db, err);

    if (r < 0)
        return r;
    r = layers_condemn_of(d, id, err);
    for (size_t i = 0; r == 0 && i < LH_ARRAY_SIZE(statements) - !key_too; i++)
        r = db_run(d->db, err, statements[i], "s", id);
    r = db_end(d->db, r, err);
    if (r == 0)
        r = images_remove(d, id, err);
    return r < 0 ? r : layers_remove_condemned(d, NULL);
}

bool snapshot_is_ready(struct daemon *d, const char *id)
{
    int64_t n = 0;

    return db_int(d->db, NULL, &n, "SELECT count(*) FROM snapshots WHERE id=? AND ready=1", "s",
                  id) == 0 &&
           n > 0;
}

static int read_origin(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct snapshot_origin *o = ctx;
    char **strings[] = {&o->image, &o->image_id, &o->image_path, &o->task};

    snprintf(o->id, sizeof o->id, "%s", db_text(row, 0));
    for (int i = 0; i < (int)LH_ARRAY_SIZE(strings); i++)
        if (!(*strings[i] = strdup(db_text(row, 1 + i))))
            return lh_fail_errno(err, ENOMEM, "reading a snapshot");
    o->network = (Longhaul__Task__V1__Network)sqlite3_column_int(row, 5);
    return registry_read_limits(&o->limits, row, 6, err);
}

int snapshot_origin(struct daemon *d, const char *id, struct snapshot_origin *out,
                    struct lh_error *err)
{
    *out = (struct snapshot_origin){0};
    int r = db_each(d->db, err, read_origin, out,
                    "SELECT id, image, image_id, image_path, task, network, limits FROM snapshots"
                    " WHERE id=? AND ready=1",
                    "s", id);
    if (r == 0 && !out->id[0])
        r = lh_fail(err, LH_NOT_FOUND, "no snapshot \"%s\"", id);
    if (r < 0)
        snapshot_origin_finish(out);
    return r;
}

void snapshot_origin_finish(struct snapshot_origin *o)
{
    free(o->image);
    free(o->image_id);
    free(o->image_path);
    free(o->task);
    *o = (struct snapshot_origin){0};
}

/* Snapshots come in from outside, which nobody vouches for.
 *
 * What is checked: the manifest against its digest, its fields against their bounds, its base image
 * against the digest of ours, every name and kind in the archives by layerunpack.c, and every
 * layer, once it lies on disk, against the address that the manifest gives it.  So of all bytes
 * that a sandbox will see later, none was taken on trust in the archive: whoever trusts the digest
 * gets what was exported, or an error.  Processes are another matter, since restoring them takes
 * privilege: they are believed under our own key only (processes.h), which is asked for before
 * anything is recorded.
 *
 * Recorded before it is made, like a snapshot of our own (snapshot.c): rows of the snapshot, not
 * ready, and of the layers; then the layers; then the snapshot becomes ready.  A crash in between
 * leaves what recovery drops, and an error drops it at once.  Layers that are here already are
 * shared and not read again. */
#include "agentenv/snapshot/import.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/snapshot/outside.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/parse.h"

LH_LOG_COMPONENT("agentenvd");

int import_check_time(const struct importing *x, struct lh_error *err)
{
    if (x->call && rpc_cancelled(x->call))
        return lh_fail(err, LH_CANCELLED, "the caller is gone");
    return lh_ms_left(x->deadline_ms)
               ? 0
               : lh_fail(err, LH_DEADLINE_EXCEEDED, "the import took too long");
}

struct incoming *import_find(const struct importing *x, const char *address, size_t len)
{
    for (size_t i = 0; i < x->n; i++)
        if (strlen(x->layers[i].address) == len && !memcmp(x->layers[i].address, address, len))
            return &x->layers[i];
    return NULL;
}

/* ---- records ---- */

/* Inside the transaction that names it, so that it cannot go meanwhile. */
static int find_ours(struct importing *x, struct incoming *l, struct lh_error *err)
{
    struct lh_error none = {0};
    lh_autofree char *ours =
        db_string(x->d->db, &none,
                  "SELECT c.layer FROM layer_contents c JOIN layers l ON l.id=c.layer"
                  " WHERE c.content=? AND l.sealed=1 AND l.durable=1 ORDER BY c.layer LIMIT 1",
                  "s", l->address);

    if (!ours && none.code != LH_NOT_FOUND)
        return lh_fail(err, none.code, "%s", none.message);
    l->fresh = !ours;
    l->done = ours;
    if (ours) {
        memcpy(l->id, ours, LH_ID_SIZE);
        return 0;
    }
    lh_id_new_text(l->id);
    return db_run(x->d->db, err, "INSERT INTO layers VALUES(?,0,0,0,?)", "sl", l->id, lh_unix_ms());
}

static bool wants_processes(const struct importing *x)
{
    return x->m->processes && !x->req->files_only;
}

static const char *engine_of(const struct importing *x)
{
    return wants_processes(x) ? "criu" : "fsonly";
}

static int insert_snapshot(struct importing *x, const struct daemon_image *image,
                           struct lh_error *err)
{
    const SnapshotManifest *m = x->m;
    size_t len;
    lh_autofree uint8_t *limits = lh_pack(&m->limits->base, &len, err);
    int64_t now = lh_unix_ms();

    if (!limits)
        return LH_RESOURCE_EXHAUSTED;
    return db_run(x->d->db, err,
                  "INSERT INTO snapshots(id, ready, durable, parent, sandbox, image, image_id,"
                  " image_path, task, engine, limits, network, created_ms, unowned_ms)"
                  " VALUES(?,0,1,'','',?,?,?,?,?,?,?,?,?)",
                  "ssssssbill", x->id, image->name, image->id, image->path, m->task, engine_of(x),
                  limits, len, (int)m->network, m->created_ms, now);
}

/* Positions as a snapshot of ours has them: -1 is its top layer. */
static int insert_layers(struct importing *x, struct lh_error *err)
{
    int r = 0;

    for (size_t i = 0; r == 0 && i < x->n; i++)
        r = find_ours(x, &x->layers[i], err);
    for (size_t i = 0; r == 0 && i < x->m->n_layers; i++) {
        const char *address = x->m->layers[i];
        r = db_run(x->d->db, err, "INSERT INTO snapshot_layers VALUES(?,?,?)", "sis", x->id,
                   (int)i - 1, import_find(x, address, strlen(address))->id);
    }
    return r;
}

static int record(struct importing *x, struct lh_error *err)
{
    struct daemon_image image;
    int r = x->d->hooks->image_by_digest(x->d, x->m->image_digest, &image, err);

    if (r < 0)
        return lh_wrap(err, "its image %.100s", x->m->image);
    if (*x->m->task) {
        struct daemon_task task = {0};
        if ((r = x->d->hooks->task_find(x->d, x->m->task, &task, err)) < 0)
            return lh_wrap(err, "its task");
        lh_message_free(task.owned);
    }
    if ((r = db_begin(x->d->db, err)) < 0)
        return r;
    r = insert_snapshot(x, &image, err);
    if (r == 0)
        r = insert_layers(x, err);
    return db_end(x->d->db, r, err);
}

static int make_ready(struct importing *x, uint64_t bytes, struct lh_error *err)
{
    const char *owner = x->req->retain_owner;
    int r = db_begin(x->d->db, err);

    if (r < 0)
        return r;
    r = db_run(x->d->db, err,
               "UPDATE snapshots SET ready=1, bytes=?2+(SELECT bytes FROM layers JOIN"
               " snapshot_layers ON layer=layers.id WHERE snapshot=?1 AND pos=-1) WHERE id=?1",
               "sl", x->id, (int64_t)bytes);
    if (r == 0 && *owner)
        r = db_run(x->d->db, err, "INSERT INTO snapshot_owners VALUES(?,?)", "ss", x->id, owner);
    r = db_end(x->d->db, r, err);
    return r == 0 ? db_flush(x->d->db, err) : r;
}

/* ---- one layer ---- */

struct layer_unpack *import_begin_layer(struct importing *x, struct incoming *l,
                                        struct lh_error *err)
{
    lh_autofree char *path = layer_dir(x->d, l->id);

    if (!path || mkdir(path, 0700) < 0)
        return lh_fail_errno(err, path ? errno : ENOMEM, "layer %s", l->id), NULL;
    return layer_unpack_create(path, err);
}

/* What lies there now is what counts, not what the archive said. */
static int check_layer(struct importing *x, struct incoming *l, const char *path,
                       struct lh_error *err)
{
    char address[LAYER_ADDRESS_SIZE];
    uint64_t bytes;
    int r = layer_address(path, address, NULL, err);

    if (r == 0 && strcmp(address, l->address) != 0)
        r = lh_fail(err, LH_DATA_LOSS,
                    "layer %.16s... holds something else than its address says: refused",
                    l->address);
    if (r == 0)
        r = layer_settle(path, true, &bytes, err);
    if (r == 0)
        r = db_run(x->d->db, err, "UPDATE layers SET sealed=1, durable=1, bytes=? WHERE id=?", "ls",
                   (int64_t)bytes, l->id);
    if (r == 0)
        r = db_run(x->d->db, err, "INSERT INTO layer_contents VALUES(?,?)", "ss", l->id, address);
    l->done = r == 0;
    return r;
}

int import_end_layer(struct importing *x, struct incoming *l, struct layer_unpack *u,
                     struct lh_error *err)
{
    lh_autofree char *path = layer_dir(x->d, l->id);
    int r = path ? layer_unpack_finish(u, err) : lh_fail_errno(err, ENOMEM, "layer %s", l->id);

    layer_unpack_destroy(u);
    return r < 0 ? r : check_layer(x, l, path, err);
}

static int check_complete(const struct importing *x, struct lh_error *err)
{
    for (size_t i = 0; i < x->n; i++)
        if (!x->layers[i].done)
            return lh_fail(err, LH_DATA_LOSS, "layer %.16s... is missing", x->layers[i].address);
    return 0;
}

/* ---- either ---- */

/* Where the layers come from: one of the two is set. */
struct source {
    struct archive *file;
    struct blobs *store;
};

static int take_layers(struct importing *x, const struct source *from, struct lh_error *err)
{
    int r = 0;

    if (from->file)
        return import_file_layers(x, from->file, err);
    for (size_t i = 0; r == 0 && i < x->n; i++)
        if (x->layers[i].fresh)
            r = import_fetch_layer(x, from->store, &x->layers[i], err);
    return r == 0 && x->processes ? import_fetch_processes(x, from->store, err) : r;
}

/* Before anything is recorded. */
static int admit(struct importing *x, struct lh_error *err)
{
    int r = wants_processes(x) ? processes_admit(x->d, x->m, err) : 0;

    return r == 0 && wants_processes(x) ? engines_need_criu(x->d, x->deadline_ms, err) : r;
}

static int begin_processes(struct importing *x, struct lh_error *err)
{
    lh_autofree char *path = images_dir(x->d, x->id);

    if (!path)
        return lh_fail_errno(err, ENOMEM, "import");
    x->processes = process_unpack_create(path, x->m, err);
    return x->processes ? 0 : LH_INTERNAL;
}

/* All that the snapshot consists of, whole and on disk. */
static int take_all(struct importing *x, const struct source *from, uint64_t *bytes,
                    struct lh_error *err)
{
    int r = wants_processes(x) ? begin_processes(x, err) : 0;

    if (r == 0)
        r = take_layers(x, from, err);
    if (r == 0)
        r = check_complete(x, err);
    if (r == 0 && x->processes)
        r = process_unpack_finish(x->processes, err);
    return r == 0 && x->processes ? images_settle(x->d, x->id, true, bytes, err) : r;
}

static int plan(struct importing *x, struct lh_error *err)
{
    x->layers = calloc(x->m->n_layers, sizeof *x->layers);
    if (!x->layers)
        return lh_fail_errno(err, ENOMEM, "import");
    for (size_t i = 0; i < x->m->n_layers; i++)
        if (!import_find(x, x->m->layers[i], strlen(x->m->layers[i])))
            x->layers[x->n++].address = x->m->layers[i];
    return 0;
}

static int import(struct importing *x, const SnapshotManifest *m, const struct source *from,
                  struct lh_error *err)
{
    struct lh_error undo = {0};
    uint64_t bytes = 0;

    x->m = m;
    lh_id_new_text(x->id);
    int r = admit(x, err);
    if (r == 0)
        r = quota_check(x->d, err);
    if (r == 0)
        r = plan(x, err);
    if (r == 0)
        r = record(x, err);
    if (r < 0)
        return r;
    r = take_all(x, from, &bytes, err);
    if (r == 0)
        r = make_ready(x, bytes, err);
    if (r < 0 && snapshot_drop(x->d, x->id, true, &undo) < 0)
        lh_warn("import not undone", "snapshot=%s why=%s", x->id, undo.message);
    return r;
}

static int from_file(struct importing *x, struct lh_error *err)
{
    const char *path = x->req->location;
    lh_autoclose int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    char digest[LAYER_ADDRESS_SIZE];
    struct stat st;
    size_t len, said_len;

    if (fd < 0 || fstat(fd, &st) < 0)
        return lh_fail_errno(err, errno, "%s", path);
    if (!S_ISREG(st.st_mode))
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s is no file", path);
    auto_import_archive a = import_open_archive(fd, err);
    lh_autofree char *text = a ? import_read_text(x, a, OUTSIDE_MANIFEST, &len, err) : NULL;
    lh_autofree char *said = text ? import_read_text(x, a, OUTSIDE_DIGEST, &said_len, err) : NULL;
    if (!said)
        return err->code;
    const char *wanted = *x->req->digest ? x->req->digest : said;
    lh_automsg(SnapshotManifest) m = manifest_parse(text, len, wanted, digest, err);
    const struct source from = {.file = a};
    return m ? import(x, m, &from, err) : err->code;
}

static int from_store(struct importing *x, struct lh_error *err)
{
    lh_auto(blobs) b = blobs_open(x->req->location, err);
    char digest[LAYER_ADDRESS_SIZE];
    size_t len;
    lh_autofree char *text = b ? import_fetch_manifest(x, b, &len, err) : NULL;

    if (!text)
        return err->code;
    lh_automsg(SnapshotManifest) m = manifest_parse(text, len, x->req->digest, digest, err);
    const struct source from = {.store = b};
    return m ? import(x, m, &from, err) : err->code;
}

int service_import_snapshot(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                            ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(ImportSnapshotRequest) *req = (const void *)request;
    struct importing x = {
        .d = ctx, .call = call, .req = req, .deadline_ms = outside_deadline_ms(call)};
    int r = *req->retain_owner ? snapshot_check_owner(req->retain_owner, err) : 0;

    if (r == 0)
        r = *req->location == '/' ? from_file(&x, err) : from_store(&x, err);
    free(x.layers);
    process_unpack_destroy(x.processes);
    if (r < 0)
        return lh_wrap(err, "import from %s", req->location);
    V1(Snapshot) *made = snapshot_show(ctx, x.id, err);
    *reply = made ? &made->base : NULL;
    return made ? 0 : err->code;
}

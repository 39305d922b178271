/* Snapshots leave their store: as one file, or as objects of a store outside.
 *
 * A file is a zstd-compressed tar: manifest.json, its digest, then each layer once below
 * layers/ADDRESS, then the images of its processes.  A store has manifests/DIGEST.json,
 * layers/ADDRESS.tar.zst and processes/ADDRESS.tar.zst, so that what it has already is not sent
 * again; the manifest goes last, and a reader that finds one finds the rest too.  While it goes on
 * the snapshot has an owner "export/ID", and its layers stay where they are. */
#include <archive.h>
#include <archive_entry.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/snapshot/blobs.h"
#include "agentenv/snapshot/layertar.h"
#include "agentenv/snapshot/manifest.h"
#include "agentenv/snapshot/outside.h"
#include "agentenv/snapshot/processes.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/parse.h"

LH_LOG_COMPONENT("agentenvd");

struct exporting {
    struct daemon *d;
    struct rpc_call *call;
    const char *snapshot;
    int images; /* directory; -1: it has no processes */
    const SnapshotManifest *m;
    const char *text; /* of the manifest */
    char digest[LAYER_ADDRESS_SIZE];
    int64_t deadline_ms;
    V1(ExportSnapshotReply) * reply;
};

static int check_time(const struct exporting *x, struct lh_error *err)
{
    if (x->call && rpc_cancelled(x->call))
        return lh_fail(err, LH_CANCELLED, "the caller is gone");
    return lh_ms_left(x->deadline_ms)
               ? 0
               : lh_fail(err, LH_DEADLINE_EXCEEDED, "the export took too long");
}

/* Any layer of the snapshot with this content. */
static char *find_layer(const struct exporting *x, const char *address, struct lh_error *err)
{
    lh_autofree char *id = db_string(x->d->db, err,
                                     "SELECT s.layer FROM snapshot_layers s JOIN layer_contents c"
                                     " ON c.layer=s.layer WHERE s.snapshot=? AND c.content=?",
                                     "ss", x->snapshot, address);
    char *path = id ? layer_dir(x->d, id) : NULL;

    if (id && !path)
        lh_fail_errno(err, ENOMEM, "layer %s", id);
    return path;
}

static bool is_repeated(const SnapshotManifest *m, size_t i)
{
    for (size_t k = 0; k < i; k++)
        if (!strcmp(m->layers[k], m->layers[i]))
            return true;
    return false;
}

/* ---- archives ---- */

static void free_archive(struct archive **a)
{
    archive_write_free(*a);
}
#define auto_archive __attribute__((cleanup(free_archive))) struct archive *

static int archive_failure(struct archive *a, const char *what, struct lh_error *err)
{
    int code = archive_errno(a) > 0 ? lh_status_from_errno(archive_errno(a)) : LH_INTERNAL;
    const char *why = archive_error_string(a);

    return lh_fail(err, code, "%s: %s", what, why ? why : "libarchive failed");
}

static struct archive *new_archive(int fd, struct lh_error *err)
{
    auto_archive a = archive_write_new();

    if (!a)
        return lh_fail_errno(err, ENOMEM, "an archive"), NULL;
    archive_write_set_format_pax(a);                   /* times to the nanosecond, attributes */
    archive_write_set_options(a, "hdrcharset=BINARY"); /* names are bytes */
    archive_write_set_bytes_in_last_block(a, 1);
    if (archive_write_add_filter_zstd(a) != ARCHIVE_OK ||
        archive_write_open_fd(a, fd) != ARCHIVE_OK)
        return archive_failure(a, "an archive", err), NULL;
    return lh_steal(&a);
}

static int put_text(struct archive *a, const char *name, const char *text, struct lh_error *err)
{
    struct archive_entry *e = archive_entry_new();
    size_t len = strlen(text);

    if (!e)
        return lh_fail_errno(err, ENOMEM, "an archive");
    archive_entry_copy_pathname(e, name);
    archive_entry_set_filetype(e, AE_IFREG);
    archive_entry_set_perm(e, 0644);
    archive_entry_set_size(e, (int64_t)len);
    int r = archive_write_header(a, e) == ARCHIVE_OK && archive_write_data(a, text, len) >= 0
                ? 0
                : archive_failure(a, name, err);
    archive_entry_free(e);
    return r;
}

static int pack(const struct exporting *x, struct archive *a, const char *address,
                const char *prefix, struct lh_error *err)
{
    lh_autofree char *path = find_layer(x, address, err);
    int r = path ? check_time(x, err) : LH_NOT_FOUND;

    return r < 0 ? r : layer_pack(a, path, prefix, err);
}

/* ---- one file ---- */

static int pack_all(struct exporting *x, struct archive *a, struct lh_error *err)
{
    int r = put_text(a, OUTSIDE_MANIFEST, x->text, err);

    if (r == 0)
        r = put_text(a, OUTSIDE_DIGEST, x->digest, err);
    for (size_t i = 0; r == 0 && i < x->m->n_layers; i++) {
        lh_autofree char *prefix = lh_format(OUTSIDE_LAYERS "/%s", x->m->layers[i]);
        if (!prefix)
            return lh_fail_errno(err, ENOMEM, "an archive");
        if (is_repeated(x->m, i))
            continue;
        r = pack(x, a, x->m->layers[i], prefix, err);
        x->reply->layers++;
    }
    if (r == 0 && x->m->processes)
        r = processes_pack(a, x->images, x->m, err);
    return r == 0 && archive_write_close(a) != ARCHIVE_OK ? archive_failure(a, "an archive", err)
                                                          : r;
}

static int fill_file(struct exporting *x, int fd, struct lh_error *err)
{
    struct stat st;
    auto_archive a = new_archive(fd, err);
    int r = a ? pack_all(x, a, err) : LH_INTERNAL;

    if (r == 0 && (fsync(fd) < 0 || fstat(fd, &st) < 0))
        r = lh_fail_errno(err, errno, "flushing");
    if (r == 0)
        x->reply->bytes = (uint64_t)st.st_size;
    return r;
}

/* Written beside it under another name, so that the file is whole or not there. */
static int to_file(struct exporting *x, const char *path, struct lh_error *err)
{
    char id[LH_ID_SIZE];
    lh_id_new_text(id);
    lh_autofree char *incoming = lh_format("%s.incoming-%s", path, id);
    lh_autoclose int fd =
        incoming ? open(incoming, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600) : -1;

    if (fd < 0)
        return lh_fail_errno(err, incoming ? errno : ENOMEM, "%s", path);
    int r = fill_file(x, fd, err);
    if (r == 0 && rename(incoming, path) < 0)
        r = lh_fail_errno(err, errno, "%s", path);
    if (r < 0)
        unlink(incoming);
    return r < 0 ? r : lh_sync_dir_of(path, err);
}

/* ---- a store ---- */

/* Packs one thing of the snapshot. */
typedef int pack_fn(const struct exporting *x, struct archive *a, const char *what,
                    struct lh_error *err);

static int pack_layer(const struct exporting *x, struct archive *a, const char *address,
                      struct lh_error *err)
{
    return pack(x, a, address, "", err);
}

static int pack_processes(const struct exporting *x, struct archive *a, const char *what,
                          struct lh_error *err)
{
    (void)what;
    return processes_pack(a, x->images, x->m, err);
}

static int push_packed(struct exporting *x, struct blobs *b, const char *name, int fd,
                       struct lh_error *err)
{
    struct stat st;
    int r = fstat(fd, &st) < 0 || lseek(fd, 0, SEEK_SET) < 0
                ? lh_fail_errno(err, errno, "%s", name)
                : blobs_put(b, name, fd, x->deadline_ms, err);

    if (r == 0)
        x->reply->bytes += (uint64_t)st.st_size;
    return r;
}

/* One archive, unless the store has it.  1 = it was sent. */
static int push(struct exporting *x, struct blobs *b, const char *name, pack_fn *fn,
                const char *what, struct lh_error *err)
{
    bool has = false;
    int r = name ? blobs_has(b, name, x->deadline_ms, &has, err)
                 : lh_fail_errno(err, ENOMEM, "an export");

    if (r < 0 || has)
        return r;
    lh_autoclose int fd = outside_temporary(x->d, err);
    auto_archive a = fd < 0 ? NULL : new_archive(fd, err);
    if (!a)
        return LH_INTERNAL;
    r = fn(x, a, what, err);
    if (r == 0 && archive_write_close(a) != ARCHIVE_OK)
        r = archive_failure(a, name, err);
    if (r == 0)
        r = push_packed(x, b, name, fd, err);
    return r < 0 ? r : 1;
}

static int push_layer(struct exporting *x, struct blobs *b, const char *address,
                      struct lh_error *err)
{
    lh_autofree char *name = outside_layer_name(address);
    int r = push(x, b, name, pack_layer, address, err);

    x->reply->layers += r > 0;
    return r < 0 ? r : 0;
}

static int push_processes(struct exporting *x, struct blobs *b, struct lh_error *err)
{
    char address[LAYER_ADDRESS_SIZE];
    int r = processes_address(x->m, address, err);

    if (r < 0)
        return r;
    lh_autofree char *name = outside_processes_name(address);
    r = push(x, b, name, pack_processes, NULL, err);
    return r < 0 ? r : 0;
}

static int push_manifest(struct exporting *x, struct blobs *b, struct lh_error *err)
{
    lh_autofree char *name = outside_manifest_name(x->digest);
    lh_autoclose int fd = outside_temporary(x->d, err);
    int r = fd < 0 ? fd : lh_write_all(fd, x->text, strlen(x->text), err);

    if (r == 0 && (!name || lseek(fd, 0, SEEK_SET) < 0))
        r = lh_fail_errno(err, name ? errno : ENOMEM, "a manifest");
    return r < 0 ? r : blobs_put(b, name, fd, x->deadline_ms, err);
}

static int to_store(struct exporting *x, const char *location, struct lh_error *err)
{
    lh_auto(blobs) b = blobs_open(location, err);
    int r = b ? 0 : LH_INVALID_ARGUMENT;

    for (size_t i = 0; r == 0 && i < x->m->n_layers; i++)
        if (!is_repeated(x->m, i))
            r = push_layer(x, b, x->m->layers[i], err);
    if (r == 0 && x->m->processes)
        r = push_processes(x, b, err);
    return r < 0 ? r : push_manifest(x, b, err);
}

/* ---- the rpc ---- */

/* With the processes, whose directory stays open: their pages may be exchanged meanwhile. */
static SnapshotManifest *describe(struct exporting *x, struct lh_error *err)
{
    lh_automsg(SnapshotManifest) m = manifest_make(x->d, x->snapshot, err);

    if (!m || !strcmp(m->engine, "fsonly"))
        return lh_steal(&m);
    x->images = images_open(x->d, x->snapshot, err);
    return x->images >= 0 && processes_describe(x->d, x->images, m, err) == 0 ? lh_steal(&m) : NULL;
}

static int export(struct exporting *x, const char *location, struct lh_error *err)
{
    lh_automsg(SnapshotManifest) m = describe(x, err);
    lh_autofree char *text = m ? manifest_print(m, x->digest, err) : NULL;

    if (!text)
        return err->code;
    x->m = m;
    x->text = text;
    x->reply->digest = strdup(x->digest);
    if (!x->reply->digest)
        return lh_fail_errno(err, ENOMEM, "export");
    return *location == '/' ? to_file(x, location, err) : to_store(x, location, err);
}

int service_export_snapshot(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                            ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(ExportSnapshotRequest) *req = (const void *)request;
    lh_automsg(V1(ExportSnapshotReply)) out = calloc(1, sizeof *out);
    struct exporting x = {.d = ctx,
                          .call = call,
                          .snapshot = req->snapshot,
                          .images = -1,
                          .deadline_ms = outside_deadline_ms(call),
                          .reply = out};
    char id[LH_ID_SIZE];

    if (!out)
        return lh_fail_errno(err, ENOMEM, "export");
    longhaul__sandbox__v1__export_snapshot_reply__init(out);
    lh_id_new_text(id);
    lh_autofree char *owner = lh_format("export/%s", id);
    int r = owner ? snapshot_retain(ctx, req->snapshot, owner, err)
                  : lh_fail_errno(err, ENOMEM, "export");
    if (r < 0)
        return r;
    r = export(&x, req->location, err);
    images_close(ctx, x.images);
    struct lh_error why = {0};
    if (snapshot_release(ctx, req->snapshot, owner, &why) < 0)
        lh_warn("released at the next start", "snapshot=%s why=%s", req->snapshot, why.message);
    if (r < 0)
        return lh_wrap(err, "export of snapshot %s to %s", req->snapshot, req->location);
    *reply = &lh_steal(&out)->base;
    return 0;
}

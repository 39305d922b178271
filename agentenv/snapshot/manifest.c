#include "agentenv/snapshot/manifest.h"

#include <errno.h>
#include <sodium.h>
#include <string.h>

#include "agentenv/criu/memory.h"
#include "agentenv/snapshot/contents.h"
#include "agentenv/snapshot/layertar.h"
#include "agentenv/snapshot/processes.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/hex.h"
#include "proto/json.h"

enum { LAYERS_MAX = 400, DEPTH_MAX = 16, IMAGE_NAME_MAX = 200 };

/* ---- from the registry ---- */

static int read_row(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    SnapshotManifest *m = ctx;
    char **strings[] = {&m->engine, &m->image, &m->task};

    for (int i = 0; i < (int)LH_ARRAY_SIZE(strings); i++)
        if (!(*strings[i] = strdup(db_text(row, i))))
            return lh_fail_errno(err, ENOMEM, "a manifest");
    m->network = (Longhaul__Task__V1__Network)sqlite3_column_int(row, 3);
    m->created_ms = sqlite3_column_int64(row, 4);
    m->limits = calloc(1, sizeof *m->limits);
    if (!m->limits)
        return lh_fail_errno(err, ENOMEM, "a manifest");
    longhaul__task__v1__limits__init(m->limits);
    return registry_read_limits(m->limits, row, 5, err);
}

struct layer_ids {
    char (*ids)[LH_ID_SIZE];
    size_t n;
};

static int read_layer(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct layer_ids *l = ctx;
    char(*more)[LH_ID_SIZE] = realloc(l->ids, (l->n + 1) * sizeof *more);

    if (!more)
        return lh_fail_errno(err, ENOMEM, "a manifest");
    l->ids = more;
    snprintf(l->ids[l->n++], LH_ID_SIZE, "%s", db_text(row, 0));
    return 0;
}

static int add_layers(struct daemon *d, const char *snapshot, SnapshotManifest *m,
                      struct lh_error *err)
{
    struct layer_ids l = {0};
    int r =
        db_each(d->db, err, read_layer, &l,
                "SELECT layer FROM snapshot_layers WHERE snapshot=? ORDER BY pos", "s", snapshot);

    m->layers = calloc(l.n + 1, sizeof *m->layers);
    if (r == 0 && !m->layers)
        r = lh_fail_errno(err, ENOMEM, "a manifest");
    for (size_t i = 0; r == 0 && i < l.n; i++) {
        char *address = malloc(LAYER_ADDRESS_SIZE);
        m->layers[m->n_layers++] = address;
        r = address ? contents_of(d, l.ids[i], address, err)
                    : lh_fail_errno(err, ENOMEM, "a manifest");
    }
    free(l.ids);
    return r;
}

SnapshotManifest *manifest_make(struct daemon *d, const char *snapshot, struct lh_error *err)
{
    lh_automsg(SnapshotManifest) m = calloc(1, sizeof *m);

    if (!m)
        return lh_fail_errno(err, ENOMEM, "a manifest"), NULL;
    longhaul__sandbox__v1__snapshot_manifest__init(m);
    m->format = MANIFEST_FORMAT;
    int r = db_each(d->db, err, read_row, m,
                    "SELECT engine, image, task, network, created_ms, limits FROM snapshots"
                    " WHERE id=? AND ready=1",
                    "s", snapshot);
    if (r == 0 && !m->limits)
        r = lh_fail(err, LH_NOT_FOUND, "no snapshot \"%s\"", snapshot);
    if (r == 0 && !(m->image_digest = d->hooks->image_digest(d, snapshot, err)))
        r = LH_NOT_FOUND;
    if (r == 0)
        r = add_layers(d, snapshot, m, err);
    return r < 0 ? NULL : lh_steal(&m);
}

/* ---- as text ---- */

static int digest_of(const char *text, size_t len, char digest[LAYER_ADDRESS_SIZE],
                     struct lh_error *err)
{
    uint8_t bytes[LAYER_ADDRESS];

    if (sodium_init() < 0)
        return lh_fail(err, LH_INTERNAL, "libsodium cannot start");
    crypto_generichash(bytes, sizeof bytes, (const uint8_t *)text, len, NULL, 0);
    lh_hex_print(bytes, sizeof bytes, digest);
    return 0;
}

char *manifest_print(const SnapshotManifest *m, char digest[LAYER_ADDRESS_SIZE],
                     struct lh_error *err)
{
    lh_autofree char *text = lh_json_print(&m->base, err);

    return text && digest_of(text, strlen(text), digest, err) == 0 ? lh_steal(&text) : NULL;
}

/* Lower case, since it becomes a name. */
bool manifest_digest_valid(const char *digest)
{
    return strlen(digest) == LAYER_ADDRESS_SIZE - 1 &&
           digest[strspn(digest, "0123456789abcdef")] == 0;
}

/* "NAME" or "parent/NAME", "parent/parent/NAME", ...: what is made is below the directory. */
static bool is_image_name(const char *name)
{
    static const char below[] = MEMORY_PARENT "/";
    unsigned depth = 0;

    for (; !strncmp(name, below, sizeof below - 1); name += sizeof below - 1)
        if (++depth > DEPTH_MAX)
            return false;
    return *name && *name != '.' && strcmp(name, MEMORY_PARENT) && strlen(name) <= IMAGE_NAME_MAX &&
           !strchr(name, '/');
}

static int check_processes(const V1(ProcessImages) * p, struct lh_error *err)
{
    if (p->n_files > PROCESS_FILES_MAX)
        return lh_fail(err, LH_INVALID_ARGUMENT, "the manifest has %zu process images, at most %d",
                       p->n_files, PROCESS_FILES_MAX);
    for (size_t i = 0; i < p->n_files; i++) {
        const V1(ProcessFile) *f = p->files[i];
        if (!is_image_name(f->name) || !manifest_digest_valid(f->digest) ||
            f->bytes > LAYER_BYTES_MAX)
            return lh_fail(err, LH_INVALID_ARGUMENT, "\"%.80s\" is no process image", f->name);
    }
    return 0;
}

static int check(const SnapshotManifest *m, struct lh_error *err)
{
    if (m->format != MANIFEST_FORMAT)
        return lh_fail(err, LH_INVALID_ARGUMENT, "the manifest has format %u, this is %d",
                       m->format, MANIFEST_FORMAT);
    bool processes = !strcmp(m->engine, "criu");
    if (!processes && strcmp(m->engine, "fsonly") != 0)
        return lh_fail(err, LH_UNIMPLEMENTED,
                       "the snapshot is of engine \"%.40s\", which is not ours", m->engine);
    if (processes != !!m->processes)
        return lh_fail(err, LH_INVALID_ARGUMENT, "the manifest is of engine %s and %s processes",
                       m->engine, processes ? "lists no" : "lists");
    if (m->n_layers < 1 || m->n_layers > LAYERS_MAX)
        return lh_fail(err, LH_INVALID_ARGUMENT, "the manifest has %zu layers, not 1 to %d",
                       m->n_layers, LAYERS_MAX);
    for (size_t i = 0; i < m->n_layers; i++)
        if (!manifest_digest_valid(m->layers[i]))
            return lh_fail(err, LH_INVALID_ARGUMENT, "\"%.80s\" is no address of a layer",
                           m->layers[i]);
    if (!m->limits || !protobuf_c_enum_descriptor_get_value(
                          &longhaul__task__v1__network__descriptor, (int)m->network))
        return lh_fail(err, LH_INVALID_ARGUMENT, "the manifest lacks limits or a network");
    return m->processes ? check_processes(m->processes, err) : 0;
}

SnapshotManifest *manifest_parse(const char *text, size_t len, const char *wanted,
                                 char digest[LAYER_ADDRESS_SIZE], struct lh_error *err)
{
    int r = digest_of(text, len, digest, err);

    if (r == 0 && *wanted && strcmp(wanted, digest) != 0)
        r = lh_fail(err, LH_DATA_LOSS, "the manifest is not the one that was asked for (it is %s)",
                    digest);
    if (r < 0)
        return NULL;
    lh_automsg(SnapshotManifest) m =
        (SnapshotManifest *)lh_json_parse(&longhaul__sandbox__v1__snapshot_manifest__descriptor,
                                          text, len, (struct lh_parse_limits){0}, err);
    return m && check(m, err) == 0 ? lh_steal(&m) : NULL;
}

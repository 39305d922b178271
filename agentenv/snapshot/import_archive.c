/* Archives as import.c wants them: of one file, layer after layer, or of a store, one for each. */
#include "agentenv/snapshot/import.h"

#include <archive.h>
#include <archive_entry.h>
#include <errno.h>
#include <string.h>

#include "agentenv/snapshot/outside.h"
#include "proto/file.h"

enum { BLOCK = 256 << 10, NAME_MAX_LEN = 4096 };

void import_free_archive(struct archive **a)
{
    archive_read_free(*a);
}
static int archive_failure(struct archive *a, struct lh_error *err)
{
    const char *why = archive_error_string(a);

    return lh_fail(err, LH_DATA_LOSS, "%s", why ? why : "damaged archive");
}

struct archive *import_open_archive(int fd, struct lh_error *err)
{
    auto_import_archive a = archive_read_new();

    if (!a)
        return lh_fail_errno(err, ENOMEM, "an archive"), NULL;
    archive_read_support_filter_zstd(a);
    archive_read_support_format_tar(a);
    if (archive_read_open_fd(a, fd, BLOCK) != ARCHIVE_OK)
        return archive_failure(a, err), NULL;
    return lh_steal(&a);
}

/* 1 = an entry, 0 = the end. */
static int next_entry(const struct importing *x, struct archive *a, struct archive_entry **e,
                      struct lh_error *err)
{
    int r = import_check_time(x, err);

    if (r < 0)
        return r;
    r = archive_read_next_header(a, e);
    return r == ARCHIVE_OK ? 1 : r == ARCHIVE_EOF ? 0 : archive_failure(a, err);
}

/* ---- one file ---- */

/* An entry of a given name, as text. */
char *import_read_text(const struct importing *x, struct archive *a, const char *name, size_t *len,
                       struct lh_error *err)
{
    struct archive_entry *e;
    int r = next_entry(x, a, &e, err);
    const char *found = r > 0 ? archive_entry_pathname(e) : NULL;
    lh_autofree char *text = NULL;

    if (r < 0)
        return NULL;
    if (!found || strcmp(found, name) != 0)
        return lh_fail(err, LH_INVALID_ARGUMENT, "no snapshot: %s is missing", name), NULL;
    if (archive_entry_size(e) > MANIFEST_MAX || !(text = malloc(MANIFEST_MAX + 1)))
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%s is too large", name), NULL;
    la_ssize_t n = archive_read_data(a, text, MANIFEST_MAX);
    if (n < 0)
        return archive_failure(a, err), NULL;
    text[n] = 0;
    *len = (size_t)n;
    return lh_steal(&text);
}

/* The layer an entry belongs to, and the length of the name's part in front; NULL: of none. */
static struct incoming *layer_of(const struct importing *x, const char *name, char *prefix,
                                 size_t size)
{
    static const char top[] = OUTSIDE_LAYERS "/";
    size_t n = sizeof top - 1;

    if (!name || strncmp(name, top, n) != 0)
        return NULL;
    size_t len = strcspn(name + n, "/");
    snprintf(prefix, size, "%.*s", (int)(n + len), name);
    return import_find(x, name + n, len);
}

struct current {
    struct incoming *layer;
    struct layer_unpack *u;
};

static int switch_layer(struct importing *x, struct current *c, struct incoming *to,
                        struct lh_error *err)
{
    struct layer_unpack *u = c->u;
    int r = 0;

    c->u = NULL;
    if (u)
        r = import_end_layer(x, c->layer, u, err);
    c->layer = to;
    if (r < 0 || !to || !to->fresh)
        return r;
    if (to->done)
        return lh_fail(err, LH_INVALID_ARGUMENT, "layer %.16s... comes twice", to->address);
    c->u = import_begin_layer(x, to, err);
    return c->u ? 0 : LH_INTERNAL;
}

int import_file_layers(struct importing *x, struct archive *a, struct lh_error *err)
{
    struct current c = {0};
    struct archive_entry *e;
    char prefix[NAME_MAX_LEN];
    int r;

    while ((r = next_entry(x, a, &e, err)) > 0) {
        struct incoming *l = layer_of(x, archive_entry_pathname(e), prefix, sizeof prefix);
        if (!l && x->m->processes && process_unpack_owns(archive_entry_pathname(e)))
            r = x->processes ? process_unpack_entry(x->processes, a, e, err) : 0;
        else if (!l)
            r = lh_fail(err, LH_INVALID_ARGUMENT, "\"%.200s\" belongs to no layer of the snapshot",
                        archive_entry_pathname(e) ? archive_entry_pathname(e) : "");
        else if (l != c.layer)
            r = switch_layer(x, &c, l, err);
        if (r >= 0 && l && c.u)
            r = layer_unpack_entry(c.u, a, e, prefix, err);
        if (r < 0)
            break;
    }
    if (r == 0)
        r = switch_layer(x, &c, NULL, err);
    layer_unpack_destroy(c.u);
    return r;
}

/* ---- a store ---- */

/* An archive of the store, in a file that a crash leaves nothing of. */
static int fetch(struct importing *x, struct blobs *b, const char *name, struct lh_error *err)
{
    lh_autoclose int fd = outside_temporary(x->d, err);
    int r = fd;

    if (fd >= 0)
        r = name ? blobs_get(b, name, fd, LAYER_BYTES_MAX, x->deadline_ms, err)
                 : lh_fail_errno(err, ENOMEM, "an import");
    if (r == 0 && lseek(fd, 0, SEEK_SET) < 0)
        r = lh_fail_errno(err, errno, "%s", name);
    return r < 0 ? r : lh_steal_fd(&fd);
}

/* Each entry, into a layer or (NULL) the processes. */
static int unpack_blob(struct importing *x, int fd, struct layer_unpack *u, struct lh_error *err)
{
    auto_import_archive a = import_open_archive(fd, err);
    struct archive_entry *e;
    int r = a ? 1 : LH_DATA_LOSS;

    while (r > 0 && (r = next_entry(x, a, &e, err)) > 0) {
        const char *name = archive_entry_pathname(e);
        int done = u ? layer_unpack_entry(u, a, e, "", err)
                   : process_unpack_owns(name)
                       ? process_unpack_entry(x->processes, a, e, err)
                       : lh_fail(err, LH_INVALID_ARGUMENT, "\"%.200s\" is no process image",
                                 name ? name : "");
        if (done < 0)
            return done;
    }
    return r;
}

int import_fetch_layer(struct importing *x, struct blobs *b, struct incoming *l,
                       struct lh_error *err)
{
    lh_autofree char *name = outside_layer_name(l->address);
    lh_autoclose int fd = fetch(x, b, name, err);
    struct layer_unpack *u = fd < 0 ? NULL : import_begin_layer(x, l, err);

    if (!u)
        return err->code;
    int r = unpack_blob(x, fd, u, err);
    if (r == 0)
        return import_end_layer(x, l, u, err);
    layer_unpack_destroy(u);
    return r;
}

int import_fetch_processes(struct importing *x, struct blobs *b, struct lh_error *err)
{
    char address[LAYER_ADDRESS_SIZE];
    int r = processes_address(x->m, address, err);

    if (r < 0)
        return r;
    lh_autofree char *name = outside_processes_name(address);
    lh_autoclose int fd = fetch(x, b, name, err);
    return fd < 0 ? fd : unpack_blob(x, fd, NULL, err);
}

char *import_fetch_manifest(struct importing *x, struct blobs *b, size_t *len, struct lh_error *err)
{
    const char *digest = x->req->digest;
    lh_autofree char *name = outside_manifest_name(digest), *path = NULL;

    if (!manifest_digest_valid(digest))
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "\"%.80s\" is not the digest of a manifest, 64 digits of 0-9a-f", digest),
               NULL;
    lh_autoclose int fd = outside_temporary(x->d, err);
    if (fd < 0 || !name || !(path = lh_format("/proc/self/fd/%d", fd)) ||
        blobs_get(b, name, fd, MANIFEST_MAX, x->deadline_ms, err) < 0)
        return NULL;
    return lh_read_file(path, MANIFEST_MAX, len, err);
}

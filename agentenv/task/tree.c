/* libarchive reads directories and archives alike, and writes with its guards on: no "..", no
 * absolute name, nothing through a symbolic link.  These guards hold for relative names only (an
 * absolute prefix would be checked too), so the copy runs in a thread with a working directory of
 * its own. */
#include "agentenv/task/tree.h"

#include <archive.h>
#include <archive_entry.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sodium.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/sandbox/facts.h"
#include "agentenv/task/whiteout.h"
#include "proto/cleanup.h"
#include "proto/file.h"

enum { ENTRIES_MAX = 4 << 20, BLOCK = 64 << 10 };
#define BYTES_MAX ((uint64_t)64 << 30)

struct item {
    char *path;
    uint8_t digest[TREE_DIGEST];
};

struct import {
    const char *from; /* for messages */
    const char *to;
    bool directory;  /* `from` is one, and is cut from the paths */
    struct oci *oci; /* an image of layers; its digest is taken of the tree in the end */
    int64_t uid_base;
    struct archive *in, *out; /* out NULL: only the digest is wanted */
    struct item *items;
    size_t n, room;
    uint64_t bytes;
    struct lh_error *err;
};

static int fail_archive(struct import *im, struct archive *a, struct lh_error *err)
{
    const char *why = archive_error_string(a);
    int code = archive_errno(a) > 0 && archive_errno(a) != EINVAL
                   ? lh_status_from_errno(archive_errno(a))
                   : LH_INVALID_ARGUMENT;

    return lh_fail(err, code, "%s: %s", im->from, why ? why : "unreadable");
}

/* ---- names ---- */

/* "./usr/bin/" → "usr/bin"; NULL for what is not below the tree. */
static char *clean(const char *name)
{
    size_t len;

    while (!strncmp(name, "./", 2))
        for (name += 2; *name == '/';)
            name++;
    if (!strcmp(name, "."))
        name++;
    if (*name == '/')
        return NULL;
    for (const char *part = name; *part; part += len + (part[len] == '/')) {
        len = strcspn(part, "/");
        if ((len == 2 && !strncmp(part, "..", 2)) || (len == 1 && *part == '.') || len > 255)
            return NULL;
    }
    for (len = strlen(name); len && name[len - 1] == '/';)
        len--;
    return strndup(name, len);
}

/* A directory's entries carry its own path in front. */
static const char *below_root(const struct import *im, const char *name)
{
    if (!im->directory || !name)
        return name;
    name += strlen(im->from);
    return name + strspn(name, "/");
}

static int rename_entry(struct import *im, struct archive_entry *e, struct lh_error *err)
{
    const char *name = archive_entry_pathname(e), *link = archive_entry_hardlink(e);
    const char *inside = below_root(im, name);
    lh_autofree char *path = inside ? clean(inside) : NULL;
    lh_autofree char *target = link ? clean(below_root(im, link)) : NULL;

    if (!path)
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s: the name '%.300s' leaves the tree", im->from,
                       name ? name : "(not representable)");
    if (link && (!target || !*target))
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s: %.200s is a hard link to '%.300s', outside",
                       im->from, name, link);
    archive_entry_copy_pathname(e, *path ? path : ".");
    if (link)
        archive_entry_copy_hardlink(e, target);
    return 0;
}

/* ---- digest ---- */

static void feed(crypto_generichash_state *h, const void *data, uint64_t len)
{
    crypto_generichash_update(h, (const uint8_t *)&len, sizeof len);
    crypto_generichash_update(h, data, len);
}

static void feed_text(crypto_generichash_state *h, const char *text)
{
    feed(h, text ? text : "", text ? strlen(text) : 0);
}

static void feed_head(crypto_generichash_state *h, struct archive_entry *e)
{
    int64_t numbers[] = {archive_entry_mode(e), archive_entry_uid(e), archive_entry_gid(e)};

    crypto_generichash_init(h, NULL, 0, TREE_DIGEST);
    feed_text(h, archive_entry_pathname(e));
    feed_text(h, archive_entry_symlink(e));
    feed_text(h, archive_entry_hardlink(e));
    feed(h, numbers, sizeof numbers);
}

static int remember(struct import *im, struct archive_entry *e, crypto_generichash_state *h,
                    struct lh_error *err)
{
    if (im->n == ENTRIES_MAX)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%s has more than %d files", im->from,
                       ENTRIES_MAX);
    if (im->n == im->room) {
        size_t room = im->room ? 2 * im->room : 1024;
        struct item *more = reallocarray(im->items, room, sizeof *more);

        if (!more)
            return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for %zu files", room);
        im->items = more;
        im->room = room;
    }
    struct item *item = &im->items[im->n];
    item->path = strdup(archive_entry_pathname(e));
    if (!item->path)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a path");
    crypto_generichash_final(h, item->digest, sizeof item->digest);
    im->n++;
    return 0;
}

static int by_path(const void *a, const void *b)
{
    return strcmp(((const struct item *)a)->path, ((const struct item *)b)->path);
}

static void total_digest(struct import *im, uint8_t digest[TREE_DIGEST])
{
    crypto_generichash_state h;

    if (im->n)
        qsort(im->items, im->n, sizeof *im->items, by_path);
    crypto_generichash_init(&h, NULL, 0, TREE_DIGEST);
    for (size_t i = 0; i < im->n; i++)
        crypto_generichash_update(&h, im->items[i].digest, TREE_DIGEST);
    crypto_generichash_final(&h, digest, TREE_DIGEST);
}

/* ---- entries ---- */

static bool is_kept(struct archive_entry *e)
{
    mode_t type = archive_entry_filetype(e);

    return archive_entry_hardlink(e) || type == AE_IFREG || type == AE_IFDIR || type == AE_IFLNK;
}

static void feed_zeros(crypto_generichash_state *h, uint64_t n)
{
    static const uint8_t zeros[BLOCK];

    for (; n > sizeof zeros; n -= sizeof zeros)
        crypto_generichash_update(h, zeros, sizeof zeros);
    crypto_generichash_update(h, zeros, n);
}

/* The digest sees content, not the blocks and holes it came in. */
static int copy_data(struct import *im, crypto_generichash_state *h, struct lh_error *err)
{
    const void *block;
    size_t len;
    int64_t offset;
    uint64_t at = 0;
    int r;

    while ((r = archive_read_data_block(im->in, &block, &len, &offset)) == ARCHIVE_OK) {
        if ((uint64_t)offset < at || offset + len > BYTES_MAX - im->bytes)
            return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%s has more than %llu bytes", im->from,
                           (unsigned long long)BYTES_MAX);
        if (im->out && archive_write_data_block(im->out, block, len, offset) < ARCHIVE_OK)
            return fail_archive(im, im->out, err);
        feed_zeros(h, (uint64_t)offset - at);
        crypto_generichash_update(h, block, len);
        at = (uint64_t)offset + len;
    }
    im->bytes += at;
    return r == ARCHIVE_EOF ? 0 : fail_archive(im, im->in, err);
}

/* Of an entry of a layer: what it replaces goes.  1 = it is a removal, done before. */
static int make_way(struct archive_entry *e, struct lh_error *err)
{
    const char *path = archive_entry_pathname(e), *name = strrchr(path, '/');

    if (!strncmp(name ? name + 1 : path, ".wh.", 4))
        return 1;
    return whiteout_make_way(AT_FDCWD, path, archive_entry_filetype(e) == AE_IFDIR, err);
}

/* Where images cannot be ID-mapped, their files have the ids of sandboxes on disk, as far as there
 * are such. */
static int place_owner(const struct import *im, struct archive_entry *e, struct lh_error *err)
{
    const struct box_facts *f = box_facts();
    int64_t uid = archive_entry_uid(e), gid = archive_entry_gid(e);

    if (f->idmap)
        return 0;
    if (uid >= f->uid_count || gid >= f->uid_count)
        return lh_fail(
            err, LH_FAILED_PRECONDITION,
            "%s: %.200s belongs to %lld:%lld, and only %u ids exist in sandboxes of this "
            "user: apt-get install uidmap and give a range in /etc/subuid and "
            "/etc/subgid, or make the archive with --owner=0 --group=0",
            im->from, archive_entry_pathname(e), (long long)uid, (long long)gid, f->uid_count);
    archive_entry_set_uid(e, uid + f->uid_base);
    archive_entry_set_gid(e, gid + f->uid_base);
    return 0;
}

/* In a directory, files of other users of this host: they cannot be given an id that is ours. */
static int refuse_foreign(const struct import *im, struct archive_entry *e, struct lh_error *err)
{
    const struct box_facts *f = box_facts();

    if (!f->rootless || !im->directory || archive_entry_uid(e) != f->host_root)
        return 0;
    return lh_fail(err, LH_FAILED_PRECONDITION,
                   "%s: %.200s belongs to another user of this host; import a tar archive of it, "
                   "or run agentenvd as root",
                   im->from, archive_entry_pathname(e));
}

/* A sandbox's files have ids of the host; those of its image do not. */
static void shift_owner(const struct import *im, struct archive_entry *e)
{
    if (archive_entry_uid(e) >= im->uid_base)
        archive_entry_set_uid(e, archive_entry_uid(e) - im->uid_base);
    if (archive_entry_gid(e) >= im->uid_base)
        archive_entry_set_gid(e, archive_entry_gid(e) - im->uid_base);
}

static int copy_entry(struct import *im, struct archive_entry *e, struct lh_error *err)
{
    crypto_generichash_state h;

    if (im->directory && archive_read_disk_can_descend(im->in))
        archive_read_disk_descend(im->in);
    int r = rename_entry(im, e, err);
    if (r < 0 || !is_kept(e))
        return r;
    if ((r = refuse_foreign(im, e, err)) < 0)
        return r;
    shift_owner(im, e);
    feed_head(&h, e);
    if (im->out && (r = place_owner(im, e, err)) < 0)
        return r;
    if (im->oci && (r = make_way(e, err)) != 0)
        return r < 0 ? r : 0;
    if (im->out && archive_write_header(im->out, e) < ARCHIVE_OK)
        return fail_archive(im, im->out, err);
    if (archive_entry_filetype(e) == AE_IFREG && !archive_entry_hardlink(e))
        r = copy_data(im, &h, err);
    if (r == 0 && im->out && archive_write_finish_entry(im->out) < ARCHIVE_OK)
        r = fail_archive(im, im->out, err);
    return r < 0 || im->oci ? r : remember(im, e, &h, err);
}

static int copy_all(struct import *im, struct lh_error *err)
{
    struct archive_entry *e;
    int r;

    while ((r = archive_read_next_header(im->in, &e)) == ARCHIVE_OK) {
        int copied = copy_entry(im, e, err);

        if (copied < 0)
            return copied;
    }
    if (r != ARCHIVE_EOF)
        return fail_archive(im, im->in, err);
    if (im->out && archive_write_close(im->out) < ARCHIVE_OK)
        return fail_archive(im, im->out, err);
    return im->n || im->oci ? 0 : lh_fail(err, LH_INVALID_ARGUMENT, "%s is empty", im->from);
}

/* ---- both ends ---- */

static int open_source(struct import *im, struct lh_error *err)
{
    if (im->directory) {
        im->in = archive_read_disk_new();
        if (!im->in)
            return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory to read %s", im->from);
        archive_read_disk_set_symlink_physical(im->in);
        archive_read_disk_set_behavior(
            im->in, ARCHIVE_READDISK_NO_TRAVERSE_MOUNTS | ARCHIVE_READDISK_NO_XATTR |
                        ARCHIVE_READDISK_NO_ACL | ARCHIVE_READDISK_NO_FFLAGS);
        return archive_read_disk_open(im->in, im->from) == ARCHIVE_OK
                   ? 0
                   : fail_archive(im, im->in, err);
    }
    im->in = archive_read_new();
    if (!im->in)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory to read %s", im->from);
    archive_read_support_filter_all(im->in);
    archive_read_support_format_tar(im->in);
    return archive_read_open_filename(im->in, im->from, BLOCK) == ARCHIVE_OK
               ? 0
               : fail_archive(im, im->in, err);
}

static int open_target(struct import *im, struct lh_error *err)
{
    im->out = archive_write_disk_new();
    if (!im->out)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory to write %s", im->to);
    archive_write_disk_set_options(
        im->out, ARCHIVE_EXTRACT_PERM | ARCHIVE_EXTRACT_OWNER | ARCHIVE_EXTRACT_TIME |
                     ARCHIVE_EXTRACT_SECURE_SYMLINKS | ARCHIVE_EXTRACT_SECURE_NODOTDOT |
                     ARCHIVE_EXTRACT_SECURE_NOABSOLUTEPATHS);
    return 0;
}

/* ---- an image of layers ---- */

static int remove_below(void *ctx, struct archive *layer, struct lh_error *err)
{
    struct import *im = ctx;
    struct archive_entry *e;
    bool was;
    int r;

    while ((r = archive_read_next_header(layer, &e)) == ARCHIVE_OK) {
        int removed = rename_entry(im, e, err);
        if (removed == 0)
            removed = whiteout_apply(AT_FDCWD, archive_entry_pathname(e), &was, err);
        if (removed < 0)
            return removed;
    }
    return r == ARCHIVE_EOF ? 0 : fail_archive(im, layer, err);
}

static int add_above(void *ctx, struct archive *layer, struct lh_error *err)
{
    struct import *im = ctx;
    int r = open_target(im, err);

    im->in = layer;
    if (r == 0)
        r = copy_all(im, err);
    im->in = NULL;
    archive_write_free(lh_steal(&im->out));
    return r;
}

static uid_t shifted_base(void)
{
    return box_facts()->idmap ? 0 : box_facts()->uid_base;
}

/* The finished tree has the digest that it has as a directory. */
static int digest_tree(struct import *im, struct lh_error *err)
{
    struct import again = {
        .from = im->to, .to = im->to, .directory = true, .uid_base = shifted_base(), .err = err};
    int r = open_source(&again, err);

    if (r == 0)
        r = copy_all(&again, err);
    archive_read_free(again.in);
    im->items = again.items;
    im->n = again.n;
    im->bytes = again.bytes;
    return r;
}

static int copy_layers(struct import *im)
{
    int r = oci_each_layer(im->oci, remove_below, add_above, im, im->err);

    return r < 0 ? r : digest_tree(im, im->err);
}

static int copy_tree(struct import *im)
{
    int r = open_source(im, im->err);

    if (r == 0)
        r = open_target(im, im->err);
    if (r == 0)
        r = copy_all(im, im->err);
    archive_read_free(im->in);
    archive_write_free(im->out);
    return r;
}

static void *copy_in_own_directory(void *arg)
{
    struct import *im = arg;
    int r = 0;

    if (unshare(CLONE_FS) < 0 || chdir(im->to) < 0)
        r = lh_fail_errno(im->err, errno, "entering %s", im->to);
    if (r == 0)
        r = im->oci ? copy_layers(im) : copy_tree(im);
    return (void *)(intptr_t)r;
}

static void finish(struct import *im)
{
    for (size_t i = 0; i < im->n; i++)
        free(im->items[i].path);
    free(im->items);
}

int tree_import(const struct tree_source *source, const char *to, uint8_t digest[TREE_DIGEST],
                uint64_t *bytes, struct lh_error *err)
{
    const char *from = source->path;
    struct import im = {
        .from = from, .to = to, .oci = source->oci, .uid_base = source->uid_base, .err = err};
    struct stat st;
    pthread_t thread;
    void *result;

    if (stat(from, &st) < 0)
        return lh_fail_errno(err, errno, "cannot read %s", from);
    im.directory = S_ISDIR(st.st_mode) && !im.oci;
    if (im.directory && !im.uid_base)
        im.uid_base = shifted_base();
    if (!S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode))
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s is neither a directory nor a tar file", from);
    int r = pthread_create(&thread, NULL, copy_in_own_directory, &im);
    if (r)
        return lh_fail_errno(err, r, "starting the import of %s", from);
    pthread_join(thread, &result);
    r = (int)(intptr_t)result;
    if (r == 0) {
        total_digest(&im, digest);
        *bytes = im.bytes;
    }
    finish(&im);
    return r;
}

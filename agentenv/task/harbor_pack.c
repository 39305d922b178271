/* A task directory as one tar within the task, so that what an importer did not understand,
 * comments and empty files among it, is written out as it came.  Names, contents and modes; owners
 * and times are left out, since they would make another task of the same files. */
#include <archive.h>
#include <archive_entry.h>
#include <errno.h>
#include <fts.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/task/harbor.h"
#include "proto/cleanup.h"
#include "proto/file.h"

enum { FILE_MAX = 16 << 20 };

static int fail(struct archive *a, const char *what, struct lh_error *err)
{
    const char *why = archive_error_string(a);

    return lh_fail(err, LH_INVALID_ARGUMENT, "%s: %s", what, why ? why : "libarchive failed");
}

static int put_file(struct archive *a, const FTSENT *e, const char *name, struct lh_error *err)
{
    struct archive_entry *entry = archive_entry_new();
    bool file = e->fts_info == FTS_F;
    size_t len = 0;
    lh_autofree char *data = file ? lh_read_file(e->fts_path, FILE_MAX, &len, err) : strdup("");

    if (!entry || !data) {
        archive_entry_free(entry);
        return err->code ? err->code : lh_fail_errno(err, ENOMEM, "%s", e->fts_path);
    }
    archive_entry_copy_pathname(entry, name);
    archive_entry_set_filetype(entry, file ? AE_IFREG : AE_IFDIR);
    archive_entry_set_perm(entry, e->fts_statp->st_mode & 0777);
    archive_entry_set_size(entry, (int64_t)len);
    int r = archive_write_header(a, entry) == ARCHIVE_OK && archive_write_data(a, data, len) >= 0
                ? 0
                : fail(a, e->fts_path, err);
    archive_entry_free(entry);
    return r;
}

static int by_name(const FTSENT **a, const FTSENT **b)
{
    return strcmp((*a)->fts_name, (*b)->fts_name);
}

static int put_all(struct archive *a, FTS *fts, size_t root, struct lh_error *err)
{
    int r = 0;

    for (FTSENT *e; r == 0 && (e = fts_read(fts));) {
        if (e->fts_info == FTS_DP || e->fts_level == 0)
            continue;
        r = e->fts_info == FTS_F || e->fts_info == FTS_D
                ? put_file(a, e, e->fts_path + root + 1, err)
                : lh_fail(err, LH_INVALID_ARGUMENT, "%s is neither a file nor a directory",
                          e->fts_path);
    }
    return r;
}

/* Everything the buffer must hold is in the files, plus headers; it grows as needed. */
static la_ssize_t append(struct archive *a, void *ctx, const void *data, size_t len)
{
    ProtobufCBinaryData *b = ctx;
    uint8_t *more = b->len + len <= FILE_MAX ? realloc(b->data, b->len + len) : NULL;

    if (!more) {
        archive_set_error(a, ENOMEM, "more than %d bytes", FILE_MAX);
        return -1;
    }
    memcpy(more + b->len, data, len);
    b->data = more;
    b->len += len;
    return (la_ssize_t)len;
}

int harbor_pack(const char *dir, ProtobufCBinaryData *out, struct lh_error *err)
{
    lh_autofree char *root = realpath(dir, NULL);
    char *const roots[] = {root, NULL};
    FTS *fts = root ? fts_open(roots, FTS_PHYSICAL | FTS_NOCHDIR, by_name) : NULL;
    struct archive *a = archive_write_new();

    if (!fts || !a) {
        archive_write_free(a);
        return lh_fail_errno(err, errno, "%s", dir);
    }
    archive_write_set_format_pax_restricted(a);
    archive_write_set_bytes_in_last_block(a, 1);
    int r = archive_write_open(a, out, NULL, append, NULL) == ARCHIVE_OK
                ? put_all(a, fts, strlen(root), err)
                : fail(a, dir, err);
    if (r == 0 && archive_write_close(a) != ARCHIVE_OK)
        r = fail(a, dir, err);
    archive_write_free(a);
    fts_close(fts);
    return r;
}

/* ---- and back ---- */

struct unpacking {
    const Task *task;
    const char *dir;
    struct lh_error *err;
};

static int copy_data(struct archive *from, struct archive *to, const char *name,
                     struct lh_error *err)
{
    const void *data;
    size_t len;
    int64_t at;
    int r;

    while ((r = archive_read_data_block(from, &data, &len, &at)) == ARCHIVE_OK)
        if (archive_write_data_block(to, data, len, at) < ARCHIVE_OK)
            return fail(to, name, err);
    return r == ARCHIVE_EOF ? 0 : fail(from, name, err);
}

static int unpack_entry(struct archive *from, struct archive *to, struct archive_entry *e,
                        struct lh_error *err)
{
    mode_t type = archive_entry_filetype(e);
    const char *name = archive_entry_pathname(e);

    if (!name || archive_entry_hardlink(e) || (type != AE_IFREG && type != AE_IFDIR))
        return lh_fail(err, LH_INVALID_ARGUMENT, "\"%.200s\" in the task is no file",
                       name ? name : "");
    if (archive_write_header(to, e) < ARCHIVE_OK)
        return fail(to, name, err);
    return type == AE_IFREG ? copy_data(from, to, name, err) : 0;
}

static int unpack(struct archive *from, struct archive *to, const struct unpacking *u)
{
    const ProtobufCBinaryData *b = &u->task->unknown;
    struct archive_entry *e;
    int r;

    archive_read_support_format_tar(from);
    if (archive_read_open_memory(from, b->data, b->len) != ARCHIVE_OK)
        return fail(from, u->task->name, u->err);
    archive_write_disk_set_options(to, ARCHIVE_EXTRACT_PERM | ARCHIVE_EXTRACT_SECURE_SYMLINKS |
                                           ARCHIVE_EXTRACT_SECURE_NODOTDOT |
                                           ARCHIVE_EXTRACT_SECURE_NOABSOLUTEPATHS |
                                           ARCHIVE_EXTRACT_NO_OVERWRITE);
    while ((r = archive_read_next_header(from, &e)) == ARCHIVE_OK) {
        int done = unpack_entry(from, to, e, u->err);
        if (done < 0)
            return done;
    }
    if (r != ARCHIVE_EOF)
        return fail(from, u->task->name, u->err);
    return archive_write_close(to) < ARCHIVE_OK ? fail(to, u->dir, u->err) : 0;
}

/* libarchive's guards hold for relative names, so a thread of its own has the directory as its
 * working directory (as in tree.c). */
static void *unpack_in_directory(void *arg)
{
    struct unpacking *u = arg;
    struct archive *from = archive_read_new(), *to = archive_write_disk_new();
    int r = !from || !to || unshare(CLONE_FS) < 0 || chdir(u->dir) < 0
                ? lh_fail_errno(u->err, errno, "%s", u->dir)
                : unpack(from, to, u);

    archive_read_free(from);
    archive_write_free(to);
    return (void *)(intptr_t)r;
}

int harbor_export(const Task *t, const char *dir, struct lh_error *err)
{
    struct unpacking u = {t, dir, err};
    pthread_t thread;
    void *result;

    if (!t->unknown.len)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "task %s did not come from a Harbor directory; see task show", t->name);
    if (mkdir(dir, 0777) < 0)
        return lh_fail_errno(err, errno, "%s", dir);
    int r = pthread_create(&thread, NULL, unpack_in_directory, &u);
    if (r)
        return lh_fail_errno(err, r, "%s", dir);
    pthread_join(thread, &result);
    return (int)(intptr_t)result;
}

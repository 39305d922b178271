/* Process images as entries of an archive, and back.  What comes in is held against the manifest,
 * whose code was checked: a name that it does not have is not made, a byte more than it says is not
 * written, and a file that is not what it says fails the import before anything is restored. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/sandbox/box.h"
#include "agentenv/snapshot/outside.h"
#include "agentenv/snapshot/processes.h"
#include "proto/file.h"

typedef V1(ProcessFile) ProcessFile;

enum { PIECE = 256 << 10 };

static const char top[] = OUTSIDE_PROCESSES "/";

/* ---- packing ---- */

static int archive_failure(struct archive *a, const char *name, struct lh_error *err)
{
    int code = archive_errno(a) > 0 ? lh_status_from_errno(archive_errno(a)) : LH_INTERNAL;
    const char *why = archive_error_string(a);

    return lh_fail(err, code, "process image %s: %s", name, why ? why : "libarchive failed");
}

static int put_content(struct archive *to, int fd, const ProcessFile *f, struct lh_error *err)
{
    lh_autofree uint8_t *piece = malloc(PIECE);
    uint64_t at = 0;
    ssize_t n;

    if (!piece)
        return lh_fail_errno(err, ENOMEM, "process image %s", f->name);
    for (; at < f->bytes && (n = pread(fd, piece, PIECE, (off_t)at)) > 0; at += (uint64_t)n)
        if (archive_write_data(to, piece, (size_t)n) < 0)
            return archive_failure(to, f->name, err);
    return at == f->bytes ? 0 : lh_fail(err, LH_ABORTED, "process image %s has changed", f->name);
}

static int put_file(struct archive *to, int images, const ProcessFile *f, struct lh_error *err)
{
    lh_autoclose int fd = openat(images, f->name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    lh_autofree char *name = lh_format("%s%s", top, f->name);
    struct archive_entry *e = name ? archive_entry_new() : NULL;

    if (fd < 0 || !e)
        return lh_fail_errno(err, e ? errno : ENOMEM, "process image %s", f->name);
    archive_entry_copy_pathname(e, name);
    archive_entry_set_filetype(e, AE_IFREG);
    archive_entry_set_perm(e, 0644);
    archive_entry_set_size(e, (int64_t)f->bytes);
    int r = archive_write_header(to, e) == ARCHIVE_OK ? 0 : archive_failure(to, f->name, err);
    archive_entry_free(e);
    return r == 0 ? put_content(to, fd, f, err) : r;
}

int processes_pack(struct archive *to, int images, const SnapshotManifest *m, struct lh_error *err)
{
    int r = 0;

    for (size_t i = 0; r == 0 && i < m->processes->n_files; i++)
        r = put_file(to, images, m->processes->files[i], err);
    return r;
}

/* ---- unpacking ---- */

struct process_unpack {
    const SnapshotManifest *m; /* borrowed */
    int dir;
    bool *done; /* of each file */
};

bool process_unpack_owns(const char *name)
{
    return name && !strncmp(name, top, sizeof top - 1);
}

/* Restored tasks read there when they have the sandbox's ids (sandbox/checkpoint.c). */
static int make_dir(int at, const char *path, mode_t mode, struct lh_error *err)
{
    if (mkdirat(at, path, 0700) < 0)
        return errno == EEXIST ? 0 : lh_fail_errno(err, errno, "directory %s", path);
    lh_autoclose int fd = openat(at, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    return fd < 0 || fchown(fd, 0, BOX_UID_BASE) < 0 || fchmod(fd, mode) < 0
               ? lh_fail_errno(err, errno, "directory %s", path)
               : 0;
}

struct process_unpack *process_unpack_create(const char *path, const SnapshotManifest *m,
                                             struct lh_error *err)
{
    lh_auto(process_unpack) u = calloc(1, sizeof *u);

    if (!u || !(u->done = calloc(m->processes->n_files + 1, sizeof *u->done)))
        return lh_fail_errno(err, ENOMEM, "process images"), NULL;
    u->m = m;
    u->dir = -1;
    if (make_dir(AT_FDCWD, path, 0710, err) < 0)
        return NULL;
    u->dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    return u->dir < 0 ? (lh_fail_errno(err, errno, "directory %s", path), NULL) : lh_steal(&u);
}

void process_unpack_destroy(struct process_unpack *u)
{
    if (!u)
        return;
    lh_cleanup_close(&u->dir);
    free(u->done);
    free(u);
}

static int find(const struct process_unpack *u, const char *name)
{
    for (size_t i = 0; i < u->m->processes->n_files; i++)
        if (!strcmp(u->m->processes->files[i]->name, name))
            return (int)i;
    return -1;
}

/* The directories in front of a name that the manifest has (manifest.c says of what form). */
static int make_dirs(const struct process_unpack *u, const char *name, struct lh_error *err)
{
    int r = 0;

    for (const char *slash = name; r == 0 && (slash = strchr(slash, '/')); slash++) {
        lh_autofree char *path = strndup(name, (size_t)(slash - name));
        r = path ? make_dir(u->dir, path, 0750, err) : lh_fail_errno(err, ENOMEM, "%s", name);
    }
    return r;
}

static int take_content(struct archive *from, int fd, const ProcessFile *f, struct lh_error *err)
{
    lh_autofree uint8_t *piece = malloc(PIECE);
    uint64_t got = 0;
    la_ssize_t n;

    if (!piece)
        return lh_fail_errno(err, ENOMEM, "process image %s", f->name);
    while ((n = archive_read_data(from, piece, PIECE)) > 0) {
        got += (uint64_t)n;
        int r = got > f->bytes ? 0 : lh_write_all(fd, piece, (size_t)n, err);
        if (r < 0)
            return r;
        if (got > f->bytes)
            break;
    }
    return n < 0 ? lh_fail(err, LH_DATA_LOSS, "process image %s is damaged", f->name) : 0;
}

int process_unpack_entry(struct process_unpack *u, struct archive *from, struct archive_entry *e,
                         struct lh_error *err)
{
    const char *name = archive_entry_pathname(e) + sizeof top - 1;
    char digest[LAYER_ADDRESS_SIZE];
    uint64_t bytes;
    int i = find(u, name);

    if (i < 0 || u->done[i] || archive_entry_filetype(e) != AE_IFREG || archive_entry_hardlink(e))
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "\"%.200s\" is no process image of the snapshot, or comes twice", name);
    const ProcessFile *f = u->m->processes->files[i];
    int r = make_dirs(u, f->name, err);
    if (r < 0)
        return r;
    lh_autoclose int fd =
        openat(u->dir, f->name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (fd < 0)
        return lh_fail_errno(err, errno, "process image %s", f->name);
    r = take_content(from, fd, f, err);
    if (r == 0)
        r = process_digest(fd, digest, &bytes, err);
    if (r < 0)
        return r;
    if (bytes != f->bytes || strcmp(digest, f->digest))
        return lh_fail(err, LH_DATA_LOSS,
                       "process image %s holds something else than the manifest says: refused",
                       f->name);
    u->done[i] = true;
    return 0;
}

int process_unpack_finish(const struct process_unpack *u, struct lh_error *err)
{
    for (size_t i = 0; i < u->m->processes->n_files; i++)
        if (!u->done[i])
            return lh_fail(err, LH_DATA_LOSS, "process image %s is missing",
                           u->m->processes->files[i]->name);
    return 0;
}

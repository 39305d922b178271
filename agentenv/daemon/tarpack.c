#include <archive.h>
#include <archive_entry.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

#include "agentenv/daemon/tar.h"
#include "proto/cleanup.h"
#include "proto/file.h"

enum { MAX_DEPTH = 128, PIECE = 256 << 10 };

struct pack {
    const struct inroot *root;
    struct archive *archive;
    struct archive_entry_linkresolver *links;
    tar_sink_fn *sink;
    void *ctx;
    struct lh_error *err; /* of the sink, which libarchive cannot carry */
    int sink_status;
};

static la_ssize_t on_write(struct archive *a, void *ctx, const void *data, size_t len)
{
    struct pack *p = ctx;

    (void)a;
    p->sink_status = p->sink(p->ctx, data, len, p->err);
    return p->sink_status < 0 ? -1 : (la_ssize_t)len;
}

static int archive_failure(struct pack *p, const char *name, struct lh_error *err)
{
    const char *why = archive_error_string(p->archive);

    if (p->sink_status < 0)
        return p->sink_status;
    return lh_fail(err, LH_INTERNAL, "packing %s: %s", name, why ? why : "libarchive failed");
}

/* Exactly `size` bytes, as the header said: a file that shrinks meanwhile is padded with zeros, one
 * that grows is cut.  Of a sparse file libarchive drops the holes again. */
static int write_data(struct pack *p, int fd, int64_t size, const char *name, struct lh_error *err)
{
    char buf[64 << 10];

    lseek(fd, 0, SEEK_SET); /* looking for holes has moved it */
    while (size > 0) {
        size_t want = size < (int64_t)sizeof buf ? (size_t)size : sizeof buf;
        ssize_t n = read(fd, buf, want);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return lh_fail_errno(err, errno, "reading %s", name);
        if (n == 0) {
            memset(buf, 0, want);
            n = (ssize_t)want;
        }
        if (archive_write_data(p->archive, buf, (size_t)n) < 0)
            return archive_failure(p, name, err);
        size -= n;
    }
    return 0;
}

/* The data of a file with holes, at most MAX_PIECES pieces of it: a hostile one has millions. */
static void note_holes(int fd, struct archive_entry *e)
{
    enum { MAX_PIECES = 10000 };
    off_t size = archive_entry_size(e), at = 0;

    if (lseek(fd, 0, SEEK_HOLE) >= size)
        return;
    for (int i = 0; i < MAX_PIECES && at < size; i++) {
        off_t data = lseek(fd, at, SEEK_DATA);
        if (data < 0 || data >= size) /* nothing but a hole is left */
            break;
        at = i == MAX_PIECES - 1 ? size : lseek(fd, data, SEEK_HOLE);
        at = at < 0 || at > size ? size : at;
        archive_entry_sparse_add_entry(e, data, at - data);
    }
    if (archive_entry_sparse_count(e) == 0)
        archive_entry_sparse_add_entry(e, size, 0);
}

static int put_entry(struct pack *p, int fd, const char *name, const struct stat *st,
                     struct lh_error *err)
{
    struct archive_entry *e = archive_entry_new(), *sparse = NULL;
    char target[PATH_MAX];
    int r = 0;

    if (!e)
        return lh_fail_errno(err, ENOMEM, "packing %s", name);
    archive_entry_copy_stat(e, st);
    archive_entry_set_uid(e, inroot_from_host(p->root, st->st_uid));
    archive_entry_set_gid(e, inroot_from_host(p->root, st->st_gid));
    archive_entry_copy_pathname(e, name);
    if (S_ISLNK(st->st_mode)) {
        ssize_t n = readlinkat(fd, "", target, sizeof target - 1);
        target[n > 0 ? n : 0] = 0;
        archive_entry_copy_symlink(e, target);
    }
    archive_entry_linkify(p->links, &e, &sparse); /* a second name of one file: no data again */
    bool has_data = S_ISREG(st->st_mode) && archive_entry_size(e) > 0;
    lh_autoclose int data = has_data ? inroot_reopen(fd, err) : -1;
    if (has_data && data < 0)
        r = data;
    if (data >= 0)
        note_holes(data, e);
    if (r == 0 && archive_write_header(p->archive, e) < ARCHIVE_WARN)
        r = archive_failure(p, name, err);
    if (r == 0 && has_data)
        r = write_data(p, data, archive_entry_size(e), name, err);
    archive_entry_free(e);
    return r;
}

static int pack_tree(struct pack *p, int fd, const char *name, int depth, struct lh_error *err);

static int pack_children(struct pack *p, int fd, const char *name, int depth, struct lh_error *err)
{
    int real = inroot_reopen(fd, err);
    if (real < 0)
        return real;
    lh_autoclosedir DIR *dir = fdopendir(real);
    if (!dir) {
        close(real);
        return lh_fail_errno(err, errno, "listing %s", name);
    }
    for (struct dirent *d; (d = readdir(dir));) {
        if (!strcmp(d->d_name, ".") || !strcmp(d->d_name, ".."))
            continue;
        lh_autoclose int child = openat(fd, d->d_name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
        if (child < 0 && errno == ENOENT) /* removed meanwhile */
            continue;
        lh_autofree char *child_name = lh_format("%s/%s", name, d->d_name);
        if (child < 0 || !child_name)
            return lh_fail_errno(err, errno, "packing %s/%s", name, d->d_name);
        int r = pack_tree(p, child, child_name, depth + 1, err);
        if (r < 0)
            return r;
    }
    return 0;
}

static int pack_tree(struct pack *p, int fd, const char *name, int depth, struct lh_error *err)
{
    struct stat st;

    if (fstat(fd, &st) < 0)
        return lh_fail_errno(err, errno, "packing %s", name);
    if (depth > MAX_DEPTH)
        return lh_fail(err, LH_INVALID_ARGUMENT, "%.200s... is nested deeper than %d", name,
                       MAX_DEPTH);
    bool known = S_ISREG(st.st_mode) || S_ISDIR(st.st_mode) || S_ISLNK(st.st_mode);
    if (!known && depth == 0)
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s is a device, FIFO or socket: not copied",
                       name);
    if (!known)
        return 0;
    int r = put_entry(p, fd, name, &st, err);
    return r == 0 && S_ISDIR(st.st_mode) ? pack_children(p, fd, name, depth, err) : r;
}

/* The file itself, a final symbolic link not followed; and the name it gets in the archive. */
static int find_source(const struct inroot *r, const char *path, const char **name,
                       struct lh_error *err)
{
    if (path[0] == '/' && path[strspn(path, "/")] == 0) {
        *name = "root";
        return inroot_find(r, "/", err);
    }
    lh_autoclose int parent = inroot_find_parent(r, path, false, name, err);
    if (parent < 0)
        return parent;
    int fd = openat(parent, *name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    return fd < 0 ? lh_fail_errno(err, errno, "%s in the sandbox", path) : fd;
}

static int pack_to_archive(struct pack *p, int fd, const char *name, struct lh_error *err)
{
    archive_write_set_format_pax_restricted(p->archive); /* long names, any bytes in them, holes */
    archive_write_set_bytes_per_block(p->archive, PIECE);
    archive_write_set_bytes_in_last_block(p->archive, 1);
    archive_entry_linkresolver_set_strategy(p->links, ARCHIVE_FORMAT_TAR_PAX_RESTRICTED);
    if (archive_write_open(p->archive, p, NULL, on_write, NULL) != ARCHIVE_OK)
        return archive_failure(p, name, err);
    int r = pack_tree(p, fd, name, 0, err);
    if (r == 0 && archive_write_close(p->archive) != ARCHIVE_OK)
        r = archive_failure(p, name, err);
    return r;
}

int tar_pack(const struct inroot *r, const char *path, tar_sink_fn *sink, void *ctx,
             struct lh_error *err)
{
    struct pack p = {.root = r, .sink = sink, .ctx = ctx, .err = err};
    const char *name;
    int rc;

    lh_autoclose int fd = find_source(r, path, &name, err);
    if (fd < 0)
        return fd;
    p.archive = archive_write_new();
    p.links = archive_entry_linkresolver_new();
    if (p.archive && p.links)
        rc = pack_to_archive(&p, fd, name, err);
    else
        rc = lh_fail_errno(err, ENOMEM, "packing %s", name);
    if (p.archive)
        archive_write_free(p.archive);
    if (p.links)
        archive_entry_linkresolver_free(p.links);
    return rc;
}

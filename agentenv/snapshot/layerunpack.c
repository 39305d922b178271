#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "agentenv/sandbox/box.h"
#include "agentenv/sandbox/facts.h"
#include "agentenv/snapshot/layertar.h"
#include "agentenv/snapshot/layerwalk.h"
#include "proto/cleanup.h"

enum { HOLE = 4096 };

/* Entries change the time of the directory they are made in, so these are set last. */
struct dir_time {
    char *name;
    struct timespec mtime;
};

struct layer_unpack {
    int root;
    struct dir_time *dirs;
    size_t n_dirs, room;
    uint64_t bytes;
    uint32_t entries;
};

struct layer_unpack *layer_unpack_create(const char *dir, struct lh_error *err)
{
    struct layer_unpack *u = calloc(1, sizeof *u);

    if (!u)
        return lh_fail_errno(err, ENOMEM, "%s", dir), NULL;
    u->root = open(dir, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (u->root < 0) {
        lh_fail_errno(err, errno, "%s", dir);
        layer_unpack_destroy(u);
        return NULL;
    }
    return u;
}

void layer_unpack_destroy(struct layer_unpack *u)
{
    if (!u)
        return;
    for (size_t i = 0; i < u->n_dirs; i++)
        free(u->dirs[i].name);
    free(u->dirs);
    if (u->root >= 0)
        close(u->root);
    free(u);
}

/* ---- names ---- */

static int refuse(struct lh_error *err, const char *name, const char *why)
{
    return lh_fail(err, LH_INVALID_ARGUMENT, "archive entry \"%.200s\" is refused: %s", name, why);
}

/* The name within the layer in `out`, "" for the layer itself; a directory's slash is cut off. */
static int name_below(const char *full, const char *prefix, char out[PATH_MAX],
                      struct lh_error *err)
{
    size_t n = strlen(prefix), len = full ? strlen(full) : 0;

    if (!full || strncmp(full, prefix, n) != 0 || (n && full[n] && full[n] != '/') ||
        len - n >= PATH_MAX)
        return refuse(err, full ? full : "", "not a name of this layer");
    snprintf(out, PATH_MAX, "%s", full + n + (n && full[n]));
    len = strlen(out);
    if (len && out[len - 1] == '/')
        out[--len] = 0;
    if (!n && !strcmp(out, "."))
        out[0] = 0;
    return 0;
}

/* The directory that holds `name`, which an earlier entry made; *last is the rest of the name. */
static int open_parent(const struct layer_unpack *u, const char *name, const char **last,
                       struct lh_error *err)
{
    lh_autoclose int at = fcntl(u->root, F_DUPFD_CLOEXEC, 0);
    char part[256];
    int depth = 0;

    for (const char *p = name; at >= 0; depth++) {
        size_t len = strcspn(p, "/");
        if (len == 0 || len > 255 || (len == 1 && *p == '.') || (len == 2 && !memcmp(p, "..", 2)))
            return refuse(err, name, "not the name of something in a layer");
        if (!p[len]) {
            *last = p;
            return lh_steal_fd(&at);
        }
        if (depth == LAYER_DEPTH_MAX)
            return refuse(err, name, "nested too deep");
        memcpy(part, p, len);
        part[len] = 0;
        int next = openat(at, part, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (next < 0)
            return refuse(err, name, "below what is no directory of the archive");
        close(at);
        at = next;
        p += len + 1;
    }
    return lh_fail_errno(err, errno, "unpacking a layer");
}

/* ---- attributes ---- */

static int check_owner(struct archive_entry *e, const char *name, struct lh_error *err)
{
    int64_t uid = archive_entry_uid(e), gid = archive_entry_gid(e);
    int64_t last = box_facts()->idmap ? BOX_INIT_UID : box_facts()->uid_count - 1;

    return uid < 0 || uid > last || gid < 0 || gid > last
               ? refuse(err, name, "its owner is no user of a sandbox")
               : 0;
}

static int set_xattr(int fd, mode_t type, const char *name, const char *key, const void *value,
                     size_t len, struct lh_error *err)
{
    bool opaque =
        !strcmp(key, LAYER_OPAQUE) && type == AE_IFDIR && len == 1 && *(char *)value == 'y';
    bool user = !strncmp(key, "user.", 5) && (type == AE_IFDIR || type == AE_IFREG);

    if (!opaque && !user)
        return refuse(err, name, "it has an attribute that a layer may not have");
    char on_disk[LAYER_XATTR_NAME];
    return fsetxattr(fd, layer_xattr_on_disk(key, on_disk), value, len, 0) < 0
               ? lh_fail_errno(err, errno, "attribute %.100s of %.200s", key, name)
               : 0;
}

static int set_xattrs(int fd, struct archive_entry *e, const char *name, struct lh_error *err)
{
    const char *key;
    const void *value;
    size_t len;

    archive_entry_xattr_reset(e);
    while (archive_entry_xattr_next(e, &key, &value, &len) == ARCHIVE_OK) {
        int r = key ? set_xattr(fd, archive_entry_filetype(e), name, key, value, len, err)
                    : refuse(err, name, "it has an attribute without a name");
        if (r < 0)
            return r;
    }
    return 0;
}

static struct timespec mtime_of(struct archive_entry *e)
{
    return (struct timespec){archive_entry_mtime(e), archive_entry_mtime_nsec(e)};
}

/* Of a file or directory that is open. */
static int set_metadata(int fd, struct archive_entry *e, const char *name, struct lh_error *err)
{
    const struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, mtime_of(e)};
    int r = set_xattrs(fd, e, name, err);

    if (r == 0 && (fchown(fd, box_facts()->uid_base + (uid_t)archive_entry_uid(e),
                          box_facts()->uid_base + (gid_t)archive_entry_gid(e)) < 0 ||
                   fchmod(fd, archive_entry_perm(e) & 07777) < 0 || futimens(fd, times) < 0))
        r = lh_fail_errno(err, errno, "attributes of %.200s", name);
    return r;
}

/* Of what cannot be opened; a link has no mode of its own. */
static int set_metadata_at(int dir, const char *last, struct archive_entry *e, const char *name,
                           struct lh_error *err)
{
    const struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, mtime_of(e)};
    bool link = archive_entry_filetype(e) == AE_IFLNK;

    if (fchownat(dir, last, box_facts()->uid_base + (uid_t)archive_entry_uid(e),
                 box_facts()->uid_base + (gid_t)archive_entry_gid(e), AT_SYMLINK_NOFOLLOW) < 0 ||
        (!link && fchmodat(dir, last, archive_entry_perm(e) & 07777, 0) < 0) ||
        utimensat(dir, last, times, AT_SYMLINK_NOFOLLOW) < 0)
        return lh_fail_errno(err, errno, "attributes of %.200s", name);
    return 0;
}

/* ---- kinds ---- */

static bool all_zero(const char *data, size_t len)
{
    return len == 0 || (data[0] == 0 && !memcmp(data, data + 1, len - 1));
}

/* A piece of zeros stays a hole. */
static int write_piece(int fd, const char *data, size_t len, int64_t at, const char *name,
                       struct lh_error *err)
{
    for (size_t done = 0, n; done < len; done += n) {
        n = len - done < HOLE ? len - done : HOLE;
        if (all_zero(data + done, n))
            continue;
        ssize_t wrote = pwrite(fd, data + done, n, at + (off_t)done);
        if (wrote < 0)
            return lh_fail_errno(err, errno, "writing %.200s", name);
        n = (size_t)wrote;
    }
    return 0;
}

static int write_content(struct layer_unpack *u, int fd, struct archive *from, const char *name,
                         struct lh_error *err)
{
    const void *data;
    size_t len;
    int64_t at;
    int rc, r;

    while ((rc = archive_read_data_block(from, &data, &len, &at)) == ARCHIVE_OK) {
        u->bytes += len;
        if (at < 0 || u->bytes > LAYER_BYTES_MAX)
            return lh_fail(err, LH_RESOURCE_EXHAUSTED, "a layer of more than %llu bytes",
                           (unsigned long long)LAYER_BYTES_MAX);
        if ((r = write_piece(fd, data, len, at, name, err)) < 0)
            return r;
    }
    if (rc == ARCHIVE_EOF)
        return 0;
    const char *why = archive_error_string(from);
    return lh_fail(err, LH_DATA_LOSS, "reading %.200s: %s", name, why ? why : "damaged archive");
}

static int make_file(struct layer_unpack *u, int dir, const char *last, struct archive *from,
                     struct archive_entry *e, const char *name, struct lh_error *err)
{
    int64_t size = archive_entry_size(e);

    if (size < 0 || (uint64_t)size > LAYER_BYTES_MAX)
        return refuse(err, name, "it claims an impossible size");
    lh_autoclose int fd =
        openat(dir, last, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return lh_fail_errno(err, errno, "making %.200s", name);
    int r = write_content(u, fd, from, name, err);
    if (r == 0 && ftruncate(fd, size) < 0)
        r = lh_fail_errno(err, errno, "size of %.200s", name);
    return r < 0 ? r : set_metadata(fd, e, name, err);
}

static int note_time(struct layer_unpack *u, struct archive_entry *e, const char *name,
                     struct lh_error *err)
{
    if (u->n_dirs == u->room) {
        size_t room = u->room ? 2 * u->room : 64;
        struct dir_time *more = realloc(u->dirs, room * sizeof *more);
        if (!more)
            return lh_fail_errno(err, ENOMEM, "unpacking a layer");
        u->dirs = more;
        u->room = room;
    }
    char *copy = strdup(name);
    if (!copy)
        return lh_fail_errno(err, ENOMEM, "unpacking a layer");
    u->dirs[u->n_dirs++] = (struct dir_time){copy, mtime_of(e)};
    return 0;
}

static int make_dir(struct layer_unpack *u, int dir, const char *last, struct archive_entry *e,
                    const char *name, struct lh_error *err)
{
    if (mkdirat(dir, last, 0700) < 0)
        return lh_fail_errno(err, errno, "making %.200s", name);
    lh_autoclose int fd = openat(dir, last, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return lh_fail_errno(err, errno, "making %.200s", name);
    int r = set_metadata(fd, e, name, err);
    return r < 0 ? r : note_time(u, e, name, err);
}

static int make_link(struct layer_unpack *u, int dir, const char *last, const char *target,
                     const char *name, struct lh_error *err)
{
    const char *last_of_target;

    lh_autoclose int from = open_parent(u, target, &last_of_target, err);
    if (from < 0)
        return from;
    return linkat(from, last_of_target, dir, last, 0) < 0
               ? refuse(err, name, "a hard link to what is not in the layer")
               : 0;
}

/* 1 = marked as a socket, 0 = not, or refused. */
static int is_socket(struct archive_entry *e, const char *name, struct lh_error *err)
{
    const char *key;
    const void *value;
    size_t len;
    int marked = 0;

    archive_entry_xattr_reset(e);
    while (archive_entry_xattr_next(e, &key, &value, &len) == ARCHIVE_OK) {
        if (!key || strcmp(key, LAYER_SOCKET) != 0)
            return refuse(err, name, "it has an attribute that a layer may not have");
        marked = 1;
    }
    return marked;
}

/* FIFOs, sockets and whiteouts. */
static int make_node(int dir, const char *last, struct archive_entry *e, const char *name,
                     struct lh_error *err)
{
    bool whiteout = archive_entry_filetype(e) == AE_IFCHR;
    int socket = is_socket(e, name, err);
    mode_t type = whiteout ? S_IFCHR : socket ? S_IFSOCK : S_IFIFO;

    if (socket < 0)
        return socket;
    if (whiteout && (archive_entry_rdevmajor(e) || archive_entry_rdevminor(e)))
        return refuse(err, name, "a device");
    if (mknodat(dir, last, type, 0) < 0)
        return lh_fail_errno(err, errno, "making %.200s", name);
    return whiteout ? 0 : set_metadata_at(dir, last, e, name, err);
}

static int make_symlink(int dir, const char *last, struct archive_entry *e, const char *name,
                        struct lh_error *err)
{
    const char *target = archive_entry_symlink(e);

    if (!target || !*target)
        return refuse(err, name, "a symbolic link to nothing");
    if (symlinkat(target, dir, last) < 0)
        return lh_fail_errno(err, errno, "making %.200s", name);
    return set_metadata_at(dir, last, e, name, err);
}

static int make(struct layer_unpack *u, int dir, const char *last, struct archive *from,
                struct archive_entry *e, const char *name, struct lh_error *err)
{
    switch (archive_entry_filetype(e)) {
    case AE_IFREG:
        return make_file(u, dir, last, from, e, name, err);
    case AE_IFDIR:
        return make_dir(u, dir, last, e, name, err);
    case AE_IFLNK:
        return make_symlink(dir, last, e, name, err);
    case AE_IFIFO:
    case AE_IFCHR:
        return make_node(dir, last, e, name, err);
    default:
        return refuse(err, name, "a device or something unknown");
    }
}

/* The layer itself exists already. */
static int set_root(struct layer_unpack *u, struct archive_entry *e, struct lh_error *err)
{
    if (archive_entry_filetype(e) != AE_IFDIR || u->entries != 1)
        return refuse(err, ".", "the layer itself must be a directory and come first");
    int r = set_metadata(u->root, e, ".", err);
    return r < 0 ? r : note_time(u, e, "", err);
}

int layer_unpack_entry(struct layer_unpack *u, struct archive *from, struct archive_entry *e,
                       const char *prefix, struct lh_error *err)
{
    const char *last, *link = archive_entry_hardlink(e);
    char name[PATH_MAX], target[PATH_MAX];
    int r = name_below(archive_entry_pathname(e), prefix, name, err);

    if (r == 0 && link)
        r = name_below(link, prefix, target, err);
    if (r == 0)
        r = check_owner(e, name, err);
    if (r == 0 && ++u->entries > LAYER_ENTRIES_MAX)
        r = lh_fail(err, LH_RESOURCE_EXHAUSTED, "a layer of more than %d files", LAYER_ENTRIES_MAX);
    if (r < 0 || !*name)
        return r < 0 ? r : set_root(u, e, err);
    lh_autoclose int dir = open_parent(u, name, &last, err);
    if (dir < 0)
        return dir;
    return link ? make_link(u, dir, last, target, name, err)
                : make(u, dir, last, from, e, name, err);
}

static int set_dir_time(struct layer_unpack *u, const struct dir_time *d, struct lh_error *err)
{
    const struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, d->mtime};
    const char *last = ".";

    lh_autoclose int dir =
        *d->name ? open_parent(u, d->name, &last, err) : fcntl(u->root, F_DUPFD_CLOEXEC, 0);
    if (dir < 0)
        return LH_INTERNAL;
    return utimensat(dir, last, times, AT_SYMLINK_NOFOLLOW) < 0
               ? lh_fail_errno(err, errno, "time of %.200s", d->name)
               : 0;
}

int layer_unpack_finish(struct layer_unpack *u, struct lh_error *err)
{
    int r = 0;

    for (size_t i = u->n_dirs; r == 0 && i-- > 0;)
        r = set_dir_time(u, &u->dirs[i], err);
    return r;
}

#include "agentenv/cli/copy.h"

#include <archive.h>
#include <archive_entry.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/cli/verbs.h"
#include "proto/file.h"
#include "proto/parse.h"

/* One Upload carries at most this much; a tree is cut between entries. */
enum { PIECE = 32 << 20, FILE_MAX = 58 << 20, COPY_MS = 600000 };

static int archive_failure(struct archive *a, const char *what, struct lh_error *err)
{
    const char *why = archive_error_string(a);

    return lh_fail(err, LH_INTERNAL, "%s: %s", what, why ? why : "libarchive failed");
}

/* The last component, trailing slashes off; "" for "/" and ".". */
static char *base_name(const char *path)
{
    size_t len = strlen(path);

    while (len > 1 && path[len - 1] == '/')
        len--;
    size_t cut = len;
    while (cut > 0 && path[cut - 1] != '/')
        cut--;
    char *name = strndup(path + cut, len - cut);
    if (name && (!strcmp(name, ".") || !strcmp(name, "..") || !strcmp(name, "/")))
        name[0] = 0;
    return name;
}

/* A replacement for the first component of `name`, which is `old_len` long. */
static char *rename_top(const char *name, size_t old_len, const char *top)
{
    const char *rest = name + (strlen(name) >= old_len ? old_len : strlen(name));

    return top[0] ? lh_format("%s%s", top, rest) : lh_format(".%s", rest);
}

/* ---- in ---- */

struct uploading {
    struct cli *cli;
    const char *id;
    const char *dir; /* in the sandbox */
    struct archive *out;
    char *buf;
    size_t len, room;
};

static la_ssize_t grow(struct archive *a, void *ctx, const void *data, size_t len)
{
    struct uploading *u = ctx;

    (void)a;
    if (u->len + len > u->room) {
        size_t room = 2 * (u->len + len);
        char *more = realloc(u->buf, room);
        if (!more)
            return -1;
        u->buf = more;
        u->room = room;
    }
    memcpy(u->buf + u->len, data, len);
    u->len += len;
    return (la_ssize_t)len;
}

static int open_piece(struct uploading *u, struct lh_error *err)
{
    u->len = 0;
    u->out = archive_write_new();
    if (!u->out)
        return lh_fail_errno(err, ENOMEM, "cp");
    archive_write_set_format_gnutar(u->out);
    archive_write_set_bytes_in_last_block(u->out, 1);
    return archive_write_open(u->out, u, NULL, grow, NULL) == ARCHIVE_OK
               ? 0
               : archive_failure(u->out, "cp", err);
}

static int send_piece(struct uploading *u, struct lh_error *err)
{
    V1(UploadRequest) req = LONGHAUL__SANDBOX__V1__UPLOAD_REQUEST__INIT;
    lh_automsg(V1(UploadReply)) reply = NULL;

    if (archive_write_close(u->out) != ARCHIVE_OK)
        return archive_failure(u->out, "cp", err);
    archive_write_free(u->out);
    u->out = NULL;
    req.id = (char *)u->id;
    req.path = (char *)u->dir;
    req.tar.data = (uint8_t *)u->buf;
    req.tar.len = u->len;
    return cli_call(u->cli, "Upload", &req.base, &longhaul__sandbox__v1__upload_reply__descriptor,
                    COPY_MS, (ProtobufCMessage **)&reply, err);
}

static int add_data(struct uploading *u, struct archive *disk, const char *name,
                    struct lh_error *err)
{
    const void *data;
    size_t len;
    la_int64_t offset;
    int64_t at = 0;
    static const char zeros[4096];
    int rc;

    while ((rc = archive_read_data_block(disk, &data, &len, &offset)) == ARCHIVE_OK) {
        for (; at < offset;
             at += (int64_t)sizeof zeros < offset - at ? (int64_t)sizeof zeros : offset - at)
            if (archive_write_data(u->out, zeros,
                                   (int64_t)sizeof zeros < offset - at ? sizeof zeros
                                                                       : (size_t)(offset - at)) < 0)
                return archive_failure(u->out, name, err);
        if (archive_write_data(u->out, data, len) < 0)
            return archive_failure(u->out, name, err);
        at = offset + (int64_t)len;
    }
    return rc == ARCHIVE_EOF ? 0 : archive_failure(disk, name, err);
}

static int add_entry(struct uploading *u, struct archive *disk, struct archive_entry *e,
                     size_t local_len, const char *top, struct lh_error *err)
{
    const char *name = archive_entry_pathname(e);
    lh_autofree char *renamed = rename_top(name, local_len, top);

    if (!renamed)
        return lh_fail_errno(err, ENOMEM, "cp");
    if (archive_entry_size(e) > FILE_MAX)
        return lh_fail(err, LH_OUT_OF_RANGE, "%s has %lld bytes; one file may have %d", name,
                       (long long)archive_entry_size(e), FILE_MAX);
    archive_entry_set_uid(e, 0); /* root of the sandbox; ids of this machine mean nothing there */
    archive_entry_set_gid(e, 0);
    archive_entry_set_uname(e, NULL);
    archive_entry_set_gname(e, NULL);
    lh_autofree char *copy = lh_steal(&renamed);
    archive_entry_copy_pathname(e, copy);
    if (archive_write_header(u->out, e) != ARCHIVE_OK)
        return archive_failure(u->out, copy, err);
    return archive_entry_filetype(e) == AE_IFREG ? add_data(u, disk, copy, err) : 0;
}

static int add_tree(struct uploading *u, struct archive *disk, const char *local, const char *top,
                    struct lh_error *err)
{
    lh_autofree char *clean = strdup(local);
    size_t len = strlen(local);
    struct archive_entry *e = archive_entry_new();
    int r = 0, rc;

    if (!e || !clean)
        return archive_entry_free(e), lh_fail_errno(err, ENOMEM, "cp");
    while (len > 1 && clean[len - 1] == '/')
        clean[--len] = 0;
    if (archive_read_disk_open(disk, clean) != ARCHIVE_OK)
        r = archive_failure(disk, local, err);
    while (r == 0 && (rc = archive_read_next_header2(disk, e)) != ARCHIVE_EOF) {
        if (rc < ARCHIVE_WARN)
            r = archive_failure(disk, local, err);
        archive_read_disk_descend(disk);
        if (r == 0)
            r = add_entry(u, disk, e, len, top, err);
        if (r == 0 && u->len > PIECE && (r = send_piece(u, err)) == 0)
            r = open_piece(u, err);
    }
    archive_entry_free(e);
    return r;
}

static bool is_directory_there(struct cli *cli, const char *id, const char *path)
{
    V1(ListFilesRequest) req = LONGHAUL__SANDBOX__V1__LIST_FILES_REQUEST__INIT;
    lh_automsg(V1(ListFilesReply)) reply = NULL;
    lh_autofree char *dot = lh_format("%s/.", path);

    req.id = (char *)id;
    req.path = dot ? dot : (char *)path;
    return cli_call(cli, "ListFiles", &req.base,
                    &longhaul__sandbox__v1__list_files_reply__descriptor, CALL_MS,
                    (ProtobufCMessage **)&reply, NULL) == 0;
}

/* Where it goes: *dir to unpack in, *top the name of the topmost entry. */
static int choose_target(struct cli *cli, const char *local, const char *id, const char *path,
                         char **dir, char **top, struct lh_error *err)
{
    size_t len = strlen(path);

    if (len == 0 || path[0] != '/')
        return lh_fail(err, LH_INVALID_ARGUMENT, "\"%s\" is not an absolute path", path);
    if (path[len - 1] == '/' || is_directory_there(cli, id, path)) {
        *dir = strdup(path);
        *top = base_name(local);
    } else {
        size_t cut = len;
        while (path[cut - 1] != '/')
            cut--;
        *dir = strndup(path, cut);
        *top = strdup(path + cut);
    }
    return *dir && *top ? 0 : lh_fail_errno(err, ENOMEM, "cp");
}

int copy_in(struct cli *cli, const char *local, const char *id, const char *path,
            struct lh_error *err)
{
    struct uploading u = {.cli = cli, .id = id};
    lh_autofree char *dir = NULL, *top = NULL;
    struct stat st;

    if (lstat(local, &st) < 0)
        return lh_fail_errno(err, errno, "%s", local);
    int r = choose_target(cli, local, id, path, &dir, &top, err);
    if (r < 0)
        return r;
    u.dir = dir;
    struct archive *disk = archive_read_disk_new();
    if (!disk)
        return lh_fail_errno(err, ENOMEM, "cp");
    archive_read_disk_set_symlink_physical(disk);
    r = open_piece(&u, err);
    if (r == 0)
        r = add_tree(&u, disk, local, top, err);
    if (r == 0)
        r = send_piece(&u, err);
    archive_read_free(disk);
    if (u.out)
        archive_write_free(u.out);
    free(u.buf);
    return r;
}

/* ---- out ---- */

static int to_file(void *ctx, const ProtobufCMessage *message, struct lh_error *err)
{
    const V1(DownloadChunk) *c = (const void *)message;

    return lh_write_all(*(int *)ctx, c->tar.data, c->tar.len, err);
}

/* What a hostile sandbox packed must not leave the target: libarchive's checks refuse "..",
 * absolute names and writing through symbolic links. */
enum {
    EXTRACT = ARCHIVE_EXTRACT_TIME | ARCHIVE_EXTRACT_PERM | ARCHIVE_EXTRACT_SECURE_SYMLINKS |
              ARCHIVE_EXTRACT_SECURE_NODOTDOT | ARCHIVE_EXTRACT_SECURE_NOABSOLUTEPATHS,
};

static int extract_entry(struct archive *a, struct archive_entry *e, const char *top,
                         struct lh_error *err)
{
    const char *name = archive_entry_pathname(e), *link = archive_entry_hardlink(e);
    lh_autofree char *renamed = name ? rename_top(name, strcspn(name, "/"), top) : NULL;
    lh_autofree char *link_renamed = link ? rename_top(link, strcspn(link, "/"), top) : NULL;

    if (!renamed || (link && !link_renamed))
        return lh_fail(err, LH_INVALID_ARGUMENT, "an entry without a name");
    archive_entry_copy_pathname(e, renamed);
    if (link)
        archive_entry_copy_hardlink(e, link_renamed);
    return archive_read_extract(a, e, EXTRACT) < ARCHIVE_WARN ? archive_failure(a, renamed, err)
                                                              : 0;
}

static int extract(int fd, const char *top, struct lh_error *err)
{
    struct archive *a = archive_read_new();
    struct archive_entry *e;
    int r = 0, rc;

    if (!a)
        return lh_fail_errno(err, ENOMEM, "cp");
    archive_read_support_format_tar(a);
    if (archive_read_open_fd(a, fd, 65536) != ARCHIVE_OK)
        r = archive_failure(a, "cp", err);
    while (r == 0 && (rc = archive_read_next_header(a, &e)) != ARCHIVE_EOF)
        r = rc < ARCHIVE_WARN ? archive_failure(a, "cp", err) : extract_entry(a, e, top, err);
    archive_read_free(a);
    return r;
}

/* Goes to the directory that receives the source and says under which name. */
static char *enter_target(const char *local, const char *path, struct lh_error *err)
{
    struct stat st;
    size_t len = strlen(local), cut = len;
    bool into = stat(local, &st) == 0 && S_ISDIR(st.st_mode);

    if (!into && len && local[len - 1] == '/')
        return lh_fail(err, LH_NOT_FOUND, "no directory %s", local), NULL;
    while (cut > 0 && local[cut - 1] != '/')
        cut--;
    lh_autofree char *dir = into ? strdup(local) : cut ? strndup(local, cut) : strdup(".");
    lh_autofree char *top = into ? base_name(path) : strdup(local + cut);
    if (!dir || !top)
        return lh_fail_errno(err, ENOMEM, "cp"), NULL;
    if (chdir(dir) < 0)
        return lh_fail_errno(err, errno, "%s", dir), NULL;
    return lh_steal(&top);
}

int copy_out(struct cli *cli, const char *id, const char *path, const char *local,
             struct lh_error *err)
{
    V1(DownloadRequest) req = LONGHAUL__SANDBOX__V1__DOWNLOAD_REQUEST__INIT;
    const char *tmp = getenv("TMPDIR");

    lh_autoclose int fd = open(tmp ? tmp : "/tmp", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
    if (fd < 0)
        return lh_fail_errno(err, errno, "a temporary file in %s", tmp ? tmp : "/tmp");
    req.id = (char *)id;
    req.path = (char *)path;
    int r =
        cli_stream(cli, "Download", &req.base, &longhaul__sandbox__v1__download_chunk__descriptor,
                   COPY_MS, to_file, &fd, err);
    if (r < 0)
        return r;
    if (lseek(fd, 0, SEEK_SET) < 0)
        return lh_fail_errno(err, errno, "cp");
    lh_autofree char *top = enter_target(local, path, err);
    return top ? extract(fd, top, err) : err->code;
}

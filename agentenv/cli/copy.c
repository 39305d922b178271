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

enum { PIECE = 256 << 10, COPY_MS = 3600000 };

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
    struct rpc_upload *to;
    const char *id, *dir; /* said once */
    struct archive *out;
    struct lh_error *err; /* of the connection, which libarchive cannot carry */
};

static la_ssize_t send_piece(struct archive *a, void *ctx, const void *data, size_t len)
{
    V1(UploadRequest) req = LONGHAUL__SANDBOX__V1__UPLOAD_REQUEST__INIT;
    struct uploading *u = ctx;

    (void)a;
    req.id = (char *)(u->id ? u->id : "");
    req.path = (char *)(u->id ? u->dir : "");
    u->id = NULL;
    req.tar.data = (uint8_t *)data;
    req.tar.len = len;
    return rpc_upload_send(u->to, &req.base, u->err) < 0 ? -1 : (la_ssize_t)len;
}

static int open_archive(struct uploading *u, struct lh_error *err)
{
    u->out = archive_write_new();
    if (!u->out)
        return lh_fail_errno(err, ENOMEM, "cp");
    archive_write_set_format_pax_restricted(u->out);
    archive_write_set_bytes_per_block(u->out, PIECE);
    archive_write_set_bytes_in_last_block(u->out, 1);
    return archive_write_open(u->out, u, NULL, send_piece, NULL) == ARCHIVE_OK
               ? 0
               : archive_failure(u->out, "cp", err);
}

/* The server's own words, if it was the server that ended it. */
static int finish(struct uploading *u, int r, struct lh_error *err)
{
    lh_automsg(V1(UploadReply)) reply = NULL;
    struct lh_error why = {0};

    if (u->out && archive_write_close(u->out) != ARCHIVE_OK && r == 0)
        r = archive_failure(u->out, "cp", err);
    if (u->out)
        archive_write_free(u->out);
    if (r < 0 && u->err->code != LH_CANCELLED) {
        rpc_upload_cancel(u->to);
        return r;
    }
    int end = rpc_upload_end(u->to, &longhaul__sandbox__v1__upload_reply__descriptor,
                             (ProtobufCMessage **)&reply, &why);
    return end < 0 ? lh_fail(err, end, "%s", why.message) : r;
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
    archive_entry_set_uid(e, 0); /* root of the sandbox; ids of this machine mean nothing there */
    archive_entry_set_gid(e, 0);
    archive_entry_set_uname(e, NULL);
    archive_entry_set_gname(e, NULL);
    lh_autofree char *copy = lh_steal(&renamed);
    archive_entry_copy_pathname(e, copy);
    if (archive_write_header(u->out, e) < ARCHIVE_WARN)
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
    }
    archive_entry_free(e);
    return r;
}

static bool is_directory_there(struct cli *cli, const char *id, const char *path)
{
    V1(StatFileRequest) req = LONGHAUL__SANDBOX__V1__STAT_FILE_REQUEST__INIT;
    lh_automsg(V1(FileInfo)) info = NULL;

    req.id = (char *)id;
    req.path = (char *)path;
    req.follow = true;
    return cli_call(cli, "StatFile", &req.base, &longhaul__sandbox__v1__file_info__descriptor,
                    CALL_MS, (ProtobufCMessage **)&info, NULL) == 0 &&
           S_ISDIR(info->mode);
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

static int upload(struct uploading *u, const char *local, const char *top, struct lh_error *err)
{
    struct archive *disk = archive_read_disk_new();

    if (!disk)
        return lh_fail_errno(err, ENOMEM, "cp");
    archive_read_disk_set_symlink_physical(disk);
    int r = open_archive(u, err);
    if (r == 0)
        r = add_tree(u, disk, local, top, err);
    archive_read_free(disk);
    return r;
}

int copy_in(struct cli *cli, const char *local, const char *id, const char *path,
            struct lh_error *err)
{
    lh_autofree char *dir = NULL, *top = NULL;
    struct lh_error sending = {0};
    struct uploading u = {.id = id, .err = &sending};
    struct stat st;

    if (lstat(local, &st) < 0)
        return lh_fail_errno(err, errno, "%s", local);
    int r = choose_target(cli, local, id, path, &dir, &top, err);
    if (r < 0)
        return r;
    u.dir = dir;
    u.to = cli_upload(cli, "Upload", COPY_MS, err);
    if (!u.to)
        return err->code;
    return finish(&u, upload(&u, local, top, err), err);
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
    EXTRACT = ARCHIVE_EXTRACT_TIME | ARCHIVE_EXTRACT_PERM | ARCHIVE_EXTRACT_SPARSE |
              ARCHIVE_EXTRACT_SECURE_SYMLINKS | ARCHIVE_EXTRACT_SECURE_NODOTDOT |
              ARCHIVE_EXTRACT_SECURE_NOABSOLUTEPATHS,
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

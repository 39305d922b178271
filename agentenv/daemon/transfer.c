#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "agentenv/daemon/inroot.h"
#include "agentenv/daemon/internal.h"
#include "agentenv/daemon/service.h"
#include "agentenv/daemon/tar.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/parse.h"

/* A sandbox held for its files, and its root. */
struct opened {
    struct daemon *d;
    struct sandbox *s;
    struct inroot root;
};

static int root_of(struct sandbox *s, struct lh_error *err)
{
    if (!s->box)
        return sandbox_has_no_files(s, err);
    return s->state == SB_DEAD ? box_dead_root_fd(s->box, err) : box_root_fd(s->box, err);
}

static int open_files(struct daemon *d, const char *id, unsigned states, struct opened *o,
                      struct lh_error *err)
{
    int r = sandbox_begin(d, id, ANY_ATTEMPT, states, HOLD_FILES, lh_now_ms() + WAIT_DEFAULT_MS,
                          &o->s, err);

    if (r < 0)
        return r;
    o->d = d;
    o->root = (struct inroot){
        .fd = root_of(o->s, err), .uid_base = BOX_UID_BASE, .uid_count = BOX_UID_COUNT};
    if (o->root.fd >= 0)
        return 0;
    r = o->root.fd;
    sandbox_end(d, o->s, HOLD_FILES);
    return r;
}

static void close_files(struct opened *o)
{
    close(o->root.fd);
    sandbox_end(o->d, o->s, HOLD_FILES);
}

enum {
    ALIVE = SB_IN(SB_RUNNING) | SB_IN(SB_FROZEN),
    ALIVE_OR_NEW = ALIVE | SB_IN(SB_CREATING),
    READABLE = ALIVE | SB_IN(SB_DEAD),
};

int service_upload(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                   ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(UploadRequest) *req = (const void *)request;
    V1(UploadReply) *out = calloc(1, sizeof *out);
    struct opened o;

    (void)call;
    if (!out)
        return lh_fail_errno(err, ENOMEM, "upload");
    longhaul__sandbox__v1__upload_reply__init(out);
    *reply = &out->base;
    int r = open_files(ctx, req->id, ALIVE, &o, err);
    if (r < 0)
        return r;
    lh_autoclose int dir = inroot_find_dir(&o.root, req->path, true, err);
    r = dir < 0 ? dir : tar_unpack(&o.root, dir, req->tar.data, req->tar.len, &out->bytes, err);
    close_files(&o);
    return r < 0 ? lh_wrap(err, "upload to %s:%s", req->id, req->path) : 0;
}

static int send_piece(void *ctx, const void *data, size_t len, struct lh_error *err)
{
    V1(DownloadChunk) chunk = LONGHAUL__SANDBOX__V1__DOWNLOAD_CHUNK__INIT;

    chunk.tar.data = (uint8_t *)data;
    chunk.tar.len = len;
    return rpc_send(ctx, &chunk.base, err);
}

int service_download(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                     struct lh_error *err)
{
    const V1(DownloadRequest) *req = (const void *)request;
    struct opened o;
    int r = open_files(ctx, req->id, READABLE, &o, err);

    if (r < 0)
        return r;
    r = tar_pack(&o.root, req->path, send_piece, call, err);
    close_files(&o);
    return r < 0 ? lh_wrap(err, "download of %s:%s", req->id, req->path) : 0;
}

/* gRPC strings are UTF-8: other bytes as \xHH. */
static char *printable(const char *name)
{
    char *out = malloc(4 * strlen(name) + 1), *p = out;

    if (!out)
        return NULL;
    for (const unsigned char *s = (const unsigned char *)name; *s;) {
        int len = *s < 0x80 ? 1 : *s >= 0xf0 && *s < 0xf5 ? 4 : *s >= 0xe0 ? 3 : *s >= 0xc2 ? 2 : 0;
        bool good = *s < 0xf5 && len > 0;
        for (int i = 1; good && i < len; i++)
            good = (s[i] & 0xc0) == 0x80;
        /* overlong forms and surrogates */
        good = good && !(*s == 0xe0 && s[1] < 0xa0) && !(*s == 0xed && s[1] > 0x9f) &&
               !(*s == 0xf0 && s[1] < 0x90) && !(*s == 0xf4 && s[1] > 0x8f);
        if (good) {
            memcpy(p, s, (size_t)len);
            p += len;
            s += len;
        } else {
            p += sprintf(p, "\\x%02X", *s++);
        }
    }
    *p = 0;
    return out;
}

static V1(FileInfo) * file_info(int dir, const char *name, struct lh_error *err)
{
    lh_automsg(V1(FileInfo)) f = calloc(1, sizeof *f);
    struct stat st;
    char target[4096];

    if (!f)
        return lh_fail_errno(err, ENOMEM, "listing files"), NULL;
    longhaul__sandbox__v1__file_info__init(f);
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH) < 0)
        return lh_fail_errno(err, errno, "stat of %s", name), NULL;
    f->name = printable(name);
    f->mode = st.st_mode;
    f->size = (uint64_t)st.st_size;
    f->mtime_ms = (int64_t)st.st_mtim.tv_sec * 1000 + st.st_mtim.tv_nsec / 1000000;
    if (S_ISLNK(st.st_mode)) {
        ssize_t n = readlinkat(dir, name, target, sizeof target - 1);
        target[n > 0 ? n : 0] = 0;
        f->target = printable(target);
    }
    if (!f->name || !f->target)
        return lh_fail_errno(err, ENOMEM, "listing files"), NULL;
    return lh_steal(&f);
}

static int add_file(V1(ListFilesReply) * out, V1(FileInfo) * f, struct lh_error *err)
{
    V1(FileInfo) **more = f ? realloc(out->files, (out->n_files + 1) * sizeof *more) : NULL;

    if (!more) {
        if (f)
            lh_fail_errno(err, ENOMEM, "listing files");
        lh_message_free(f ? &f->base : NULL);
        return LH_RESOURCE_EXHAUSTED;
    }
    out->files = more;
    out->files[out->n_files++] = f;
    return 0;
}

static int by_name(const void *a, const void *b)
{
    V1(FileInfo) *const *x = a, *const *y = b;

    return strcmp((*x)->name, (*y)->name);
}

static int list_dir(int path_fd, V1(ListFilesReply) * out, struct lh_error *err)
{
    int fd = inroot_reopen(path_fd, err);
    if (fd < 0)
        return fd;
    lh_autoclosedir DIR *dir = fdopendir(fd);
    if (!dir) {
        close(fd);
        return lh_fail_errno(err, errno, "listing files");
    }
    for (struct dirent *e; (e = readdir(dir));) {
        struct lh_error why = {0};
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
            continue;
        V1(FileInfo) *f = file_info(dirfd(dir), e->d_name, &why);
        if (!f && why.code == LH_NOT_FOUND) /* removed meanwhile */
            continue;
        if (add_file(out, f, &why) < 0)
            return lh_fail(err, why.code, "%s", why.message);
    }
    if (out->n_files)
        qsort(out->files, out->n_files, sizeof *out->files, by_name);
    return 0;
}

int service_list_files(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                       ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(ListFilesRequest) *req = (const void *)request;
    V1(ListFilesReply) *out = calloc(1, sizeof *out);
    struct opened o;
    struct stat st;

    (void)call;
    if (!out)
        return lh_fail_errno(err, ENOMEM, "listing files");
    longhaul__sandbox__v1__list_files_reply__init(out);
    *reply = &out->base;
    int r = open_files(ctx, req->id, READABLE, &o, err);
    if (r < 0)
        return r;
    lh_autoclose int fd = inroot_find(&o.root, req->path, err);
    if (fd < 0 || fstat(fd, &st) < 0)
        r = fd < 0 ? fd : lh_fail_errno(err, errno, "stat");
    else if (S_ISDIR(st.st_mode))
        r = list_dir(fd, out, err);
    else
        r = add_file(out, file_info(fd, "", err), err);
    close_files(&o);
    return r < 0 ? lh_wrap(err, "files of %s:%s", req->id, req->path) : 0;
}

/* ---- the daemon's own files in a sandbox ---- */

static int put(struct opened *o, const char *path, const void *data, size_t len, mode_t mode,
               struct lh_error *err)
{
    const char *name;

    lh_autoclose int dir = inroot_find_parent(&o->root, path, true, &name, err);
    if (dir < 0)
        return dir;
    lh_autoclose int fd = inroot_create(&o->root, dir, name, mode, err);
    return fd < 0 ? fd : lh_write_all(fd, data, len, err);
}

int daemon_put_file(struct daemon *d, const char *id, const char *path, const void *data,
                    size_t len, mode_t mode, struct lh_error *err)
{
    struct opened o;
    int r = open_files(d, id, ALIVE_OR_NEW, &o, err);

    if (r < 0)
        return r;
    r = put(&o, path, data, len, mode, err);
    close_files(&o);
    return r < 0 ? lh_wrap(err, "writing %s in sandbox %s", path, id) : 0;
}

int daemon_make_dir(struct daemon *d, const char *id, const char *path, struct lh_error *err)
{
    struct opened o;
    int r = open_files(d, id, ALIVE_OR_NEW, &o, err);

    if (r < 0)
        return r;
    lh_autoclose int fd = inroot_find_dir(&o.root, path, true, err);
    close_files(&o);
    return fd < 0 ? lh_wrap(err, "directory %s in sandbox %s", path, id) : 0;
}

static char *get(struct opened *o, const char *path, size_t max, size_t *len, struct lh_error *err)
{
    lh_autoclose int found = inroot_find(&o->root, path, err);
    lh_autoclose int fd = found < 0 ? -1 : inroot_reopen(found, err);
    struct stat st;

    if (fd < 0)
        return NULL;
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
        return lh_fail(err, LH_INVALID_ARGUMENT, "not a regular file"), NULL;
    lh_autofree char *buf = malloc(max + 1);
    if (!buf)
        return lh_fail_errno(err, ENOMEM, "no buffer"), NULL;
    for (*len = 0;;) {
        ssize_t n = read(fd, buf + *len, max + 1 - *len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return lh_fail_errno(err, errno, "read"), NULL;
        *len += (size_t)n;
        if (*len > max)
            return lh_fail(err, LH_RESOURCE_EXHAUSTED, "more than %zu bytes", max), NULL;
        if (n == 0)
            break;
    }
    buf[*len] = 0;
    return lh_steal(&buf);
}

char *daemon_get_file(struct daemon *d, const char *id, const char *path, size_t max, size_t *len,
                      struct lh_error *err)
{
    struct opened o;

    if (open_files(d, id, ALIVE_OR_NEW, &o, err) < 0)
        return NULL;
    char *data = get(&o, path, max, len, err);
    close_files(&o);
    if (!data)
        lh_wrap(err, "reading %s in sandbox %s", path, id);
    return data;
}

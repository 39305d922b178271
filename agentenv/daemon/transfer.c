/* Bytes into and out of sandboxes: tar streams of clients, and single files of the daemon's own. */
#include <errno.h>
#include <string.h>

#include "agentenv/daemon/opened.h"
#include "agentenv/daemon/service.h"
#include "agentenv/daemon/tar.h"
#include "agentenv/sandbox/facts.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/parse.h"

static int root_of(struct sandbox *s, struct lh_error *err)
{
    if (!s->box)
        return sandbox_has_no_files(s, err);
    return s->state == SB_DEAD ? box_dead_root_fd(s->box, err) : box_root_fd(s->box, err);
}

int open_files(struct daemon *d, const char *id, unsigned states, struct opened *o,
               struct lh_error *err)
{
    int r = sandbox_begin(d, id, ANY_ATTEMPT, states, HOLD_FILES, lh_now_ms() + WAIT_DEFAULT_MS,
                          &o->s, err);

    if (r < 0)
        return r;
    o->d = d;
    o->root = (struct inroot){.fd = root_of(o->s, err),
                              .uid_base = box_facts()->uid_base,
                              .uid_count = box_facts()->uid_count};
    if (o->root.fd >= 0)
        return 0;
    r = o->root.fd;
    sandbox_end(d, o->s, HOLD_FILES);
    return r;
}

void close_files(struct opened *o)
{
    close(o->root.fd);
    sandbox_end(o->d, o->s, HOLD_FILES);
}

/* The pieces of an upload: what the first message brought, then what comes. */
struct incoming {
    struct rpc_call *call;
    const ProtobufCBinaryData *first;
    ProtobufCMessage *message;
};

static ssize_t next_piece(void *ctx, const void **data, struct lh_error *err)
{
    struct incoming *in = ctx;
    const ProtobufCBinaryData *piece = in->first;

    in->first = NULL;
    while (!piece || piece->len == 0) {
        lh_message_free(in->message);
        in->message = NULL;
        int r = rpc_receive(in->call, &in->message, err);
        if (r <= 0)
            return r;
        piece = &((const V1(UploadRequest) *)in->message)->tar;
    }
    *data = piece->data;
    return (ssize_t)piece->len;
}

int service_upload(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                   struct lh_error *err)
{
    const V1(UploadRequest) *req = (const void *)request;
    V1(UploadReply) out = LONGHAUL__SANDBOX__V1__UPLOAD_REPLY__INIT;
    struct incoming in = {.call = call, .first = &req->tar};
    struct opened o;
    int r = open_files(ctx, req->id, FILES_ALIVE, &o, err);

    if (r < 0)
        return r;
    lh_autoclose int dir = inroot_find_dir(&o.root, req->path, true, err);
    r = dir < 0 ? dir : tar_unpack(&o.root, dir, next_piece, &in, &out.bytes, err);
    lh_message_free(in.message);
    close_files(&o);
    return r < 0 ? lh_wrap(err, "upload to %s:%s", req->id, req->path)
                 : rpc_send(call, &out.base, err);
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
    int r = open_files(ctx, req->id, FILES_READABLE, &o, err);

    if (r < 0)
        return r;
    r = tar_pack(&o.root, req->path, send_piece, call, err);
    close_files(&o);
    return r < 0 ? lh_wrap(err, "download of %s:%s", req->id, req->path) : 0;
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
    int r = open_files(d, id, FILES_ALIVE_OR_NEW, &o, err);

    if (r < 0)
        return r;
    r = put(&o, path, data, len, mode, err);
    close_files(&o);
    return r < 0 ? lh_wrap(err, "writing %s in sandbox %s", path, id) : 0;
}

int daemon_make_dir(struct daemon *d, const char *id, const char *path, struct lh_error *err)
{
    struct opened o;
    int r = open_files(d, id, FILES_ALIVE_OR_NEW, &o, err);

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

    if (open_files(d, id, FILES_ALIVE_OR_NEW, &o, err) < 0)
        return NULL;
    char *data = get(&o, path, max, len, err);
    close_files(&o);
    if (!data)
        lh_wrap(err, "reading %s in sandbox %s", path, id);
    return data;
}

/* What lies in a sandbox: stat and list.  Everything here was named by the agent. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "agentenv/daemon/opened.h"
#include "agentenv/daemon/service.h"
#include "proto/parse.h"

char *files_printable(const char *name)
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

static int set_name(V1(FileInfo) * f, const char *name)
{
    f->name = files_printable(name);
    if (!f->name || !strcmp(f->name, name))
        return f->name ? 0 : -1;
    f->raw_name.data = (uint8_t *)strdup(name);
    f->raw_name.len = f->raw_name.data ? strlen(name) : 0;
    return f->raw_name.data ? 0 : -1;
}

static void set_numbers(V1(FileInfo) * f, const struct inroot *root, const struct stat *st)
{
    f->mode = st->st_mode;
    f->size = (uint64_t)st->st_size;
    f->mtime_ms = (int64_t)st->st_mtim.tv_sec * 1000 + st->st_mtim.tv_nsec / 1000000;
    f->uid = inroot_from_host(root, st->st_uid);
    f->gid = inroot_from_host(root, st->st_gid);
    f->links = (uint32_t)st->st_nlink;
    f->allocated_bytes = (uint64_t)st->st_blocks * 512;
}

static V1(FileInfo) *
    file_info(const struct inroot *root, int dir, const char *name, struct lh_error *err)
{
    lh_automsg(V1(FileInfo)) f = calloc(1, sizeof *f);
    struct stat st;
    char target[4096];

    if (!f)
        return lh_fail_errno(err, ENOMEM, "listing files"), NULL;
    longhaul__sandbox__v1__file_info__init(f);
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH) < 0)
        return lh_fail_errno(err, errno, "stat of %s", name), NULL;
    set_numbers(f, root, &st);
    if (S_ISLNK(st.st_mode)) {
        ssize_t n = readlinkat(dir, name, target, sizeof target - 1);
        target[n > 0 ? n : 0] = 0;
        f->target = files_printable(target);
    }
    if (set_name(f, name) < 0 || !f->target)
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

static int list_dir(const struct inroot *root, int path_fd, V1(ListFilesReply) * out,
                    struct lh_error *err)
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
        V1(FileInfo) *f = file_info(root, dirfd(dir), e->d_name, &why);
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
    int r = open_files(ctx, req->id, FILES_READABLE, &o, err);
    if (r < 0)
        return r;
    lh_autoclose int fd = inroot_find(&o.root, req->path, err);
    if (fd < 0 || fstat(fd, &st) < 0)
        r = fd < 0 ? fd : lh_fail_errno(err, errno, "stat");
    else if (S_ISDIR(st.st_mode))
        r = list_dir(&o.root, fd, out, err);
    else
        r = add_file(out, file_info(&o.root, fd, "", err), err);
    close_files(&o);
    return r < 0 ? lh_wrap(err, "files of %s:%s", req->id, req->path) : 0;
}

/* "/" has no parent to be found in. */
static int find(const struct opened *o, const char *path, bool follow, struct lh_error *err)
{
    const char *name;

    if (follow || path[strspn(path, "/")] == 0)
        return inroot_find(&o->root, path, err);
    lh_autoclose int parent = inroot_find_parent(&o->root, path, false, &name, err);
    if (parent < 0)
        return parent;
    int fd = openat(parent, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    return fd < 0 ? lh_fail_errno(err, errno, "%s in the sandbox", path) : fd;
}

int service_stat_file(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                      ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(StatFileRequest) *req = (const void *)request;
    V1(FileInfo) *info = NULL;
    struct opened o;

    (void)call;
    int r = open_files(ctx, req->id, FILES_READABLE, &o, err);
    if (r < 0)
        return r;
    lh_autoclose int fd = find(&o, req->path, req->follow, err);
    if (fd >= 0)
        info = file_info(&o.root, fd, "", err);
    close_files(&o);
    *reply = info ? &info->base : NULL;
    return info ? 0 : lh_wrap(err, "stat of %s:%s", req->id, req->path);
}

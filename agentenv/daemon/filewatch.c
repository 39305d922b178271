/* Changes of files in a sandbox, as they happen.
 *
 * inotify watches inodes, so a watch set from here on a descriptor that was resolved inside the
 * sandbox's root sees what its processes do, and no path is resolved twice.  Watches hold neither
 * the sandbox nor its mounts: a snapshot may put a new overlay under a running sandbox, which they
 * would not notice.  So the root is looked at five times a second; when it is another one, watches
 * are set again and the client is told that it may have missed something (RESCAN), as after an
 * overflow.
 *
 * The tree belongs to the agent.  Directories are opened one component at a time, a symbolic link
 * is never followed, and their number is bounded. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>

#include "agentenv/daemon/opened.h"
#include "agentenv/daemon/service.h"
#include "proto/clock.h"
#include "proto/file.h"

enum {
    MAX_DIRS = 4096,
    MAX_DEPTH = 64,
    TICK_MS = 200, /* how soon another root, and a client that went away, are noticed */
    MASK = IN_CREATE | IN_DELETE | IN_CLOSE_WRITE | IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO |
           IN_DELETE_SELF | IN_MOVE_SELF | IN_EXCL_UNLINK,
};

struct watched {
    int wd;
    char *path; /* below the root of the watch, "" = itself */
};

struct file_watch {
    struct daemon *d;
    struct rpc_call *call;
    const V1(WatchFilesRequest) * req;
    int fd;     /* inotify */
    dev_t root; /* the file system that is watched */
    struct watched dirs[MAX_DIRS];
    size_t n_dirs;
};

static const struct {
    uint32_t mask;
    V1(FileChange) change;
} changes[] = {
    {IN_CREATE, LONGHAUL__SANDBOX__V1__FILE_CHANGE__FILE_CREATED},
    {IN_MOVED_TO, LONGHAUL__SANDBOX__V1__FILE_CHANGE__FILE_CREATED},
    {IN_CLOSE_WRITE, LONGHAUL__SANDBOX__V1__FILE_CHANGE__FILE_WRITTEN},
    {IN_ATTRIB, LONGHAUL__SANDBOX__V1__FILE_CHANGE__FILE_ATTRIBUTES},
    {IN_DELETE, LONGHAUL__SANDBOX__V1__FILE_CHANGE__FILE_DELETED},
    {IN_MOVED_FROM, LONGHAUL__SANDBOX__V1__FILE_CHANGE__FILE_DELETED},
};

static void forget_all(struct file_watch *w)
{
    for (size_t i = 0; i < w->n_dirs; i++)
        free(w->dirs[i].path);
    w->n_dirs = 0;
    if (w->fd >= 0)
        close(w->fd);
    w->fd = -1;
}

static struct watched *find_watched(struct file_watch *w, int wd)
{
    for (size_t i = 0; i < w->n_dirs; i++)
        if (w->dirs[i].wd == wd)
            return &w->dirs[i];
    return NULL;
}

static void drop(struct file_watch *w, struct watched *dir)
{
    free(dir->path);
    *dir = w->dirs[--w->n_dirs];
}

/* The directory or file behind an O_PATH descriptor. */
static int add(struct file_watch *w, int fd, const char *path, struct lh_error *err)
{
    char self[64];

    if (w->n_dirs == MAX_DIRS)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "more than %d directories to watch", MAX_DIRS);
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    int wd = inotify_add_watch(w->fd, self, MASK);
    if (wd < 0)
        return lh_fail_errno(err, errno, "watching \"%s\" (fs.inotify.max_user_watches?)", path);
    struct watched *known = find_watched(w, wd);
    char *copy = strdup(path);
    if (!copy)
        return lh_fail_errno(err, ENOMEM, "watching");
    if (known) { /* it was renamed */
        free(known->path);
        known->path = copy;
    } else {
        w->dirs[w->n_dirs++] = (struct watched){wd, copy};
    }
    return 0;
}

static int add_tree(struct file_watch *w, int fd, const char *path, int depth,
                    struct lh_error *err);

static int add_children(struct file_watch *w, int fd, const char *path, int depth,
                        struct lh_error *err)
{
    int real = inroot_reopen(fd, err), r = real;
    DIR *listing = real < 0 ? NULL : fdopendir(real);

    if (real >= 0 && !listing) {
        close(real);
        return lh_fail_errno(err, errno, "watching \"%s\"", path);
    }
    lh_autoclosedir DIR *dir = listing;
    for (struct dirent *e; r >= 0 && dir && (e = readdir(dir));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
            continue;
        lh_autoclose int child =
            openat(fd, e->d_name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (child < 0) /* no directory, or gone */
            continue;
        lh_autofree char *name = lh_format("%s%s%s", path, *path ? "/" : "", e->d_name);
        r = name ? add_tree(w, child, name, depth + 1, err)
                 : lh_fail_errno(err, ENOMEM, "watching");
    }
    return r < 0 ? r : 0;
}

/* Its watch first, then its children: what is made in between is seen at least once. */
static int add_tree(struct file_watch *w, int fd, const char *path, int depth, struct lh_error *err)
{
    struct stat st;
    int r = add(w, fd, path, err);

    if (r < 0 || !w->req->recursive || fstat(fd, &st) < 0 || !S_ISDIR(st.st_mode))
        return r;
    if (depth > MAX_DEPTH)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "directories are nested deeper than %d",
                       MAX_DEPTH);
    return add_children(w, fd, path, depth, err);
}

static int send_change(struct file_watch *w, V1(FileChange) change, const char *path, bool is_dir,
                       struct lh_error *err)
{
    V1(FileEvent) event = LONGHAUL__SANDBOX__V1__FILE_EVENT__INIT;
    lh_autofree char *name = files_printable(path);

    if (!name)
        return lh_fail_errno(err, ENOMEM, "watching");
    event.change = change;
    event.path = name;
    event.directory = is_dir;
    return rpc_send(w->call, &event.base, err);
}

static dev_t file_system(const struct opened *o)
{
    struct stat st = {0};

    fstat(o->root.fd, &st);
    return st.st_dev;
}

/* All watches, from the beginning; the first message says that they are there. */
static int set_up(struct file_watch *w, struct lh_error *err)
{
    struct opened o;
    int r;

    forget_all(w);
    w->fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (w->fd < 0)
        return lh_fail_errno(err, errno, "inotify (fs.inotify.max_user_instances?)");
    if ((r = open_files(w->d, w->req->id, FILES_ALIVE, &o, err)) < 0)
        return r;
    w->root = file_system(&o);
    lh_autoclose int fd = inroot_find(&o.root, w->req->path, err);
    r = fd < 0 ? fd : add_tree(w, fd, "", 0, err);
    close_files(&o);
    return r < 0 ? r
                 : send_change(w, LONGHAUL__SANDBOX__V1__FILE_CHANGE__FILE_RESCAN, "", false, err);
}

/* A directory that appeared: itself by the same way as at the start, component by component. */
static int follow_new(struct file_watch *w, const char *path, struct lh_error *err)
{
    struct opened o;
    char *rest = NULL, *name;
    lh_autofree char *copy = strdup(path);

    if (!copy)
        return lh_fail_errno(err, ENOMEM, "watching");
    if (open_files(w->d, w->req->id, FILES_ALIVE, &o, err) < 0)
        return err->code;
    int fd = inroot_find(&o.root, w->req->path, err), depth = 0;
    for (name = strtok_r(copy, "/", &rest); name && fd >= 0; name = strtok_r(NULL, "/", &rest)) {
        int next = openat(fd, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        close(fd);
        fd = next;
        depth++;
    }
    int r = fd < 0 ? 0 : add_tree(w, fd, path, depth, err); /* gone again: nothing to watch */
    if (fd >= 0)
        close(fd);
    close_files(&o);
    return r;
}

static int take_event(struct file_watch *w, const struct inotify_event *e, struct lh_error *err)
{
    struct watched *dir = find_watched(w, e->wd);
    bool is_dir = e->mask & IN_ISDIR;
    int r = 0;

    if (e->mask & IN_Q_OVERFLOW)
        return set_up(w, err);
    if (!dir)
        return 0;
    if (e->mask & (IN_DELETE_SELF | IN_MOVE_SELF) && !*dir->path)
        return lh_fail(err, LH_NOT_FOUND, "%s is not there any more", w->req->path);
    if (e->mask & IN_IGNORED) {
        drop(w, dir);
        return 0;
    }
    lh_autofree char *path =
        lh_format("%s%s%s", dir->path, *dir->path && e->len ? "/" : "", e->len ? e->name : "");
    if (!path)
        return lh_fail_errno(err, ENOMEM, "watching");
    for (size_t i = 0; i < LH_ARRAY_SIZE(changes) && r == 0; i++)
        if (e->mask & changes[i].mask)
            r = send_change(w, changes[i].change, path, is_dir, err);
    if (r == 0 && is_dir && w->req->recursive && e->mask & (IN_CREATE | IN_MOVED_TO))
        r = follow_new(w, path, err);
    return r;
}

static int take_events(struct file_watch *w, struct lh_error *err)
{
    char buf[16384] __attribute__((aligned(__alignof__(struct inotify_event))));
    int set = w->fd, r = 0;
    ssize_t n = read(w->fd, buf, sizeof buf);

    for (ssize_t at = 0; at < n && r == 0 && w->fd == set;) {
        const struct inotify_event *e = (void *)(buf + at);
        r = take_event(w, e, err);
        at += (ssize_t)sizeof *e + e->len;
    }
    return r;
}

/* When the sandbox is dead or gone there is nothing to watch. */
static int check_root(struct file_watch *w, struct lh_error *err)
{
    struct opened o;

    if (open_files(w->d, w->req->id, FILES_ALIVE, &o, err) < 0)
        return err->code;
    bool other = file_system(&o) != w->root;
    close_files(&o);
    return other ? set_up(w, err) : 0;
}

static int follow(struct file_watch *w, struct lh_error *err)
{
    int64_t look_ms = lh_now_ms() + TICK_MS;
    int r = set_up(w, err);

    while (r == 0 && !rpc_cancelled(w->call)) {
        struct pollfd p = {w->fd, POLLIN, 0};
        if (poll(&p, 1, lh_ms_left(look_ms)) > 0)
            r = take_events(w, err);
        if (r == 0 && !lh_ms_left(look_ms)) {
            r = check_root(w, err);
            look_ms = lh_now_ms() + TICK_MS;
        }
    }
    return r;
}

int service_watch_files(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                        struct lh_error *err)
{
    struct file_watch *w = calloc(1, sizeof *w);

    if (!w)
        return lh_fail_errno(err, ENOMEM, "watching files");
    w->d = ctx;
    w->call = call;
    w->req = (const void *)request;
    w->fd = -1;
    int r = follow(w, err);
    forget_all(w);
    free(w);
    return r;
}

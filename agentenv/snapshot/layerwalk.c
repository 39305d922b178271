#include "agentenv/snapshot/layerwalk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <search.h>
#include <stdio.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "agentenv/sandbox/box.h"
#include "agentenv/sandbox/facts.h"
#include "proto/cleanup.h"
#include "proto/file.h"

enum { XATTRS_MAX = 256, VALUE_MAX = 65536 };

struct seen {
    ino_t inode;
    char *path;
};

struct walk {
    layer_entry_fn *fn;
    void *ctx;
    void *seen; /* tree (tsearch) of files with several names */
    struct lh_error *err;
};

bool layer_is_whiteout(const struct stat *st)
{
    return S_ISCHR(st->st_mode) && st->st_rdev == makedev(0, 0);
}

static int fail(struct walk *w, const char *what, const char *path)
{
    return lh_fail_errno(w->err, errno, "%s of %s in a layer", what, *path ? path : ".");
}

/* ---- attributes ---- */

/* What overlay notes about the layers below; without effect on what is seen. */
static bool is_bookkeeping(const char *name)
{
    static const char *const names[] = {"origin", "impure", "nlink", "upper", "uuid", "protattr"};
    const char *prefix = box_facts()->overlay_xattr;

    if (strncmp(name, prefix, strlen(prefix)) != 0)
        return false;
    for (size_t i = 0; i < LH_ARRAY_SIZE(names); i++)
        if (!strcmp(name + strlen(prefix), names[i]))
            return true;
    return false;
}

struct xattrs {
    struct layer_xattr items[XATTRS_MAX];
    size_t n;
};

static void free_xattrs(struct xattrs *x)
{
    for (size_t i = 0; i < x->n; i++) {
        free(x->items[i].name);
        free(x->items[i].value);
    }
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct layer_xattr *)a)->name, ((const struct layer_xattr *)b)->name);
}

static int add_xattr(struct walk *w, struct xattrs *x, const char *at, const char *name,
                     const char *path)
{
    lh_autofree void *value = malloc(VALUE_MAX);
    ssize_t len = value ? getxattr(at, name, value, VALUE_MAX) : -1;

    if (len < 0)
        return fail(w, name, path);
    if (x->n == XATTRS_MAX)
        return lh_fail(w->err, LH_FAILED_PRECONDITION, "%s has more than %d attributes", path,
                       XATTRS_MAX);
    struct layer_xattr *item = &x->items[x->n];
    char canonical[LAYER_XATTR_NAME];
    *item = (struct layer_xattr){strdup(layer_xattr_canonical(name, canonical)), NULL, (size_t)len};
    if (!item->name)
        return lh_fail_errno(w->err, ENOMEM, "attributes of a layer");
    x->n++;
    void *exact = realloc(value, (size_t)len + 1);
    item->value = exact ? exact : value;
    value = NULL;
    return 0;
}

/* Through /proc/self/fd, so that an O_PATH descriptor of any kind of file will do. */
static int read_xattrs(struct walk *w, int fd, struct xattrs *x, const char *path)
{
    char at[32];
    lh_autofree char *names = malloc(VALUE_MAX);

    snprintf(at, sizeof at, "/proc/self/fd/%d", fd);
    ssize_t len = names ? listxattr(at, names, VALUE_MAX) : -1;
    if (len < 0)
        return errno == ENOTSUP ? 0 : fail(w, "attributes", path);
    for (const char *n = names; n < names + len; n += strlen(n) + 1) {
        int r = is_bookkeeping(n) ? 0 : add_xattr(w, x, at, n, path);
        if (r < 0)
            return r;
    }
    qsort(x->items, x->n, sizeof *x->items, by_name);
    return 0;
}

/* ---- one entry ---- */

static int by_inode(const void *a, const void *b)
{
    ino_t x = ((const struct seen *)a)->inode, y = ((const struct seen *)b)->inode;

    return (x > y) - (x < y);
}

static void free_seen(void *seen)
{
    free(((struct seen *)seen)->path);
    free(seen);
}

/* *link is the path under which the file was met before, or "". */
static int find_link(struct walk *w, const struct stat *st, const char *path, const char **link)
{
    const struct seen wanted = {.inode = st->st_ino};

    *link = "";
    if (S_ISDIR(st->st_mode) || layer_is_whiteout(st) || st->st_nlink < 2)
        return 0;
    struct seen **found = tfind(&wanted, &w->seen, by_inode);
    if (found) {
        *link = (*found)->path;
        return 0;
    }
    struct seen *met = malloc(sizeof *met);
    if (!met)
        return lh_fail_errno(w->err, ENOMEM, "links of a layer");
    *met = (struct seen){st->st_ino, strdup(path)};
    if (met->path && tsearch(met, &w->seen, by_inode))
        return 0;
    free_seen(met);
    return lh_fail_errno(w->err, ENOMEM, "links of a layer");
}

static int to_inside(struct walk *w, struct stat *st, const char *path)
{
    if (layer_is_whiteout(st)) { /* made by overlay as it likes: only that it is one counts */
        *st = (struct stat){.st_mode = S_IFCHR, .st_rdev = st->st_rdev};
        return 0;
    }
    const uid_t base = box_facts()->uid_base;
    if (st->st_uid < base || st->st_uid > base + BOX_INIT_UID || st->st_gid < base ||
        st->st_gid > base + BOX_INIT_UID)
        return lh_fail(w->err, LH_FAILED_PRECONDITION,
                       "%s in a layer belongs to %u:%u of the host, not to the sandbox",
                       *path ? path : ".", st->st_uid, st->st_gid);
    st->st_uid -= base;
    st->st_gid -= base;
    if (S_ISCHR(st->st_mode) || S_ISBLK(st->st_mode))
        return lh_fail(w->err, LH_FAILED_PRECONDITION, "%s in a layer is a device", path);
    return 0;
}

static int describe(struct walk *w, int at, const char *path, struct layer_entry *e, char *target)
{
    if (fstat(at, &e->st) < 0)
        return fail(w, "status", path);
    if (S_ISLNK(e->st.st_mode)) {
        ssize_t n = readlinkat(at, "", target, PATH_MAX - 1);
        if (n < 0)
            return fail(w, "target", path);
        target[n] = 0;
    }
    int r = find_link(w, &e->st, path, &e->link);
    return r < 0 ? r : to_inside(w, &e->st, path);
}

/* `at` is an O_PATH descriptor of the entry. */
static int visit(struct walk *w, int at, const char *path, mode_t *type)
{
    __attribute__((cleanup(free_xattrs))) struct xattrs x = {.n = 0};
    struct layer_entry e = {.path = path, .fd = -1};
    char target[PATH_MAX] = "", reopen[32];
    int r = describe(w, at, path, &e, target);

    if (r < 0)
        return r;
    *type = e.st.st_mode & S_IFMT;
    e.target = target;
    if (!*e.link && !layer_is_whiteout(&e.st) && !S_ISLNK(e.st.st_mode) &&
        (r = read_xattrs(w, at, &x, path)) < 0)
        return r;
    e.xattrs = x.items;
    e.n_xattrs = x.n;
    snprintf(reopen, sizeof reopen, "/proc/self/fd/%d", at);
    lh_autoclose int fd =
        S_ISREG(e.st.st_mode) && !*e.link ? open(reopen, O_RDONLY | O_CLOEXEC | O_NOATIME) : -1;
    if (S_ISREG(e.st.st_mode) && !*e.link && fd < 0)
        return fail(w, "content", path);
    e.fd = fd;
    return w->fn(w->ctx, &e, w->err);
}

/* ---- the walk ---- */

struct names {
    char **items;
    size_t n;
};

static void free_names(struct names *n)
{
    for (size_t i = 0; i < n->n; i++)
        free(n->items[i]);
    free(n->items);
}

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static int read_names(struct walk *w, int dir_fd, struct names *out, const char *path)
{
    int copy = openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOATIME);
    lh_autoclosedir DIR *dir = copy < 0 ? NULL : fdopendir(copy);

    if (!dir) {
        if (copy >= 0)
            close(copy);
        return fail(w, "names", path);
    }
    for (struct dirent *e; (e = readdir(dir));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
            continue;
        char **more = (out->n & (out->n - 1)) == 0 /* room for a power of two */
                          ? realloc(out->items, (out->n ? 2 * out->n : 1) * sizeof *more)
                          : out->items;
        if (more)
            out->items = more;
        char *name = more ? strdup(e->d_name) : NULL;
        if (!name)
            return lh_fail_errno(w->err, ENOMEM, "names of a layer");
        out->items[out->n++] = name;
    }
    if (out->n)
        qsort(out->items, out->n, sizeof *out->items, by_bytes);
    return 0;
}

static int walk_dir(struct walk *w, int dir, const char *path, int depth);

static int walk_name(struct walk *w, int dir, const char *path, const char *name, int depth)
{
    lh_autofree char *below = lh_format("%s%s%s", path, *path ? "/" : "", name);
    lh_autoclose int at = openat(dir, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    mode_t type = 0;

    if (!below || at < 0)
        return fail(w, "opening", below ? below : name);
    int r = visit(w, at, below, &type);
    return r == 0 && type == S_IFDIR ? walk_dir(w, at, below, depth + 1) : r;
}

/* What is in a directory; the entry itself has been visited. */
static int walk_dir(struct walk *w, int dir, const char *path, int depth)
{
    __attribute__((cleanup(free_names))) struct names names = {0};
    int r = depth > LAYER_DEPTH_MAX
                ? lh_fail(w->err, LH_FAILED_PRECONDITION,
                          "directories in a layer are nested deeper than %d", LAYER_DEPTH_MAX)
                : read_names(w, dir, &names, path);

    for (size_t i = 0; r == 0 && i < names.n; i++)
        r = walk_name(w, dir, path, names.items[i], depth);
    return r;
}

int layer_walk(const char *path, layer_entry_fn *fn, void *ctx, struct lh_error *err)
{
    struct lh_error local = {0};
    struct walk w = {.fn = fn, .ctx = ctx, .err = err ? err : &local};
    mode_t type = 0;
    lh_autoclose int root = open(path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);

    if (root < 0)
        return lh_fail_errno(err, errno, "layer %s", path);
    int r = visit(&w, root, "", &type);
    if (r == 0)
        r = walk_dir(&w, root, "", 1);
    tdestroy(w.seen, free_seen);
    return r < 0 ? lh_wrap(err, "%s", path) : 0;
}

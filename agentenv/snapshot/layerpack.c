#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "agentenv/snapshot/layertar.h"
#include "agentenv/snapshot/layerwalk.h"
#include "proto/cleanup.h"
#include "proto/file.h"

enum { PIECE = 256 << 10 };

struct packing {
    struct archive *to;
    const char *prefix;
    uint8_t *piece;
};

static int archive_failure(struct packing *p, const char *name, struct lh_error *err)
{
    int code = archive_errno(p->to) > 0 ? lh_status_from_errno(archive_errno(p->to)) : LH_INTERNAL;
    const char *why = archive_error_string(p->to);

    return lh_fail(err, code, "packing %s: %s", name, why ? why : "libarchive failed");
}

static int add_xattrs(struct archive_entry *to, const struct layer_entry *e, struct lh_error *err)
{
    for (size_t i = 0; i < e->n_xattrs; i++) {
        const struct layer_xattr *x = &e->xattrs[i];
        if (strncmp(x->name, "user.", 5) != 0 && strcmp(x->name, LAYER_OPAQUE) != 0)
            return lh_fail(err, LH_FAILED_PRECONDITION,
                           "%s has the attribute %s, which is of this host only; remove it",
                           e->path, x->name);
        archive_entry_xattr_add_entry(to, x->name, x->value, x->len);
    }
    if (S_ISSOCK(e->st.st_mode))
        archive_entry_xattr_add_entry(to, LAYER_SOCKET, "y", 1);
    return 0;
}

static int describe(struct packing *p, struct archive_entry *to, const struct layer_entry *e,
                    struct lh_error *err)
{
    lh_autofree char *name = lh_format("%s%s%s", p->prefix, *p->prefix && *e->path ? "/" : "",
                                       *e->path || *p->prefix ? e->path : ".");
    lh_autofree char *link = lh_format("%s%s%s", p->prefix, *p->prefix ? "/" : "", e->link);

    if (!name || !link)
        return lh_fail_errno(err, ENOMEM, "packing a layer");
    archive_entry_copy_stat(to, &e->st);
    archive_entry_unset_atime(to);
    archive_entry_unset_ctime(to);
    archive_entry_set_nlink(to, 1); /* the writer shall not look for links by itself */
    archive_entry_copy_pathname(to, name);
    if (S_ISSOCK(e->st.st_mode))
        archive_entry_set_filetype(to, AE_IFIFO);
    if (S_ISLNK(e->st.st_mode))
        archive_entry_copy_symlink(to, e->target);
    if (*e->link) {
        archive_entry_copy_hardlink(to, link);
        archive_entry_set_size(to, 0);
    }
    return add_xattrs(to, e, err);
}

static int write_content(struct packing *p, const struct layer_entry *e, struct lh_error *err)
{
    ssize_t n;

    while ((n = read(e->fd, p->piece, PIECE)) > 0)
        if (archive_write_data(p->to, p->piece, (size_t)n) < 0)
            return archive_failure(p, e->path, err);
    return n < 0 ? lh_fail_errno(err, errno, "reading %s", e->path) : 0;
}

static int pack_entry(void *ctx, const struct layer_entry *e, struct lh_error *err)
{
    struct packing *p = ctx;
    struct archive_entry *to = archive_entry_new();

    if (!to)
        return lh_fail_errno(err, ENOMEM, "packing a layer");
    int r = describe(p, to, e, err);
    if (r == 0 && archive_write_header(p->to, to) != ARCHIVE_OK)
        r = archive_failure(p, e->path, err);
    archive_entry_free(to);
    return r == 0 && e->fd >= 0 ? write_content(p, e, err) : r;
}

int layer_pack(struct archive *to, const char *path, const char *prefix, struct lh_error *err)
{
    lh_autofree uint8_t *piece = malloc(PIECE);
    struct packing p = {to, prefix, piece};

    return piece ? layer_walk(path, pack_entry, &p, err)
                 : lh_fail_errno(err, ENOMEM, "packing a layer");
}

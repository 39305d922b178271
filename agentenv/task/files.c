#include "agentenv/task/files.h"

#include <errno.h>
#include <fts.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "agentenv/task/task.h"
#include "proto/cleanup.h"
#include "proto/file.h"
#include "proto/parse.h"

typedef Longhaul__Task__V1__File File;

static int add_file(struct file_list *l, const FTSENT *e, const char *to, struct lh_error *err)
{
    lh_automsg(File) f = malloc(sizeof *f);
    size_t len;

    if (!f)
        return lh_fail_errno(err, ENOMEM, "%s", e->fts_path);
    longhaul__task__v1__file__init(f);
    f->mode = e->fts_statp->st_mode & 0777;
    f->path = lh_format("%s", to);
    f->content.data = (uint8_t *)lh_read_file(e->fts_path, TASK_FILE_MAX, &len, err);
    if (!f->path || !f->content.data)
        return err->code ? err->code : LH_RESOURCE_EXHAUSTED;
    f->content.len = len;
    l->bytes += len;
    if (l->bytes > TASK_FILES_MAX)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%s: more than %d bytes of files", e->fts_path,
                       TASK_FILES_MAX);
    File **more = reallocarray(l->items, l->n + 1, sizeof *more);
    if (!more)
        return lh_fail_errno(err, ENOMEM, "%s", e->fts_path);
    l->items = more;
    l->items[l->n++] = lh_steal(&f);
    return 0;
}

static int by_name(const FTSENT **a, const FTSENT **b)
{
    return strcmp((*a)->fts_name, (*b)->fts_name);
}

static int add_entry(struct file_list *l, const FTSENT *e, size_t root, const char *to,
                     struct lh_error *err)
{
    switch (e->fts_info) {
    case FTS_D:
    case FTS_DP:
        return 0;
    case FTS_F: {
        lh_autofree char *path = lh_format("%s%s", to, e->fts_path + root);
        return path ? add_file(l, e, path, err) : lh_fail_errno(err, ENOMEM, "%s", e->fts_path);
    }
    case FTS_ERR:
    case FTS_DNR:
    case FTS_NS:
        return lh_fail_errno(err, e->fts_errno, "%s", e->fts_path);
    default:
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "%s is a symbolic link or no file at all; only files can be taken",
                       e->fts_path);
    }
}

int files_add(struct file_list *l, const char *from, const char *to, struct lh_error *err)
{
    lh_autofree char *trimmed = strdup(from);
    char *const roots[] = {trimmed, NULL};
    int r = 0;

    for (size_t n = trimmed ? strlen(trimmed) : 0; n > 1 && trimmed[n - 1] == '/'; n--)
        trimmed[n - 1] = 0;
    FTS *fts = trimmed ? fts_open(roots, FTS_PHYSICAL | FTS_NOCHDIR | FTS_XDEV, by_name) : NULL;
    if (!fts)
        return lh_fail_errno(err, errno, "%s", from);
    errno = 0;
    for (FTSENT *e; r == 0 && (e = fts_read(fts));)
        r = add_entry(l, e, strlen(trimmed), to, err);
    fts_close(fts);
    return r;
}

void files_finish(struct file_list *l)
{
    for (size_t i = 0; i < l->n; i++)
        lh_message_free(&l->items[i]->base);
    free(l->items);
    *l = (struct file_list){0};
}

/* What is known of images: by name, by digest, through a snapshot, one or all of them for a client.
 * Only rows are read here; the trees below the paths that come back are image.c's. */
#include "agentenv/task/image.h"

#include <stdio.h>
#include <string.h>

#include "proto/parse.h"

typedef Longhaul__Sandbox__V1__ImageInfo ImageInfo;

static int fill_image(struct daemon *d, const char *id, const char *name, struct daemon_image *out,
                      struct lh_error *err)
{
    snprintf(out->id, sizeof out->id, "%s", id);
    snprintf(out->name, sizeof out->name, "%s", name);
    int n = snprintf(out->path, sizeof out->path, "%s/images/%s", daemon_state_dir(d), id);
    if (n < 0 || (size_t)n >= sizeof out->path)
        return lh_fail(err, LH_INVALID_ARGUMENT, "the path of image %s is too long", name);
    return 0;
}

int image_find(struct daemon *d, const char *name, struct daemon_image *out, struct lh_error *err)
{
    lh_autofree char *id = db_string(
        daemon_db(d), err, "SELECT id FROM images WHERE name = ? AND state = 1", "s", name);

    if (!id && err && err->code != LH_NOT_FOUND)
        return err->code;
    if (!id)
        return lh_fail(err, LH_NOT_FOUND, "no image %s; agentenv image import %s PATH", name, name);
    return fill_image(d, id, name, out, err);
}

struct found {
    struct daemon *d;
    struct daemon_image *out;
    int n;
};

static int take_found(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct found *f = ctx;

    f->n++;
    return fill_image(f->d, db_text(row, 0), db_text(row, 1), f->out, err);
}

int image_by_digest(struct daemon *d, const char *digest, struct daemon_image *out,
                    struct lh_error *err)
{
    struct found f = {d, out, 0};
    int r =
        db_each(daemon_db(d), err, take_found, &f,
                "SELECT id, name FROM images WHERE digest = ? AND state = 1 LIMIT 1", "s", digest);

    if (r == 0 && !f.n)
        r = lh_fail(err, LH_NOT_FOUND,
                    "no image has digest %.64s; import the same image first (agentenv image "
                    "import)",
                    digest);
    return r;
}

char *image_digest_of(struct daemon *d, const char *snapshot, struct lh_error *err)
{
    return db_string(daemon_db(d), err,
                     "SELECT digest FROM images WHERE id ="
                     " (SELECT image_id FROM snapshots WHERE id = ?)",
                     "s", snapshot);
}

/* What was kept of it comes first, the columns of the row over it. */
static int fill_config(ImageInfo *info, sqlite3_stmt *row, struct lh_error *err)
{
    if (sqlite3_column_type(row, 4) == SQLITE_NULL)
        return 0;
    lh_automsg(ImageInfo) kept = (ImageInfo *)lh_parse(
        &longhaul__sandbox__v1__image_info__descriptor, sqlite3_column_blob(row, 4),
        (size_t)sqlite3_column_bytes(row, 4), (struct lh_parse_limits){0}, err);
    if (!kept)
        return LH_DATA_LOSS;
    info->n_env = kept->n_env;
    info->env = kept->env;
    info->workdir = strdup(kept->workdir);
    info->user = strdup(kept->user);
    info->warm_up = strdup(kept->warm_up);
    kept->n_env = 0;
    kept->env = NULL;
    return info->workdir && info->user && info->warm_up
               ? 0
               : lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory");
}

static int fill_info(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    ImageInfo *info = ctx;
    int r = fill_config(info, row, err);

    if (r < 0)
        return r;
    info->name = strdup(db_text(row, 0));
    info->digest = strdup(db_text(row, 1));
    info->bytes = (uint64_t)sqlite3_column_int64(row, 2);
    info->created_ms = sqlite3_column_int64(row, 3);
    return info->name && info->digest ? 0 : lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory");
}

#define INFO                                                                                       \
    "SELECT name, digest, bytes, created_ms, info FROM images"                                     \
    " LEFT JOIN image_configs ON image = id WHERE state = 1"

static ImageInfo *new_info(struct lh_error *err)
{
    static const ImageInfo empty = LONGHAUL__SANDBOX__V1__IMAGE_INFO__INIT;
    ImageInfo *info = malloc(sizeof *info);

    if (info)
        *info = empty;
    else
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for an image");
    return info;
}

ImageInfo *image_show(struct daemon *d, const char *name, struct lh_error *err)
{
    lh_automsg(ImageInfo) info = new_info(err);
    int r = info ? db_each(daemon_db(d), err, fill_info, info, INFO " AND name = ?", "s", name)
                 : LH_RESOURCE_EXHAUSTED;

    if (r == 0 && !*info->name)
        r = lh_fail(err, LH_NOT_FOUND, "no image %s; see agentenv image ls", name);
    return r < 0 ? NULL : lh_steal(&info);
}

ImageInfo *image_info(struct daemon *d, const char *id, struct lh_error *err)
{
    lh_automsg(ImageInfo) info = new_info(err);
    int r = info ? db_each(daemon_db(d), err, fill_info, info, INFO " AND id = ?", "s", id)
                 : LH_RESOURCE_EXHAUSTED;

    if (r == 0 && !*info->name)
        r = lh_fail(err, LH_NOT_FOUND, "image %s is gone", id);
    return r < 0 ? NULL : lh_steal(&info);
}

static int add_info(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    Longhaul__Sandbox__V1__ListImagesReply *list = ctx;
    void *more = reallocarray(list->images, list->n_images + 1, sizeof *list->images);

    if (!more)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a list of images");
    list->images = more;
    list->images[list->n_images] = new_info(err);
    if (!list->images[list->n_images])
        return LH_RESOURCE_EXHAUSTED;
    return fill_info(list->images[list->n_images++], row, err);
}

int image_list_rpc(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                   ProtobufCMessage **reply, struct lh_error *err)
{
    static const Longhaul__Sandbox__V1__ListImagesReply empty =
        LONGHAUL__SANDBOX__V1__LIST_IMAGES_REPLY__INIT;
    lh_automsg(Longhaul__Sandbox__V1__ListImagesReply) list = malloc(sizeof *list);

    if (!list)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a list of images");
    *list = empty;
    int r = db_each(daemon_db(ctx), err, add_info, list, INFO " ORDER BY name", "");
    if (r == 0)
        *reply = &lh_steal(&list)->base;
    return r;
}

/* A limit to what snapshots may hold on disk: their layers and their processes, not the images that
 * they stand on, nor what running sandboxes write (their own limits bound that).
 *
 * Looked at before something new is kept, so that the store ends at most one snapshot above it.
 * First gc is tried: what nobody has retained for a minute goes, and pages are shared.  Layers are
 * summed up from their rows; process images are looked at on disk, since pages may outlive the
 * snapshot that brought them (sharing.c): each link to a file counts for its part of it. */
#include <errno.h>
#include <fts.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/snapshot/snapshot.h"
#include "proto/file.h"
#include "proto/log.h"

LH_LOG_COMPONENT("agentenvd");

enum { GRACE_MS = 60000, BLOCK = 512 };

static int images_used(struct daemon *d, uint64_t *bytes, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/checkpoints", d->state_dir);
    char *const roots[] = {path, NULL};
    FTS *fts = path ? fts_open(roots, FTS_PHYSICAL | FTS_NOCHDIR | FTS_XDEV, NULL) : NULL;

    if (!fts)
        return lh_fail_errno(err, path ? errno : ENOMEM, "looking at process images");
    for (FTSENT *e; (e = fts_read(fts));) /* what goes meanwhile is no error */
        if (e->fts_info == FTS_F)
            *bytes += (uint64_t)e->fts_statp->st_blocks * BLOCK / e->fts_statp->st_nlink;
    fts_close(fts);
    return 0;
}

int quota_used(struct daemon *d, uint64_t *bytes, struct lh_error *err)
{
    int64_t layers = 0;
    int r = db_int(d->db, err, &layers, "SELECT coalesce(sum(bytes), 0) FROM layers", "");

    *bytes = (uint64_t)layers;
    return r == 0 ? images_used(d, bytes, err) : r;
}

static void make_room(struct daemon *d)
{
    struct gc_result done = {0};
    struct lh_error err = {0};
    const struct sharing_scope scope = {.checkpoints = true, .at_once = true};

    if (snapshot_gc(d, GRACE_MS, &done, &err) < 0 ||
        sharing_round(d, &scope, &done.bytes, &err) < 0)
        lh_warn("gc for a full store failed", "why=%s", err.message);
}

int quota_check(struct daemon *d, struct lh_error *err)
{
    uint64_t used = 0;

    if (!d->store_limit)
        return 0;
    int r = quota_used(d, &used, err);
    if (r == 0 && used >= d->store_limit) {
        make_room(d);
        r = quota_used(d, &used, err);
    }
    if (r < 0 || used < d->store_limit)
        return r;
    return lh_fail(err, LH_RESOURCE_EXHAUSTED,
                   "the store holds %llu MiB, its limit is %llu: release snapshots (agentenv "
                   "snapshot ls), or start agentenvd with a larger --store-limit",
                   (unsigned long long)used >> 20, (unsigned long long)d->store_limit >> 20);
}

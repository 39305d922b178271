/* Memory that snapshots have in common is on disk once.
 *
 * A snapshot with processes is compared, page by page, with the one before it of the same sandbox,
 * or the one that the sandbox was started from, and keeps only what differs (criu/share.c).  Not
 * when it is taken: the dump writes all of memory at the speed of the disk's cache, and a resume
 * soon after reads from there.  The thread that addresses layers does it later (contents.c), for
 * snapshots that are durable; not for the checkpoints of sandboxes that sleep, whose resume
 * somebody waits for, and to which CRIU has a shorter way when images stand alone.  Those follow
 * when somebody asks for room: gc, or a store that is full.
 *
 * New images are made beside the old, in STATE/sharing/ID, flushed, and exchanged with them by one
 * renameat2().  A row `sharing` with done = 0 stands from before the directory is made until it is
 * gone, whatever lies in it, the new images or the old ones: what a crash leaves is removed by that
 * row, and the snapshot is looked at again.  A restore that began before the exchange reads the old
 * ones through its open directory; they stay until no restore goes on.
 *
 * The row of the snapshot is asked for in the transaction that covers the exchange: who drops a
 * snapshot deletes its row first, so that never a directory is exchanged while it is removed. */
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agentenv/criu/memory.h"
#include "agentenv/criu/share.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"

LH_LOG_COMPONENT("agentenvd");

enum {
    WORTH = 8, /* less than one page in so many: not worth the exchange */
    READERS_MS = 30000,
    READERS_POLL_MS = 20,
};

struct pair {
    char id[LH_ID_SIZE], base[LH_ID_SIZE]; /* "" = there is none */
};

static char *work_dir(const struct daemon *d, const char *id)
{
    return lh_format("%s/sharing/%s", d->state_dir, id);
}

/* ---- records ---- */

static int set_done(struct daemon *d, const char *id, struct lh_error *err)
{
    return db_run(d->db, err, "INSERT OR REPLACE INTO sharing VALUES(?,1)", "s", id);
}

/* The directory, then the row. */
static int clear(struct daemon *d, const char *id, struct lh_error *err)
{
    lh_autofree char *path = work_dir(d, id);
    int r = path ? lh_remove_tree(path, err) : lh_fail_errno(err, ENOMEM, "sharing of %s", id);

    return r < 0 ? r : db_run(d->db, err, "DELETE FROM sharing WHERE snapshot=?", "s", id);
}

/* Those that a crash, or a reader that would not end, left half done. */
static int clear_all(struct daemon *d, struct lh_error *err)
{
    int r = 0;

    while (r == 0) {
        struct lh_error none = {0};
        lh_autofree char *id =
            db_string(d->db, &none, "SELECT snapshot FROM sharing WHERE done=0 LIMIT 1", "");
        if (!id)
            return none.code == LH_NOT_FOUND ? 0 : lh_fail(err, none.code, "%s", none.message);
        r = clear(d, id, err);
    }
    return r;
}

int sharing_recover(struct daemon *d, struct lh_error *err)
{
    return clear_all(d, err);
}

static int read_pair(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct pair *p = ctx;

    (void)err;
    snprintf(p->id, sizeof p->id, "%s", db_text(row, 0));
    snprintf(p->base, sizeof p->base, "%s", db_text(row, 1));
    return 0;
}

#define CHECKPOINTS "(SELECT snapshot FROM snapshot_owners WHERE owner LIKE 'checkpoint/%')"

/* Oldest first, and only over what was looked at itself: else it would hold whole what the base is
 * about to share. */
static int next_pair(struct daemon *d, const struct sharing_scope *scope, struct pair *out,
                     struct lh_error *err)
{
    *out = (struct pair){0};
    return db_each(
        d->db, err, read_pair, out,
        "SELECT s.id, coalesce((SELECT b.id FROM snapshots b WHERE b.engine='criu' AND b.ready=1"
        " AND (b.sandbox=s.sandbox AND b.sandbox<>'' AND b.id<s.id OR b.id=s.parent)"
        " ORDER BY b.id DESC LIMIT 1), '') AS base FROM snapshots s"
        " WHERE s.engine='criu' AND s.ready=1 AND s.durable=1 AND s.created_ms<=?1"
        " AND s.id NOT IN (SELECT snapshot FROM sharing)"
        " AND (?2 OR s.id NOT IN " CHECKPOINTS ")"
        " AND (base='' OR base IN (SELECT snapshot FROM sharing WHERE done=1)"
        " OR NOT ?2 AND base IN " CHECKPOINTS ") ORDER BY s.id LIMIT 1",
        "li", lh_unix_ms() - scope->after_ms, (int)scope->checkpoints);
}

/* ---- one snapshot ---- */

static int open_images(struct daemon *d, const char *id, struct lh_error *err)
{
    lh_autofree char *path = images_dir(d, id);
    int fd = path ? open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;

    return fd < 0 ? lh_fail_errno(err, path ? errno : ENOMEM, "images of snapshot %s", id) : fd;
}

/* As the images' own directory is, which restored tasks enter. */
static int make_work_dir(const char *path, int like, struct lh_error *err)
{
    struct stat st;
    int fd = mkdir(path, 0700) < 0 ? -1 : open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd < 0)
        return lh_fail_errno(err, errno, "making %s", path);
    if (fstat(like, &st) == 0 && fchown(fd, st.st_uid, st.st_gid) == 0 &&
        fchmod(fd, st.st_mode & 07777) == 0)
        return fd;
    int r = lh_fail_errno(err, errno, "%s", path);
    close(fd);
    return r;
}

static int exchange(struct daemon *d, const char *id, const char *work, struct lh_error *err)
{
    lh_autofree char *images = images_dir(d, id);
    int64_t there = 0;
    int r = images ? db_begin(d->db, err) : lh_fail_errno(err, ENOMEM, "snapshot %s", id);

    if (r < 0)
        return r;
    r = db_int(d->db, err, &there, "SELECT count(*) FROM snapshots WHERE id=?", "s", id);
    if (r == 0 && !there)
        r = lh_fail(err, LH_NOT_FOUND, "snapshot %s is gone", id);
    if (r == 0 && renameat2(AT_FDCWD, work, AT_FDCWD, images, RENAME_EXCHANGE) < 0)
        r = lh_fail_errno(err, errno, "exchanging the images of %s", id);
    r = db_end(d->db, r, err);
    if (r == 0)
        r = lh_sync_dir_of(images, err);
    return r == 0 ? lh_sync_dir_of(work, err) : r;
}

static bool nobody_reads(struct daemon *d)
{
    LH_LOCKED(&d->lock);
    return d->readers == 0;
}

/* In the background, and seldom anything to wait for. */
static bool wait_for_readers(struct daemon *d, bool at_once)
{
    int64_t deadline_ms = lh_now_ms() + (at_once ? 0 : READERS_MS);

    while (!nobody_reads(d)) {
        if (!lh_ms_left(deadline_ms))
            return false;
        poll(NULL, 0, READERS_POLL_MS);
    }
    return true;
}

/* What lies beside the images now are the old ones. */
static int finish(struct daemon *d, const char *id, const struct sharing_scope *scope,
                  uint64_t freed, struct lh_error *err)
{
    int r = db_run(d->db, err, "UPDATE snapshots SET bytes=max(0, bytes-?) WHERE id=?", "ls",
                   (int64_t)freed, id);

    if (r < 0 || !wait_for_readers(d, scope->at_once))
        return r; /* the next round clears it */
    r = clear(d, id, err);
    return r == 0 ? set_done(d, id, err) : r;
}

static int make_shared(struct daemon *d, const struct pair *p, const char *work,
                       struct criu_shared *out, struct lh_error *err)
{
    lh_autoclose int images = open_images(d, p->id, err);
    lh_autoclose int base = images < 0 ? -1 : open_images(d, p->base, err);
    lh_autoclose int to = base < 0 ? -1 : make_work_dir(work, images, err);

    if (to < 0)
        return err->code;
    return criu_shares(images) ? 0 : criu_share(images, base, to, out, err);
}

static int share(struct daemon *d, const struct pair *p, const struct sharing_scope *scope,
                 uint64_t *freed, struct lh_error *err)
{
    lh_autofree char *work = work_dir(d, p->id);
    struct criu_shared done = {0};
    uint64_t bytes;
    int r = work ? db_run(d->db, err, "INSERT INTO sharing VALUES(?,0)", "s", p->id)
                 : lh_fail_errno(err, ENOMEM, "sharing of %s", p->id);

    if (r == 0)
        r = make_shared(d, p, work, &done, err);
    if (r < 0)
        return r;
    if (done.shared == 0 || done.shared * WORTH < done.pages) {
        r = clear(d, p->id, err);
        return r == 0 ? set_done(d, p->id, err) : r;
    }
    r = layer_settle(work, true, &bytes, err);
    if (r == 0)
        r = exchange(d, p->id, work, err);
    if (r < 0)
        return r;
    *freed = done.shared * MEMORY_PAGE;
    lh_info("pages shared", "snapshot=%s with=%s pages=%llu shared=%llu", p->id, p->base,
            (unsigned long long)done.pages, (unsigned long long)done.shared);
    return finish(d, p->id, scope, *freed, err);
}

static bool is_there(struct daemon *d, const char *id)
{
    int64_t n = 0;

    return db_int(d->db, NULL, &n, "SELECT count(*) FROM snapshots WHERE id=?", "s", id) == 0 &&
           n > 0;
}

/* One that cannot be shared stays whole; one that went meanwhile, or whose base did, is no error.
 */
static int look_at(struct daemon *d, const struct pair *p, const struct sharing_scope *scope,
                   uint64_t *bytes, struct lh_error *err)
{
    struct lh_error why = {0};
    uint64_t freed = 0;

    if (!p->base[0])
        return set_done(d, p->id, err);
    int r = share(d, p, scope, &freed, &why);
    *bytes += freed;
    if (r == 0)
        return 0;
    bool free = nobody_reads(d); /* what lies there may be the old images */
    r = free ? clear(d, p->id, err) : 0;
    if (r < 0 || !is_there(d, p->id) || !is_there(d, p->base))
        return r;
    if (why.code == LH_RESOURCE_EXHAUSTED)
        return lh_fail(err, why.code, "%s", why.message);
    lh_warn("memory stays whole", "snapshot=%s why=%s", p->id, why.message);
    return free ? set_done(d, p->id, err) : 0; /* else the next round clears it */
}

/* ---- rounds ---- */

static int look_at_all(struct daemon *d, const struct sharing_scope *scope, uint64_t *bytes,
                       struct lh_error *err)
{
    struct pair p = {0};
    int r = db_run(
        d->db, err,
        "DELETE FROM sharing WHERE done=1 AND snapshot NOT IN (SELECT id FROM snapshots)", "");

    if (r == 0 && nobody_reads(d))
        r = clear_all(d, err);
    while (r == 0 && (r = next_pair(d, scope, &p, err)) == 0 && p.id[0])
        r = look_at(d, &p, scope, bytes, err);
    return r;
}

static bool enter(struct daemon *d)
{
    LH_LOCKED(&d->lock);
    bool free = !d->sharing;

    d->sharing = true;
    return free;
}

int sharing_round(struct daemon *d, const struct sharing_scope *scope, uint64_t *bytes,
                  struct lh_error *err)
{
    if (!enter(d))
        return 0; /* somebody does it */
    int r = look_at_all(d, scope, bytes, err);
    pthread_mutex_lock(&d->lock);
    d->sharing = false;
    pthread_mutex_unlock(&d->lock);
    return r < 0 ? lh_wrap(err, "sharing pages") : 0;
}

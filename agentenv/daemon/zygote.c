/* Images that are warm already.
 *
 * An image may name a command that makes it ready: an interpreter with its modules loaded, a server
 * started.  That is done once, in a sandbox of its own, whose checkpoint, the *zygote*, is what new
 * sandboxes of the image start from.  It is made when the image is imported, and again at the first
 * start after it has lost its worth: another command, another kernel, CRIU or init.  One is made at
 * a time, and nobody waits for another's.
 *
 * Whoever cannot have it gets the same the slow way: the command runs in the new sandbox before it
 * is handed out.  How often that happens, and why, is counted.  A zygote that fails to be restored
 * FAILURES_MAX times in a row, where there was room for it, is broken: only every AGAIN_EVERY-th
 * start tries it again, since what was wrong may have been the host.
 *
 * Records: the snapshot is retained as "zygote-of/IMAGE", and a row of `zygotes` names it.  A
 * snapshot under that name without a row, or of an image that is no more, is swept. */
#include <dirent.h>
#include <errno.h>
#include <string.h>
#include <sys/utsname.h>

#include "agentenv/daemon/internal.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/parse.h"

LH_LOG_COMPONENT("agentenvd");

enum { WARM_UP_MS = 600000, START_MS = 60000, FAILURES_MAX = 3, AGAIN_EVERY = 32, PIDS = 1024 };
enum { WORTH_MS = 10000 /* with less time left none is made */ };
#define DISK_BYTES   ((uint64_t)4 << 30)
#define MEMORY_BYTES ((uint64_t)2 << 30)

/* ---- the command ---- */

struct last_words {
    char text[400];
    size_t len;
};

static int keep_first(void *ctx, int stream, const void *data, size_t len, struct lh_error *err)
{
    struct last_words *w = ctx;
    size_t room = sizeof w->text - 1 - w->len, n = len < room ? len : room;

    (void)stream;
    (void)err;
    memcpy(w->text + w->len, data, n);
    w->len += n;
    return 0;
}

static int run(struct daemon *d, const char *sandbox, const V1(ImageInfo) * info,
               int64_t deadline_ms, struct lh_error *err)
{
    int left_ms = lh_ms_left(deadline_ms);
    V1(ExecRequest) req = LONGHAUL__SANDBOX__V1__EXEC_REQUEST__INIT;
    V1(ExecExit) done = LONGHAUL__SANDBOX__V1__EXEC_EXIT__INIT;
    char *argv[] = {(char *)"/bin/sh", (char *)"-c", info->warm_up};
    struct last_words said = {0};

    if (!left_ms) /* 0 would be the default */
        return lh_fail(err, LH_DEADLINE_EXCEEDED, "no time left for warm-up \"%.100s\"",
                       info->warm_up);
    req.id = (char *)sandbox;
    req.argv = argv;
    req.n_argv = LH_ARRAY_SIZE(argv);
    req.env = info->env;
    req.n_env = info->n_env;
    req.cwd = info->workdir;
    req.user = info->user;
    req.timeout_ms = (uint32_t)(left_ms < WARM_UP_MS ? left_ms : WARM_UP_MS);
    int r = daemon_exec(d, &req, NULL, keep_first, &said, &done, err);
    if (r == 0 && (done.status || done.timed_out))
        r = lh_fail(err, LH_FAILED_PRECONDITION, "it ends with %d: %s", done.status, said.text);
    return r < 0 ? lh_wrap(err, "warm-up \"%.100s\"", info->warm_up) : 0;
}

int zygote_run(struct daemon *d, const struct sandbox *s, int64_t deadline_ms, struct lh_error *err)
{
    lh_automsg(V1(ImageInfo)) info = d->hooks->image_info(d, s->image_id, err);

    return info ? run(d, s->id, info, deadline_ms, err) : err->code;
}

/* ---- records ---- */

/* What a zygote depends on. */
static char *made_with(struct daemon *d, const V1(ImageInfo) * info)
{
    lh_autofree char *programs = box_host_fingerprint(d->host);
    struct utsname u;

    return programs && uname(&u) == 0 ? lh_format("%s %s\n%s", u.release, programs, info->warm_up)
                                      : NULL;
}

/* *id = "": there is none of that make, or not one that can be restored. */
static int find(struct daemon *d, const char *image, const char *with, char id[LH_ID_SIZE],
                bool *broken, struct lh_error *err)
{
    struct lh_error none = {0};
    int64_t failures = 0;
    lh_autofree char *found =
        db_string(d->db, &none,
                  "SELECT z.snapshot FROM zygotes z JOIN snapshots s ON s.id=z.snapshot"
                  " WHERE z.image=? AND z.made_with=? AND s.ready=1",
                  "ss", image, with);

    id[0] = 0;
    *broken = false;
    if (!found)
        return none.code == LH_NOT_FOUND ? 0 : lh_fail(err, none.code, "%s", none.message);
    int r = db_int(d->db, err, &failures, "SELECT failures FROM zygotes WHERE image=?", "s", image);
    *broken = failures >= FAILURES_MAX && failures % AGAIN_EVERY;
    if (!*broken)
        snprintf(id, LH_ID_SIZE, "%s", found);
    return r;
}

static char *next_to_sweep(struct daemon *d, struct lh_error *none)
{
    return db_string(d->db, none,
                     "SELECT o.snapshot FROM snapshot_owners o JOIN snapshots s ON s.id=o.snapshot"
                     " WHERE o.owner='zygote-of/' || s.image_id AND s.ready=1"
                     " AND o.snapshot NOT IN (SELECT snapshot FROM zygotes WHERE image IN"
                     " (SELECT id FROM images WHERE state=1)) LIMIT 1",
                     "");
}

static bool begin_making(struct daemon *d)
{
    LH_LOCKED(&d->lock);
    bool free = !d->making_zygote;

    d->making_zygote = true;
    return free;
}

static void end_making(struct daemon *d)
{
    LH_LOCKED(&d->lock);
    d->making_zygote = false;
}

static void sweep(struct daemon *d)
{
    struct lh_error err = {0};
    int r =
        db_run(d->db, &err,
               "DELETE FROM zygotes WHERE image NOT IN (SELECT id FROM images WHERE state=1)", "");

    while (r == 0) {
        struct lh_error none = {0};
        lh_autofree char *id = next_to_sweep(d, &none);
        if (!id)
            break;
        r = snapshot_drop(d, id, true, &err);
    }
    if (r < 0)
        lh_warn("zygotes not swept", "why=%s", err.message);
}

void zygotes_sweep(struct daemon *d)
{
    if (!begin_making(d))
        return; /* one that is made has no row yet; gc comes again */
    sweep(d);
    end_making(d);
}

/* ---- making one ---- */

static int take(struct daemon *d, const char *sandbox, const V1(ImageInfo) * info,
                const char *image, char id[LH_ID_SIZE], struct lh_error *err)
{
    lh_autofree char *owner = lh_format("zygote-of/%s", image), *with = made_with(d, info);
    struct sandbox *s;

    if (!owner || !with)
        return lh_fail_errno(err, ENOMEM, "a zygote");
    const struct snapshot_options o = {
        .owner = owner, .durable = true, .state = SB_SNAPSHOTTING, .processes = true};
    int r = sandbox_begin(d, sandbox, ANY_ATTEMPT, SB_IN(SB_RUNNING), HOLD_ALONE,
                          lh_now_ms() + START_MS, &s, err);
    if (r < 0)
        return r;
    r = strcmp(s->image_id, image) ? lh_fail(err, LH_ABORTED, "the image was imported again")
                                   : snapshot_take(d, s, &o, id, err);
    sandbox_end(d, s, HOLD_ALONE);
    return r < 0 ? r
                 : db_run(d->db, err, "INSERT OR REPLACE INTO zygotes VALUES(?,?,?,0)", "sss",
                          image, id, with);
}

static int start(struct daemon *d, const char *image, int64_t deadline_ms, char sandbox[LH_ID_SIZE],
                 struct lh_error *err)
{
    const struct daemon_create_options o = {.transient = true};
    V1(CreateRequest) req = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__INIT;
    Longhaul__Task__V1__Limits limits = LONGHAUL__TASK__V1__LIMITS__INIT;

    limits.memory_bytes = MEMORY_BYTES;
    limits.disk_bytes = DISK_BYTES;
    limits.pids = PIDS;
    req.limits = &limits;
    req.network = LONGHAUL__TASK__V1__NETWORK__NETWORK_LOOPBACK;
    req.owner = (char *)"zygote";
    req.source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_IMAGE;
    req.image = (char *)image;
    req.files_only = true;
    int64_t ours_ms = lh_now_ms() + START_MS;
    return daemon_create(d, &req, &o, ours_ms < deadline_ms ? ours_ms : deadline_ms, sandbox, err);
}

static int make(struct daemon *d, const V1(ImageInfo) * info, const char *image,
                int64_t deadline_ms, char id[LH_ID_SIZE], struct lh_error *err)
{
    char sandbox[LH_ID_SIZE] = "";
    struct lh_error undo = {0};
    int64_t start_ms = lh_now_ms();
    int r = start(d, info->name, deadline_ms, sandbox, err);

    if (r == 0)
        r = run(d, sandbox, info, deadline_ms, err);
    if (r == 0)
        r = take(d, sandbox, info, image, id, err);
    if (sandbox[0] && daemon_remove(d, sandbox, ANY_ATTEMPT, &undo) < 0)
        lh_warn("a zygote's sandbox stays until the daemon restarts", "sandbox=%s why=%s", sandbox,
                undo.message);
    sweep(d); /* the one before */
    if (r == 0)
        lh_info("zygote made", "image=%s snapshot=%s ms=%lld", info->name, id,
                (long long)(lh_now_ms() - start_ms));
    return r;
}

/* *id: it, made if need be; "" = none, and *why. */
static int get(struct daemon *d, const V1(ImageInfo) * info, const char *image, int64_t deadline_ms,
               char id[LH_ID_SIZE], enum warm_start *why, struct lh_error *err)
{
    lh_autofree char *with = made_with(d, info);
    bool broken;

    *why = COLD_NO_ENGINE;
    id[0] = 0;
    if (!with)
        return lh_fail_errno(err, ENOMEM, "a zygote");
    if (!engines_have_criu(d))
        return 0;
    int r = find(d, image, with, id, &broken, err);
    *why = broken ? COLD_FAILED : COLD_NOT_MADE;
    if (r < 0 || id[0] || broken || lh_ms_left(deadline_ms) < WORTH_MS || !begin_making(d))
        return r;
    r = make(d, info, image, deadline_ms, id, err);
    end_making(d);
    return r;
}

/* ---- using it ---- */

#define ONE_MORE "UPDATE zygotes SET failures=failures+1 WHERE image=?"

static void set_failures(struct daemon *d, const struct sandbox *s, const char *statement)
{
    struct lh_error err = {0};

    if (db_run(d->db, &err, statement, "s", s->image_id) < 0)
        lh_warn("a zygote's failures are not counted", "image=%s why=%s", s->image, err.message);
}

void zygote_count(struct daemon *d, const struct sandbox *s, int result)
{
    atomic_fetch_add(&d->warm_starts[result], 1);
    if (result == WARM_RESTORED)
        set_failures(d, s, "UPDATE zygotes SET failures=0 WHERE image=? AND failures>0");
}

/* Twice what it is: CRIU runs within the same limits. */
static bool has_room(struct daemon *d, const struct sandbox *s)
{
    lh_autofree char *path = images_dir(d, s->snapshot);
    lh_autoclosedir DIR *dir = path ? opendir(path) : NULL;
    uint64_t tasks = 0;
    int64_t bytes = 0;

    for (const struct dirent *e; dir && (e = readdir(dir));)
        tasks += !strncmp(e->d_name, "core-", 5);
    return db_int(d->db, NULL, &bytes, "SELECT bytes FROM snapshots WHERE id=?", "s",
                  s->snapshot) == 0 &&
           s->limits.memory_bytes / 2 >= (uint64_t)bytes && s->limits.pids / 2 >= tasks;
}

void zygote_blame(struct daemon *d, const struct sandbox *s)
{
    if (has_room(d, s))
        set_failures(d, s, ONE_MORE);
}

static int set_snapshot(struct sandbox *s, const char *id, struct lh_error *err)
{
    char *copy = strdup(id);

    if (!copy)
        return lh_fail_errno(err, ENOMEM, "a new sandbox");
    free(s->snapshot);
    s->snapshot = copy;
    s->warm = true;
    return 0;
}

int zygote_choose(struct daemon *d, struct sandbox *s, bool retry, int64_t deadline_ms,
                  struct lh_error *err)
{
    lh_automsg(V1(ImageInfo)) info = d->hooks->image_info(d, s->image_id, err);
    enum warm_start why = COLD_FAILED;
    struct lh_error failed = {0};
    char id[LH_ID_SIZE] = "";

    if (!info || !*info->warm_up)
        return info ? 0 : err->code;
    if (!retry && get(d, info, s->image_id, deadline_ms, id, &why, &failed) < 0)
        lh_warn("no zygote", "image=%s why=%s", s->image, failed.message);
    if (id[0] && failed.code == 0)
        return set_snapshot(s, id, err);
    s->cold = true;
    zygote_count(d, s, why);
    if (!retry && why == COLD_FAILED) /* broken: this start counts, too */
        set_failures(d, s, ONE_MORE);
    return 0;
}

int daemon_warm_up(struct daemon *d, const char *image, struct lh_error *err)
{
    struct daemon_image found;
    char id[LH_ID_SIZE];
    enum warm_start why;
    int r = d->hooks->image_find(d, image, &found, err);

    if (r < 0 || engines_need_criu(d, lh_now_ms() + START_MS, NULL) < 0)
        return r; /* then it is run at each start */
    lh_automsg(V1(ImageInfo)) info = d->hooks->image_info(d, found.id, err);
    return info ? get(d, info, found.id, lh_now_ms() + START_MS + WARM_UP_MS, id, &why, err)
                : err->code;
}

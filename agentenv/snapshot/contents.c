/* When a layer gets its address.
 *
 * A layer must have a name before it is made, and its content is known only after: so on disk it is
 * called by an id, and table layer_contents gives the address to it later.  Not at the snapshot: a
 * step of training takes hundreds of them for verdicts and drops each within seconds, and hashing
 * would be the larger part of their 5 ms.  What is still there a minute later, or is exported,
 * is worth it; one thread does it, a layer at a time, and rests four times as long as it worked.
 *
 * Equal layers.  Once a layer's address is known and another has the same, snapshots are made to
 * name the older one, and the younger goes with the last sandbox that has it mounted.  A layer that
 * cannot be addressed (layerwalk.h) has a row with NULL, so that nobody tries again. */
#include "agentenv/snapshot/contents.h"

#include <errno.h>
#include <linux/ioprio.h>
#include <string.h>
#include <sys/syscall.h>

#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/wait.h"

LH_LOG_COMPONENT("agentenvd");

enum { CONTENTS_AFTER_MS = 60000, ROUND_MS = 30000, REST = 4, REST_MAX_MS = 60000 };

struct contents {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool stopping;
};

/* ---- one layer ---- */

/* Only of a layer that is not condemned: one half removed would get the address of what is left. */
static int record(struct daemon *d, const char *layer, const char *address, struct lh_error *err)
{
    return db_run(d->db, err,
                  "INSERT OR IGNORE INTO layer_contents SELECT id, ? FROM layers"
                  " WHERE id=? AND sealed=1",
                  "ss", address, layer);
}

/* Inside a transaction.  A snapshot that is being exported keeps the directories it has. */
static int name_older(struct daemon *d, const char *layer, const char *older, struct lh_error *err)
{
    int r = db_run(d->db, err,
                   "UPDATE snapshot_layers SET layer=?1 WHERE layer=?2 AND snapshot IN"
                   " (SELECT id FROM snapshots WHERE ready=1) AND snapshot NOT IN"
                   " (SELECT snapshot FROM snapshot_owners WHERE owner LIKE 'export/%')",
                   "ss", older, layer);

    return r < 0 ? r
                 : db_run(d->db, err,
                          "UPDATE layers SET sealed=-1 WHERE id=?1 AND sealed=1"
                          " AND NOT EXISTS (SELECT 1 FROM sandbox_layers WHERE layer=?1)"
                          " AND NOT EXISTS (SELECT 1 FROM snapshot_layers WHERE layer=?1)",
                          "s", layer);
}

static int share(struct daemon *d, const char *layer, const char *address, struct lh_error *err)
{
    struct lh_error none = {0};
    int r = db_begin(d->db, err);

    if (r < 0)
        return r;
    lh_autofree char *older =
        db_string(d->db, &none,
                  "SELECT c.layer FROM layer_contents c JOIN layers l ON l.id=c.layer"
                  " WHERE c.content=? AND l.sealed=1 AND c.layer<?2 AND l.durable>="
                  " (SELECT durable FROM layers WHERE id=?2) ORDER BY c.layer LIMIT 1",
                  "ss", address, layer);
    if (older)
        r = name_older(d, layer, older, err);
    else if (none.code != LH_NOT_FOUND)
        r = lh_fail(err, none.code, "%s", none.message);
    r = db_end(d->db, r, err);
    if (r == 0 && older)
        r = layers_remove_condemned(d, NULL);
    return r;
}

/* LH_FAILED_PRECONDITION: it can have none. */
static int address_layer(struct daemon *d, const char *layer, char address[LAYER_ADDRESS_SIZE],
                         struct lh_error *err)
{
    lh_autofree char *path = layer_dir(d, layer);

    if (!path)
        return lh_fail_errno(err, ENOMEM, "layer %s", layer);
    int r = layer_address(path, address, NULL, err);
    if (r < 0 && r != LH_FAILED_PRECONDITION)
        return r;
    struct lh_error why = {0};
    int recorded = record(d, layer, r == 0 ? address : NULL, &why);
    if (recorded < 0)
        return lh_fail(err, recorded, "%s", why.message);
    return r;
}

int contents_of(struct daemon *d, const char *layer, char address[LAYER_ADDRESS_SIZE],
                struct lh_error *err)
{
    struct lh_error none = {0};
    lh_autofree char *known = db_string(
        d->db, &none, "SELECT content FROM layer_contents WHERE layer=? AND content IS NOT NULL",
        "s", layer);

    if (!known && none.code != LH_NOT_FOUND)
        return lh_fail(err, none.code, "%s", none.message);
    if (!known)
        return address_layer(d, layer, address, err);
    snprintf(address, LAYER_ADDRESS_SIZE, "%s", known);
    return 0;
}

/* ---- the thread ---- */

static int next_layer(struct daemon *d, int64_t after_ms, char **layer, struct lh_error *err)
{
    struct lh_error none = {0};

    *layer = db_string(d->db, &none,
                       "SELECT id FROM layers WHERE sealed=1 AND created_ms<=?"
                       " AND id NOT IN (SELECT layer FROM layer_contents)"
                       " AND id IN (SELECT layer FROM snapshot_layers JOIN snapshots ON id=snapshot"
                       " WHERE ready=1) LIMIT 1",
                       "l", lh_unix_ms() - after_ms);
    return *layer || none.code == LH_NOT_FOUND ? 0 : lh_fail(err, none.code, "%s", none.message);
}

static bool is_there(struct daemon *d, const char *layer)
{
    int64_t n = 0;

    return db_int(d->db, NULL, &n, "SELECT count(*) FROM layers WHERE id=? AND sealed=1", "s",
                  layer) == 0 &&
           n > 0;
}

/* 1 = one was addressed, 0 = there is none. */
static int address_next(struct daemon *d, int64_t after_ms, struct lh_error *err)
{
    char address[LAYER_ADDRESS_SIZE];
    lh_autofree char *layer = NULL;
    int r = next_layer(d, after_ms, &layer, err);

    if (r < 0 || !layer)
        return r;
    struct lh_error why = {0};
    r = address_layer(d, layer, address, &why);
    if (r == LH_FAILED_PRECONDITION)
        lh_info("layer without an address", "layer=%s why=%s", layer, why.message);
    else if (r < 0 && is_there(d, layer))
        return lh_fail(err, r, "%s", why.message);
    else if (r == 0 && (r = share(d, layer, address, err)) < 0)
        return r;
    return 1;
}

int contents_round(struct daemon *d, int64_t after_ms, struct lh_error *err)
{
    int n = 0, r;

    while ((r = address_next(d, after_ms, err)) > 0)
        n++;
    return r < 0 ? r : n;
}

static bool rest(struct contents *c, int64_t ms)
{
    int64_t until_ms = lh_now_ms() + ms;

    LH_LOCKED(&c->lock);
    while (!c->stopping && lh_wait_until(&c->wake, &c->lock, until_ms))
        ;
    return !c->stopping;
}

static void share_memory(struct daemon *d)
{
    static const struct sharing_scope scope = {.after_ms = CONTENTS_AFTER_MS};
    struct lh_error err = {0};
    uint64_t bytes = 0;

    if (sharing_round(d, &scope, &bytes, &err) < 0)
        lh_warn("memory of snapshots not compared", "why=%s", err.message);
}

static void *contents_main(void *arg)
{
    struct daemon *d = arg;
    int64_t pause_ms = ROUND_MS;

    syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, IOPRIO_PRIO_VALUE(IOPRIO_CLASS_IDLE, 0));
    while (rest(d->contents, pause_ms)) {
        struct lh_error err = {0};
        int64_t start_ms = lh_now_ms();
        int r = address_next(d, CONTENTS_AFTER_MS, &err);
        int64_t worked_ms = lh_now_ms() - start_ms;

        if (r < 0)
            lh_warn("a layer got no address", "why=%s", err.message);
        else if (r == 0) /* nothing more important: it has the quiet of this thread, too */
            share_memory(d);
        pause_ms = r != 1                           ? ROUND_MS
                   : worked_ms * REST > REST_MAX_MS ? REST_MAX_MS
                                                    : 1 + worked_ms * REST;
    }
    return NULL;
}

int contents_start(struct daemon *d, struct lh_error *err)
{
    struct contents *c = calloc(1, sizeof *c);

    if (!c)
        return lh_fail_errno(err, ENOMEM, "addressing layers");
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->wake, NULL);
    d->contents = c;
    int e = pthread_create(&c->thread, NULL, contents_main, d);
    if (e) {
        free(c);
        d->contents = NULL;
        return lh_fail_errno(err, e, "addressing layers");
    }
    return 0;
}

void contents_stop(struct daemon *d)
{
    struct contents *c = d->contents;

    if (!c)
        return;
    pthread_mutex_lock(&c->lock);
    c->stopping = true;
    pthread_cond_signal(&c->wake);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->thread, NULL);
    pthread_cond_destroy(&c->wake);
    pthread_mutex_destroy(&c->lock);
    free(c);
    d->contents = NULL;
}

/* ---- audit ---- */

struct addressed {
    char layer[LH_ID_SIZE], address[LAYER_ADDRESS_SIZE];
};

struct addressed_list {
    struct addressed *items;
    size_t n;
};

static int collect(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct addressed_list *l = ctx;
    struct addressed *more = realloc(l->items, (l->n + 1) * sizeof *more);

    if (!more)
        return lh_fail_errno(err, ENOMEM, "audit");
    l->items = more;
    snprintf(more[l->n].layer, LH_ID_SIZE, "%s", db_text(row, 0));
    snprintf(more[l->n++].address, LAYER_ADDRESS_SIZE, "%s", db_text(row, 1));
    return 0;
}

/* NULL when it is as it should be. */
static char *check(struct daemon *d, const struct addressed *a)
{
    lh_autofree char *path = layer_dir(d, a->layer);
    char now[LAYER_ADDRESS_SIZE];
    struct lh_error why = {0};

    if (!path || layer_address(path, now, NULL, &why) < 0)
        return is_there(d, a->layer)
                   ? lh_format("layer %s cannot be read: %s", a->layer, why.message)
                   : NULL;
    if (!strcmp(now, a->address) || !is_there(d, a->layer))
        return NULL;
    return lh_format("layer %s holds something else than its address %.16s... says", a->layer,
                     a->address);
}

int contents_audit(struct daemon *d, void (*problem)(void *ctx, const char *text), void *ctx,
                   struct lh_error *err)
{
    struct addressed_list l = {0};
    int r = db_each(d->db, err, collect, &l,
                    "SELECT layer, content FROM layer_contents WHERE content IS NOT NULL", "");

    for (size_t i = 0; r == 0 && i < l.n; i++) {
        lh_autofree char *text = check(d, &l.items[i]);
        if (text)
            problem(ctx, text);
    }
    free(l.items);
    return r;
}

/* Rows of the registry.  What a table holds and who may delete a row:
 *   sandboxes        one that exists, from before its creation to after its removal
 *   sandbox_layers   the sealed layers below its upper directory, 0 on top
 *   keys             idempotency keys and what they were given to; outlive it (snapshot/gc.c)
 *   snapshots, snapshot_layers, snapshot_owners, layers: snapshot/
 *   policies         what the janitor does with a sandbox (daemon/policy.c); goes with it
 *   network_rules    what is opened for a sandbox (daemon/network.c); goes with it
 *   snapshot_rules   the same of a snapshot, for who starts from it; goes with it
 *   layer_contents   addresses of layers by content; goes with the layer (snapshot/contents.c)
 *   zygotes          what sandboxes of an image start from (daemon/zygote.c)
 *   sharing          snapshots whose pages were compared, or are (snapshot/sharing.c)
 * A layer lives while a row of sandbox_layers or snapshot_layers names it: reference counts that
 * cannot go wrong, because they are not counted. */
#include <errno.h>
#include <string.h>

#include "agentenv/daemon/internal.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/parse.h"

enum { BOOT_ID_MAX = 64, SCHEMA_VERSION = 1 };

static const char *const schema[] = {
    "CREATE TABLE IF NOT EXISTS meta(version INT NOT NULL, boot TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS sandboxes(id TEXT PRIMARY KEY, name TEXT NOT NULL,"
    " state INT NOT NULL, cause INT NOT NULL DEFAULT 0, image TEXT NOT NULL,"
    " image_id TEXT NOT NULL, image_path TEXT NOT NULL, snapshot TEXT NOT NULL,"
    " task TEXT NOT NULL, owner TEXT NOT NULL, attempt INT NOT NULL, created_ms INT NOT NULL, "
    "ttl_at_ms INT NOT NULL, transient INT NOT NULL,"
    " limits BLOB NOT NULL, network INT NOT NULL, top_layer TEXT NOT NULL, boot TEXT NOT NULL,"
    " init_pid INT NOT NULL DEFAULT 0, start_ticks INT NOT NULL DEFAULT 0) WITHOUT ROWID",
    "CREATE UNIQUE INDEX IF NOT EXISTS living_names ON sandboxes(name) WHERE name<>'' AND state<>8",
    "CREATE TABLE IF NOT EXISTS sandbox_layers(sandbox TEXT NOT NULL, pos INT NOT NULL,"
    " layer TEXT NOT NULL, PRIMARY KEY(sandbox, pos)) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS sandbox_layers_by_layer ON sandbox_layers(layer)",
    "CREATE TABLE IF NOT EXISTS keys(kind TEXT NOT NULL, key TEXT NOT NULL, object TEXT NOT NULL,"
    " created_ms INT NOT NULL, PRIMARY KEY(kind, key)) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS keys_by_object ON keys(object)",
    "CREATE TABLE IF NOT EXISTS layers(id TEXT PRIMARY KEY, sealed INT NOT NULL,"
    " durable INT NOT NULL, bytes INT NOT NULL, created_ms INT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS layer_contents(layer TEXT PRIMARY KEY"
    " REFERENCES layers(id) ON DELETE CASCADE, content TEXT) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS layers_by_content ON layer_contents(content)",
    "CREATE INDEX IF NOT EXISTS condemned_layers ON layers(sealed) WHERE sealed=-1",
    "CREATE TABLE IF NOT EXISTS snapshots(id TEXT PRIMARY KEY, ready INT NOT NULL,"
    " durable INT NOT NULL, parent TEXT NOT NULL, sandbox TEXT NOT NULL, image TEXT NOT NULL,"
    " image_id TEXT NOT NULL, image_path TEXT NOT NULL, task TEXT NOT NULL,"
    " engine TEXT NOT NULL, limits BLOB NOT NULL,"
    " network INT NOT NULL, bytes INT NOT NULL DEFAULT 0, created_ms INT NOT NULL,"
    " unowned_ms INT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS policies(sandbox TEXT PRIMARY KEY"
    " REFERENCES sandboxes(id) ON DELETE CASCADE, policy BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS selftests(fingerprint TEXT PRIMARY KEY) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS zygotes(image TEXT PRIMARY KEY, snapshot TEXT NOT NULL,"
    " made_with TEXT NOT NULL, failures INT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS sharing(snapshot TEXT PRIMARY KEY, done INT NOT NULL)"
    " WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS snapshot_layers(snapshot TEXT NOT NULL, pos INT NOT NULL,"
    " layer TEXT NOT NULL, PRIMARY KEY(snapshot, pos)) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS snapshot_layers_by_layer ON snapshot_layers(layer)",
    "CREATE TABLE IF NOT EXISTS network_rules(sandbox TEXT PRIMARY KEY"
    " REFERENCES sandboxes(id) ON DELETE CASCADE, rules BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS snapshot_rules(snapshot TEXT PRIMARY KEY"
    " REFERENCES snapshots(id) ON DELETE CASCADE, rules BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS snapshot_owners(snapshot TEXT NOT NULL, owner TEXT NOT NULL,"
    " PRIMARY KEY(snapshot, owner)) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS snapshot_owners_by_owner ON snapshot_owners(owner)",
};

/* Distinguishes this boot of the host from others: what ran before it does not run now. */
static char *boot_id(struct lh_error *err)
{
    char *id = lh_read_file("/proc/sys/kernel/random/boot_id", BOOT_ID_MAX, NULL, err);

    if (id)
        id[strcspn(id, "\n")] = 0;
    return id;
}

static int check_version(struct daemon *d, struct lh_error *err)
{
    int64_t version = SCHEMA_VERSION;
    int r = db_int(d->db, err, &version, "SELECT version FROM meta", "");

    if (r == LH_NOT_FOUND)
        return db_run(d->db, err, "INSERT INTO meta VALUES(?,?)", "is", SCHEMA_VERSION, d->boot);
    if (r == 0 && version != SCHEMA_VERSION)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "%s was written by another version (format %lld, this is %d)", d->state_dir,
                       (long long)version, SCHEMA_VERSION);
    return r;
}

int registry_open(struct daemon *d, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/registry.db", d->state_dir);

    d->db = path ? db_open(path, err) : NULL;
    if (!d->db)
        return path ? lh_wrap(err, "the registry") : lh_fail_errno(err, ENOMEM, "the registry");
    d->boot = boot_id(err);
    if (!d->boot)
        return LH_INTERNAL;
    int r = db_begin(d->db, err);
    if (r < 0)
        return r;
    for (size_t i = 0; r == 0 && i < LH_ARRAY_SIZE(schema); i++)
        r = db_run(d->db, err, schema[i], "");
    if (r == 0)
        r = check_version(d, err);
    return db_end(d->db, r, err);
}

static int insert_row(struct daemon *d, const struct sandbox *s, struct lh_error *err)
{
    size_t len;
    lh_autofree uint8_t *limits = lh_pack(&s->limits.base, &len, err);

    if (!limits)
        return LH_RESOURCE_EXHAUSTED;
    return db_run(
        d->db, err,
        "INSERT INTO sandboxes(id, name, state, image, image_id, image_path, snapshot, task,"
        " owner, attempt, created_ms, ttl_at_ms, transient, limits, network, top_layer,"
        " boot) VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
        "ssissssssllli"
        "biss",
        s->id, s->name, SB_CREATING, s->image, s->image_id, s->image_path, s->snapshot, s->task,
        s->owner, (int64_t)s->attempt, s->created_ms, s->ttl_at_ms, (int)s->transient, limits, len,
        (int)s->network, s->top_layer, d->boot);
}

int registry_set_rules(struct daemon *d, const struct sandbox *s, struct lh_error *err)
{
    size_t len;
    lh_autofree uint8_t *rules = lh_pack(&s->rules->base, &len, err);

    if (!rules)
        return LH_RESOURCE_EXHAUSTED;
    return db_run(d->db, err, "INSERT OR REPLACE INTO network_rules VALUES(?,?)", "sb", s->id,
                  rules, len);
}

int registry_set_policy(struct daemon *d, const struct sandbox *s, struct lh_error *err)
{
    size_t len;
    lh_autofree uint8_t *policy = lh_pack(&s->policy.base, &len, err);

    if (!policy)
        return LH_RESOURCE_EXHAUSTED;
    return db_run(d->db, err, "INSERT OR REPLACE INTO policies VALUES(?,?)", "sb", s->id, policy,
                  len);
}

int registry_set_ttl(struct daemon *d, const char *id, int64_t at_ms, struct lh_error *err)
{
    return db_run(d->db, err, "UPDATE sandboxes SET ttl_at_ms=? WHERE id=?", "ls", at_ms, id);
}

int registry_insert(struct daemon *d, const struct sandbox *s, const char *kind, const char *key,
                    const char *from_snapshot, struct lh_error *err)
{
    int r = db_begin(d->db, err);

    if (r < 0)
        return r;
    r = insert_row(d, s, err);
    if (r == LH_ALREADY_EXISTS)
        lh_fail(err, r, "the name \"%s\" is taken by a living sandbox", s->name);
    if (r == 0 && s->rules)
        r = registry_set_rules(d, s, err);
    if (r == 0 && s->has_policy)
        r = registry_set_policy(d, s, err);
    if (r == 0 && key)
        r = registry_bind_key(d, kind, key, s->id, err);
    /* Copied inside the transaction, so that gc cannot take the layers in between. */
    if (r == 0 && from_snapshot) {
        r = db_run(
            d->db, err,
            "INSERT INTO sandbox_layers SELECT ?, row_number() OVER (ORDER BY pos) - 1, layer"
            " FROM snapshot_layers"
            " WHERE snapshot=(SELECT id FROM snapshots WHERE id=? AND ready=1)",
            "ss", s->id, from_snapshot);
        if (r == 0 && db_changes(d->db) == 0)
            r = lh_fail(err, LH_NOT_FOUND, "no snapshot \"%s\"", from_snapshot);
    }
    return db_end(d->db, r, err);
}

int registry_set_running(struct daemon *d, const struct sandbox *s,
                         const struct box_identity *identity, struct lh_error *err)
{
    return db_run(d->db, err, "UPDATE sandboxes SET state=?, init_pid=?, start_ticks=? WHERE id=?",
                  "iils", SB_RUNNING, (int)identity->init_pid, (int64_t)identity->start_ticks,
                  s->id);
}

int registry_set_state(struct daemon *d, const char *id, int state, int cause, struct lh_error *err)
{
    return db_run(d->db, err, "UPDATE sandboxes SET state=?, cause=? WHERE id=?", "iis", state,
                  cause, id);
}

int registry_set_attempt(struct daemon *d, const char *id, uint32_t attempt, struct lh_error *err)
{
    return db_run(d->db, err, "UPDATE sandboxes SET attempt=? WHERE id=?", "ls", (int64_t)attempt,
                  id);
}

int registry_delete(struct daemon *d, const char *id, bool key_too, struct lh_error *err)
{
    int r = db_begin(d->db, err);

    if (r < 0)
        return r;
    r = layers_condemn_of(d, id, err);
    if (r == 0)
        r = db_run(d->db, err, "DELETE FROM sandbox_layers WHERE sandbox=?", "s", id);
    if (r == 0 && key_too)
        r = db_run(d->db, err, "DELETE FROM keys WHERE object=?", "s", id);
    if (r == 0)
        r = db_run(d->db, err, "DELETE FROM sandboxes WHERE id=?", "s", id);
    return db_end(d->db, r, err);
}

static int take_key(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    (void)err;
    snprintf(ctx, LH_ID_SIZE, "%s", db_text(row, 0));
    return 0;
}

int registry_find_key(struct daemon *d, const char *kind, const char *key, char id[LH_ID_SIZE],
                      struct lh_error *err)
{
    id[0] = 0;
    return db_each(d->db, err, take_key, id, "SELECT object FROM keys WHERE kind=? AND key=?", "ss",
                   kind, key);
}

int registry_bind_key(struct daemon *d, const char *kind, const char *key, const char *object,
                      struct lh_error *err)
{
    return db_run(d->db, err, "INSERT INTO keys VALUES(?,?,?,?)", "sssl", kind, key, object,
                  lh_unix_ms());
}

struct each {
    struct daemon *d;
    registry_row_fn *fn;
    void *ctx;
};

int registry_read_limits(Longhaul__Task__V1__Limits *to, sqlite3_stmt *row, int column,
                         struct lh_error *err)
{
    lh_automsg(Longhaul__Task__V1__Limits) l = (void *)lh_parse(
        &longhaul__task__v1__limits__descriptor, sqlite3_column_blob(row, column),
        (size_t)sqlite3_column_bytes(row, column), (struct lh_parse_limits){0}, err);

    if (!l)
        return lh_wrap(err, "limits in the registry");
    *to = *l;
    to->base.n_unknown_fields = 0; /* owned by l */
    to->base.unknown_fields = NULL;
    return 0;
}

static int read_rules(V1(NetworkRules) * *out, sqlite3_stmt *row, int column, struct lh_error *err)
{
    if (sqlite3_column_type(row, column) == SQLITE_NULL)
        return 0;
    *out = (void *)lh_parse(
        &longhaul__sandbox__v1__network_rules__descriptor, sqlite3_column_blob(row, column),
        (size_t)sqlite3_column_bytes(row, column), (struct lh_parse_limits){0}, err);
    return *out ? 0 : lh_wrap(err, "network rules in the registry");
}

static int take_rules(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    return read_rules(ctx, row, 0, err);
}

int registry_snapshot_rules(struct daemon *d, const char *snapshot, V1(NetworkRules) * *out,
                            struct lh_error *err)
{
    return db_each(d->db, err, take_rules, out, "SELECT rules FROM snapshot_rules WHERE snapshot=?",
                   "s", snapshot);
}

static int read_policy(struct sandbox *s, sqlite3_stmt *row, int column, struct lh_error *err)
{
    if (sqlite3_column_type(row, column) == SQLITE_NULL)
        return 0;
    lh_automsg(V1(Policy)) p = (void *)lh_parse(
        &longhaul__sandbox__v1__policy__descriptor, sqlite3_column_blob(row, column),
        (size_t)sqlite3_column_bytes(row, column), (struct lh_parse_limits){0}, err);
    if (!p)
        return lh_wrap(err, "a policy in the registry");
    policy_copy(&s->policy, p);
    return 0;
}

static int read_row(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct each *e = ctx;
    struct sandbox *s = sandbox_new(err);
    char **strings[] = {&s->name,     &s->image, &s->image_id, &s->image_path,
                        &s->snapshot, &s->task,  &s->owner,    &s->top_layer};
    struct registry_row out = {.sandbox = s};
    int r;

    if (!s)
        return LH_RESOURCE_EXHAUSTED;
    snprintf(s->id, sizeof s->id, "%s", db_text(row, 0));
    for (int i = 0; i < (int)LH_ARRAY_SIZE(strings); i++)
        if (!(*strings[i] = strdup(db_text(row, 1 + i)))) {
            sandbox_unref(e->d, s);
            return lh_fail_errno(err, ENOMEM, "reading the registry");
        }
    const int at = 1 + (int)LH_ARRAY_SIZE(strings);
    s->state = sqlite3_column_int(row, at);
    s->cause = sqlite3_column_int(row, at + 1);
    s->attempt = (uint32_t)sqlite3_column_int64(row, at + 2);
    s->created_ms = sqlite3_column_int64(row, at + 3);
    s->ttl_at_ms = sqlite3_column_int64(row, at + 4);
    s->transient = sqlite3_column_int(row, at + 5);
    s->network = (Longhaul__Task__V1__Network)sqlite3_column_int(row, at + 6);
    out.identity.init_pid = sqlite3_column_int(row, at + 7);
    out.identity.start_ticks = (uint64_t)sqlite3_column_int64(row, at + 8);
    s->init_pid = out.identity.init_pid;
    out.this_boot = !strcmp(db_text(row, at + 9), e->d->boot);
    if ((r = registry_read_limits(&s->limits, row, at + 10, err)) < 0 ||
        (r = read_rules(&s->rules, row, at + 11, err)) < 0 ||
        (r = read_policy(s, row, at + 12, err)) < 0 || (r = e->fn(e->ctx, &out, err)) < 0)
        sandbox_unref(e->d, s);
    return r;
}

int registry_each(struct daemon *d, registry_row_fn *fn, void *ctx, struct lh_error *err)
{
    struct each e = {d, fn, ctx};

    return db_each(
        d->db, err, read_row, &e,
        "SELECT id, name, image, image_id, image_path, snapshot, task, owner, top_layer,"
        " state, cause, attempt,"
        " created_ms, ttl_at_ms, transient, network, init_pid, start_ticks, boot, limits,"
        " rules, policy FROM sandboxes LEFT JOIN network_rules n ON n.sandbox=id"
        " LEFT JOIN policies p ON p.sandbox=id ORDER BY id",
        "");
}

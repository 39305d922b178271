#include "agentenv/daemon/token.h"

#include <errno.h>
#include <sodium.h>
#include <string.h>

#include "agentenv/daemon/access.h"
#include "agentenv/daemon/internal.h"
#include "proto/clock.h"
#include "proto/parse.h"

enum { SECRET_BYTES = 32, HASH_BYTES = crypto_generichash_BYTES };

int token_tables(struct db *db, struct lh_error *err)
{
    if (sodium_init() < 0)
        return lh_fail(err, LH_INTERNAL, "libsodium does not start");
    return db_run(
        db, err,
        "CREATE TABLE IF NOT EXISTS tokens(name TEXT PRIMARY KEY, hash BLOB NOT NULL UNIQUE,"
        " scope INT NOT NULL, owner_prefix TEXT NOT NULL, max_sandboxes INT NOT NULL,"
        " created_ms INT NOT NULL, expires_ms INT NOT NULL) WITHOUT ROWID",
        "");
}

/* The secret is random and long: a plain hash of it cannot be searched. */
static void hash_secret(const char *secret, unsigned char hash[HASH_BYTES])
{
    crypto_generichash(hash, HASH_BYTES, (const unsigned char *)secret, strlen(secret), NULL, 0);
}

static int read_token(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    struct token *t = ctx;

    (void)err;
    snprintf(t->name, sizeof t->name, "%s", db_text(row, 0));
    snprintf(t->owner_prefix, sizeof t->owner_prefix, "%s", db_text(row, 1));
    t->scope = sqlite3_column_int(row, 2);
    t->max_sandboxes = (uint32_t)sqlite3_column_int64(row, 3);
    return 0;
}

int token_find(struct db *db, const char *secret, struct token *out, struct lh_error *err)
{
    unsigned char hash[HASH_BYTES];

    *out = (struct token){.name = ""};
    if (!secret)
        return lh_fail(err, LH_UNAUTHENTICATED, "a bearer token is needed: agentenv token create");
    hash_secret(secret, hash);
    int r = db_each(db, err, read_token, out,
                    "SELECT name, owner_prefix, scope, max_sandboxes FROM tokens"
                    " WHERE hash=? AND (expires_ms=0 OR expires_ms>?)",
                    "bl", hash, sizeof hash, lh_unix_ms());
    if (r < 0 || out->name[0])
        return r;
    return lh_fail(err, LH_UNAUTHENTICATED, "this token is not known, or its time is over");
}

static int check_request(const V1(CreateTokenRequest) * q, struct lh_error *err)
{
    size_t len = strlen(q->name);

    if (len == 0 || len >= TOKEN_NAME_SIZE ||
        q->name[strspn(q->name,
                       "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")])
        return lh_fail(err, LH_INVALID_ARGUMENT, "name: 1 to 64 of letters, digits, \"._-\"");
    if (q->scope < LONGHAUL__SANDBOX__V1__SCOPE__SCOPE_READ ||
        q->scope > LONGHAUL__SANDBOX__V1__SCOPE__SCOPE_ADMIN)
        return lh_fail(err, LH_INVALID_ARGUMENT, "scope must be given");
    if (strlen(q->owner_prefix) >= TOKEN_PREFIX_SIZE)
        return lh_fail(err, LH_INVALID_ARGUMENT, "owner_prefix is longer than %d",
                       TOKEN_PREFIX_SIZE - 1);
    return 0;
}

static V1(Token) * new_token(const char *name, const char *prefix, struct lh_error *err)
{
    lh_automsg(V1(Token)) t = calloc(1, sizeof *t);

    if (!t)
        return lh_fail_errno(err, ENOMEM, "a token"), NULL;
    longhaul__sandbox__v1__token__init(t);
    t->name = strdup(name);
    t->owner_prefix = strdup(prefix);
    if (!t->name || !t->owner_prefix)
        return lh_fail_errno(err, ENOMEM, "a token"), NULL;
    return lh_steal(&t);
}

int service_create_token(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                         ProtobufCMessage **reply, struct lh_error *err)
{
    const V1(CreateTokenRequest) *q = (const void *)request;
    unsigned char random[SECRET_BYTES], hash[HASH_BYTES];
    char secret[2 * SECRET_BYTES + 1];
    struct daemon *d = ctx;
    int r = check_request(q, err);

    (void)call;
    if (r < 0)
        return r;
    V1(Token) *t = new_token(q->name, q->owner_prefix, err);
    *reply = t ? &t->base : NULL;
    if (!t)
        return err->code;
    randombytes_buf(random, sizeof random);
    sodium_bin2hex(secret, sizeof secret, random, sizeof random);
    hash_secret(secret, hash);
    t->scope = q->scope;
    t->max_sandboxes = q->max_sandboxes;
    t->created_ms = lh_unix_ms();
    t->expires_ms = q->ttl_ms ? t->created_ms + (int64_t)q->ttl_ms : 0;
    t->secret = strdup(secret);
    if (!t->secret)
        return lh_fail_errno(err, ENOMEM, "a token");
    r = db_run(d->db, err, "INSERT INTO tokens VALUES(?,?,?,?,?,?,?)",
               "sbisl"
               "ll",
               q->name, hash, sizeof hash, (int)q->scope, q->owner_prefix,
               (int64_t)q->max_sandboxes, t->created_ms, t->expires_ms);
    if (r == LH_ALREADY_EXISTS)
        return lh_fail(err, r, "there is a token \"%s\"; revoke it first", q->name);
    return r < 0 ? r : db_flush(d->db, err);
}

static int add_row(void *ctx, sqlite3_stmt *row, struct lh_error *err)
{
    V1(ListTokensReply) *out = ctx;
    V1(Token) *t = new_token(db_text(row, 0), db_text(row, 1), err);
    V1(Token) **more = t ? realloc(out->tokens, (out->n_tokens + 1) * sizeof *more) : NULL;

    if (!more) {
        lh_message_free(t ? &t->base : NULL);
        return lh_fail_errno(err, ENOMEM, "tokens");
    }
    t->scope = (V1(Scope))sqlite3_column_int(row, 2);
    t->max_sandboxes = (uint32_t)sqlite3_column_int64(row, 3);
    t->created_ms = sqlite3_column_int64(row, 4);
    t->expires_ms = sqlite3_column_int64(row, 5);
    out->tokens = more;
    out->tokens[out->n_tokens++] = t;
    return 0;
}

int service_list_tokens(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                        ProtobufCMessage **reply, struct lh_error *err)
{
    V1(ListTokensReply) *out = calloc(1, sizeof *out);
    struct daemon *d = ctx;

    (void)call;
    (void)request;
    if (!out)
        return lh_fail_errno(err, ENOMEM, "tokens");
    longhaul__sandbox__v1__list_tokens_reply__init(out);
    *reply = &out->base;
    return db_each(d->db, err, add_row, out,
                   "SELECT name, owner_prefix, scope, max_sandboxes, created_ms, expires_ms"
                   " FROM tokens ORDER BY name",
                   "");
}

int service_revoke_token(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                         ProtobufCMessage **reply, struct lh_error *err)
{
    const char *name = ((const V1(TokenName) *)request)->name;
    V1(Empty) *out = calloc(1, sizeof *out);
    struct daemon *d = ctx;

    (void)call;
    if (!out)
        return lh_fail_errno(err, ENOMEM, "tokens");
    longhaul__sandbox__v1__empty__init(out);
    *reply = &out->base;
    int64_t n = 0;
    int r = db_int(d->db, err, &n, "SELECT count(*) FROM tokens WHERE name=?", "s", name);
    if (r == 0 && n == 0)
        r = lh_fail(err, LH_NOT_FOUND, "no token \"%s\"", name);
    if (r == 0)
        r = db_run(d->db, err, "DELETE FROM tokens WHERE name=?", "s", name);
    return r < 0 ? r : db_flush(d->db, err);
}

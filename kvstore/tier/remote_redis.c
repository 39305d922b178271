/* A Redis Cluster as a remote tier; a single server is one whose every slot is its own.
 *
 * hiredis as Debian has it knows no clusters, so this does: a map of slots, asked of any node that
 * answers and asked again after a node has failed; MOVED corrects one slot, ASK sends one command
 * elsewhere.  A command follows HOPS redirections and survives one broken connection (an idle one
 * that the server has closed); everything else is a failure of the peer, and a miss.
 *
 * Redirections are believed, password and all, as in every client of a cluster: whoever may answer
 * for a node may name another.  Keep a cluster in a network of its own. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvstore/tier/remote_link.h"
#include "kvstore/tier/remote_peer.h"
#include "kvstore/tier/remote_slots.h"
#include "proto/cleanup.h"
#include "proto/clock.h"

enum {
    NODES = 256,
    HOPS = 5,
    NOBODY = NODES,
    CONNECT_MS = 500, /* so that the others can be asked within the deadline, too */
    MAP_MS = 500,
    KEY_MAX = 128,
    RESP_MAX = 1024, /* bytes of an error, or of what stands around a string */
};

struct node {
    struct kv_redis_place place;
    struct kv_link_redis link;
};

struct redis {
    struct kv_peer_options o;
    struct node nodes[NODES];
    unsigned n, seeds; /* the first `seeds` are those of the job file */
    uint16_t owner[KV_REDIS_SLOTS];
    bool mapped;
};

static void redis_close(void *self)
{
    struct redis *r = self;

    for (unsigned i = 0; i < r->n; i++)
        kv_link_redis_close(&r->nodes[i].link);
    free(r);
}

static void forget_map(struct redis *r)
{
    for (unsigned i = 0; i < KV_REDIS_SLOTS; i++)
        r->owner[i] = NOBODY;
    r->mapped = false;
}

static unsigned find_node(const struct redis *r, const struct kv_redis_place *p)
{
    unsigned i = 0;

    while (i < r->n &&
           (r->nodes[i].place.port != p->port || strcmp(r->nodes[i].place.host, p->host)))
        i++;
    return i;
}

/* Its number; NOBODY when there are too many: then all but the seeds are forgotten, with the map.
 */
static unsigned node_at(struct redis *r, const struct kv_redis_place *p)
{
    unsigned i = find_node(r, p);

    if (i < r->n)
        return i;
    if (r->n == NODES) {
        while (r->n > r->seeds)
            kv_link_redis_close(&r->nodes[--r->n].link);
        forget_map(r);
        return NOBODY;
    }
    r->nodes[r->n] = (struct node){.place = *p, .link = {.stop_fd = r->o.stop_fd}};
    return r->n++;
}

static int add_seeds(struct redis *r, const char *places, struct lh_error *err)
{
    for (const char *at = places, *end; *at; at = end + (*end == ',')) {
        struct kv_redis_place p;
        end = at + strcspn(at, ",");
        if (!kv_redis_parse_place(at, (size_t)(end - at), &p) || !*p.host || r->n == NODES / 2)
            return lh_fail(err, LH_INVALID_ARGUMENT,
                           "kvstore.remote redis://%.200s: HOST:PORT, more of them after commas",
                           places);
        node_at(r, &p);
    }
    r->seeds = r->n;
    return r->n ? 0 : lh_fail(err, LH_INVALID_ARGUMENT, "kvstore.remote names no server");
}

static void *redis_open(const struct kv_peer_options *o, struct lh_error *err)
{
    struct redis *r = calloc(1, sizeof *r);

    if (!r)
        return lh_fail_errno(err, ENOMEM, "redis"), NULL;
    r->o = *o;
    forget_map(r);
    if (add_seeds(r, o->place, err) < 0) {
        redis_close(r);
        return NULL;
    }
    return r;
}

/* ---- one command to one node ---- */

static int64_t sooner(int64_t deadline_ms, int ms)
{
    int64_t at = lh_now_ms() + ms;

    return at < deadline_ms ? at : deadline_ms;
}

static redisReply *call(struct redis *r, unsigned node, const struct kv_link_arg *args, int n,
                        size_t max, int64_t deadline_ms, struct lh_error *err)
{
    struct node *at = &r->nodes[node];

    if (!at->link.context &&
        kv_link_redis_open(&at->link, at->place.host, at->place.port, r->o.secrets,
                           sooner(deadline_ms, CONNECT_MS), err) < 0)
        return NULL;
    redisReply *reply = kv_link_redis_call(&at->link, args, n, max, deadline_ms, err);
    if (!reply)
        lh_wrap(err, "%s:%d", at->place.host, at->place.port);
    return reply;
}

/* ---- the map ---- */

static void own(struct redis *r, unsigned first, unsigned last, unsigned node)
{
    for (unsigned i = first; i <= last; i++)
        r->owner[i] = (uint16_t)node;
}

static bool take_map(struct redis *r, unsigned teller, const redisReply *reply)
{
    struct kv_redis_place teller_at = r->nodes[teller].place, master;
    unsigned first, last;

    forget_map(r);
    for (size_t i = 0; i < reply->elements; i++) {
        if (!kv_redis_range(reply, i, &first, &last, &master))
            return false;
        if (!*master.host)
            memcpy(master.host, teller_at.host, sizeof master.host);
        unsigned node = node_at(r, &master);
        if (node == NOBODY)
            return false;
        own(r, first, last, node);
    }
    r->mapped = true;
    return true;
}

static bool ask_for_map(struct redis *r, unsigned node, int64_t deadline_ms, struct lh_error *err)
{
    struct kv_link_arg args[] = {kv_link_text("CLUSTER"), kv_link_text("SLOTS")};
    redisReply *reply = call(r, node, args, 2, KV_LINK_REPLY, sooner(deadline_ms, MAP_MS), err);
    bool done = false;

    if (!reply)
        return false;
    if (reply->type == REDIS_REPLY_ARRAY) {
        done = take_map(r, node, reply);
    } else if (reply->type == REDIS_REPLY_ERROR && strstr(reply->str, "cluster support disabled")) {
        own(r, 0, KV_REDIS_SLOTS - 1, node);
        done = r->mapped = true;
    }
    if (!done)
        lh_fail(err, LH_INTERNAL, "%s:%d says nothing about its slots: %.200s",
                r->nodes[node].place.host, r->nodes[node].place.port,
                reply->type == REDIS_REPLY_ERROR ? reply->str : "not a map");
    freeReplyObject(reply);
    return done;
}

/* Last the seeds: they know no more than the others, and may be gone. */
static int load_map(struct redis *r, int64_t deadline_ms, struct lh_error *err)
{
    struct lh_error why = {.code = LH_DEADLINE_EXCEEDED, .message = "no time left to ask"};

    for (unsigned i = r->n; i-- > 0 && lh_ms_left(deadline_ms);)
        if (i < r->n && ask_for_map(r, i, deadline_ms, &why))
            return 0;
    int code = why.code == LH_OUT_OF_RANGE ? LH_INTERNAL : why.code;
    return lh_fail(err, code, "no map of the cluster: %s", why.message);
}

static int owner_of(struct redis *r, uint16_t slot, unsigned *node, int64_t deadline_ms,
                    struct lh_error *err)
{
    if (!r->mapped && load_map(r, deadline_ms, err) < 0)
        return err->code;
    *node = r->owner[slot];
    return *node == NOBODY ? lh_fail(err, LH_UNAVAILABLE, "nobody serves slot %u", slot) : 0;
}

/* ---- one command to the cluster ---- */

struct command {
    const struct kv_link_arg *args;
    int n;
    size_t max; /* bytes of the reply */
    int64_t deadline_ms;
};

static bool may_ask(struct redis *r, unsigned node, const struct command *c, struct lh_error *err)
{
    struct kv_link_arg asking = kv_link_text("ASKING");
    redisReply *reply = call(r, node, &asking, 1, KV_LINK_REPLY, c->deadline_ms, err);

    if (reply)
        freeReplyObject(reply);
    return reply;
}

static int failure(enum kv_redis_error e, const char *text, struct lh_error *err)
{
    static const int codes[] = {
        [KV_REDIS_FAILED] = LH_INTERNAL,          [KV_REDIS_AWAY] = LH_UNAVAILABLE,
        [KV_REDIS_DENIED] = LH_PERMISSION_DENIED, [KV_REDIS_FULL] = LH_RESOURCE_EXHAUSTED,
        [KV_REDIS_OTHER_TYPE] = LH_DATA_LOSS,     [KV_REDIS_MOVED] = LH_UNAVAILABLE,
        [KV_REDIS_ASK] = LH_UNAVAILABLE,
    };

    return lh_fail(err, codes[e], "redis: %.200s", text);
}

/* Where a redirection leads: 0 and *node and *asked, or the failure that the reply is. */
static int follow(struct redis *r, const redisReply *reply, uint16_t slot, unsigned *node,
                  bool *asked, struct lh_error *err)
{
    struct kv_redis_place to = {.port = 0};
    enum kv_redis_error e = kv_redis_explain(reply->str, (size_t)reply->len, &to);

    if (e != KV_REDIS_MOVED && e != KV_REDIS_ASK)
        return failure(e, reply->str, err);
    if (!*to.host)
        memcpy(to.host, r->nodes[*node].place.host, sizeof to.host);
    *asked = e == KV_REDIS_ASK;
    *node = node_at(r, &to);
    if (*node == NOBODY)
        return failure(e, reply->str, err);
    if (!*asked) {
        r->owner[slot] = (uint16_t)*node;
        r->mapped = false; /* others will have moved, too */
    }
    return 0;
}

/* Whether a command whose connection has broken may be sent once more. */
static bool is_worth_it(const struct command *c, const struct lh_error *why)
{
    return why->code != LH_CANCELLED && why->code != LH_OUT_OF_RANGE && lh_ms_left(c->deadline_ms);
}

/* The reply, which is no error; the caller frees it. */
static redisReply *command(struct redis *r, const char *key, const struct command *c,
                           struct lh_error *err)
{
    uint16_t slot = kv_redis_slot(key, strlen(key));
    bool asked = false, broken = false;
    unsigned node;

    if (owner_of(r, slot, &node, c->deadline_ms, err) < 0)
        return NULL;
    for (int hop = 0; hop <= HOPS; hop++) {
        redisReply *reply = asked && !may_ask(r, node, c, err)
                                ? NULL
                                : call(r, node, c->args, c->n, c->max, c->deadline_ms, err);
        if (reply && reply->type != REDIS_REPLY_ERROR)
            return reply;
        int e = reply ? follow(r, reply, slot, &node, &asked, err) : 0;
        if (!reply) {
            forget_map(r);
            e = broken || !is_worth_it(c, err) ? err->code
                                               : owner_of(r, slot, &node, c->deadline_ms, err);
            broken = true;
            asked = false;
        }
        freeReplyObject(reply);
        if (e < 0)
            return NULL;
    }
    return lh_fail(err, LH_UNAVAILABLE, "redis: %d redirections", HOPS), NULL;
}

/* ---- the operations ---- */

static void key_of(const char *name, char key[KEY_MAX])
{
    snprintf(key, KEY_MAX, "longhaul:kv:%s", name);
}

static int redis_has(void *self, const char *name, int64_t deadline_ms, bool *has,
                     struct lh_error *err)
{
    char key[KEY_MAX];

    key_of(name, key);
    struct kv_link_arg args[] = {kv_link_text("EXISTS"), kv_link_text(key)};
    struct command c = {args, LH_ARRAY_SIZE(args), KV_LINK_REPLY, deadline_ms};
    redisReply *r = command(self, key, &c, err);
    if (!r)
        return err->code;
    bool number = r->type == REDIS_REPLY_INTEGER;
    *has = number && r->integer == 1;
    freeReplyObject(r);
    return number ? 0 : lh_fail(err, LH_INTERNAL, "redis: EXISTS was not answered by a number");
}

static int redis_put(void *self, const char *name, const struct iovec parts[2], int64_t deadline_ms,
                     struct lh_error *err)
{
    struct redis *s = self;
    char key[KEY_MAX], ttl[16];

    key_of(name, key);
    snprintf(ttl, sizeof ttl, "%u", s->o.ttl_s);
    struct kv_link_arg args[] = {kv_link_text("SET"),
                                 kv_link_text(key),
                                 {.parts = {parts[0], parts[1]}},
                                 kv_link_text("EX"),
                                 kv_link_text(ttl)};
    struct command c = {args, s->o.ttl_s ? 5 : 3, KV_LINK_REPLY, deadline_ms};
    redisReply *r = command(self, key, &c, err);
    if (!r)
        return err->code;
    bool stored = r->type == REDIS_REPLY_STATUS;
    freeReplyObject(r);
    return stored ? 0 : lh_fail(err, LH_INTERNAL, "redis: SET was not answered by OK");
}

static int take_object(const redisReply *r, const struct iovec parts[2], struct lh_error *err)
{
    size_t want = parts[0].iov_len + parts[1].iov_len;

    if (r->type == REDIS_REPLY_NIL)
        return lh_fail(err, LH_NOT_FOUND, "redis: no such key");
    if (r->type != REDIS_REPLY_STRING || (size_t)r->len != want)
        return lh_fail(err, LH_DATA_LOSS, "redis: not a string of %zu bytes", want);
    memcpy(parts[0].iov_base, r->str, parts[0].iov_len);
    memcpy(parts[1].iov_base, r->str + parts[0].iov_len, parts[1].iov_len);
    return 0;
}

static int redis_get(void *self, const char *name, const struct iovec parts[2], int64_t deadline_ms,
                     struct lh_error *err)
{
    char key[KEY_MAX];

    key_of(name, key);
    struct kv_link_arg args[] = {kv_link_text("GET"), kv_link_text(key)};
    struct command c = {args, 2, parts[0].iov_len + parts[1].iov_len + RESP_MAX, deadline_ms};
    redisReply *r = command(self, key, &c, err);
    if (!r) /* longer than what was asked for: something else */
        return err->code == LH_OUT_OF_RANGE ? lh_fail(err, LH_DATA_LOSS, "redis: too long")
                                            : err->code;
    int e = take_object(r, parts, err);
    freeReplyObject(r);
    return e;
}

const struct kv_peer_kind kv_peer_redis = {
    .scheme = "redis://",
    .object_max = UINT64_C(512) << 20, /* proto-max-bulk-len */
    .open = redis_open,
    .close = redis_close,
    .has = redis_has,
    .put = redis_put,
    .get = redis_get,
};

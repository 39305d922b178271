/* SHOW: one root, one unit, or one trajectory, for people. */
#include <string.h>

#include "kvstore/daemon/request.h"

typedef Longhaul__Kv__V1__ShowReply ShowReply;

/* What the message points to, in one allocation. */
struct shown {
    Longhaul__Kv__V1__PathStat path;
    Longhaul__Kv__V1__TrajectoryStat trajectory;
    struct kv_entry root, objects[KV_PARTS];
    Longhaul__Kv__V1__Entry *list[KV_PARTS];
};

static void show_root(struct kv_call *c, struct shown *x, const struct kv_root *root, ShowReply *r)
{
    kv_entry_of_root(&x->root, root, c->now_us);
    r->root = &x->root.entry;
    r->tenant = (char *)c->service->index.tenants[root->tenant].name;
    r->block_bytes = root->geometry.block_bytes;
    r->state_bytes = root->geometry.state_bytes;
    r->unit_tokens = root->geometry.unit_tokens;
}

static uint32_t children(const struct kv_index *ix, const struct kv_node *n)
{
    uint32_t count = 0;

    for (const struct kv_node *at = kv_at(ix, n->child); at; at = kv_at(ix, at->next))
        count += at->phase == KV_VISIBLE;
    return count;
}

static void show_path(const struct kv_service *s, struct shown *x, const struct kv_node *last)
{
    const struct kv_geometry *g = &kv_root_of(&s->index, last)->geometry;
    Longhaul__Kv__V1__PathStat *p = &x->path;

    *p = (Longhaul__Kv__V1__PathStat)LONGHAUL__KV__V1__PATH_STAT__INIT;
    p->units = last->unit + 1u;
    p->pins = last->pins;
    p->continued = children(&s->index, last);
    for (const struct kv_node *n = last; n; n = kv_parent(&s->index, n)) {
        bool state = kv_object_exists(&n->parts[KV_STATE]);
        p->in_memory += n->parts[KV_BLOCK].at[KV_MEMORY] != 0;
        p->on_disk += n->parts[KV_BLOCK].at[KV_DISK] != 0;
        p->states += state;
        p->bytes += g->block_bytes + (state ? g->state_bytes : 0);
        if (!p->boundary && kv_node_is_boundary(&s->index, n))
            p->boundary = n->unit + 1u;
    }
}

static void show_node(struct kv_call *c, struct shown *x, const struct kv_node *n, ShowReply *r)
{
    show_path(c->service, x, n);
    r->path = &x->path;
    r->objects = x->list;
    for (int part = 0; part < KV_PARTS; part++) {
        struct kv_entry *e = &x->objects[r->n_objects];
        if (kv_entry_of_object(e, c->service, n, part, c->now_us))
            x->list[r->n_objects++] = &e->entry;
    }
}

static struct kv_node *find_anywhere(struct kv_index *ix, const struct kv_key *hash)
{
    for (const struct kv_root *root = ix->live; root; root = root->next) {
        struct kv_node *n = kv_node_find(ix, root, hash);
        if (n)
            return n;
    }
    return NULL;
}

static int show_key(struct kv_call *c, struct shown *x, const struct kv_key *key, ShowReply *r,
                    struct lh_error *err)
{
    struct kv_index *ix = &c->service->index;
    const struct kv_root *root = kv_root_find(ix, key);
    const struct kv_node *n = root ? NULL : find_anywhere(ix, key);

    if (!root && !n)
        return lh_fail(err, LH_NOT_FOUND, "no live root and no stored unit has this key");
    show_root(c, x, root ? root : kv_root_of(ix, n), r);
    if (n)
        show_node(c, x, n, r);
    return 0;
}

static void show_sums(const struct kv_call *c, struct shown *x, const struct kv_trail *t)
{
    Longhaul__Kv__V1__TrajectoryStat *s = &x->trajectory;

    *s = (Longhaul__Kv__V1__TrajectoryStat)LONGHAUL__KV__V1__TRAJECTORY_STAT__INIT;
    s->puts = t->puts;
    s->put_bytes = t->put_bytes;
    s->refused = t->refused;
    s->lookups = t->lookups;
    s->hits = t->hits;
    s->hit_units = t->hit_units;
    s->loaded_bytes = t->loaded_bytes;
    s->idle_s = (double)(c->now_us - t->used_us) / 1e6;
}

/* The end of what it put, or of what it found when that is gone. */
static const struct kv_node *end_of(struct kv_index *ix, const struct kv_root *root,
                                    const struct kv_trail *t)
{
    const struct kv_node *put = kv_node_find(ix, root, &t->put);
    const struct kv_node *hit = kv_node_find(ix, root, &t->hit);

    return !put || (hit && hit->unit > put->unit) ? hit : put;
}

static int show_trajectory(struct kv_call *c, struct shown *x, const char *name, ShowReply *r,
                           struct lh_error *err)
{
    struct kv_index *ix = &c->service->index;
    const struct kv_trail *t = kv_trail_find(&c->service->trails, name);

    if (!t)
        return lh_fail(err, LH_NOT_FOUND,
                       "%s has not been here, or too long ago; `kvstore explain` knows what its "
                       "worker decided",
                       name);
    show_sums(c, x, t);
    r->trajectory = &x->trajectory;
    const struct kv_root *root = kv_root_find(ix, &t->root);
    if (!root)
        return 0; /* its version is retired, and all of it with that */
    show_root(c, x, root, r);
    const struct kv_node *n = end_of(ix, root, t);
    if (n)
        show_node(c, x, n, r);
    return 0;
}

int kv_handle_show(struct kv_call *c, struct lh_error *err)
{
    const Longhaul__Kv__V1__ShowRequest *q = c->request->show;
    ShowReply *r = &c->reply->body.show;
    struct shown *x = kv_reply_alloc(c->reply, 1, sizeof *x);
    struct kv_key key;

    if (!x)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "out of memory");
    if (!q->key.len == !*q->trajectory)
        return lh_fail(err, LH_INVALID_ARGUMENT, "show takes a key or a trajectory");
    int e = q->key.len ? kv_check_key(&q->key, "key", &key, err)
                       : kv_check_text(q->trajectory, KV_TRAJECTORY_MAX, "trajectory", err);
    if (e < 0)
        return e;
    *r = (ShowReply)LONGHAUL__KV__V1__SHOW_REPLY__INIT;
    c->reply->message.body_case = LONGHAUL__KV__V1__REPLY__BODY_SHOW;
    c->reply->message.show = r;
    return q->key.len ? show_key(c, x, &key, r, err) : show_trajectory(c, x, q->trajectory, r, err);
}

/* Regions and what backs them. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/cleanup.h"
#include "proto/ipc.h"
#include "trainer/arbiter/holders.h"
#include "trainer/arbiter/node.h"

static Longhaul__Arbiter__V1__Region describe(struct region *r)
{
    Longhaul__Arbiter__V1__Region m = LONGHAUL__ARBITER__V1__REGION__INIT;

    m.name = r->name;
    m.class_ = r->class;
    m.bytes = r->bytes;
    m.phases = r->phases;
    m.park = r->park;
    return m;
}

static int send_part(struct client *c, struct region *r, uint64_t call, uint64_t *sizes,
                     const int *fds, size_t n, bool writable, struct lh_error *err)
{
    Longhaul__Arbiter__V1__ServerMessage m = LONGHAUL__ARBITER__V1__SERVER_MESSAGE__INIT;
    Longhaul__Arbiter__V1__Grant g = LONGHAUL__ARBITER__V1__GRANT__INIT;
    Longhaul__Arbiter__V1__Region region = describe(r);

    g.region = &region;
    g.n_bytes = n;
    g.bytes = sizes;
    g.writable = writable;
    m.call = call;
    m.body_case = LONGHAUL__ARBITER__V1__SERVER_MESSAGE__BODY_GRANT;
    m.grant = &g;
    return node_send(c, &m, fds, n, err);
}

/* One message carries at most IPC_MAX_FDS fds: the parts before the last go as events. */
static int send_grant(const struct node *n, struct client *c, struct region *r, uint64_t call,
                      struct lh_error *err)
{
    size_t total = r->chunks ? r->bytes / n->pool.chunk_bytes : 0, at = 0;
    uint64_t sizes[IPC_MAX_FDS];
    int fds[IPC_MAX_FDS];

    do {
        size_t part = total - at < IPC_MAX_FDS ? total - at : IPC_MAX_FDS;
        for (size_t i = 0; i < part; i++) {
            fds[i] = n->pool.chunks[r->chunks[at + i]].fd;
            sizes[i] = n->pool.chunk_bytes;
        }
        at += part;
        int code = send_part(c, r, at == total ? call : 0, sizes, fds, part, true, err);
        if (code < 0)
            return code;
    } while (at < total);
    return 0;
}

int node_lend(struct node *n, struct client *c, struct region *r, uint64_t call,
              struct lh_error *err)
{
    bool due = !n->sw.running && r->phases >> n->phase & 1 && !r->chunks;

    if (due) {
        size_t count = r->bytes / n->pool.chunk_bytes;
        lh_autofree size_t *chunks = calloc(count, sizeof *chunks);
        if (!chunks)
            return lh_fail_errno(err, ENOMEM, "region %s of %s", r->name, c->name);
        if (pool_lend(&n->pool, count, chunks, err) < 0)
            return lh_wrap(err, "region %s of %s, %llu bytes", r->name, c->name,
                           (unsigned long long)r->bytes);
        r->chunks = lh_steal(&chunks);
    }
    return due || call ? send_grant(n, c, r, call, err) : 0;
}

void node_take_back(struct node *n, struct region *r)
{
    if (r->chunks)
        pool_take_back(&n->pool, r->chunks, r->bytes / n->pool.chunk_bytes);
    free(r->chunks);
    r->chunks = NULL;
}

struct residual {
    const struct node *node;
    const struct client *client;
};

/* A chunk the client maps is residual unless one of its own regions holds it now. */
static bool is_residual(const void *ctx, ino_t inode)
{
    const struct residual *q = ctx;
    const struct pool *p = &q->node->pool;

    for (size_t i = 0; i < q->client->n_regions; i++) {
        const struct region *r = &q->client->regions[i];
        for (size_t k = 0; r->chunks && k < r->bytes / p->chunk_bytes; k++)
            if (p->chunks[r->chunks[k]].inode == inode)
                return false;
    }
    for (size_t i = 0; i < p->n; i++)
        if (p->chunks[i].inode == inode)
            return true;
    return false; /* a shared segment: everybody may map it in every phase */
}

uint64_t node_residual(const struct node *n, const struct client *c)
{
    struct residual q = {n, c};

    return holders_mapped_bytes(c->pid, is_residual, &q);
}

static int send_shared(struct client *c, struct shared_region *s, bool writable, uint64_t call,
                       struct lh_error *err)
{
    struct region r = {.class = LONGHAUL__ARBITER__V1__CLASS__CLASS_WEIGHTS,
                       .park = LONGHAUL__ARBITER__V1__PARK__PARK_KEEP,
                       .bytes = s->bytes,
                       .phases = NODE_ALL_PHASES};
    char path[64];

    /* A second open file without write access: a reader cannot map it writable. */
    snprintf(path, sizeof path, "/proc/self/fd/%d", s->fd);
    lh_autoclose int fd = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    if (fd < 0)
        return lh_fail_errno(err, errno, "opening segment %s", s->name);
    snprintf(r.name, sizeof r.name, "%s", s->name);
    return send_part(c, &r, call, &s->bytes, &fd, 1, writable, err);
}

static struct shared_region *find_shared(struct node *n, const char *name)
{
    for (size_t i = 0; i < n->n_shared; i++)
        if (!strcmp(n->shared[i].name, name))
            return &n->shared[i];
    return NULL;
}

static int declare_shared(struct node *n, struct client *c, uint64_t call, const char *name,
                          uint64_t bytes, struct lh_error *err)
{
    struct shared_region *s = find_shared(n, name);

    if (!c->leader)
        return lh_fail(err, LH_PERMISSION_DENIED,
                       "%s is not the leader and may not declare weights", c->name);
    if (s && s->bytes != bytes)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "segment %s has %llu bytes, %s wants %llu: another model? Restart arbiterd",
                       name, (unsigned long long)s->bytes, c->name, (unsigned long long)bytes);
    if (s)
        return send_shared(c, s, true, call, err);
    if (n->n_shared == NODE_SHARED)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "more than %d shared segments", NODE_SHARED);
    s = &n->shared[n->n_shared];
    s->fd = pool_shared_segment("longhaul-weights", bytes, &s->inode, err);
    if (s->fd < 0)
        return s->fd;
    s->bytes = bytes;
    snprintf(s->name, sizeof s->name, "%s", name);
    n->n_shared++;
    return send_shared(c, s, true, call, err);
}

int node_attach(struct node *n, struct client *c, uint64_t call, const char *name,
                struct lh_error *err)
{
    struct shared_region *s = find_shared(n, name);

    if (!s)
        return lh_fail(err, LH_NOT_FOUND, "nobody has declared the segment %s yet", name);
    return send_shared(c, s, false, call, err);
}

static int check_region(const struct node *n, const struct client *c,
                        const Longhaul__Arbiter__V1__Region *q, struct lh_error *err)
{
    if (!q || !*q->name || strlen(q->name) >= NODE_NAME)
        return lh_fail(err, LH_INVALID_ARGUMENT, "a region needs a name of 1..%d bytes",
                       NODE_NAME - 1);
    if (!q->bytes || q->bytes > (uint64_t)INT64_MAX - n->pool.chunk_bytes)
        return lh_fail(err, LH_OUT_OF_RANGE, "region %s has %llu bytes", q->name,
                       (unsigned long long)q->bytes);
    if (q->class_ < 1 || q->class_ > LONGHAUL__ARBITER__V1__CLASS__CLASS_WORKSPACE || q->park < 1 ||
        q->park > LONGHAUL__ARBITER__V1__PARK__PARK_DISK || !q->phases ||
        q->phases & ~(unsigned)NODE_ALL_PHASES)
        return lh_fail(err, LH_INVALID_ARGUMENT, "region %s: unknown class, park rule or phase",
                       q->name);
    if (c->n_regions == NODE_REGIONS)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%s has %d regions already", c->name,
                       NODE_REGIONS);
    for (size_t i = 0; i < c->n_regions; i++)
        if (!strcmp(c->regions[i].name, q->name))
            return lh_fail(err, LH_ALREADY_EXISTS, "%s has a region %s already", c->name, q->name);
    return 0;
}

int node_declare(struct node *n, struct client *c, uint64_t call,
                 const Longhaul__Arbiter__V1__Region *q, struct lh_error *err)
{
    size_t chunk = n->pool.chunk_bytes;
    int r = check_region(n, c, q, err);

    if (r < 0)
        return r;
    if (q->class_ == LONGHAUL__ARBITER__V1__CLASS__CLASS_WEIGHTS)
        return declare_shared(n, c, call, q->name, q->bytes, err);
    struct region *new = &c->regions[c->n_regions];
    *new = (struct region){.class = q->class_, .park = q->park, .phases = q->phases};
    new->bytes = (q->bytes + chunk - 1) / chunk *chunk;
    snprintf(new->name, sizeof new->name, "%s", q->name);
    /* On this backend host memory is where a parked copy would go anyway. */
    if (new->park == LONGHAUL__ARBITER__V1__PARK__PARK_KEEP ||
        new->park == LONGHAUL__ARBITER__V1__PARK__PARK_HOST)
        new->phases = NODE_ALL_PHASES;
    r = node_lend(n, c, new, call, err);
    if (r < 0)
        return r;
    c->n_regions++;
    return 0;
}

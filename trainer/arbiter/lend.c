/* Regions and what backs them. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/ipc.h"
#include "proto/log.h"
#include "trainer/arbiter/holders.h"
#include "trainer/arbiter/node.h"

LH_LOG_COMPONENT("arbiterd");

enum { EMPTYINGS = 3 };

static Longhaul__Arbiter__V1__Region describe(struct region *r)
{
    Longhaul__Arbiter__V1__Region m = LONGHAUL__ARBITER__V1__REGION__INIT;

    m.name = r->name;
    m.class_ = r->class;
    m.bytes = r->bytes;
    m.phases = r->phases;
    m.park = r->park;
    m.device = r->on_device;
    m.own_file = r->own_file;
    return m;
}

/* Numbers of shared device segments, behind those of any chunk. */
#define SHARED_ID ((uint64_t)1 << 32)

/* What one message of a grant carries. */
struct part {
    uint64_t sizes[IPC_MAX_FDS], ids[IPC_MAX_FDS];
    int fds[IPC_MAX_FDS];
    size_t n;
};

static int send_part(struct client *c, struct region *r, uint64_t call, struct part *p,
                     bool writable, struct lh_error *err)
{
    Longhaul__Arbiter__V1__ServerMessage m = LONGHAUL__ARBITER__V1__SERVER_MESSAGE__INIT;
    Longhaul__Arbiter__V1__Grant g = LONGHAUL__ARBITER__V1__GRANT__INIT;
    Longhaul__Arbiter__V1__Region region = describe(r);

    g.region = &region;
    g.n_bytes = p->n;
    g.bytes = p->sizes;
    g.n_ids = r->on_device ? p->n : 0;
    g.ids = p->ids;
    g.writable = writable;
    m.call = call;
    m.body_case = LONGHAUL__ARBITER__V1__SERVER_MESSAGE__BODY_GRANT;
    m.grant = &g;
    c->on_device |= r->on_device;
    return node_send(c, &m, p->fds, p->n, err);
}

/* One message carries at most IPC_MAX_FDS fds: the parts before the last go as events. */
static int send_grant(struct node *n, struct client *c, struct region *r, uint64_t call,
                      struct lh_error *err)
{
    const struct pool *pool = node_pool(n, r);
    size_t total = r->chunks ? r->bytes / pool->chunk_bytes : 0, at = 0;
    struct part part;

    do {
        part.n = total - at < IPC_MAX_FDS ? total - at : IPC_MAX_FDS;
        for (size_t i = 0; i < part.n; i++) {
            part.ids[i] = r->chunks[at + i];
            part.fds[i] = pool->chunks[r->chunks[at + i]].fd;
            part.sizes[i] = pool->chunk_bytes;
        }
        at += part.n;
        int code = send_part(c, r, at == total ? call : 0, &part, true, err);
        if (code < 0)
            return code;
    } while (at < total);
    return 0;
}

static int send_file(struct client *c, struct region *r, uint64_t call, struct lh_error *err)
{
    struct part part = {.sizes = {r->bytes}, .fds = {r->fd}, .n = 1};

    return send_part(c, r, call, &part, true, err);
}

int node_lend(struct node *n, struct client *c, struct region *r, uint64_t call,
              struct lh_error *err)
{
    if (r->own_file)
        return call ? send_file(c, r, call, err) : 0;
    bool due = !n->sw.running && r->phases >> n->phase & 1 && !r->chunks;

    if (due) {
        size_t count = r->bytes / node_pool(n, r)->chunk_bytes;
        lh_autofree size_t *chunks = calloc(count, sizeof *chunks);
        if (!chunks)
            return lh_fail_errno(err, ENOMEM, "region %s of %s", r->name, c->name);
        if (pool_lend(node_pool(n, r), count, chunks, err) < 0)
            return lh_wrap(err, "region %s of %s, %llu bytes", r->name, c->name,
                           (unsigned long long)r->bytes);
        r->chunks = lh_steal(&chunks);
    }
    return due || call ? send_grant(n, c, r, call, err) : 0;
}

uint64_t node_file_bytes(const struct region *r)
{
    struct stat st;

    return r->own_file && fstat(r->fd, &st) == 0 ? (uint64_t)st.st_blocks * 512 : 0;
}

/* Who writes to it even so has lost what was written; again, should that happen just now. */
static void empty_file(const struct region *r)
{
    for (int i = 0; i < EMPTYINGS && node_file_bytes(r); i++)
        if (fallocate(r->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)r->bytes) < 0)
            lh_err("empty", "region %s: %s", r->name, strerror(errno));
}

void node_end_region(struct node *n, struct region *r)
{
    node_take_back(n, r);
    if (r->own_file)
        close(r->fd);
}

void node_take_back(struct node *n, struct region *r)
{
    if (r->own_file)
        empty_file(r);
    if (r->chunks)
        pool_take_back(node_pool(n, r), r->chunks, r->bytes / node_pool(n, r)->chunk_bytes);
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
        for (size_t k = 0; r->chunks && !r->on_device && k < r->bytes / p->chunk_bytes; k++)
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

/* A file that its holder hands on: of full length, empty, and nobody can shrink it. */
static int make_file(struct region *r, struct lh_error *err)
{
    lh_autoclose int fd = memfd_create("longhaul-kv", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (fd < 0 || ftruncate(fd, (off_t)r->bytes) < 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        return lh_fail_errno(err, errno, "file of region %s, %llu bytes", r->name,
                             (unsigned long long)r->bytes);
    r->fd = lh_steal_fd(&fd);
    return 0;
}

static int send_shared(struct client *c, struct shared_region *s, bool writable, uint64_t call,
                       struct lh_error *err)
{
    struct region r = {.class = LONGHAUL__ARBITER__V1__CLASS__CLASS_WEIGHTS,
                       .park = LONGHAUL__ARBITER__V1__PARK__PARK_KEEP,
                       .bytes = s->bytes,
                       .phases = NODE_ALL_PHASES,
                       .on_device = !s->inode};
    struct part part = {.sizes = {s->bytes}, .ids = {SHARED_ID + (uint64_t)s->fd}, .n = 1};
    char path[64];

    snprintf(r.name, sizeof r.name, "%s", s->name);
    part.fds[0] = s->fd;
    if (r.on_device) /* who may write is not the driver's concern */
        return send_part(c, &r, call, &part, writable, err);

    /* A second open file without write access: a reader cannot map it writable. */
    snprintf(path, sizeof path, "/proc/self/fd/%d", s->fd);
    lh_autoclose int fd = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    if (fd < 0)
        return lh_fail_errno(err, errno, "opening segment %s", s->name);
    part.fds[0] = fd;
    return send_part(c, &r, call, &part, writable, err);
}

static struct shared_region *find_shared(struct node *n, const char *name)
{
    for (size_t i = 0; i < n->n_shared; i++)
        if (!strcmp(n->shared[i].name, name))
            return &n->shared[i];
    return NULL;
}

static int make_shared(struct node *n, struct shared_region *s, bool on_device, uint64_t bytes,
                       struct lh_error *err)
{
    size_t size = bytes;

    s->inode = 0;
    s->fd = on_device ? device_segment(&size, err)
                      : pool_shared_segment("longhaul-weights", size, &s->inode, err);
    if (s->fd < 0)
        return s->fd;
    s->asked = bytes;
    s->bytes = size;
    n->device_shared += on_device ? size : 0;
    return 0;
}

static int declare_shared(struct node *n, struct client *c, uint64_t call, const char *name,
                          uint64_t bytes, bool on_device, struct lh_error *err)
{
    struct shared_region *s = find_shared(n, name);

    if (!c->leader)
        return lh_fail(err, LH_PERMISSION_DENIED,
                       "%s is not the leader and may not declare weights", c->name);
    if (s && (s->asked != bytes || on_device != !s->inode))
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "segment %s has %llu bytes, %s wants %llu: another model? Restart arbiterd",
                       name, (unsigned long long)s->asked, c->name, (unsigned long long)bytes);
    if (s)
        return send_shared(c, s, true, call, err);
    if (n->n_shared == NODE_SHARED)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "more than %d shared segments", NODE_SHARED);
    s = &n->shared[n->n_shared];
    if (make_shared(n, s, on_device, bytes, err) < 0)
        return err->code;
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
        q->phases & ~(unsigned)NODE_ALL_PHASES || q->device > 1 ||
        (q->device && q->park == LONGHAUL__ARBITER__V1__PARK__PARK_DISK) ||
        (q->own_file && (q->device || q->park != LONGHAUL__ARBITER__V1__PARK__PARK_DISCARD)))
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
    int r = check_region(n, c, q, err);
    size_t chunk;

    if (r < 0)
        return r;
    if (q->class_ == LONGHAUL__ARBITER__V1__CLASS__CLASS_WEIGHTS)
        return declare_shared(n, c, call, q->name, q->bytes, q->device, err);
    struct region *new = &c->regions[c->n_regions];
    *new = (struct region){
        .class = q->class_, .park = q->park, .phases = q->phases, .on_device = q->device};
    chunk = node_pool(n, new)->chunk_bytes;
    new->bytes = (q->bytes + chunk - 1) / chunk *chunk;
    snprintf(new->name, sizeof new->name, "%s", q->name);
    /* For host memory, host memory is where a parked copy would go anyway. */
    if (new->park == LONGHAUL__ARBITER__V1__PARK__PARK_KEEP ||
        (new->park == LONGHAUL__ARBITER__V1__PARK__PARK_HOST && !new->on_device))
        new->phases = NODE_ALL_PHASES;
    new->own_file = q->own_file;
    if (new->own_file && make_file(new, err) < 0)
        return err->code;
    r = node_lend(n, c, new, call, err);
    if (r < 0) {
        node_end_region(n, new);
        return r;
    }
    c->n_regions++;
    return 0;
}

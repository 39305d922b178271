/* Recovery of the disk tier from a file that anyone may have written to.  The input edits the index
 * of a small tier that real requests have filled: raw bytes anywhere, or fields of a slot, a root
 * or the superblock whose checksum is then made right again, so that what lies behind the checksums
 * is reached.  After recovery both rules of kvstore/index/index.h hold, every page is held at most
 * once, and the store works: it takes new objects and gives everything back. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kvstore/daemon/service.h"
#include "proto/cleanup.h"
#include "proto/crc.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

typedef Longhaul__Kv__V1__Request Request;

enum { BYTES = 16 << 20, UNITS = 16, CHAINS = 8, ROOTS = 2, EDIT_MAX = 32, WORD = 64 };

static struct kv_key roots[ROOTS], chains[ROOTS][CHAINS][UNITS];
static uint8_t *index_bytes; /* as requests left them */
static size_t index_size;
static char path[32];
static int fd = -1;

static void require(int condition)
{
    if (!condition)
        abort();
}

static bool open_store(struct kv_service *s)
{
    struct kv_service_options o = {.memory_bytes = KV_SEGMENT_MIN,
                                   .max_inflight_bytes = UINT64_MAX,
                                   .disk_path = path,
                                   .disk_bytes = BYTES};

    return kv_service_init(s, &o, NULL) == 0 && s->has_disk;
}

static void ask(struct kv_service *s, struct kv_peer *peer, const Request *q, struct kv_reply *r)
{
    require(kv_service_handle(s, peer, q, r));
}

static void hello(struct kv_service *s, struct kv_peer *peer)
{
    Longhaul__Kv__V1__HelloRequest hello = LONGHAUL__KV__V1__HELLO_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_reply r;

    *peer = (struct kv_peer){0};
    hello.protocol = KV_PROTOCOL;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_HELLO;
    q.hello = &hello;
    ask(s, peer, &q, &r);
    kv_reply_finish(&r);
}

static ProtobufCBinaryData keys(const struct kv_key *k, size_t n)
{
    return (ProtobufCBinaryData){n * sizeof *k, (uint8_t *)k->bytes};
}

static void open_root(struct kv_service *s, struct kv_peer *peer, int i)
{
    Longhaul__Kv__V1__OpenRootRequest open = LONGHAUL__KV__V1__OPEN_ROOT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_reply r;

    open.root = keys(&roots[i], 1);
    open.block_bytes = 9000;
    open.state_bytes = i ? 5000 : 0;
    open.unit_tokens = 16;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_OPEN_ROOT;
    q.open_root = &open;
    ask(s, peer, &q, &r);
    kv_reply_finish(&r);
}

/* May be refused: the input may have left a root of this key with another geometry. */
static void put(struct kv_service *s, struct kv_peer *peer, int root, const struct kv_key *chain)
{
    Longhaul__Kv__V1__PutRequest put = LONGHAUL__KV__V1__PUT_REQUEST__INIT;
    Longhaul__Kv__V1__CommitRequest commit = LONGHAUL__KV__V1__COMMIT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    uint32_t crc[UNITS] = {0};
    struct kv_reply r;

    put.root = keys(&roots[root], 1);
    put.chain = keys(chain, UNITS);
    put.deadline_ms = 1000;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_PUT;
    q.put = &put;
    ask(s, peer, &q, &r);
    commit.ticket = r.body.put.ticket;
    commit.n_block_crc32c = r.body.put.n_blocks;
    bool granted = r.message.body_case == LONGHAUL__KV__V1__REPLY__BODY_PUT && commit.ticket;
    kv_reply_finish(&r);
    if (!granted)
        return;
    commit.block_crc32c = crc;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_COMMIT;
    q.commit = &commit;
    ask(s, peer, &q, &r);
    kv_reply_finish(&r);
}

static void work(struct kv_service *s)
{
    while (kv_service_work(s) || s->disk.in_flight)
        ;
}

static void fill(struct kv_service *s, struct kv_peer *peer, int n)
{
    for (int root = 0; root < ROOTS; root++) {
        open_root(s, peer, root);
        for (int c = 0; c < n; c++) {
            put(s, peer, root, chains[root][c]);
            work(s);
        }
    }
}

static void prepare(void)
{
    int32_t tokens[UNITS * 16] = {0};
    struct kv_service s;
    struct kv_peer peer;

    setenv("LONGHAUL_LOG", "error", 1);
    fd = memfd_create("kv.disk", MFD_CLOEXEC);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    for (int root = 0; root < ROOTS; root++) {
        roots[root].bytes[0] = (uint8_t)(root + 1);
        for (int c = 0; c < CHAINS; c++) {
            tokens[UNITS * 8] = c;
            kv_chain(&roots[root], tokens, UNITS * 16, 16, chains[root][c]);
        }
    }
    require(fd >= 0 && open_store(&s));
    hello(&s, &peer);
    fill(&s, &peer, CHAINS);
    s.disk.flush_at_us = 1; /* what has changed is due now */
    while (s.disk.n_stale || s.disk.in_flight)
        kv_service_work(&s);
    require(s.exchange.stored > UNITS);
    index_size = s.disk.data_at;
    kv_service_forget(&s, &peer);
    kv_service_finish(&s);
    index_bytes = malloc(index_size);
    require(index_bytes && pread(fd, index_bytes, index_size, 0) == (ssize_t)index_size);
}

/* ---- edits ---- */

struct input {
    const uint8_t *p, *end;
};

static uint32_t number(struct input *in, uint32_t below)
{
    uint32_t v = 0;

    for (int i = 0; i < 2; i++)
        v = v << 8 | (in->p < in->end ? *in->p++ : 0);
    return v % below;
}

static void change(struct input *in, uint8_t *at, size_t room)
{
    size_t from = number(in, (uint32_t)room), n = number(in, EDIT_MAX);

    for (size_t i = from; n-- && i < room && in->p < in->end; i++)
        at[i] = *in->p++;
}

static struct kv_disk_slot *slot_at(uint8_t *index, uint32_t i)
{
    return (struct kv_disk_slot *)(index + kv_disk_sector_at(KV_ROOT_SECTORS)) + i;
}

static struct kv_disk_root *root_at(uint8_t *index, uint32_t i)
{
    return (struct kv_disk_root *)(index + kv_disk_sector_at(0)) + i;
}

static void edit_slot(struct input *in, uint8_t *index)
{
    struct kv_disk_slot *s = slot_at(index, number(in, 512));

    change(in, (uint8_t *)s, sizeof *s);
    s->crc32c = kv_disk_slot_crc(s, &root_at(index, s->root % KV_ROOT_SLOTS)->key);
}

static void copy_slot(struct input *in, uint8_t *index)
{
    const struct kv_disk_slot *from = slot_at(index, number(in, 512));

    *slot_at(index, number(in, 4000)) = *from;
}

static void edit_root(struct input *in, uint8_t *index)
{
    struct kv_disk_root *r = root_at(index, number(in, 4));

    change(in, (uint8_t *)r, sizeof *r);
    r->crc32c = kv_disk_root_crc(r);
}

static void edit_anything(struct input *in, uint8_t *index)
{
    size_t at = (size_t)number(in, (uint32_t)(index_size / 16)) * 16;

    change(in, index + at, index_size - at < 64 ? index_size - at : 64);
}

static void (*const edits[])(struct input *, uint8_t *) = {edit_slot, copy_slot, edit_root,
                                                           edit_anything};

/* ---- what must hold ---- */

static uint64_t bits_of(const struct kv_pages *p)
{
    uint64_t bits = 0;

    for (uint32_t i = 0; i < (p->n + WORD - 1) / WORD; i++)
        bits += (uint64_t)__builtin_popcountll(p->taken[i]);
    return bits;
}

static void check(const struct kv_service *s)
{
    const struct kv_index *ix = &s->index;
    uint64_t pages = 0;

    for (uint32_t i = 1; i < ix->touched; i++) {
        const struct kv_node *n = &ix->nodes[i], *parent = kv_parent(ix, n);
        if (n->phase != KV_VISIBLE)
            continue;
        require(n->unit == 0 ? !parent : parent && parent->phase == KV_VISIBLE);
        require(n->child || n->pins || kv_node_is_boundary(ix, n));
        for (int part = 0; part < KV_PARTS; part++)
            if (n->parts[part].at[KV_DISK])
                pages += kv_root_of(ix, n)->pages[part][KV_DISK];
    }
    require(s->disk.pages.used == pages && bits_of(&s->disk.pages) == pages);
}

static void use(struct kv_service *s)
{
    struct kv_peer peer;

    hello(s, &peer);
    fill(s, &peer, 2);
    check(s);
    kv_service_forget(s, &peer);
    kv_root_retire_others(&s->index, NULL, 0);
    work(s);
    require(s->index.in_use == 0 && s->index.objects == 0);
    require(s->pages.used == 0 && s->disk.pages.used == 0 && bits_of(&s->disk.pages) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    struct input in = {p, p + n};
    struct kv_service s;

    if (fd < 0)
        prepare();
    lh_autofree uint8_t *index = malloc(index_size);
    require(index != NULL);
    memcpy(index, index_bytes, index_size);
    while (in.p < in.end)
        edits[number(&in, LH_ARRAY_SIZE(edits))](&in, index);
    require(pwrite(fd, index, index_size, 0) == (ssize_t)index_size);
    if (!open_store(&s))
        return 0;
    check(&s);
    use(&s);
    kv_service_finish(&s);
    return 0;
}

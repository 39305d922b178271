/* What goes first under each policy of eviction, in a store that is full of evictable things. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdlib.h>
#include <string.h>

#include "direct.h"
#include "kvstore/index/policy.h"

enum { PAGE = 4096, STATE_PAGES = 8, SEQUENCES = 40, UNITS = 16 };

struct fixture {
    struct direct d;
    struct kv_key root, chain[SEQUENCES][UNITS];
};

static void make_chains(struct fixture *f, unsigned version)
{
    struct kv_identity id = {.policy_version = {(uint8_t)version}, .tenant = ""};
    int32_t tokens[UNITS * 16];

    f->root = kv_root(&id);
    for (int s = 0; s < SEQUENCES; s++) {
        for (int i = 0; i < UNITS * 16; i++)
            tokens[i] = s * 1000 + i;
        kv_chain(&f->root, tokens, UNITS * 16, 16, f->chain[s]);
    }
    cr_assert(eq(int, direct_root(&f->d, &f->root, PAGE, STATE_PAGES * PAGE), 0));
}

static void begin(struct fixture *f, const char *policy)
{
    setenv("LONGHAUL_LOG", "error", 1);
    memset(f, 0, sizeof *f);
    direct_open(&f->d, 256);
    f->d.service.index.policy = kv_policy_find(policy);
    cr_assert(f->d.service.index.policy != NULL);
    make_chains(f, 1);
}

static void store(struct fixture *f, int s, size_t first, size_t n)
{
    uint64_t ticket;

    cr_assert(eq(int, direct_put(&f->d, &f->root, f->chain[s], first, n, &ticket), 0));
    cr_assert(direct_commit(&f->d, ticket, n - first));
}

static size_t find(struct fixture *f, int s)
{
    uint64_t lease;
    size_t units = direct_lookup(&f->d, &f->root, f->chain[s], UNITS, 0, &lease);

    if (units)
        direct_release(&f->d, lease, false);
    return units;
}

/* A state behind 16 units saves 16 times the computing of one behind a single unit, and costs with
 * its blocks less than three times the bytes. */
Test(policy, value_keeps_what_saves_more_computing_for_its_bytes)
{
    struct fixture f;

    begin(&f, "value");
    store(&f, 0, 0, UNITS);
    store(&f, 1, 0, 1);
    cr_assert(kv_index_evict(&f.d.service.index, KV_ANY_TENANT));
    cr_assert(eq(sz, find(&f, 1), 0), "the younger one is worth less");
    cr_assert(eq(sz, find(&f, 0), UNITS));
    direct_close(&f.d);
}

/* From the nearest checkpoint, not from the root: the tail of a long sequence with a checkpoint one
 * unit before saves one unit. */
Test(policy, value_counts_from_the_nearest_checkpoint)
{
    struct fixture f;

    begin(&f, "value");
    store(&f, 0, 0, UNITS - 1);
    store(&f, 0, UNITS - 1, UNITS);
    store(&f, 1, 0, 8);
    cr_assert(kv_index_evict(&f.d.service.index, KV_ANY_TENANT), "the superseded state");
    cr_assert(kv_index_evict(&f.d.service.index, KV_ANY_TENANT));
    cr_assert(eq(sz, find(&f, 0), UNITS), "without it, all of the sequence hangs on its end");
    direct_close(&f.d);
    begin(&f, "value");
    store(&f, 2, 0, UNITS);
    uint64_t whole = f.d.service.index.tick;
    store(&f, 0, 0, UNITS - 1);
    store(&f, 0, UNITS - 1, UNITS);
    const struct kv_index *ix = &f.d.service.index;
    const struct kv_root *root = kv_root_find(&f.d.service.index, &f.root);
    const struct kv_node *far = kv_node_find(&f.d.service.index, root, &f.chain[2][UNITS - 1]);
    const struct kv_node *near = kv_node_find(&f.d.service.index, root, &f.chain[0][UNITS - 1]);
    cr_assert(gt(u64, far->rank - whole, near->rank - ix->tick), "16 units against one");
    direct_close(&f.d);
}

Test(policy, lru_takes_the_oldest)
{
    struct fixture f;

    begin(&f, "lru");
    store(&f, 0, 0, UNITS);
    store(&f, 1, 0, 1);
    cr_assert(kv_index_evict(&f.d.service.index, KV_ANY_TENANT));
    cr_assert(eq(sz, find(&f, 0), 0));
    cr_assert(eq(sz, find(&f, 1), 1));
    direct_close(&f.d);
}

/* One that was used again survives a scan of things used once; under LRU it would not. */
static size_t after_a_scan(const char *policy)
{
    struct fixture f;

    begin(&f, policy);
    store(&f, 0, 0, 2);
    find(&f, 0);
    for (int s = 1; s < SEQUENCES; s++)
        store(&f, s, 0, 2);
    size_t left = find(&f, 0);
    direct_close(&f.d);
    return left;
}

Test(policy, s3_fifo_resists_a_scan)
{
    cr_assert(eq(sz, after_a_scan("s3-fifo"), 2));
    cr_assert(eq(sz, after_a_scan("lru"), 0));
}

Test(policy, older_versions_go_first_whatever_the_policy)
{
    static const char *const names[] = {"value", "lru", "s3-fifo"};
    struct lh_error e = {0};

    for (size_t i = 0; i < LH_ARRAY_SIZE(names); i++) {
        struct fixture f;
        begin(&f, names[i]);
        struct kv_index *ix = &f.d.service.index;
        struct kv_geometry g = {PAGE, STATE_PAGES * PAGE, 16};
        uint32_t page_bytes[KV_TIERS] = {PAGE};
        struct kv_key old = f.root;
        make_chains(&f, 2);
        cr_assert(kv_root_open(ix, &old, &g, 1, page_bytes, &e) != NULL);
        cr_assert(kv_root_open(ix, &f.root, &g, 2, page_bytes, &e) != NULL);
        struct kv_key young = f.root;
        store(&f, 0, 0, 4);
        make_chains(&f, 1);
        store(&f, 0, 0, 4);
        cr_assert(kv_root_open(ix, &old, &g, 1, page_bytes, &e) != NULL);
        cr_assert(kv_root_open(ix, &young, &g, 2, page_bytes, &e) != NULL);
        cr_assert(kv_index_evict(ix, KV_ANY_TENANT));
        cr_assert(eq(sz, find(&f, 0), 0), "%s: the old version's, used last, has gone", names[i]);
        make_chains(&f, 2);
        cr_assert(eq(sz, find(&f, 0), 4), "%s", names[i]);
        direct_close(&f.d);
    }
}

Test(policy, names)
{
    cr_assert(kv_policy_find("lru") != NULL);
    cr_assert(kv_policy_find("clock") == NULL);
}

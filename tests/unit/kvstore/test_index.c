/* The rules one by one: boundaries, eviction order, roots, models without one of the two parts, and
 * requests nobody honest would send.  4,096-byte objects, so one page each. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdlib.h>
#include <string.h>

#include "direct.h"
#include "kvstore/flow/flow.h"

enum { PAGE = 4096, N = 32 };

struct fixture {
    struct direct d;
    struct kv_key root, chain[3][N]; /* three sequences that share 8 units */
};

static void begin(struct fixture *f, uint32_t pages, uint32_t block, uint32_t state)
{
    struct kv_identity id = {.tenant = "t"};
    int32_t tokens[N * 16];

    direct_open(&f->d, pages);
    f->root = kv_root(&id);
    for (int s = 0; s < 3; s++) {
        for (int i = 0; i < N * 16; i++)
            tokens[i] = i < 8 * 16 ? i : i + 1000 * s;
        kv_chain(&f->root, tokens, N * 16, 16, f->chain[s]);
    }
    cr_assert(eq(int, direct_root(&f->d, &f->root, block, state), 0));
}

static void end(struct fixture *f)
{
    direct_check(&f->d);
    direct_close(&f->d);
}

/* Stores units first..n-1 of a sequence. */
static void store(struct fixture *f, int s, size_t first, size_t n)
{
    uint64_t ticket;

    cr_assert(eq(int, direct_put(&f->d, &f->root, f->chain[s], first, n, &ticket), 0));
    if (!ticket)
        return;
    const struct kv_grant *g = f->d.peer.grants;
    cr_assert(direct_commit(&f->d, ticket, g->root->geometry.block_bytes ? g->n_pending : 0));
    direct_check(&f->d);
}

static size_t find(struct fixture *f, int s, size_t n, size_t at_least)
{
    uint64_t lease;
    size_t units = direct_lookup(&f->d, &f->root, f->chain[s], n, at_least, &lease);

    if (units)
        direct_release(&f->d, lease, false);
    return units;
}

Test(index, a_hit_ends_at_a_state)
{
    struct fixture f;

    begin(&f, 256, PAGE, PAGE);
    store(&f, 0, 0, 8);
    store(&f, 0, 8, 20);
    cr_assert(eq(sz, find(&f, 0, N, 0), 20));
    cr_assert(eq(sz, find(&f, 0, 20, 0), 20), "exactly the boundary");
    cr_assert(eq(sz, find(&f, 0, 19, 0), 8), "attention goes on, the state does not");
    cr_assert(eq(sz, find(&f, 0, 19, 8), 0));
    cr_assert(eq(sz, find(&f, 0, 19, 7), 8));
    cr_assert(eq(sz, find(&f, 1, N, 0), 8), "the shared part of another sequence");
    cr_assert(eq(sz, find(&f, 0, 7, 0), 0));
    end(&f);
}

Test(index, a_model_without_recurrent_layers_hits_at_every_unit)
{
    struct fixture f;

    begin(&f, 256, PAGE, 0);
    store(&f, 0, 0, 20);
    for (size_t n = 1; n <= N; n++)
        cr_assert(eq(sz, find(&f, 0, n, 0), n < 20 ? n : 20));
    end(&f);
}

Test(index, a_model_without_attention_has_states_only)
{
    struct fixture f;

    begin(&f, 256, 0, PAGE);
    store(&f, 0, 0, 8);
    store(&f, 0, 8, 20);
    cr_assert(eq(u32, f.d.service.pages.used, 2));
    cr_assert(eq(sz, find(&f, 0, N, 0), 20));
    cr_assert(eq(sz, find(&f, 0, 19, 0), 8));
    end(&f);
}

Test(index, what_is_put_is_visible_at_its_commit_only)
{
    struct fixture f;
    uint64_t one, two;

    begin(&f, 256, PAGE, PAGE);
    cr_assert(eq(int, direct_put(&f.d, &f.root, f.chain[0], 0, 8, &one), 0));
    cr_assert(eq(sz, find(&f, 0, N, 0), 0));
    cr_assert(eq(int, direct_put(&f.d, &f.root, f.chain[0], 0, 8, &two), 0), "nor to another put");
    cr_assert(direct_commit(&f.d, one, 8));
    cr_assert(eq(sz, find(&f, 0, N, 0), 8));
    cr_assert(direct_commit(&f.d, two, 8), "the second finds everything there");
    cr_assert(eq(u32, f.d.service.pages.used, 9), "and its pages are free again");
    end(&f);
}

/* 8 + 1, 4 + 1, 4 + 1 pages of 256; then one-page puts are forced by filling the store up. */
Test(index, superseded_states_go_first_then_the_oldest_tail)
{
    struct fixture f;
    struct kv_extent filler;

    begin(&f, 256, PAGE, PAGE);
    store(&f, 0, 0, 8);
    store(&f, 0, 8, 12);
    store(&f, 0, 12, 16);
    store(&f, 1, 8, 12);
    cr_assert(kv_pages_take(&f.d.service.pages, 256 - f.d.service.pages.used, KV_BOTTOM, &filler));
    cr_assert(kv_index_evict(&f.d.service.index, KV_ANY_TENANT));
    cr_assert(eq(sz, find(&f, 0, 15, 0), 8), "the state at 12 was superseded by the one at 16");
    cr_assert(eq(sz, find(&f, 0, 16, 0), 16), "its blocks stay");
    cr_assert(eq(sz, find(&f, 1, N, 0), 12));
    cr_assert(kv_index_evict(&f.d.service.index, KV_ANY_TENANT));
    cr_assert(eq(sz, find(&f, 0, 16, 0), 8), "then the older tail, back to the fork");
    cr_assert(eq(sz, find(&f, 1, N, 0), 12));
    cr_assert(eq(u32, f.d.service.index.in_use, 12));
    cr_assert(kv_index_evict(&f.d.service.index, KV_ANY_TENANT));
    cr_assert(eq(sz, find(&f, 1, N, 0), 12), "the fork has one way left, so its state goes");
    cr_assert(kv_index_evict(&f.d.service.index, KV_ANY_TENANT));
    cr_assert(eq(u32, f.d.service.index.in_use, 0), "without a state before it all of it goes");
    cr_assert(not(kv_index_evict(&f.d.service.index, KV_ANY_TENANT)));
    kv_pages_give(&f.d.service.pages, &filler);
    end(&f);
}

/* Blocks of 3 pages and states of 31, put and evicted at random for long: holes are refilled by
 * their own kind, so the store stays full instead of being cleared to make one hole. */
Test(index, two_sizes_do_not_fragment_the_store)
{
    enum { SEQUENCES = 200, LONGEST = 24, TURN = 3, PUTS = 4000 };
    static struct kv_key chains[SEQUENCES][LONGEST];
    size_t stored[SEQUENCES] = {0};
    uint32_t least = UINT32_MAX;
    struct fixture f;
    uint64_t ticket;

    begin(&f, 4096, 3 * PAGE, 31 * PAGE);
    srand(1);
    for (int i = 0; i < PUTS; i++) {
        int s = rand() % SEQUENCES;
        size_t first = stored[s];
        if (first + TURN > LONGEST || first == 0) {
            stored[s] = first = 0;
            for (int k = 0; k < LONGEST; k++)
                memcpy(chains[s][k].bytes, (int[3]){i + 1, s, k}, 12);
        }
        int r = direct_put(&f.d, &f.root, chains[s], first, first + TURN, &ticket);
        stored[s] = r == 0 ? first + TURN : 0;
        cr_assert(r == 0 || r == LH_FAILED_PRECONDITION, "evicted before it was continued, or %d",
                  r);
        if (r == 0)
            cr_assert(direct_commit(&f.d, ticket, TURN));
        if (i > PUTS / 4 && f.d.service.pages.used < least)
            least = f.d.service.pages.used;
        if (i % 100 == 0)
            direct_check(&f.d);
    }
    cr_assert(gt(u32, least, 4096 * 3 / 4));
    end(&f);
}

Test(index, a_pin_keeps_the_whole_path)
{
    struct fixture f;
    uint64_t lease;

    begin(&f, 256, PAGE, PAGE);
    store(&f, 0, 0, 8);
    store(&f, 0, 8, 16);
    cr_assert(eq(sz, direct_lookup(&f.d, &f.root, f.chain[0], 16, 0, &lease), 16));
    while (kv_index_evict(&f.d.service.index, KV_ANY_TENANT))
        ;
    cr_assert(eq(sz, find(&f, 0, 16, 0), 16), "only the superseded state could go");
    cr_assert(eq(u32, f.d.service.pages.used, 17));
    direct_release(&f.d, lease, false);
    while (kv_index_evict(&f.d.service.index, KV_ANY_TENANT))
        ;
    cr_assert(eq(u32, f.d.service.pages.used, 0));
    end(&f);
}

Test(index, dropped_bytes_stay_until_their_readers_have_gone)
{
    struct fixture f;
    uint64_t reader, other;

    begin(&f, 256, PAGE, PAGE);
    store(&f, 0, 0, 8);
    store(&f, 0, 8, 16);
    store(&f, 1, 8, 16);
    cr_assert(eq(sz, direct_lookup(&f.d, &f.root, f.chain[0], 16, 0, &reader), 16));
    cr_assert(eq(sz, direct_lookup(&f.d, &f.root, f.chain[1], 16, 8, &other), 16));
    direct_release(&f.d, other, true);
    cr_assert(eq(sz, find(&f, 1, 16, 0), 8), "what the lease covered has gone");
    cr_assert(eq(sz, direct_lookup(&f.d, &f.root, f.chain[0], 8, 0, &other), 8));
    direct_release(&f.d, other, true);
    cr_assert(eq(sz, find(&f, 0, 16, 0), 0), "nothing matches");
    cr_assert(eq(u32, f.d.service.pages.used, 18), "the reader's pages are not reused");
    direct_release(&f.d, reader, false);
    cr_assert(eq(u32, f.d.service.pages.used, 0));
    end(&f);
}

/* Retiring looks at roots, never at what they hold: everything is still in place afterwards and
 * nothing of it matches; work() then frees a bounded number of entries a call. */
Test(index, retiring_costs_one_flag_and_reclaiming_comes_in_slices)
{
    struct fixture f;
    struct kv_key next = {{1}}, chain[1024];
    uint64_t ticket, lease;
    unsigned slices = 0;

    begin(&f, 4096, PAGE, PAGE);
    memset(chain, 0, sizeof chain);
    for (unsigned i = 0; i < 1024; i++)
        memcpy(chain[i].bytes, &(unsigned){i + 1}, sizeof i);
    for (size_t first = 0; first < 1024; first += 128) {
        cr_assert(eq(int, direct_put(&f.d, &f.root, chain, first, first + 128, &ticket), 0));
        cr_assert(direct_commit(&f.d, ticket, 128));
    }
    cr_assert(eq(sz, direct_lookup(&f.d, &f.root, chain, 1024, 0, &lease), 1024));
    direct_release(&f.d, lease, false);
    cr_assert(eq(int, direct_retire(&f.d, &next), 0));
    cr_assert(eq(u32, f.d.service.index.in_use, 1024), "nothing was walked");
    cr_assert(eq(sz, direct_lookup(&f.d, &f.root, chain, 1024, 0, &lease), 0), "I4");
    cr_assert(eq(int, direct_put(&f.d, &f.root, chain, 0, 8, &ticket), LH_FAILED_PRECONDITION));
    while (kv_service_work(&f.d.service))
        slices++;
    cr_assert(gt(u32, slices, 0));
    cr_assert(eq(u32, f.d.service.pages.used, 0));
    cr_assert(f.d.service.index.retired == NULL);
    end(&f);
}

Test(index, a_commit_after_its_root_was_retired_stores_nothing)
{
    struct fixture f;
    struct kv_key next = {{1}};
    uint64_t ticket;

    begin(&f, 256, PAGE, PAGE);
    store(&f, 0, 0, 8);
    cr_assert(eq(int, direct_put(&f.d, &f.root, f.chain[0], 8, 16, &ticket), 0));
    cr_assert(eq(int, direct_retire(&f.d, &next), 0));
    while (kv_service_work(&f.d.service))
        ;
    cr_assert(not(direct_commit(&f.d, ticket, 8)));
    while (kv_service_work(&f.d.service))
        ;
    cr_assert(eq(u32, f.d.service.pages.used, 0));
    end(&f);
}

Test(index, roots_are_bounded_and_keep_their_geometry)
{
    struct fixture f;
    struct kv_key key = {{0}};

    begin(&f, 256, PAGE, PAGE);
    store(&f, 0, 0, 8);
    cr_assert(eq(int, direct_root(&f.d, &f.root, PAGE, 2 * PAGE), LH_FAILED_PRECONDITION));
    cr_assert(eq(int, direct_root(&f.d, &f.root, PAGE, PAGE), 0), "again is fine");
    for (int i = 0; i < 3 * KV_MAX_ROOTS; i++) {
        memcpy(key.bytes, &i, sizeof i);
        cr_assert(eq(int, direct_root(&f.d, &key, PAGE, PAGE), 0));
    }
    cr_assert(le(u32, f.d.service.index.n_roots, KV_MAX_ROOTS));
    cr_assert(eq(sz, find(&f, 0, 8, 0), 8), "a root with entries is not forgotten");
    end(&f);
}

/* Chains whose hashes contradict what is stored: they fit nowhere and leave nothing. */
Test(index, inconsistent_chains_store_nothing)
{
    struct fixture f;
    struct kv_key lie[4];
    uint64_t ticket;

    begin(&f, 256, PAGE, PAGE);
    store(&f, 0, 0, 8);
    memset(lie, 7, sizeof lie);
    cr_assert(eq(int, direct_put(&f.d, &f.root, lie, 0, 4, &ticket), 0),
              "the same hash four times");
    cr_assert(not(direct_commit(&f.d, ticket, 4)));
    direct_check(&f.d);
    lie[0] = f.chain[0][5];
    cr_assert(eq(int, direct_put(&f.d, &f.root, lie, 0, 1, &ticket), 0), "unit 5 as unit 0");
    cr_assert(not(direct_commit(&f.d, ticket, 1)));
    cr_assert(eq(int, direct_put(&f.d, &f.root, lie, 1, 2, &ticket), LH_FAILED_PRECONDITION));
    cr_assert(eq(sz, find(&f, 0, 8, 0), 8));
    cr_assert(eq(u32, f.d.service.pages.used, 9));
    end(&f);
}

static int send_put(struct fixture *f, size_t root_bytes, size_t chain_bytes, uint32_t first,
                    uint32_t deadline_ms)
{
    static uint8_t bytes[16 * (KV_MAX_UNITS + 1)];
    Longhaul__Kv__V1__PutRequest put = LONGHAUL__KV__V1__PUT_REQUEST__INIT;
    Longhaul__Kv__V1__Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_reply r;

    put.root = (ProtobufCBinaryData){root_bytes, f->root.bytes};
    put.chain = (ProtobufCBinaryData){chain_bytes, bytes};
    put.first = first;
    put.deadline_ms = deadline_ms;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_PUT;
    q.put = &put;
    kv_service_handle(&f->d.service, &f->d.peer, &q, &r);
    int code = r.message.body_case == LONGHAUL__KV__V1__REPLY__BODY_FAILURE ? r.error.code : 0;
    kv_reply_finish(&r);
    return code;
}

Test(index, every_field_is_bounded)
{
    struct fixture f;
    uint64_t huge = (uint64_t)256 * PAGE + 1;

    begin(&f, 256, PAGE, PAGE);
    cr_assert(eq(int, send_put(&f, 15, 16, 0, 1), LH_INVALID_ARGUMENT));
    cr_assert(eq(int, send_put(&f, 16, 0, 0, 1), LH_INVALID_ARGUMENT));
    cr_assert(eq(int, send_put(&f, 16, 17, 0, 1), LH_INVALID_ARGUMENT));
    cr_assert(eq(int, send_put(&f, 16, 16 * (KV_MAX_UNITS + 1), 0, 1), LH_INVALID_ARGUMENT));
    cr_assert(eq(int, send_put(&f, 16, 32, KV_MAX_UNITS - 1, 1), LH_INVALID_ARGUMENT));
    cr_assert(eq(int, send_put(&f, 16, 16, UINT32_MAX, 1), LH_INVALID_ARGUMENT));
    cr_assert(eq(int, send_put(&f, 16, 16, 0, 0), LH_INVALID_ARGUMENT));
    cr_assert(eq(int, send_put(&f, 16, 16, 0, KV_TICKET_MAX_MS + 1), LH_INVALID_ARGUMENT));
    cr_assert(eq(int, send_put(&f, 16, 16 * KV_MAX_UNITS, 0, 1), LH_RESOURCE_EXHAUSTED));
    cr_assert(eq(int, send_put(&f, 16, 16, 0, 1), 0));
    f.root.bytes[0] ^= 1;
    cr_assert(eq(int, direct_root(&f.d, &f.root, 0, 0), LH_INVALID_ARGUMENT));
    cr_assert(eq(int, direct_root(&f.d, &f.root, (uint32_t)huge, 0), LH_INVALID_ARGUMENT));
    cr_assert(eq(int, direct_root(&f.d, &f.root, UINT32_MAX, UINT32_MAX), LH_INVALID_ARGUMENT));
    end(&f);
}

Test(index, hello_comes_first)
{
    struct fixture f;

    begin(&f, 256, PAGE, PAGE);
    f.d.peer.ready = false;
    cr_assert(eq(int, send_put(&f, 16, 16, 0, 1), LH_FAILED_PRECONDITION));
    end(&f);
}

Test(index, grants_of_one_client_are_bounded)
{
    struct fixture f;
    uint64_t lease;

    begin(&f, 256, PAGE, PAGE);
    store(&f, 0, 0, 8);
    for (int i = 0; i < KV_MAX_GRANTS; i++)
        cr_assert(eq(sz, direct_lookup(&f.d, &f.root, f.chain[0], 8, 0, &lease), 8));
    cr_assert(eq(int, send_put(&f, 16, 16, 0, 1), LH_RESOURCE_EXHAUSTED));
    kv_service_expire(&f.d.service, &f.d.peer, INT64_MAX);
    cr_assert(eq(u32, f.d.peer.n_grants, 0), "leases have deadlines");
    cr_assert(eq(u32, f.d.service.index.pinned, 0));
    cr_assert(eq(u64, f.d.service.flow.lanes[KV_LOAD].in_flight, 0));
    end(&f);
}

Test(pages, both_ends_and_exact_accounting)
{
    struct kv_pages p;
    struct kv_extent low, high, mid, none;

    cr_assert(eq(int, kv_pages_init(&p, 200, NULL), 0));
    cr_assert(kv_pages_take(&p, 70, KV_BOTTOM, &low));
    cr_assert(kv_pages_take(&p, 65, KV_TOP, &high));
    cr_assert(eq(u32, low.page, 0));
    cr_assert(eq(u32, high.page, 135));
    cr_assert(kv_pages_take(&p, 65, KV_TOP, &mid));
    cr_assert(eq(u32, mid.page, 70));
    cr_assert(not(kv_pages_take(&p, 1, KV_BOTTOM, &none)));
    cr_assert(not(kv_pages_take(&p, 1, KV_TOP, &none)));
    kv_pages_give(&p, &mid);
    kv_pages_give(&p, &mid);
    cr_assert(eq(u32, p.used, 135), "giving nothing back changes nothing");
    cr_assert(kv_pages_take(&p, 64, KV_BOTTOM, &mid));
    cr_assert(eq(u32, mid.page, 70));
    cr_assert(not(kv_pages_take(&p, 2, KV_TOP, &none)));
    cr_assert(kv_pages_take(&p, 1, KV_TOP, &none));
    cr_assert(eq(u32, none.page, 134));
    kv_pages_finish(&p);
}

Test(flow, waits_follow_the_queue_and_fade)
{
    struct kv_flow f = {.limit = 1000};
    struct kv_share a = {{0}};
    int64_t now = 1000000;

    cr_assert(kv_flow_admits(&f, &a, KV_LOAD, 5000), "one is always allowed");
    kv_flow_begin(&f, &a, KV_LOAD, 5000, now);
    cr_assert(not(kv_flow_admits(&f, &a, KV_LOAD, 1)));
    cr_assert(kv_flow_admits(&f, &a, KV_SPILL, 1), "directions are separate");
    kv_flow_end(&f, &a, KV_LOAD, 5000, now, now + 10000, true); /* 500 bytes a ms */
    kv_flow_begin(&f, &a, KV_LOAD, 600, now);
    cr_assert(kv_flow_admits(&f, &a, KV_LOAD, 400));
    cr_assert(not(kv_flow_admits(&f, &a, KV_LOAD, 401)));
    cr_assert(epsilon_eq(dbl, kv_flow_begin(&f, &a, KV_LOAD, 400, now), 600 / 500.0, 1e-9));
    double wait = kv_flow_wait_ms(&f, KV_LOAD, now);
    cr_assert(gt(dbl, wait, 0));
    cr_assert(epsilon_eq(dbl, kv_flow_wait_ms(&f, KV_LOAD, now + 500000), wait / 2, 1e-9));
}

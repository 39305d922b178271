/* The store as clients see it: a real kvstored, its socket, its shared memory. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#include "kit.h"
#include "kvstore/client/link.h"
#include "longhaul/kv/v1/kv.pb-c.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/ipc.h"
#include "proto/parse.h"

enum { AMPLE = 64 << 20 };

static struct kv_pressure pressure_of(struct kv_client *c)
{
    struct kv_pressure p = {0};
    struct lh_error e = {0};

    cr_assert(eq(int, kv_pressure(c, &p, &e), 0), "%s", e.message);
    return p;
}

Test(daemon, what_was_put_comes_back)
{
    struct daemon d;
    struct lh_error e = {0};
    struct kv_key root = root_of(1), chain[20];

    daemon_start(&d, AMPLE, AMPLE);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    chain_of(&root, 7, 20, chain);
    cr_assert(eq(sz, get_units(c, chain, 20, 0), 0), "empty");
    cr_assert(eq(i64, put_units(c, chain, 0, 8, &e), 8 * BLOCK + STATE), "%s", e.message);
    cr_assert(eq(sz, get_units(c, chain, 8, 0), 8), "exactly the boundary");
    cr_assert(eq(sz, get_units(c, chain, 20, 0), 8), "a longer chain finds its stored part");
    cr_assert(eq(sz, get_units(c, chain, 7, 0), 0), "before the only state there is no boundary");
    cr_assert(eq(i64, put_units(c, chain, 8, 14, &e), 6 * BLOCK + STATE), "%s", e.message);
    cr_assert(eq(sz, get_units(c, chain, 20, 0), 14));
    cr_assert(eq(sz, get_units(c, chain, 13, 0), 8), "falls back to the last state");
    cr_assert(eq(sz, get_units(c, chain, 20, 10), 14));
    cr_assert(eq(sz, get_units(c, chain, 20, 14), 0), "not longer than what is there");
    cr_assert(eq(i64, put_units(c, chain, 0, 14, &e), 0), "all of it is there");
    daemon_stop(&d);
}

Test(daemon, a_put_never_leaves_a_hole)
{
    struct daemon d;
    struct lh_error e = {0};
    struct kv_key root = root_of(1), chain[10];

    daemon_start(&d, AMPLE, AMPLE);
    lh_auto(kv_client) c = client_of(&d, "a");
    chain_of(&root, 1, 10, chain);
    cr_assert(eq(i64, put_units(c, chain, 0, 4, &e), LH_FAILED_PRECONDITION), "no root is in use");
    use_version(c, 1, false);
    cr_assert(eq(i64, put_units(c, chain, 4, 8, &e), LH_FAILED_PRECONDITION));
    cr_assert(eq(sz, get_units(c, chain, 10, 0), 0));
    cr_assert(eq(i64, put_units(c, chain, 0, 4, &e), 4 * BLOCK + STATE));
    cr_assert(eq(i64, put_units(c, chain, 5, 8, &e), LH_FAILED_PRECONDITION), "unit 4 is missing");
    cr_assert(eq(i64, put_units(c, chain, 4, 8, &e), 4 * BLOCK + STATE));
    cr_assert(eq(sz, get_units(c, chain, 10, 0), 8));
    daemon_stop(&d);
}

/* I4: an entry serves the version that made it and no other. */
Test(daemon, versions_do_not_mix_and_retire_at_once)
{
    struct daemon d;
    struct lh_error e = {0};
    struct kv_key root1 = root_of(1), root2 = root_of(2), one[6], two[6];

    daemon_start(&d, AMPLE, AMPLE);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    chain_of(&root1, 3, 6, one);
    chain_of(&root2, 3, 6, two);
    cr_assert(gt(i64, put_units(c, one, 0, 6, &e), 0));
    use_version(c, 2, false);
    cr_assert(eq(sz, get_units(c, two, 6, 0), 0), "same tokens, other version");
    cr_assert(eq(sz, get_units(c, one, 6, 0), 0), "a chain of another root does not match either");
    use_version(c, 1, false);
    cr_assert(eq(sz, get_units(c, one, 6, 0), 6), "not retired yet");
    use_version(c, 2, true);
    use_version(c, 1, false);
    cr_assert(eq(sz, get_units(c, one, 6, 0), 0),
              "retired, and opening it again brings nothing back");
    cr_assert(gt(i64, put_units(c, one, 0, 6, &e), 0));
    cr_assert(eq(sz, get_units(c, one, 6, 0), 6));
    daemon_stop(&d);
}

static void wait_until_used(struct kv_client *c, uint64_t bytes)
{
    int64_t deadline = lh_now_ms() + 5000;

    while (pressure_of(c).used_bytes != bytes && lh_ms_left(deadline))
        usleep(1000);
    cr_assert(eq(u64, pressure_of(c).used_bytes, bytes));
}

Test(daemon, retired_space_comes_back_by_itself)
{
    struct daemon d;
    struct lh_error e = {0};
    struct kv_key root = root_of(1), chain[500];

    daemon_start(&d, AMPLE, AMPLE);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    for (unsigned seed = 0; seed < 8; seed++) {
        chain_of(&root, seed, 500, chain);
        cr_assert(gt(i64, put_units(c, chain, 0, 500, &e), 0), "%s", e.message);
    }
    cr_assert(gt(u64, pressure_of(c).used_bytes, 4000 * BLOCK));
    use_version(c, 2, true);
    wait_until_used(c, 0);
    daemon_stop(&d);
}

/* Asks for pages as a client would and then does nothing more. */
static Longhaul__Kv__V1__Reply *raw_put(struct kv_link *l, const struct kv_key *root,
                                        const struct kv_key *chain, size_t n, uint32_t deadline_ms)
{
    Longhaul__Kv__V1__PutRequest put = LONGHAUL__KV__V1__PUT_REQUEST__INIT;
    Longhaul__Kv__V1__Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct lh_error e = {0};

    put.root = (ProtobufCBinaryData){16, (uint8_t *)root->bytes};
    put.chain = (ProtobufCBinaryData){16 * n, (uint8_t *)chain->bytes};
    put.deadline_ms = deadline_ms;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_PUT;
    q.put = &put;
    Longhaul__Kv__V1__Reply *r = kv_link_call(l, &q, lh_now_ms() + 5000, &e);
    cr_assert(r && r->put->ticket, "%s", e.message);
    return r;
}

static void open_link(struct kv_link *l, const struct daemon *d)
{
    struct lh_error e = {0};

    cr_assert(eq(int, kv_link_open(l, d->socket, "raw", lh_now_ms() + 5000, &e), 0), "%s",
              e.message);
}

Test(daemon, a_client_that_dies_before_its_commit_leaves_nothing)
{
    struct daemon d;
    struct kv_key root = root_of(1), chain[8];
    struct kv_link l;

    daemon_start(&d, AMPLE, AMPLE);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    chain_of(&root, 1, 8, chain);
    open_link(&l, &d);
    lh_automsg(Longhaul__Kv__V1__Reply) r = raw_put(&l, &root, chain, 8, 60000);
    memset(kv_map_at(l.map, r->put->blocks[0], BLOCK), 1, BLOCK);
    cr_assert(gt(u64, pressure_of(c).used_bytes, 0));
    cr_assert(eq(sz, get_units(c, chain, 8, 0), 0), "granted is not visible");
    kv_link_close(&l);
    wait_until_used(c, 0);
    cr_assert(eq(sz, get_units(c, chain, 8, 0), 0));
    daemon_stop(&d);
}

Test(daemon, a_ticket_ends_at_its_deadline)
{
    struct daemon d;
    struct kv_key root = root_of(1), chain[4];
    struct kv_link l;
    struct lh_error e = {0};
    Longhaul__Kv__V1__CommitRequest commit = LONGHAUL__KV__V1__COMMIT_REQUEST__INIT;
    Longhaul__Kv__V1__Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    uint32_t crc[4] = {0};

    daemon_start(&d, AMPLE, AMPLE);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    chain_of(&root, 1, 4, chain);
    open_link(&l, &d);
    lh_automsg(Longhaul__Kv__V1__Reply) r = raw_put(&l, &root, chain, 4, 100);
    wait_until_used(c, 0);
    commit.ticket = r->put->ticket;
    commit.block_crc32c = crc;
    commit.n_block_crc32c = 4;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_COMMIT;
    q.commit = &commit;
    lh_automsg(Longhaul__Kv__V1__Reply) done = kv_link_call(&l, &q, lh_now_ms() + 5000, &e);
    cr_assert(done != NULL, "%s", e.message);
    cr_assert(not(done->commit->stored));
    kv_link_close(&l);
    daemon_stop(&d);
}

/* Flips one byte of an object in the shared memory, as a broken DIMM or a stray pointer would. */
static void spoil(const struct daemon *d, const struct kv_key *root, const struct kv_key *chain,
                  size_t n, bool state)
{
    Longhaul__Kv__V1__LookupRequest lookup = LONGHAUL__KV__V1__LOOKUP_REQUEST__INIT;
    Longhaul__Kv__V1__Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct lh_error e = {0};
    struct kv_link l;

    open_link(&l, d);
    lookup.root = (ProtobufCBinaryData){16, (uint8_t *)root->bytes};
    lookup.chain = (ProtobufCBinaryData){16 * n, (uint8_t *)chain->bytes};
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_LOOKUP;
    q.lookup = &lookup;
    lh_automsg(Longhaul__Kv__V1__Reply) r = kv_link_call(&l, &q, lh_now_ms() + 5000, &e);
    cr_assert(r && r->lookup->units == n, "%s", e.message);
    *kv_map_at(l.map, (state ? r->lookup->state : r->lookup->blocks[n / 2]) + 17, 1) ^= 0x10;
    kv_link_close(&l);
}

static void corruption_is_a_miss(bool state)
{
    struct daemon d;
    struct lh_error e = {0};
    struct kv_key root = root_of(1), chain[12];
    uint8_t buffer[STATE];

    daemon_start(&d, AMPLE, AMPLE);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    chain_of(&root, 1, 12, chain);
    cr_assert(gt(i64, put_units(c, chain, 0, 4, &e), 0));
    cr_assert(gt(i64, put_units(c, chain, 4, 8, &e), 0));
    cr_assert(gt(i64, put_units(c, chain, 8, 12, &e), 0));
    spoil(&d, &root, chain, 8, state);
    struct kv_hit *h = kv_lookup(c, chain, 8, 4, "t", &e);
    cr_assert(h != NULL, "%s", e.message);
    if (!state)
        cr_assert(eq(int, kv_hit_block(h, 5, buffer, &e), 0), "the others are fine");
    int r = state ? kv_hit_state(h, buffer, &e) : kv_hit_block(h, 4, buffer, &e);
    cr_assert(eq(int, r, LH_DATA_LOSS));
    kv_hit_destroy(h);
    cr_assert(eq(sz, get_units(c, chain, 12, 0), 4),
              "what the hit covered and what continues it is gone, the rest is not");
    cr_assert(gt(i64, put_units(c, chain, 4, 12, &e), 0), "%s", e.message);
    cr_assert(eq(sz, get_units(c, chain, 12, 0), 12));
    daemon_stop(&d);
}

Test(daemon, a_wrong_block_is_a_miss_and_takes_its_siblings)
{
    corruption_is_a_miss(false);
}

Test(daemon, a_wrong_state_is_a_miss_and_takes_its_siblings)
{
    corruption_is_a_miss(true);
}

Test(daemon, a_client_survives_the_death_of_kvstored)
{
    struct daemon d;
    struct lh_error e = {0};
    struct kv_key root = root_of(1), chain[8];
    uint8_t block[BLOCK], state[STATE];

    daemon_start(&d, AMPLE, AMPLE);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    chain_of(&root, 1, 8, chain);
    cr_assert(gt(i64, put_units(c, chain, 0, 8, &e), 0));
    struct kv_hit *held = kv_lookup(c, chain, 8, 0, "t", &e);
    cr_assert(held != NULL);
    daemon_kill(&d);
    int64_t start = lh_now_ms();
    cr_assert(eq(sz, get_units(c, chain, 8, 0), 0), "a miss while it is away");
    cr_assert(eq(i64, put_units(c, chain, 0, 8, &e), LH_UNAVAILABLE), "%s", e.message);
    cr_assert(lt(long, (long)(lh_now_ms() - start), 2000), "at once, not after a timeout");
    cr_assert(eq(int, kv_hit_block(held, 3, block, &e), 0), "a hit of before is still good");
    daemon_restart(&d);
    usleep(100000);
    cr_assert(eq(sz, get_units(c, chain, 8, 0), 0), "it begins empty");
    cr_assert(gt(i64, put_units(c, chain, 0, 8, &e), 0), "%s", e.message);
    cr_assert(eq(sz, get_units(c, chain, 8, 0), 8), "the root was opened again");
    cr_assert(eq(int, kv_hit_state(held, state, &e), 0));
    kv_hit_destroy(held);
    cr_assert(eq(sz, get_units(c, chain, 8, 0), 8), "a lease of before releases nothing of now");
    daemon_stop(&d);
}

Test(daemon, a_hung_kvstored_costs_one_timeout)
{
    struct daemon d;
    struct lh_error e = {0};
    struct kv_key root = root_of(1), chain[4];

    daemon_start(&d, AMPLE, AMPLE);
    struct kv_options o = {.path = d.socket,
                           .name = "a",
                           .unit_tokens = UNIT,
                           .block_bytes = BLOCK,
                           .state_bytes = STATE,
                           .timeout_ms = 200};
    lh_auto(kv_client) c = kv_client_create(&o, &e);
    use_version(c, 1, false);
    chain_of(&root, 1, 4, chain);
    cr_assert(gt(i64, put_units(c, chain, 0, 4, &e), 0));
    kill(d.pid, SIGSTOP);
    int64_t start = lh_now_ms();
    cr_assert(kv_lookup(c, chain, 4, 0, "t", &e) == NULL);
    cr_assert(eq(int, e.code, LH_DEADLINE_EXCEEDED));
    cr_assert(lt(i64, put_units(c, chain, 0, 4, &e), 0));
    cr_assert(lt(long, (long)(lh_now_ms() - start), 1500));
    kill(d.pid, SIGCONT);
    usleep(100000);
    cr_assert(eq(sz, get_units(c, chain, 4, 0), 4), "it is found again, nothing was lost");
    daemon_stop(&d);
}

/* I9: the store takes what it was given and no more, and goes on afterwards. */
Test(daemon, a_full_store_evicts_and_stays_in_bounds)
{
    struct daemon d;
    struct lh_error e = {0};
    struct kv_key root = root_of(1), chain[8];

    daemon_start(&d, MEMORY, MEMORY);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    for (unsigned seed = 0; seed < 200; seed++) {
        chain_of(&root, seed, 8, chain);
        cr_assert(gt(i64, put_units(c, chain, 0, 8, &e), 0), "%u: %s", seed, e.message);
        cr_assert(eq(sz, get_units(c, chain, 8, 0), 8));
    }
    struct kv_pressure p = pressure_of(c);
    cr_assert(eq(u64, p.capacity_bytes, MEMORY));
    cr_assert(le(u64, p.used_bytes, p.capacity_bytes));
    chain_of(&root, 0, 8, chain);
    cr_assert(eq(sz, get_units(c, chain, 8, 0), 0), "the oldest went");
    daemon_stop(&d);
}

static long anonymous_kib(pid_t pid)
{
    lh_autofree char *path = lh_format("/proc/%d/status", pid);
    lh_autofclose FILE *f = fopen(path, "r");
    char line[256];
    long kib = -1;

    while (f && fgets(line, sizeof line, f) && sscanf(line, "RssAnon: %ld", &kib) != 1)
        ;
    cr_assert(ge(long, kib, 0));
    return kib;
}

#ifdef __SANITIZE_ADDRESS__
enum { GROWTH_KIB = 512 << 10 }; /* freed memory is kept in quarantine */
#else
enum { GROWTH_KIB = 1024 };
#endif

/* I9 */
Test(daemon, its_own_memory_does_not_grow, .timeout = 60)
{
    struct daemon d;
    struct lh_error e = {0};
    long before = 0;

    daemon_start(&d, MEMORY, MEMORY);
    lh_auto(kv_client) c = client_of(&d, "a");
    for (unsigned i = 0; i < 1500; i++) {
        struct kv_key root = root_of(i / 100), chain[8];
        if (i % 100 == 0)
            use_version(c, i / 100, i % 200 == 0);
        chain_of(&root, i, 8, chain);
        cr_assert(gt(i64, put_units(c, chain, 0, 8, &e), 0), "%s", e.message);
        cr_assert(eq(sz, get_units(c, chain, 8, 0), 8));
        if (i == 500)
            before = anonymous_kib(d.pid);
    }
    cr_assert(lt(long, anonymous_kib(d.pid) - before, GROWTH_KIB));
    daemon_stop(&d);
}

Test(daemon, what_is_pinned_stays_and_a_full_store_recovers)
{
    struct daemon d;
    struct lh_error e = {0};
    enum { N = 80 };
    struct kv_key root = root_of(1), chain[N];
    uint8_t block[BLOCK];
    struct kv_hit *held[20];
    unsigned n = 0;

    daemon_start(&d, MEMORY, 64 * MEMORY);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    for (; n < 3; n++) {
        chain_of(&root, n, N - 16, chain);
        cr_assert(gt(i64, put_units(c, chain, 0, N - 16, &e), 0), "%s", e.message);
        held[n] = kv_lookup(c, chain, N - 16, 0, "t", &e);
        cr_assert(held[n] != NULL);
    }
    chain_of(&root, 99, N, chain);
    cr_assert(eq(i64, put_units(c, chain, 0, N, &e), LH_RESOURCE_EXHAUSTED), "%s", e.message);
    chain_of(&root, 0, N - 16, chain);
    cr_assert(eq(int, kv_hit_block(held[0], 40, block, &e), 0), "what is pinned was not touched");
    while (n)
        kv_hit_destroy(held[--n]);
    chain_of(&root, 99, N, chain);
    cr_assert(gt(i64, put_units(c, chain, 0, N, &e), 0), "%s", e.message);
    cr_assert(eq(sz, get_units(c, chain, N, 0), N));
    daemon_stop(&d);
}

Test(daemon, too_much_in_flight_is_refused)
{
    struct daemon d;
    struct lh_error e = {0};
    struct kv_key root = root_of(1), chain[8];

    daemon_start(&d, AMPLE, 8 * BLOCK);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    chain_of(&root, 1, 8, chain);
    cr_assert(gt(i64, put_units(c, chain, 0, 8, &e), 0), "one operation is always allowed");
    struct kv_hit *h = kv_lookup(c, chain, 8, 0, "t", &e);
    cr_assert(h != NULL, "%s", e.message);
    cr_assert(kv_lookup(c, chain, 8, 0, "t", &e) == NULL);
    cr_assert(eq(int, e.code, LH_RESOURCE_EXHAUSTED));
    kv_hit_destroy(h);
    cr_assert(eq(sz, get_units(c, chain, 8, 0), 8));
    daemon_stop(&d);
}

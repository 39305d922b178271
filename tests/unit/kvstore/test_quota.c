/* Quotas of tenants, in a service without its socket. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "direct.h"
#include "kvstore/daemon/request.h"

enum { PAGE = 4096, CHAIN = 8 };

struct tenancy {
    struct direct d;
    struct kv_key roots[3]; /* of "", "acme", "lab" */
};

static const char *const names[] = {"", "acme", "lab"};

static struct kv_key root_for(const char *tenant)
{
    struct kv_identity id = {.tenant = tenant};

    return kv_root(&id);
}

static int open_root_of(struct direct *d, const struct kv_key *root, const char *tenant)
{
    Longhaul__Kv__V1__OpenRootRequest open = LONGHAUL__KV__V1__OPEN_ROOT_REQUEST__INIT;
    Longhaul__Kv__V1__Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_reply r;

    open.root = (ProtobufCBinaryData){sizeof root->bytes, (uint8_t *)root->bytes};
    open.block_bytes = open.state_bytes = PAGE;
    open.unit_tokens = 16;
    open.tenant = (char *)tenant;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_OPEN_ROOT;
    q.open_root = &open;
    kv_service_handle(&d->service, &d->peer, &q, &r);
    int code = r.error.code;
    kv_reply_finish(&r);
    return code;
}

static void begin(struct tenancy *t, const char *quotas)
{
    struct lh_error e = {0};

    direct_open(&t->d, 256);
    cr_assert(eq(int, kv_quotas_parse(&t->d.service, quotas, &e), 0), "%s", e.message);
    for (int i = 0; i < 3; i++) {
        t->roots[i] = root_for(names[i]);
        cr_assert(eq(int, open_root_of(&t->d, &t->roots[i], names[i]), 0));
    }
}

static void chain_for(const struct kv_key *root, int32_t seed, struct kv_key *chain)
{
    int32_t tokens[CHAIN * 16];

    for (int i = 0; i < CHAIN * 16; i++)
        tokens[i] = seed * 1000 + i;
    kv_chain(root, tokens, CHAIN * 16, 16, chain);
}

/* 9 pages; the code of a refusal. */
static int put(struct tenancy *t, int who, int32_t seed)
{
    struct kv_key chain[CHAIN];
    uint64_t ticket;

    chain_for(&t->roots[who], seed, chain);
    int code = direct_put(&t->d, &t->roots[who], chain, 0, CHAIN, &ticket);
    if (code == 0)
        cr_assert(direct_commit(&t->d, ticket, CHAIN));
    return code;
}

static bool is_there(struct tenancy *t, int who, int32_t seed)
{
    struct kv_key chain[CHAIN];
    uint64_t lease;

    chain_for(&t->roots[who], seed, chain);
    size_t units = direct_lookup(&t->d, &t->roots[who], chain, CHAIN, 0, &lease);
    direct_release(&t->d, lease, false);
    return units == CHAIN;
}

static const struct kv_tenant *tenant_of(struct tenancy *t, int who)
{
    struct kv_index *ix = &t->d.service.index;

    return &ix->tenants[kv_root_find(ix, &t->roots[who])->tenant];
}

Test(quota, a_tenant_at_its_quota_evicts_its_own)
{
    struct tenancy t;

    begin(&t, "acme=80KiB"); /* 20 pages: two sequences */
    cr_assert(eq(int, put(&t, 2, 1), 0));
    cr_assert(eq(int, put(&t, 0, 1), 0));
    for (int32_t seed = 0; seed < 40; seed++) {
        cr_assert(eq(int, put(&t, 1, seed), 0));
        cr_assert(le(u64, tenant_of(&t, 1)->granted[KV_MEMORY], 20));
        cr_assert(is_there(&t, 1, seed), "the newest stays");
    }
    cr_assert(not(is_there(&t, 1, 0)));
    cr_assert(is_there(&t, 2, 1), "the oldest of all, and another's");
    cr_assert(is_there(&t, 0, 1));
    cr_assert(gt(u64, tenant_of(&t, 1)->evicted, 0));
    cr_assert(eq(u64, tenant_of(&t, 2)->evicted, 0));
    direct_close(&t.d);
}

Test(quota, what_is_in_use_is_not_evicted_for_it)
{
    struct tenancy t;
    struct kv_key chain[CHAIN];
    uint64_t lease;

    begin(&t, "acme=64KiB"); /* 16 pages */
    cr_assert(eq(int, put(&t, 1, 1), 0));
    chain_for(&t.roots[1], 1, chain);
    cr_assert(eq(sz, direct_lookup(&t.d, &t.roots[1], chain, CHAIN, 0, &lease), CHAIN));
    cr_assert(eq(int, put(&t, 1, 2), LH_RESOURCE_EXHAUSTED));
    cr_assert(eq(u64, tenant_of(&t, 1)->refused, 1));
    cr_assert(eq(u64, t.d.service.flow.refused[KV_QUOTA], 1));
    cr_assert(eq(u64, t.d.service.flow.refused[KV_FULL], 0));
    cr_assert(eq(int, put(&t, 2, 2), 0), "another is not held by it");
    direct_release(&t.d, lease, false);
    cr_assert(eq(int, put(&t, 1, 2), 0));
    direct_close(&t.d);
}

Test(quota, more_than_the_quota_is_refused_and_evicts_nothing)
{
    struct tenancy t;

    begin(&t, "*=32KiB, lab=1MiB"); /* 8 pages for everybody but lab */
    cr_assert(eq(int, put(&t, 0, 1), LH_RESOURCE_EXHAUSTED));
    cr_assert(eq(int, put(&t, 1, 1), LH_RESOURCE_EXHAUSTED));
    cr_assert(eq(int, put(&t, 2, 1), 0));
    cr_assert(eq(u64, tenant_of(&t, 1)->evicted, 0));
    direct_close(&t.d);
}

Test(quota, what_a_tenant_has_is_counted_until_it_is_gone)
{
    struct tenancy t;
    struct kv_key nobody = root_for("nobody");

    begin(&t, "acme=1MiB");
    for (int32_t seed = 0; seed < 3; seed++)
        cr_assert(eq(int, put(&t, 1, seed), 0));
    cr_assert(eq(u64, tenant_of(&t, 1)->granted[KV_MEMORY], 27));
    cr_assert(eq(int, open_root_of(&t.d, &t.roots[1], "lab"), 0));
    cr_assert(eq(u64, tenant_of(&t, 2)->granted[KV_MEMORY], 27), "its root has another owner");
    cr_assert(eq(int, direct_retire(&t.d, &nobody), 0));
    while (kv_service_work(&t.d.service))
        ;
    for (unsigned i = 0; i < t.d.service.index.n_tenants; i++)
        cr_assert(eq(u64, t.d.service.index.tenants[i].granted[KV_MEMORY], 0));
    direct_close(&t.d);
}

Test(quota, the_table_of_tenants_is_bounded_and_reused)
{
    struct tenancy t;
    char name[16];

    begin(&t, "");
    for (int i = 0; i < KV_MAX_TENANTS - 3; i++) {
        snprintf(name, sizeof name, "t%d", i);
        struct kv_key root = root_for(name);
        cr_assert(eq(int, open_root_of(&t.d, &root, name), 0), "%s", name);
    }
    struct kv_key more = root_for("more");
    cr_assert(eq(int, open_root_of(&t.d, &more, "more"), LH_RESOURCE_EXHAUSTED));
    cr_assert(eq(int, direct_retire(&t.d, &t.roots[0]), 0));
    while (kv_service_work(&t.d.service))
        ;
    cr_assert(eq(int, open_root_of(&t.d, &more, "more"), 0));
    direct_close(&t.d);
}

/* What came back from the file is nobody's until its tenant opens it. */
Test(quota, the_disk_has_quotas_of_its_own_also_after_a_restart)
{
    char path[] = "/tmp/kvstore-quota-XXXXXX";
    struct tenancy t;
    struct lh_error e = {0};

    close(mkstemp(path));
    direct_open_on_disk(&t.d, 256, path, 32 << 20);
    cr_assert(eq(int, kv_quotas_parse(&t.d.service, "acme=0+1MiB", &e), 0), "%s", e.message);
    t.roots[1] = root_for("acme");
    cr_assert(eq(int, open_root_of(&t.d, &t.roots[1], "acme"), 0));
    uint64_t limit = tenant_of(&t, 1)->quota[KV_DISK];
    cr_assert(gt(u64, limit, 0));
    for (int32_t seed = 0; seed < 60; seed++) {
        cr_assert(eq(int, put(&t, 1, seed), 0));
        direct_settle(&t.d, 30000);
        cr_assert(le(u64, tenant_of(&t, 1)->granted[KV_DISK], limit));
    }
    uint64_t had = tenant_of(&t, 1)->granted[KV_DISK];
    cr_assert(gt(u64, had, 0));
    direct_close(&t.d);

    direct_open_on_disk(&t.d, 256, path, 32 << 20);
    cr_assert(eq(u64, t.d.service.index.tenants[0].granted[KV_DISK], had));
    cr_assert(eq(int, open_root_of(&t.d, &t.roots[1], "acme"), 0));
    cr_assert(eq(u64, t.d.service.index.tenants[0].granted[KV_DISK], 0));
    cr_assert(eq(u64, tenant_of(&t, 1)->granted[KV_DISK], had));
    direct_close(&t.d);
    unlink(path);
}

Test(quota, what_is_no_quota_is_refused)
{
    static const char *const rows[] = {"acme",
                                       "=1GiB",
                                       "acme=",
                                       "acme=x",
                                       "acme=1GB",
                                       "acme=-1GiB",
                                       "acme=1GiB+",
                                       "acme=1GiB+x",
                                       "acme=1GiBx",
                                       "acme=99999999999999999999",
                                       "acme=9999999999TiB"};
    struct tenancy t;
    struct lh_error e = {0};

    begin(&t, NULL);
    for (size_t i = 0; i < LH_ARRAY_SIZE(rows); i++) {
        cr_assert(eq(int, kv_quotas_parse(&t.d.service, rows[i], &e), LH_INVALID_ARGUMENT), "%s",
                  rows[i]);
        cr_assert(strstr(e.message, rows[i]) != NULL, "%s", e.message);
    }
    direct_close(&t.d);
}

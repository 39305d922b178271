/* The store with a million objects of 4 KiB: the service itself, without sockets or bytes of
 * clients.  Time to find a prefix of 2,048 units among them, time for a new policy version, memory
 * of the index, and time from a kill to an index that answers again, by a disk tier of the same
 * million. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvstore/daemon/service.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "tests/bench/bench.h"

enum { CHAINS = 512, UNITS = 2048, OBJECT = 4096, PER_PUT = 512, LOOKUPS = 2000 };

typedef Longhaul__Kv__V1__Request Request;

static struct kv_service service;
static struct kv_peer peer;
static struct kv_key root, (*chains)[UNITS];
static bool missed;

static void must(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "bench-kv-index: %s\n", what);
    exit(EXIT_FAILURE);
}

static void ask(const Request *q, struct kv_reply *r)
{
    must(kv_service_handle(&service, &peer, q, r), "a request waits for the disk");
    must(r->message.body_case != LONGHAUL__KV__V1__REPLY__BODY_FAILURE, r->error.message);
}

static ProtobufCBinaryData keys(const struct kv_key *k, size_t n)
{
    return (ProtobufCBinaryData){n * sizeof *k, (uint8_t *)k->bytes};
}

static void open_store(uint64_t memory, const char *disk, uint64_t disk_bytes)
{
    Longhaul__Kv__V1__HelloRequest hello = LONGHAUL__KV__V1__HELLO_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_service_options o = {.memory_bytes = memory,
                                   .max_inflight_bytes = UINT64_MAX,
                                   .disk_path = disk,
                                   .disk_bytes = disk_bytes};
    struct lh_error e = {0};
    struct kv_reply r;

    must(kv_service_init(&service, &o, &e) == 0, e.message);
    peer = (struct kv_peer){0};
    hello.protocol = KV_PROTOCOL;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_HELLO;
    q.hello = &hello;
    ask(&q, &r);
    kv_reply_finish(&r);
}

static void close_store(void)
{
    kv_service_forget(&service, &peer);
    kv_service_finish(&service);
}

static void open_root(const struct kv_key *key)
{
    Longhaul__Kv__V1__OpenRootRequest open = LONGHAUL__KV__V1__OPEN_ROOT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_reply r;

    open.root = keys(key, 1);
    open.block_bytes = OBJECT;
    open.unit_tokens = 512;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_OPEN_ROOT;
    q.open_root = &open;
    ask(&q, &r);
    kv_reply_finish(&r);
}

static void put(const struct kv_key *chain, size_t first)
{
    Longhaul__Kv__V1__PutRequest want = LONGHAUL__KV__V1__PUT_REQUEST__INIT;
    Longhaul__Kv__V1__CommitRequest commit = LONGHAUL__KV__V1__COMMIT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    uint32_t crc[PER_PUT] = {0};
    struct kv_reply r;

    want.root = keys(&root, 1);
    want.chain = keys(chain + first, PER_PUT);
    if (first)
        want.parent = keys(chain + first - 1, 1);
    want.first = (uint32_t)first;
    want.deadline_ms = 1000;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_PUT;
    q.put = &want;
    ask(&q, &r);
    commit.ticket = r.body.put.ticket;
    commit.n_block_crc32c = PER_PUT;
    commit.block_crc32c = crc;
    kv_reply_finish(&r);
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_COMMIT;
    q.commit = &commit;
    ask(&q, &r);
    must(r.body.commit.stored, "a put was not stored");
    kv_reply_finish(&r);
}

static void work_and_wait(void)
{
    struct pollfd p = {.fd = service.disk.event_fd, .events = POLLIN};
    uint64_t count;

    kv_service_work(&service);
    if (service.disk.in_flight && poll(&p, 1, 10) > 0)
        must(read(p.fd, &count, sizeof count) == sizeof count, "the disk's eventfd");
}

/* Slower than the disk while there is one, so that nothing is dropped. */
static void fill(void)
{
    for (size_t c = 0; c < CHAINS; c++)
        for (size_t first = 0; first < UNITS; first += PER_PUT) {
            put(chains[c], first);
            while (service.has_disk && service.pages.used > service.pages.n / 4 * 3 &&
                   service.exchange.n > service.pages.n / 2)
                work_and_wait();
        }
}

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return (x > y) - (x < y);
}

static void time_lookups(void)
{
    static int64_t took[LOOKUPS];
    Longhaul__Kv__V1__LookupRequest lookup = LONGHAUL__KV__V1__LOOKUP_REQUEST__INIT;
    Longhaul__Kv__V1__ReleaseRequest release = LONGHAUL__KV__V1__RELEASE_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_reply r;

    lookup.root = keys(&root, 1);
    for (int i = 0; i < LOOKUPS; i++) {
        lookup.chain = keys(chains[i * 7 % CHAINS], UNITS);
        q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_LOOKUP;
        q.lookup = &lookup;
        int64_t at = lh_now_us();
        ask(&q, &r);
        took[i] = lh_now_us() - at;
        must(r.body.lookup.units == UNITS, "a lookup missed");
        release.lease = r.body.lookup.lease;
        kv_reply_finish(&r);
        q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_RELEASE;
        q.release = &release;
        ask(&q, &r);
        kv_reply_finish(&r);
    }
    qsort(took, LOOKUPS, sizeof *took, by_value);
    bench_row("index: lookup of 2048 of 1M units, median", (double)took[LOOKUPS / 2], 0, 0, "us");
    double p99 = (double)took[LOOKUPS * 99 / 100];
    bench_row("index: lookup of 2048 of 1M units, 99 %", p99, 0, 0, "us");
    missed |= p99 > 1000;
}

static void time_new_version(void)
{
    Longhaul__Kv__V1__RetireRequest retire = LONGHAUL__KV__V1__RETIRE_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_key next = {{1}};
    ProtobufCBinaryData keep = keys(&next, 1);
    struct kv_reply r;

    retire.n_keep = 1;
    retire.keep = &keep;
    int64_t at = lh_now_us();
    open_root(&next);
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_RETIRE;
    q.retire = &retire;
    ask(&q, &r);
    kv_reply_finish(&r);
    double took = (double)(lh_now_us() - at);
    at = lh_now_us();
    while (kv_service_work(&service))
        ;
    bench_row("index: new version with 1M objects", took, 0, 0, "us");
    bench_row("index: their space back, in slices", (double)(lh_now_us() - at) / 1e3, 0, 0, "ms");
    missed |= took > 1000 || service.pages.used;
}

/* Memory of this process that belongs to no file. */
static uint64_t private_bytes(void)
{
    FILE *f = fopen("/proc/self/status", "re");
    unsigned long long kib = 0;
    char line[256];

    while (f && fgets(line, sizeof line, f) && sscanf(line, "RssAnon: %llu", &kib) != 1)
        ;
    must(f && kib, "no RssAnon in /proc/self/status");
    fclose(f);
    return kib * 1024;
}

static void in_memory(void)
{
    uint64_t before = private_bytes();

    open_store((uint64_t)CHAINS * UNITS * OBJECT, NULL, 0);
    open_root(&root);
    fill();
    double each = (double)(private_bytes() - before) / CHAINS / UNITS;
    bench_row("index: memory of a unit", each, 0, 0, "bytes");
    missed |= each > 100;
    time_lookups();
    time_new_version();
    close_store();
}

static void on_disk(void)
{
    char dir[] = "/var/tmp/longhaul-bench-XXXXXX";
    uint64_t bytes = (uint64_t)CHAINS * UNITS * (OBJECT + KV_SLOT) + (64 << 20);

    must(mkdtemp(dir), "mkdtemp");
    lh_autofree char *path = lh_format("%s/disk", dir);
    open_store(256 << 20, path, bytes);
    must(service.has_disk, "no space for the disk tier's file");
    open_root(&root);
    fill();
    must(service.exchange.stored > CHAINS * UNITS * 9ull / 10, "little was written");
    uint64_t stored = service.exchange.stored;
    close_store();
    int64_t at = lh_now_us();
    open_store(256 << 20, path, bytes);
    double took = (double)(lh_now_us() - at) / 1e6;
    bench_row("disk: restart, objects found", (double)service.index.objects / 1e6,
              (double)stored / 1e6, 0, "million");
    bench_row("disk: restart, until it serves", took, 0, 0, "s");
    missed |= took > 2 || service.index.objects < stored / 10 * 9;
    close_store();
    lh_remove_tree(dir, NULL);
}

int main(void)
{
    lh_autofree int32_t *tokens = calloc(UNITS * 16, sizeof *tokens);

    setenv("LONGHAUL_LOG", "warn", 0);
    chains = calloc(CHAINS, sizeof *chains);
    must(tokens && chains, "out of memory");
    root = kv_root(&(struct kv_identity){.tenant = ""});
    for (int32_t c = 0; c < CHAINS; c++) {
        tokens[0] = c;
        kv_chain(&root, tokens, UNITS * 16, 16, chains[c]);
    }
    in_memory();
    on_disk();
    free(chains);
    return missed ? EXIT_FAILURE : EXIT_SUCCESS;
}

/* The store beside plain memory: chunks put and got through a real kvstored, as a share of the
 * speed of one memcpy of the same size over as much memory; and the time to find a prefix of 2,048
 * units, which is a million tokens in units of 512.  What the store adds to the copy is the
 * checksum and three messages. */
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "kvstore/client.h"
#include "longhaul/job/v1/job.pb-c.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/parse.h"
#include "tests/bench/bench.h"

extern char **environ;

enum { TOTAL = 128 << 20, CHUNKS = TOTAL / (64 << 10), UNITS = 2048, LOOKUPS = 1000 };

struct bench {
    char dir[40], socket[64];
    pid_t pid;
    uint8_t *from, *to;
    int64_t took[CHUNKS];
    unsigned version;
};

static void must(int ok, const struct lh_error *e, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "%s: %s\n", what, e->message);
    exit(EXIT_FAILURE);
}

static void start(struct bench *b)
{
    Longhaul__Job__V1__Job job = LONGHAUL__JOB__V1__JOB__INIT;
    Longhaul__Job__V1__KvStore kv = LONGHAUL__JOB__V1__KV_STORE__INIT;
    char *argv[] = {(char *)KVSTORED, b->dir, NULL};
    struct lh_error e = {0};
    size_t len;

    strcpy(b->dir, "/tmp/longhaul-bench-XXXXXX");
    must(mkdtemp(b->dir) != NULL, &e, "mkdtemp");
    snprintf(b->socket, sizeof b->socket, "%s/run/kv.sock", b->dir);
    lh_autofree char *path = lh_format("%s/job.pb", b->dir);
    kv.memory_bytes = 2ull * TOTAL;
    kv.max_inflight_bytes = TOTAL;
    job.format = 1;
    job.kvstore = &kv;
    lh_autofree uint8_t *data = lh_pack(&job.base, &len, &e);
    must(lh_write_file(path, data, len, 0600, &e) == 0, &e, "job");
    must(posix_spawn(&b->pid, KVSTORED, NULL, NULL, argv, environ) == 0, &e, "kvstored");
}

static void stop(struct bench *b)
{
    kill(b->pid, SIGTERM);
    waitpid(b->pid, NULL, 0);
    lh_remove_tree(b->dir, NULL);
}

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return (x > y) - (x < y);
}

static int64_t percentile(int64_t *took, size_t n, size_t percent)
{
    qsort(took, n, sizeof *took, by_value);
    return took[n * percent / 100];
}

static double copy_us(struct bench *b, size_t chunk)
{
    size_t n = TOTAL / chunk;

    for (size_t i = 0; i < n; i++) {
        int64_t at = lh_now_us();
        memcpy(b->to + i * chunk, b->from + i * chunk, chunk);
        b->took[i] = lh_now_us() - at;
    }
    return (double)percentile(b->took, n, 50);
}

static struct kv_client *client(struct bench *b, size_t chunk)
{
    struct kv_options o = {.path = b->socket,
                           .name = "bench",
                           .unit_tokens = 16,
                           .block_bytes = chunk,
                           .timeout_ms = 10000};
    struct lh_error e = {0};
    struct kv_client *c = kv_client_create(&o, &e);

    must(c != NULL, &e, "client");
    return c;
}

/* A new version each time, so that nothing is there; kvstored may still be starting. */
static struct kv_key next_root(struct bench *b, struct kv_client *c)
{
    struct kv_identity id = {.tenant = ""};
    struct lh_error e = {0};
    int64_t deadline = lh_now_ms() + 5000;

    b->version++;
    memcpy(id.policy_version, &b->version, sizeof b->version);
    struct kv_key root = kv_root(&id);
    while (kv_use_root(c, &root, b->version, 1, &e) < 0) {
        must(lh_ms_left(deadline) > 0, &e, "use root");
        usleep(20000);
    }
    usleep(100000); /* the last round's pages return meanwhile */
    return root;
}

static void chain_for(const struct kv_key *root, size_t n, struct kv_key *chain)
{
    lh_autofree int32_t *tokens = calloc(n * 16, sizeof *tokens);

    must(tokens && kv_chain(root, tokens, n * 16, 16, chain) == n, &(struct lh_error){0}, "chain");
}

static double put_us(struct bench *b, struct kv_client *c, const struct kv_key *chain, size_t chunk)
{
    size_t n = TOTAL / chunk;
    struct lh_error e = {0};

    for (size_t i = 0; i < n; i++) {
        const void *block = b->from + i * chunk;
        int64_t at = lh_now_us();
        must(kv_put(c, chain, i, i + 1, &block, NULL, "", &e) == (int64_t)chunk, &e, "put");
        b->took[i] = lh_now_us() - at;
    }
    return (double)percentile(b->took, n, 50);
}

static double get_us(struct bench *b, struct kv_client *c, const struct kv_key *chain, size_t chunk)
{
    size_t n = TOTAL / chunk;
    struct lh_error e = {0};

    for (size_t i = 0; i < n; i++) {
        int64_t at = lh_now_us();
        struct kv_hit *h = kv_lookup(c, chain, i + 1, i, "", &e);
        must(h && kv_hit_block(h, i, b->to + i * chunk, &e) == 0, &e, "get");
        kv_hit_destroy(h);
        b->took[i] = lh_now_us() - at;
    }
    must(!memcmp(b->from, b->to, TOTAL), &(struct lh_error){.message = "differs"}, "what was got");
    return (double)percentile(b->took, n, 50);
}

static void report(const char *what, size_t chunk, double us, double memcpy_us)
{
    char name[64];

    snprintf(name, sizeof name, "store: %s, %zu KiB, beside memcpy", what, chunk >> 10);
    bench_row(name, (double)chunk / us / 1e3, (double)chunk / memcpy_us / 1e3, 0, "GB/s");
}

/* The first round meets pages that the host has yet to provide; the second is what counts. */
static void chunks(struct bench *b, size_t chunk)
{
    static struct kv_key chain[CHUNKS];
    lh_auto(kv_client) c = client(b, chunk);
    double copy = 0, put = 0, get = 0;

    for (int round = 0; round < 2; round++) {
        struct kv_key root = next_root(b, c);
        chain_for(&root, TOTAL / chunk, chain);
        copy = copy_us(b, chunk);
        put = put_us(b, c, chain, chunk);
        get = get_us(b, c, chain, chunk);
    }
    report("put", chunk, put, copy);
    report("get", chunk, get, copy);
}

static void lookups(struct bench *b)
{
    static struct kv_key chain[UNITS];
    lh_auto(kv_client) c = client(b, 4096);
    struct kv_key root = next_root(b, c);
    const void *blocks[UNITS];
    struct lh_error e = {0};

    chain_for(&root, UNITS, chain);
    for (size_t i = 0; i < UNITS; i++)
        blocks[i] = b->from + i * 4096;
    must(kv_put(c, chain, 0, UNITS, blocks, NULL, "", &e) > 0, &e, "put");
    for (int i = 0; i < LOOKUPS; i++) {
        int64_t at = lh_now_us();
        struct kv_hit *h = kv_lookup(c, chain, UNITS, 0, "", &e);
        b->took[i] = lh_now_us() - at;
        must(h && kv_hit_units(h) == UNITS, &e, "lookup");
        kv_hit_destroy(h);
    }
    bench_row("store: lookup of 2048 units, median", (double)percentile(b->took, LOOKUPS, 50), 0, 0,
              "us");
    bench_row("store: lookup of 2048 units, 99 %", (double)percentile(b->took, LOOKUPS, 99), 0, 0,
              "us");
}

int main(void)
{
    static const size_t sizes[] = {64 << 10, 1 << 20, 4 << 20};
    static struct bench b;

    b.from = malloc(TOTAL);
    b.to = malloc(TOTAL);
    must(b.from && b.to, &(struct lh_error){.message = "out of memory"}, "bench");
    for (size_t i = 0; i < TOTAL; i += 8)
        memcpy(b.from + i, &(uint64_t){i * 0x9e3779b97f4a7c15}, 8);
    memset(b.to, 0, TOTAL);
    start(&b);
    for (size_t i = 0; i < LH_ARRAY_SIZE(sizes); i++)
        chunks(&b, sizes[i]);
    lookups(&b);
    stop(&b);
    free(b.from);
    free(b.to);
    return 0;
}

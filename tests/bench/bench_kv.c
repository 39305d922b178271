/* The store beside plain memory and beside Redis.
 *
 * Chunks are put and got through a real kvstored, BATCH in one operation, as a trajectory's prefix
 * is; memcpy copies the same batches between the same buffers, every page of which has been written
 * before; Redis gets them over its unix socket, BATCH pipelined, so that it pays for its wake-ups
 * as seldom.  What the store adds to the copy is the checksum and two messages a batch.  Then the
 * time to find a prefix of 2,048 units, which is a million tokens in units of 512. */
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
#include "tests/bench/peer_redis.h"

extern char **environ;

enum {
    TOTAL = 256 << 20,
    BATCH = 16,
    CHUNKS = TOTAL / (64 << 10),
    UNITS = 2048,
    LOOKUPS = 1000,
    REDIS_TOTAL = 64 << 20 /* it copies so often that more only costs time */
};

struct bench {
    char dir[40], socket[64];
    pid_t pid;
    uint8_t *from, *to;
    int64_t took[CHUNKS];
    unsigned version;
    bool missed; /* a limit */
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

static size_t batch_of(size_t chunk)
{
    return chunk * BATCH <= TOTAL / 8 ? BATCH : TOTAL / 8 / chunk;
}

static double copy_us(struct bench *b, size_t bytes)
{
    size_t n = TOTAL / bytes;

    for (size_t i = 0; i < n; i++) {
        int64_t at = lh_now_us();
        memcpy(b->to + i * bytes, b->from + i * bytes, bytes);
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
    size_t batch = batch_of(chunk), n = TOTAL / chunk / batch;
    const void *blocks[BATCH];
    struct lh_error e = {0};

    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < batch; k++)
            blocks[k] = b->from + (i * batch + k) * chunk;
        int64_t at = lh_now_us();
        int64_t put = kv_put(c, chain, i * batch, (i + 1) * batch, blocks, NULL, "", &e);
        b->took[i] = lh_now_us() - at;
        must(put == (int64_t)(chunk * batch), &e, "put");
    }
    return (double)percentile(b->took, n, 50);
}

static double get_us(struct bench *b, struct kv_client *c, const struct kv_key *chain, size_t chunk)
{
    size_t batch = batch_of(chunk), n = TOTAL / chunk / batch;
    struct lh_error e = {0};

    for (size_t i = 0; i < n; i++) {
        int64_t at = lh_now_us();
        struct kv_hit *h = kv_lookup(c, chain, (i + 1) * batch, i * batch, "", &e);
        for (size_t k = i * batch; k < (i + 1) * batch; k++)
            must(h && kv_hit_block(h, k, b->to + k * chunk, &e) == 0, &e, "get");
        kv_hit_destroy(h);
        b->took[i] = lh_now_us() - at;
    }
    must(!memcmp(b->from, b->to, TOTAL), &(struct lh_error){.message = "differs"}, "what was got");
    return (double)percentile(b->took, n, 50);
}

/* Chunks of a KV cache are megabytes: only those have a limit. */
static void report(struct bench *b, const char *what, size_t chunk, double us, double peer_us,
                   const char *peer, double least)
{
    double bytes = (double)(chunk * batch_of(chunk)), peer_rate = bytes / peer_us / 1e3;
    char name[64];

    snprintf(name, sizeof name, "store: %s, %zu KiB, beside %s", what, chunk >> 10, peer);
    b->missed |= !bench_row(name, bytes / us / 1e3, peer_rate,
                            chunk >= 1 << 20 ? least * peer_rate : 0, "GB/s");
}

static void beside_redis(struct bench *b, size_t chunk, double put, double get)
{
    struct peer_redis r;
    double set_us, get_us;

    if (!peer_redis_start(&r, b->dir)) {
        printf("# no redis-server here: the store is not measured beside it\n");
        return;
    }
    peer_redis_time(&r, b->from, chunk, batch_of(chunk), REDIS_TOTAL, &set_us, &get_us);
    peer_redis_stop(&r);
    report(b, "put", chunk, put, set_us, "Redis", 5);
    report(b, "get", chunk, get, get_us, "Redis", 5);
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
        copy = copy_us(b, chunk * batch_of(chunk));
        put = put_us(b, c, chain, chunk);
        get = get_us(b, c, chain, chunk);
    }
    report(b, "put", chunk, put, copy, "memcpy", 0.8);
    report(b, "get", chunk, get, copy, "memcpy", 0.8);
    beside_redis(b, chunk, put, get);
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
    double p99 = (double)percentile(b->took, LOOKUPS, 99);
    bench_row("store: lookup of 2048 units, 99 %", p99, 0, 0, "us");
    b->missed |= p99 > 1000;
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
    return b.missed ? EXIT_FAILURE : EXIT_SUCCESS;
}

/* The disk tier beside fio and RocksDB on the same file system, in chunks of 1 MiB: what kvstored
 * writes behind its memory while a client puts as fast as it can, what it reads back for clients,
 * and bytes written to the device for every byte kept.
 *
 * What fio does is what the tier asks of the device and nothing else: requests of 1 MiB, O_DIRECT,
 * io_uring, 32 under way, one file, from first byte to last, a GiB a round.  Whether a file's
 * blocks have been written before matters as much as anything: the first write into a preallocated
 * extent makes the file system convert it (on ext4, one worker, one journal), and every write after
 * it only overwrites.  So both are measured on both sides, and named:
 *
 *     first    fio's first round into a file it has preallocated; ours through the first time that
 *              the tier fills up its file
 *     again    fio's rounds over the same file; ours while objects take the place of evicted ones,
 *              which is what a store that lives longer than one filling of its disk does
 *
 * The disks of clouds are never the same twice: rounds of both sides alternate, and the best of
 * each counts.  db_bench puts and gets the same values once, with blob files and direct I/O, no log
 * and no compression.  A peer that is not installed is left out. */
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvstore/client.h"
#include "kvstore/client/link.h"
#include "longhaul/job/v1/job.pb-c.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/parse.h"
#include "tests/bench/bench.h"
#include "tests/bench/peer_disk.h"

extern char **environ;

enum {
    CHUNK = 1 << 20,
    BATCH = 16,
    UNITS = 64, /* of a chain */
    UNIT_TOKENS = 16,
    ROUND = 1024, /* MiB */
    MEMORY_MIB = 256,
    ROUNDS = 3,
    /* the oldest half of the last round: it has left memory and is on disk still */
    OLDEST = (MEMORY_MIB + ROUND * ROUNDS) / UNITS,
};

static char dir[] = "/var/tmp/longhaul-bench-XXXXXX";
static struct kv_link link_to;
static struct kv_client *client;
static const struct kv_key root = {{7}};
static struct kv_key chain[UNITS];
static uint8_t *buffer;
static pid_t daemon_pid;
static bool missed;

static void must(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "bench-kv-disk: %s\n", what);
    exit(EXIT_FAILURE);
}

static void write_job(void)
{
    Longhaul__Job__V1__Job job = LONGHAUL__JOB__V1__JOB__INIT;
    Longhaul__Job__V1__KvStore kv = LONGHAUL__JOB__V1__KV_STORE__INIT;
    lh_autofree char *path = lh_format("%s/job.pb", dir);
    struct lh_error e = {0};
    size_t len;

    kv.memory_bytes = (uint64_t)MEMORY_MIB << 20;
    kv.max_inflight_bytes = UINT64_MAX;
    kv.disk_bytes = (uint64_t)(ROUND * 5 / 4) << 20;
    job.format = 1;
    job.kvstore = &kv;
    lh_autofree uint8_t *data = lh_pack(&job.base, &len, &e);
    must(lh_write_file(path, data, len, 0600, &e) == 0, e.message);
}

static void start(void)
{
    char *argv[] = {(char *)KVSTORED, dir, NULL};
    lh_autofree char *socket = lh_format("%s/run/kv.sock", dir);
    struct kv_options o = {.path = socket,
                           .name = "bench",
                           .unit_tokens = UNIT_TOKENS,
                           .block_bytes = CHUNK,
                           .timeout_ms = 20000};
    int64_t deadline = lh_now_ms() + 20000;
    struct lh_error e = {0};

    write_job();
    must(posix_spawn(&daemon_pid, KVSTORED, NULL, NULL, argv, environ) == 0, "kvstored");
    while (kv_link_open(&link_to, socket, "bench", lh_now_ms() + 1000, &e) < 0) {
        must(lh_ms_left(deadline) > 0, e.message);
        usleep(20000);
    }
    client = kv_client_create(&o, &e);
    must(client && kv_use_root(client, &root, 1, 0, &e) == 0, e.message);
}

static void stop(void)
{
    kv_client_destroy(client);
    kv_link_close(&link_to);
    kill(daemon_pid, SIGTERM);
    waitpid(daemon_pid, NULL, 0);
}

static Longhaul__Kv__V1__StatReply stat_now(void)
{
    Longhaul__Kv__V1__StatRequest stat = LONGHAUL__KV__V1__STAT_REQUEST__INIT;
    Longhaul__Kv__V1__Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct lh_error e = {0};

    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_STAT;
    q.stat = &stat;
    Longhaul__Kv__V1__Reply *r = kv_link_call(&link_to, &q, lh_now_ms() + 5000, &e);
    must(r, e.message);
    Longhaul__Kv__V1__StatReply s = *r->stat;
    lh_message_free(&r->base);
    return s;
}

/* By kvstored, to the device. */
static double bytes_written(void)
{
    lh_autofree char *path = lh_format("/proc/%d/io", (int)daemon_pid);
    FILE *f = fopen(path, "re");
    unsigned long long bytes = 0;
    char line[256];

    while (f && fgets(line, sizeof line, f) && sscanf(line, "write_bytes: %llu", &bytes) != 1)
        ;
    must(f && bytes, "no write_bytes in /proc/PID/io");
    fclose(f);
    return (double)bytes;
}

static void use_chain(unsigned number)
{
    int32_t tokens[UNITS * UNIT_TOKENS] = {(int32_t)number};

    kv_chain(&root, tokens, UNITS * UNIT_TOKENS, UNIT_TOKENS, chain);
}

/* Waits until memory has room that is written already. */
static void keep_pace(void)
{
    for (;;) {
        Longhaul__Kv__V1__StatReply s = stat_now();
        if (s.disk_waiting < MEMORY_MIB * 3 / 4 || s.used_bytes < s.capacity_bytes * 3 / 4)
            return;
        usleep(1000);
    }
}

static void put_chain(unsigned number)
{
    const void *blocks[BATCH];
    struct lh_error e = {0};

    use_chain(number);
    for (size_t i = 0; i < BATCH; i++)
        blocks[i] = buffer + i * CHUNK;
    for (size_t i = 0; i < UNITS; i += BATCH) {
        must(kv_put(client, chain, i, i + BATCH, blocks, NULL, "", &e) >= 0, e.message);
        keep_pace();
    }
}

/* Puts chains as fast as memory takes them.  Returns GB/s of the disk. */
static double write_mib(size_t mib)
{
    static unsigned number;
    uint64_t before = stat_now().disk_stored_bytes;
    int64_t at = lh_now_us();

    for (size_t i = 0; i < mib; i += UNITS)
        put_chain(number++);
    return (double)(stat_now().disk_stored_bytes - before) / (double)(lh_now_us() - at) / 1e3;
}

static void get_chain(unsigned number)
{
    struct lh_error e = {0};

    use_chain(number);
    lh_auto(kv_hit) h = kv_lookup(client, chain, UNITS, 0, "", &e);
    must(h, e.message);
    must(kv_hit_units(h) == UNITS, "a chain is not there any more");
    for (size_t k = 0; k < UNITS; k++)
        must(kv_hit_block(h, k, buffer, &e) == 0, e.message);
}

/* Chains from `first` on, which have left memory. */
static double read_mib(unsigned first, size_t mib)
{
    uint64_t before = stat_now().disk_loaded_bytes;
    int64_t at = lh_now_us();

    for (size_t i = 0; i < mib; i += UNITS)
        get_chain(first++);
    return (double)(stat_now().disk_loaded_bytes - before) / (double)(lh_now_us() - at) / 1e3;
}

static void row(const char *name, double ours, double peer, double share)
{
    if (peer > 0)
        missed |= !bench_row(name, ours, peer, share * peer, "GB/s");
}

static double better(double a, double b)
{
    return a > b ? a : b;
}

struct figures {
    double first, again, read;
};

static void run(struct figures *ours, struct figures *fio)
{
    fio->first = peer_fio(dir, "write", ROUND);
    write_mib(MEMORY_MIB); /* the segment's pages come from the host */
    ours->first = write_mib(ROUND);
    for (int i = 0; i < ROUNDS; i++) {
        fio->again = better(fio->again, peer_fio(dir, "write", ROUND));
        ours->again = better(ours->again, write_mib(ROUND));
    }
    fio->read = peer_fio(dir, "read", ROUND / 2);
    ours->read = read_mib(OLDEST, ROUND / 2);
    fio->read = better(fio->read, peer_fio(dir, "read", ROUND / 2));
}

static void print(const struct figures *ours, const struct figures *fio, double written)
{
    struct peer_rocksdb rocks = peer_rocksdb(dir, ROUND / 2, CHUNK);

    row("disk: first write, beside fio's first", ours->first, fio->first, 0.9);
    row("disk: write again, beside fio's best", ours->again, fio->again, 0.9);
    row("disk: read, beside fio", ours->read, fio->read, 0.9);
    row("disk: first write, beside RocksDB", ours->first, rocks.put, 1);
    row("disk: read, beside RocksDB", ours->read, rocks.get, 1);
    bench_row("disk: written per byte kept; RocksDB", written, rocks.written_per_put, 0, "bytes");
    missed |= rocks.put > 0 && written > rocks.written_per_put;
}

int main(void)
{
    struct figures ours = {0}, fio = {0};

    buffer = malloc((size_t)BATCH * CHUNK);
    must(buffer && mkdtemp(dir), "starting");
    for (size_t i = 0; i < (size_t)BATCH * CHUNK; i++)
        buffer[i] = (uint8_t)(i * 0x9e3779b97f4a7c15 >> 56);
    start();
    run(&ours, &fio);
    double written = bytes_written() / (double)stat_now().disk_stored_bytes;
    stop();
    lh_autofree char *disk = lh_format("%s/kv.disk", dir);
    unlink(disk);
    print(&ours, &fio, written);
    free(buffer);
    lh_remove_tree(dir, NULL);
    return missed ? EXIT_FAILURE : EXIT_SUCCESS;
}

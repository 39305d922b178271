/* The disk tier beside fio and RocksDB on the same file system, in chunks of 1 MiB: what kvstored
 * writes behind its memory, what it reads back for clients, and bytes written for every byte kept.
 * fio does the same I/O (O_DIRECT, io_uring, 16 under way) without a store around it; db_bench puts
 * and gets the same values with blob files and direct I/O.  A peer that is not installed is left
 * out. */
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

extern char **environ;

enum { CHUNK = 1 << 20, BATCH = 16, TOTAL_MIB = 1024, MEMORY_MIB = 256 };

static char dir[] = "/var/tmp/longhaul-bench-XXXXXX";
static struct kv_link link_to;
static bool missed;

static void must(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "bench-kv-disk: %s\n", what);
    exit(EXIT_FAILURE);
}

static pid_t start(const char *socket)
{
    Longhaul__Job__V1__Job job = LONGHAUL__JOB__V1__JOB__INIT;
    Longhaul__Job__V1__KvStore kv = LONGHAUL__JOB__V1__KV_STORE__INIT;
    char *argv[] = {(char *)KVSTORED, dir, NULL};
    lh_autofree char *path = lh_format("%s/job.pb", dir);
    int64_t deadline = lh_now_ms() + 20000;
    struct lh_error e = {0};
    size_t len;
    pid_t pid;

    kv.memory_bytes = (uint64_t)MEMORY_MIB << 20;
    kv.max_inflight_bytes = UINT64_MAX;
    kv.disk_bytes = (uint64_t)(TOTAL_MIB * 5 / 4) << 20;
    job.format = 1;
    job.kvstore = &kv;
    lh_autofree uint8_t *data = lh_pack(&job.base, &len, &e);
    must(lh_write_file(path, data, len, 0600, &e) == 0, e.message);
    must(posix_spawn(&pid, KVSTORED, NULL, NULL, argv, environ) == 0, "kvstored");
    while (kv_link_open(&link_to, socket, "bench", lh_now_ms() + 1000, &e) < 0) {
        must(lh_ms_left(deadline) > 0, e.message);
        usleep(20000);
    }
    return pid;
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

/* Puts as fast as memory has room that is written already.  Returns GB/s. */
static double write_all(struct kv_client *c, const struct kv_key *chain, const uint8_t *from)
{
    const void *blocks[BATCH];
    struct lh_error e = {0};
    int64_t at = lh_now_us();

    for (size_t i = 0; i < BATCH; i++)
        blocks[i] = from + i * CHUNK;
    for (size_t i = 0; i < TOTAL_MIB; i += BATCH) {
        must(kv_put(c, chain, i, i + BATCH, blocks, NULL, "", &e) >= 0, e.message);
        while (stat_now().disk_waiting > MEMORY_MIB * 3 / 4)
            usleep(2000);
    }
    Longhaul__Kv__V1__StatReply s = stat_now();
    return (double)s.disk_stored_bytes / (double)(lh_now_us() - at) / 1e3;
}

/* The oldest half, which has left memory. */
static double read_all(struct kv_client *c, const struct kv_key *chain, uint8_t *to)
{
    struct lh_error e = {0};
    uint64_t before = stat_now().disk_loaded_bytes;
    int64_t at = lh_now_us();

    for (size_t i = 0; i + 4 * BATCH <= TOTAL_MIB / 2; i += 4 * BATCH) {
        lh_auto(kv_hit) h = kv_lookup(c, chain, i + 4 * BATCH, i, "", &e);
        must(h, e.message);
        for (size_t k = i; k < i + 4 * BATCH; k++)
            must(kv_hit_block(h, k, to, &e) == 0, e.message);
    }
    return (double)(stat_now().disk_loaded_bytes - before) / (double)(lh_now_us() - at) / 1e3;
}

/* Field `field` (1 = first) of the command's last line that has so many, or 0. */
static double run_fio(const char *mode, int field)
{
    lh_autofree char *command =
        lh_format("fio --name=peer --directory=%s --size=%dm --bs=1m --rw=%s --direct=1 "
                  "--ioengine=io_uring --iodepth=16 --minimal 2>/dev/null",
                  dir, TOTAL_MIB / 2, mode);
    FILE *f = popen(command, "r");
    char line[8192] = "";

    while (f && fgets(line, sizeof line, f))
        ;
    if (!f || pclose(f))
        return 0;
    char *at = line;
    for (; at && field > 1; field--)
        at = strchr(at, ';') ? strchr(at, ';') + 1 : NULL;
    return at ? strtod(at, NULL) * 1024 / 1e9 : 0;
}

/* GB/s of one of db_bench's benchmarks, or 0. */
static double run_rocksdb(const char *benchmark, bool existing)
{
    lh_autofree char *command =
        lh_format("db_bench --benchmarks=%s --db=%s/rocks --use_existing_db=%d --num=%d "
                  "--value_size=%d --compression_type=none --enable_blob_files=true "
                  "--use_direct_reads=true --use_direct_io_for_flush_and_compaction=true "
                  "--disable_wal=true 2>/dev/null",
                  benchmark, dir, existing, TOTAL_MIB / 2, CHUNK);
    FILE *f = popen(command, "r");
    double rate = 0;
    char line[1024];

    while (f && fgets(line, sizeof line, f)) {
        const char *at = strncmp(line, benchmark, strlen(benchmark)) ? NULL : strstr(line, " MB/s");
        while (at && at > line && at[-1] != ' ')
            at--;
        if (at)
            rate = strtod(at, NULL) * (1 << 20) / 1e9;
    }
    return f && pclose(f) == 0 ? rate : 0;
}

static void row(const char *name, double ours, double peer, double share)
{
    if (peer > 0)
        missed |= !bench_row(name, ours, peer, share * peer, "GB/s");
}

/* A cloud disk's speed is never the same twice: fio before and after, the better one counts. */
static double better(double a, double b)
{
    return a > b ? a : b;
}

int main(void)
{
    struct kv_identity id = {.tenant = ""};
    struct lh_error e = {0};
    lh_autofree uint8_t *buffer = malloc((size_t)BATCH * CHUNK);
    lh_autofree struct kv_key *chain = calloc(TOTAL_MIB, sizeof *chain);
    lh_autofree int32_t *tokens = calloc((size_t)TOTAL_MIB * 16, sizeof *tokens);

    must(buffer && chain && tokens && mkdtemp(dir), "starting");
    for (size_t i = 0; i < (size_t)BATCH * CHUNK; i++)
        buffer[i] = (uint8_t)(i * 0x9e3779b97f4a7c15 >> 56);
    double fio_write = run_fio("write", 48), fio_read = run_fio("read", 7);
    lh_autofree char *socket = lh_format("%s/run/kv.sock", dir);
    pid_t pid = start(socket);
    struct kv_options o = {.path = socket,
                           .name = "bench",
                           .unit_tokens = 16,
                           .block_bytes = CHUNK,
                           .timeout_ms = 20000};
    lh_auto(kv_client) c = kv_client_create(&o, &e);
    struct kv_key root = kv_root(&id);
    must(c && kv_use_root(c, &root, 1, 0, &e) == 0, e.message);
    kv_chain(&root, tokens, (size_t)TOTAL_MIB * 16, 16, chain);
    double put = write_all(c, chain, buffer), get = read_all(c, chain, buffer);
    Longhaul__Kv__V1__StatReply s = stat_now();
    kv_link_close(&link_to);
    kill(pid, SIGTERM);
    waitpid(pid, NULL, 0);
    fio_write = better(fio_write, run_fio("write", 48));
    fio_read = better(fio_read, run_fio("read", 7));
    row("disk: write, beside fio", put, fio_write, 0.9);
    row("disk: read, beside fio", get, fio_read, 0.9);
    row("disk: write, beside RocksDB", put, run_rocksdb("fillseq", false), 1);
    row("disk: read, beside RocksDB", get, run_rocksdb("readrandom", true), 1);
    printf("# disk: %llu objects written, %llu read\n", (unsigned long long)s.disk_stored,
           (unsigned long long)s.disk_loaded);
    lh_remove_tree(dir, NULL);
    return missed ? EXIT_FAILURE : EXIT_SUCCESS;
}

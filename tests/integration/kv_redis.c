/* The remote tier against a real Redis Cluster: three masters, and a replica of the first. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <hiredis/hiredis.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../must_work.h"
#include "kv_lab.h"
#include "proto/clock.h"
#include "proto/file.h"

enum { MASTERS = 3, NODES = 4, ANSWER_MS = 60000, SLOTS = 16384 };

struct cluster {
    char dir[40];
    int port[NODES];
    pid_t pid[NODES];
};

/* ---- the cluster ---- */

static redisReply *say(int port, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static redisReply *say(int port, const char *fmt, ...)
{
    struct timeval patience = {.tv_sec = 10};
    redisContext *c = redisConnectWithTimeout("127.0.0.1", port, patience);
    va_list ap;

    cr_assert(c != NULL && !c->err);
    redisSetTimeout(c, patience);
    va_start(ap, fmt);
    redisReply *r = redisvCommand(c, fmt, ap);
    va_end(ap);
    cr_assert(r != NULL, "%s", c->errstr);
    redisFree(c);
    return r;
}

static void must(redisReply *r)
{
    cr_assert(ne(int, r->type, REDIS_REPLY_ERROR), "%s", r->str);
    freeReplyObject(r);
}

static void id_of(int port, char id[41])
{
    redisReply *r = say(port, "CLUSTER MYID");

    cr_assert(eq(int, r->type, REDIS_REPLY_STRING));
    snprintf(id, 41, "%s", r->str);
    freeReplyObject(r);
}

static bool says(int port, const char *what, const char *of, const char *word)
{
    redisReply *r = say(port, "%s %s", what, of);
    bool found = r->type == REDIS_REPLY_STRING && strstr(r->str, word);

    freeReplyObject(r);
    return found;
}

static void wait_until(int port, const char *what, const char *of, const char *word)
{
    int64_t deadline = lh_now_ms() + ANSWER_MS;

    while (!says(port, what, of, word)) {
        cr_assert(gt(int, lh_ms_left(deadline), 0), "%s %s: never %s", what, of, word);
        usleep(50000);
    }
}

static void start_node(struct cluster *c, int i)
{
    lh_autofree char *dir = lh_format("%s/%d", c->dir, i), *log = lh_format("%s/%d.log", c->dir, i);
    char port[16], bus[16];

    c->port[i] = lab_port();
    snprintf(port, sizeof port, "%d", c->port[i]);
    snprintf(bus, sizeof bus, "%d", lab_port());
    const char *argv[] = {"redis-server",
                          "--port",
                          port,
                          "--cluster-port",
                          bus,
                          "--bind",
                          "127.0.0.1",
                          "--dir",
                          dir,
                          "--save",
                          "",
                          "--appendonly",
                          "no",
                          "--cluster-enabled",
                          "yes",
                          "--cluster-node-timeout",
                          "1000",
                          "--cluster-replica-validity-factor",
                          "0",
                          "--repl-diskless-sync-delay",
                          "0",
                          NULL};
    cr_assert(eq(int, lh_make_dirs(dir, 0700, NULL), 0));
    c->pid[i] = lab_spawn(argv, log);
    cr_assert(lab_listens(c->port[i], ANSWER_MS));
}

static void give_slots(struct cluster *c)
{
    for (int i = 0; i < MASTERS; i++)
        must(say(c->port[i], "CLUSTER ADDSLOTSRANGE %d %d", i * SLOTS / MASTERS,
                 (i + 1) * SLOTS / MASTERS - 1));
}

/* Its bus has a port of its own, which MEET must be told. */
static void meet(struct cluster *c, int i)
{
    redisReply *r = say(c->port[i], "CONFIG GET cluster-port");

    cr_assert(eq(int, r->type, REDIS_REPLY_ARRAY));
    must(say(c->port[0], "CLUSTER MEET 127.0.0.1 %d %s", c->port[i], r->element[1]->str));
    freeReplyObject(r);
}

static void cluster_start(struct cluster *c)
{
    char first[41];

    strcpy(c->dir, "/tmp/kv-redis-XXXXXX");
    cr_assert(mkdtemp(c->dir) != NULL);
    for (int i = 0; i < NODES; i++)
        start_node(c, i);
    give_slots(c);
    for (int i = 1; i < NODES; i++) {
        must(say(c->port[i], "CLUSTER SET-CONFIG-EPOCH %d", i + 1));
        meet(c, i);
    }
    for (int i = 0; i < NODES; i++) {
        wait_until(c->port[i], "CLUSTER", "INFO", "cluster_known_nodes:4");
        wait_until(c->port[i], "CLUSTER", "INFO", "cluster_state:ok");
    }
    id_of(c->port[0], first);
    must(say(c->port[MASTERS], "CLUSTER REPLICATE %s", first));
    wait_until(c->port[MASTERS], "INFO", "replication", "master_link_status:up");
}

static void cluster_stop(struct cluster *c)
{
    for (int i = 0; i < NODES; i++)
        if (c->pid[i])
            lab_end(c->pid[i], SIGKILL);
    cr_assert(eq(int, lh_remove_tree(c->dir, NULL), 0));
}

static void start_on(struct daemon *d, const struct cluster *c, uint64_t disk)
{
    lh_autofree char *remote =
        lh_format("redis://127.0.0.1:%d,127.0.0.1:%d", c->port[0], c->port[1]);

    daemon_start_remote(d, MEMORY, disk, remote, "");
}

#define NEEDS_REDIS()                                                                              \
    NEEDS("redis", system("redis-server --version >/dev/null 2>&1") == 0,                          \
          "there is no redis-server; apt-get install redis-server")

/* ---- tests ---- */

static long keys_of(int port)
{
    redisReply *r = say(port, "DBSIZE");
    long n = (long)r->integer;

    freeReplyObject(r);
    return n;
}

static long keys_in(const struct cluster *c)
{
    long n = 0;

    for (int i = 0; i < MASTERS; i++)
        n += keys_of(c->port[i]);
    return n;
}

Test(kv_redis, what_was_evicted_comes_back, .timeout = 180)
{
    struct cluster c = {0};
    struct daemon d;

    NEEDS_REDIS();
    cluster_start(&c);
    start_on(&d, &c, 0);
    lab_store(&d, true);
    cr_assert(gt(u64, stat_of(&d).evicted, 0));
    unsigned whole = lab_read(&d);
    Longhaul__Kv__V1__StatReply s = stat_of(&d);
    cr_assert(gt(u64, s.remote_stored, 0));
    cr_assert(gt(u64, s.remote_hits, 0));
    cr_assert(gt(dbl, s.remote_load_bytes_per_s, 0.0));
    cr_assert(eq(u64, s.remote_corrupt, 0));
    cr_assert(ge(long, keys_in(&c), (long)s.remote_stored));
    /* Half of the memory was never written; the rest was, before it was evicted. */
    cr_assert(gt(uint, whole, LAB_SEQUENCES / 2));
    daemon_stop(&d);
    cluster_stop(&c);
}

Test(kv_redis, another_store_finds_it_and_bytes_that_were_changed_are_a_miss, .timeout = 180)
{
    struct cluster c = {0};
    struct daemon d, other;

    NEEDS_REDIS();
    cluster_start(&c);
    start_on(&d, &c, 0);
    lab_store(&d, true);
    start_on(&other, &c, 0);
    unsigned whole = lab_read(&other);
    cr_assert(gt(uint, whole, 0));
    lab_wait(&other, whole);
    for (int i = 0; i < MASTERS; i++) {
        redisReply *keys = say(c.port[i], "KEYS *");
        for (size_t k = 0; k < keys->elements; k++)
            must(say(c.port[i], "SETRANGE %s 300 x", keys->element[k]->str));
        freeReplyObject(keys);
    }
    cr_assert(eq(uint, lab_read_anew(&other), 0));
    cr_assert(gt(u64, stat_of(&other).remote_corrupt, 0));
    daemon_stop(&d);
    daemon_stop(&other);
    cluster_stop(&c);
}

/* Moves the keys of a slot, and with `done` the slot itself. */
static void migrate(const struct cluster *c, int slot, int from, int to, bool done)
{
    char from_id[41], to_id[41];

    id_of(c->port[from], from_id);
    id_of(c->port[to], to_id);
    must(say(c->port[to], "CLUSTER SETSLOT %d IMPORTING %s", slot, from_id));
    must(say(c->port[from], "CLUSTER SETSLOT %d MIGRATING %s", slot, to_id));
    redisReply *keys = say(c->port[from], "CLUSTER GETKEYSINSLOT %d 1000", slot);
    for (size_t i = 0; i < keys->elements; i++)
        must(say(c->port[from], "MIGRATE 127.0.0.1 %d %s 0 5000", c->port[to],
                 keys->element[i]->str));
    freeReplyObject(keys);
    for (int i = 0; done && i < MASTERS; i++)
        must(say(c->port[i], "CLUSTER SETSLOT %d NODE %s", slot, to_id));
}

static long slot_of(const struct cluster *c, const char *key)
{
    redisReply *r = say(c->port[0], "CLUSTER KEYSLOT %s", key);
    long slot = (long)r->integer;

    freeReplyObject(r);
    return slot;
}

/* Every slot of the second master that holds a key. */
static unsigned migrate_all(const struct cluster *c, bool done)
{
    redisReply *keys = say(c->port[1], "KEYS *");
    unsigned n = 0;

    for (size_t i = 0; i < keys->elements; i++) {
        redisReply *there = say(c->port[1], "EXISTS %s", keys->element[i]->str);
        bool moved = there->type != REDIS_REPLY_INTEGER || !there->integer;
        freeReplyObject(there);
        if (moved)
            continue;
        migrate(c, (int)slot_of(c, keys->element[i]->str), 1, 2, done);
        n++;
    }
    freeReplyObject(keys);
    return n;
}

Test(kv_redis, slots_that_move_are_followed, .timeout = 180)
{
    struct cluster c = {0};
    struct daemon d;

    NEEDS_REDIS();
    cluster_start(&c);
    start_on(&d, &c, 0);
    lab_store(&d, true);
    unsigned whole = lab_read_anew(&d);
    cr_assert(gt(uint, whole, 0));
    cr_assert(gt(uint, migrate_all(&c, false), 0));
    lab_wait(&d, whole); /* behind ASK */
    redisReply *keys = say(c.port[2], "KEYS *");
    char id[41];
    id_of(c.port[2], id);
    for (size_t i = 0; i < keys->elements; i++)
        for (int n = 0; n < MASTERS; n++) /* those that are its own already do not mind */
            must(say(c.port[n], "CLUSTER SETSLOT %ld NODE %s", slot_of(&c, keys->element[i]->str),
                     id));
    freeReplyObject(keys);
    lab_wait(&d, whole); /* behind MOVED */
    daemon_stop(&d);
    cluster_stop(&c);
}

/* WAIT would wait for what its own connection has written. */
static void wait_for_replica(const struct cluster *c)
{
    int64_t deadline = lh_now_ms() + ANSWER_MS;

    while (keys_of(c->port[MASTERS]) < keys_of(c->port[0])) {
        cr_assert(gt(int, lh_ms_left(deadline), 0), "the replica does not follow");
        usleep(20000);
    }
}

Test(kv_redis, a_node_that_is_killed_costs_misses_until_its_replica_has_taken_over, .timeout = 240)
{
    struct cluster c = {0};
    struct daemon d;

    NEEDS_REDIS();
    cluster_start(&c);
    start_on(&d, &c, 0);
    lab_store(&d, true);
    unsigned whole = lab_read_anew(&d);
    wait_for_replica(&c);
    lab_end(c.pid[0], SIGKILL);
    c.pid[0] = 0;
    lab_read(&d); /* whatever comes is right */
    wait_until(c.port[MASTERS], "INFO", "replication", "role:master");
    wait_until(c.port[1], "CLUSTER", "INFO", "cluster_state:ok");
    lab_wait(&d, whole);
    daemon_stop(&d);
    cluster_stop(&c);
}

Test(kv_redis, a_cluster_that_hangs_is_left_alone_and_found_again, .timeout = 240)
{
    struct cluster c = {0};
    struct daemon d;

    NEEDS_REDIS();
    cluster_start(&c);
    start_on(&d, &c, 0);
    lab_store(&d, true);
    unsigned whole = lab_read_anew(&d);
    for (int i = 0; i < NODES; i++)
        kill(c.pid[i], SIGSTOP);
    daemon_kill(&d);
    daemon_restart(&d);
    cr_assert(eq(uint, lab_read(&d), 0));
    Longhaul__Kv__V1__StatReply s = stat_of(&d);
    cr_assert(gt(u64, s.remote_errors, 0));
    cr_assert(lt(u64, s.remote_lookups, LAB_SEQUENCES), "every lookup has asked");
    cr_assert(eq(uint, s.remote_paused & 1, 1));
    for (int i = 0; i < NODES; i++)
        kill(c.pid[i], SIGCONT);
    wait_until(c.port[1], "CLUSTER", "INFO", "cluster_state:ok");
    int64_t deadline = lh_now_ms() + ANSWER_MS;
    while (lab_read(&d) < whole)
        cr_assert(gt(int, lh_ms_left(deadline), 0), "it is not asked again");
    daemon_stop(&d);
    cluster_stop(&c);
}

Test(kv_redis, a_store_without_its_cluster_is_a_store_without_a_remote_tier, .timeout = 120)
{
    struct kv_key root = root_of(1), chain[LAB_UNITS];
    lh_autofree char *remote = lh_format("redis://127.0.0.1:%d", lab_port());
    struct lh_error e = {0};
    struct daemon d;

    NEEDS_REDIS();
    daemon_start_remote(&d, MEMORY, 0, remote, "");
    lh_auto(kv_client) c = client_of(&d, "alone");
    use_version(c, 1, false);
    for (unsigned seed = 0; seed < LAB_SEQUENCES; seed++) {
        chain_of(&root, seed, LAB_UNITS, chain);
        cr_assert(ge(i64, put_units(c, chain, 0, LAB_UNITS, &e), 0), "%s", e.message);
        cr_assert(eq(sz, get_units(c, chain, LAB_UNITS, 0), LAB_UNITS));
    }
    cr_assert(eq(u64, stat_of(&d).remote_stored, 0));
    daemon_stop(&d);
}

Test(kv_redis, what_leaves_the_disk_goes_out_too, .timeout = 240)
{
    struct cluster c = {0};
    struct daemon d;

    NEEDS_REDIS();
    cluster_start(&c);
    start_on(&d, &c, 16 << 20);
    struct kv_key root = root_of(1), chain[LAB_UNITS];
    lh_auto(kv_client) client = client_of(&d, "stores");
    struct lh_error e = {0};
    int64_t deadline = lh_now_ms() + LAB_WAIT_MS;
    use_version(client, 1, false);
    for (unsigned seed = 0; !stat_of(&d).remote_stored || stat_of(&d).left_memory < 200; seed++) {
        chain_of(&root, seed, LAB_UNITS, chain);
        cr_assert(ge(i64, put_units(client, chain, 0, LAB_UNITS, &e), 0), "%s", e.message);
        cr_assert(gt(int, lh_ms_left(deadline), 0), "nothing goes out");
        usleep(5000);
    }
    daemon_stop(&d);
    cluster_stop(&c);
}

/* Two stores that share one Redis server with a password, which forgets what it likes: whatever
 * happens, every byte of a hit is what was put. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <hiredis/hiredis.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../must_work.h"
#include "kv_lab.h"
#include "proto/file.h"

enum { STORES = 2, TREES = 6, FORKS = 4, UNITS = 24, STEPS = 600, LISTEN_MS = 60000 };

struct history {
    char dir[40];
    char *secrets;
    int port;
    pid_t redis;
    redisContext *admin;
    struct daemon stores[STORES];
    struct kv_client *clients[STORES];
    unsigned version, seed, hits;
};

static unsigned below(struct history *h, unsigned n)
{
    return (unsigned)rand_r(&h->seed) / 7 % n;
}

static void start_redis(struct history *h)
{
    lh_autofree char *log = lh_format("%s/log", h->dir);
    char port[16];

    h->port = lab_port();
    snprintf(port, sizeof port, "%d", h->port);
    const char *argv[] = {"redis-server", "--port", port, "--bind",        "127.0.0.1", "--dir",
                          h->dir,         "--save", "",   "--requirepass", "hush",      NULL};
    h->redis = lab_spawn(argv, log);
    cr_assert(lab_listens(h->port, LISTEN_MS));
    h->admin = redisConnect("127.0.0.1", h->port);
    cr_assert(h->admin && !h->admin->err);
    freeReplyObject(redisCommand(h->admin, "AUTH hush"));
}

static void start(struct history *h)
{
    strcpy(h->dir, "/tmp/kv-shared-XXXXXX");
    cr_assert(mkdtemp(h->dir) != NULL);
    start_redis(h);
    h->secrets = lh_format("%s/secrets", h->dir);
    cr_assert(eq(int, lh_write_file(h->secrets, "password = hush\n", 16, 0600, NULL), 0));
    lh_autofree char *remote = lh_format("redis://127.0.0.1:%d", h->port);
    for (int i = 0; i < STORES; i++) {
        daemon_start_remote(&h->stores[i], MEMORY, i ? 16 << 20 : 0, remote, h->secrets);
        h->clients[i] = client_of(&h->stores[i], "history");
        use_version(h->clients[i], h->version, false);
    }
}

static void finish(struct history *h)
{
    for (int i = 0; i < STORES; i++) {
        kv_client_destroy(h->clients[i]);
        daemon_stop(&h->stores[i]);
    }
    redisFree(h->admin);
    lab_end(h->redis, SIGKILL);
    free(h->secrets);
    cr_assert(eq(int, lh_remove_tree(h->dir, NULL), 0));
}

/* Forks of a tree share its first half. */
static void choose_chain(struct history *h, struct kv_key chain[UNITS])
{
    struct kv_key root = root_of(h->version);
    unsigned tree = below(h, TREES), fork = below(h, FORKS);
    int32_t tokens[UNITS * UNIT];

    for (size_t i = 0; i < UNITS * UNIT; i++)
        tokens[i] =
            (int32_t)(i < sizeof tokens / sizeof *tokens / 2 ? tree : tree * 100 + fork + 50);
    cr_assert(eq(sz, kv_chain(&root, tokens, UNITS * UNIT, UNIT, chain), UNITS));
}

static void put(struct history *h)
{
    struct kv_key chain[UNITS];
    struct lh_error e = {0};
    size_t first = below(h, UNITS - 1), n = first + 1 + below(h, (unsigned)(UNITS - first));

    choose_chain(h, chain);
    put_units(h->clients[below(h, STORES)], chain, below(h, 2) ? first : 0, n, &e);
}

static void get(struct history *h)
{
    struct kv_key chain[UNITS];

    choose_chain(h, chain);
    h->hits += get_units(h->clients[below(h, STORES)], chain, UNITS, below(h, 3) ? 0 : 5) > 0;
}

static void forget_some(struct history *h)
{
    for (int i = 0; i < 10; i++) {
        redisReply *key = redisCommand(h->admin, "RANDOMKEY");
        if (key && key->type == REDIS_REPLY_STRING)
            freeReplyObject(
                redisCommand(h->admin, below(h, 2) ? "DEL %s" : "APPEND %s x", key->str));
        freeReplyObject(key);
    }
}

static void new_version(struct history *h)
{
    if (below(h, 8))
        return;
    h->version++;
    for (int i = 0; i < STORES; i++)
        use_version(h->clients[i], h->version, true);
}

static void hang_up(struct history *h)
{
    freeReplyObject(redisCommand(h->admin, "CLIENT KILL TYPE normal SKIPME yes"));
}

/* What operators see says where the tier is, and no secret. */
static void look(const struct daemon *d)
{
    lh_autofree char *command = lh_format("%s --socket=%s stat -o json", KVSTORE, d->socket);
    char text[16384];
    FILE *f = popen(command, "r");

    cr_assert(f != NULL);
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    cr_assert(eq(int, pclose(f), 0));
    cr_assert(strstr(text, "\"remote\": \"redis://127.0.0.1:") != NULL, "%s", text);
    cr_assert(strstr(text, "remote_load_bytes_per_s") != NULL);
    cr_assert(eq(ptr, strstr(text, "hush"), NULL));
}

Test(kv_shared, what_comes_back_is_what_was_put, .timeout = 240)
{
    static void (*const steps[])(struct history *) = {
        put, put, put, put, get, get, get, get, get, forget_some, new_version, hang_up};
    struct history h = {.seed = 20261130, .version = 1};

    NEEDS("redis", system("redis-server --version >/dev/null 2>&1") == 0,
          "there is no redis-server; apt-get install redis-server");
    start(&h);
    for (int i = 0; i < STEPS; i++)
        steps[below(&h, LH_ARRAY_SIZE(steps))](&h);
    cr_assert(gt(uint, h.hits, 0));
    cr_assert(gt(u64, stat_of(&h.stores[0]).remote_hits + stat_of(&h.stores[1]).remote_hits, 0));
    look(&h.stores[0]);
    finish(&h);
}

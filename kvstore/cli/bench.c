/* bench: a short run of puts, gets and lookups against the kvstored that is there, beside memcpy of
 * the same bytes between the same buffers.
 *
 * It works under a root of its own, of policy step 0, so that its entries are the first to go
 * should somebody need the room, and drops that root when it is done, whichever way.  It takes free
 * memory only: what workers have stored is not evicted for it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "kvstore/cli/cli.h"
#include "kvstore/client.h"
#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/parse.h"

enum {
    UNIT = 16,
    BATCH = 16,
    CHUNK = 1 << 20,
    BATCHES = 4,
    ROUNDS = 3, /* the first touches what is new, the last counts */
    LOOKUPS = 200,
    UNITS = BATCH * BATCHES,
    TIMEOUT_MS = 10000
};

struct bench {
    struct cli *cli;
    struct kv_client *client;
    size_t chunk;
    uint8_t *from, *to;
    struct kv_key root, chain[UNITS];
    int64_t took[LOOKUPS];
};

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return (x > y) - (x < y);
}

static double percentile(int64_t *took, size_t n, size_t percent)
{
    qsort(took, n, sizeof *took, by_value);
    return (double)took[(n - 1) * percent / 100];
}

/* A quarter of a small store at most, and only what is free. */
static int choose_size(struct bench *b, struct lh_error *err)
{
    lh_automsg(Longhaul__Kv__V1__Reply) r = cli_ask_stat(b->cli, err);

    if (!r)
        return err->code;
    uint64_t capacity = r->stat->capacity_bytes, quarter = capacity / 4 / UNITS / 4096 * 4096;
    b->chunk = quarter < CHUNK ? quarter : CHUNK;
    if (!b->chunk || capacity - r->stat->used_bytes < b->chunk * UNITS)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED,
                       "%llu of %llu bytes are free, the bench takes %zu and evicts nobody's",
                       (unsigned long long)(capacity - r->stat->used_bytes),
                       (unsigned long long)capacity, b->chunk ? b->chunk * UNITS : UNITS * 4096);
    return 0;
}

static int prepare(struct bench *b, struct lh_error *err)
{
    struct kv_options o = {.path = b->cli->socket,
                           .name = "kvstore-bench",
                           .tenant = "kvstore-bench",
                           .unit_tokens = UNIT,
                           .block_bytes = b->chunk,
                           .timeout_ms = TIMEOUT_MS};
    struct kv_identity id = {.tenant = o.tenant};
    int32_t tokens[UNITS * UNIT];

    for (int i = 0; i < UNITS * UNIT; i++)
        tokens[i] = i;
    if (getrandom(id.policy_version, sizeof id.policy_version, 0) < 0)
        return lh_fail_errno(err, errno, "a root of its own");
    b->from = malloc(b->chunk * UNITS);
    b->to = malloc(b->chunk * UNITS);
    if (!b->from || !b->to)
        return lh_fail_errno(err, ENOMEM, "bench");
    for (size_t i = 0; i < b->chunk * UNITS; i++)
        b->from[i] = (uint8_t)(i ^ i >> 12);
    b->root = kv_root(&id);
    kv_chain(&b->root, tokens, UNITS * UNIT, UNIT, b->chain);
    b->client = kv_client_create(&o, err);
    return b->client ? kv_use_root(b->client, &b->root, 0, 0, err) : err->code;
}

static int put(struct bench *b, size_t batch, struct lh_error *err)
{
    const void *blocks[BATCH];

    for (size_t i = 0; i < BATCH; i++)
        blocks[i] = b->from + (batch * BATCH + i) * b->chunk;
    int64_t r =
        kv_put(b->client, b->chain, batch * BATCH, (batch + 1) * BATCH, blocks, NULL, "", err);
    return r < 0 ? (int)r : 0;
}

static int get(struct bench *b, size_t batch, struct lh_error *err)
{
    size_t end = (batch + 1) * BATCH;
    lh_auto(kv_hit) h = kv_lookup(b->client, b->chain, end, batch * BATCH, "", err);
    int r = h ? 0 : err->code;

    for (size_t i = batch * BATCH; r == 0 && i < end; i++)
        r = kv_hit_block(h, i, b->to + i * b->chunk, err);
    return r;
}

static int copy(struct bench *b, size_t batch, struct lh_error *err)
{
    size_t at = batch * BATCH * b->chunk;

    (void)err;
    memcpy(b->to + at, b->from + at, BATCH * b->chunk);
    return 0;
}

static int look_up(struct bench *b, size_t i, struct lh_error *err)
{
    (void)i;
    lh_auto(kv_hit) h = kv_lookup(b->client, b->chain, UNITS, 0, "", err);
    return h ? 0 : err->code;
}

static int drop(struct bench *b, struct lh_error *err)
{
    Longhaul__Kv__V1__DropRequest drop = LONGHAUL__KV__V1__DROP_REQUEST__INIT;
    Longhaul__Kv__V1__Request q = LONGHAUL__KV__V1__REQUEST__INIT;

    drop.root = (ProtobufCBinaryData){sizeof b->root.bytes, b->root.bytes};
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_DROP;
    q.drop = &drop;
    lh_automsg(Longhaul__Kv__V1__Reply) r = cli_call(b->cli, &q, err);
    return r ? 0 : err->code;
}

static const struct step {
    const char *name;
    int (*run)(struct bench *b, size_t i, struct lh_error *err);
    size_t times;
    bool moves; /* a batch of bytes */
} steps[] = {{"memcpy", copy, BATCHES, true},
             {"put", put, BATCHES, true},
             {"get", get, BATCHES, true},
             {"lookup", look_up, LOOKUPS, false}};

static int time_step(struct bench *b, const struct step *s, struct lh_error *err)
{
    int r = 0;

    for (size_t i = 0; r == 0 && i < s->times; i++) {
        int64_t at = lh_now_us();
        r = s->run(b, i, err);
        b->took[i] = lh_now_us() - at;
    }
    return r < 0 ? lh_wrap(err, "%s", s->name) : 0;
}

static json_t *row_of(struct bench *b, const struct step *s, double *copy_us)
{
    double p50 = percentile(b->took, s->times, 50), p99 = percentile(b->took, s->times, 99);
    size_t bytes = s->moves ? BATCH * b->chunk : 0;

    if (s->run == copy)
        *copy_us = p50;
    return json_pack("{ss sI sf sf sf sf}", "operation", s->name, "bytes", (json_int_t)bytes,
                     "p50_us", p50, "p99_us", p99, "gb_per_s",
                     bytes ? (double)bytes / (p50 > 1 ? p50 : 1) / 1e3 : 0.0, "percent_of_memcpy",
                     bytes ? 100 * *copy_us / (p50 > 1 ? p50 : 1) : 0.0);
}

/* What was put before is not put again: each round has a root of its own. */
static int run_round(struct bench *b, json_t *rows, struct lh_error *err)
{
    double copy_us = 0;
    int r = 0;

    for (size_t i = 0; r == 0 && i < LH_ARRAY_SIZE(steps); i++) {
        r = time_step(b, &steps[i], err);
        if (r == 0 && json_array_append_new(rows, row_of(b, &steps[i], &copy_us)))
            r = lh_fail_errno(err, ENOMEM, "bench");
    }
    if (r == 0 && memcmp(b->from, b->to, b->chunk * UNITS) != 0)
        return lh_fail(err, LH_DATA_LOSS, "what was got is not what was put");
    return r;
}

static int one_round(struct bench *b, json_t *rows, struct lh_error *err)
{
    struct lh_error ignored;
    int r = prepare(b, err);

    if (r == 0)
        r = run_round(b, rows, err);
    if (b->client)
        r = r == 0 ? drop(b, err) : (drop(b, &ignored), r);
    kv_client_destroy(lh_steal(&b->client));
    free(lh_steal(&b->from));
    free(lh_steal(&b->to));
    return r;
}

int cli_bench(struct cli *c, struct lh_error *err)
{
    static const char *const columns[] = {
        "operation", "bytes", "p50_us", "p99_us", "gb_per_s", "percent_of_memcpy", NULL};
    struct bench b = {.cli = c};
    json_t *rows = json_array();
    int r = choose_size(&b, err);

    for (int i = 0; r == 0 && i < ROUNDS; i++) {
        json_array_clear(rows);
        r = one_round(&b, rows, err);
    }
    if (r == 0)
        return cli_print_rows(c, rows, columns, err);
    json_decref(rows);
    return r;
}

#include "rollout/engine/cache.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 1024 };

struct cache {
    struct pool *pool;
    uint64_t clock;
    struct checkpoint *buckets[BUCKETS];
};

static struct checkpoint **bucket_of(struct cache *c, const struct kv_key *key)
{
    return &c->buckets[(key->bytes[0] | key->bytes[1] << 8) % BUCKETS];
}

struct cache *cache_create(struct pool *pool, struct lh_error *err)
{
    struct cache *c = calloc(1, sizeof *c);

    if (!c)
        return lh_fail_errno(err, ENOMEM, "prefix cache"), NULL;
    c->pool = pool;
    return c;
}

static void destroy(struct cache *c, struct checkpoint *k)
{
    struct checkpoint **at = bucket_of(c, &k->key);

    while (*at != k)
        at = &(*at)->next_same_hash;
    *at = k->next_same_hash;
    pool_release(c->pool, k->state);
    for (size_t i = 0; i < k->n_pages; i++)
        pool_release(c->pool, k->pages[i]);
    free(k->pages);
    free(k);
}

void cache_destroy(struct cache *c)
{
    if (!c)
        return;
    for (size_t i = 0; i < BUCKETS; i++)
        while (c->buckets[i])
            destroy(c, c->buckets[i]);
    free(c);
}

struct checkpoint *cache_add(struct cache *c, const struct kv_key *key, size_t units,
                             pool_block state, const pool_block *pages, size_t n_pages)
{
    struct checkpoint *k = malloc(sizeof *k);
    pool_block *copy = malloc((n_pages + 1) * sizeof *copy);

    if (!k || !copy) {
        free(k);
        free(copy);
        return NULL;
    }
    for (size_t i = 0; i < n_pages; i++)
        pool_retain(c->pool, copy[i] = pages[i]);
    *k = (struct checkpoint){
        .key = *key,
        .units = units,
        .state = state,
        .pages = copy,
        .n_pages = n_pages,
        .holders = 1,
        .used = ++c->clock,
        .next_same_hash = *bucket_of(c, key),
    };
    *bucket_of(c, key) = k;
    return k;
}

static struct checkpoint *find_one(struct cache *c, const struct kv_key *key)
{
    for (struct checkpoint *k = *bucket_of(c, key); k; k = k->next_same_hash)
        if (!memcmp(&k->key, key, sizeof *key))
            return k;
    return NULL;
}

struct checkpoint *cache_find(struct cache *c, const struct kv_key *chain, size_t n,
                              size_t at_least)
{
    for (size_t u = n; u > at_least; u--) {
        struct checkpoint *k = find_one(c, &chain[u - 1]);
        if (!k)
            continue;
        k->used = ++c->clock;
        return k;
    }
    return NULL;
}

void cache_hold(struct checkpoint *k)
{
    k->holders++;
}

void cache_drop(struct cache *c, struct checkpoint *k, bool keep)
{
    if (!--k->holders && !keep)
        destroy(c, k);
}

bool cache_evict(struct cache *c)
{
    struct checkpoint *oldest = NULL;

    for (size_t i = 0; i < BUCKETS; i++)
        for (struct checkpoint *k = c->buckets[i]; k; k = k->next_same_hash)
            if (!k->holders && (!oldest || k->used < oldest->used))
                oldest = k;
    if (oldest)
        destroy(c, oldest);
    return oldest != NULL;
}

void cache_clear(struct cache *c)
{
    while (cache_evict(c))
        ;
}

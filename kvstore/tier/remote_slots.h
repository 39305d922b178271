/* What a Redis Cluster says about where its keys are: slots, and redirections. */
#ifndef KVSTORE_TIER_REMOTE_SLOTS_H
#define KVSTORE_TIER_REMOTE_SLOTS_H

#include <hiredis/hiredis.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { KV_REDIS_SLOTS = 16384, KV_REDIS_HOST = 256 };

struct kv_redis_place {
    char host[KV_REDIS_HOST]; /* empty: of the server that said it */
    int port;
};

/* CRC16 (XMODEM) of the key modulo 16384, as the cluster's specification has it; of keys without
 * braces, as ours are. */
uint16_t kv_redis_slot(const char *key, size_t len);

/* "host:port", where host may hold colons itself; false = it is none. */
bool kv_redis_parse_place(const char *text, size_t len, struct kv_redis_place *out);

enum kv_redis_error {
    KV_REDIS_FAILED, /* whatever else */
    KV_REDIS_MOVED,
    KV_REDIS_ASK,
    KV_REDIS_AWAY,   /* CLUSTERDOWN, TRYAGAIN, LOADING, MASTERDOWN */
    KV_REDIS_DENIED, /* NOAUTH, NOPERM, WRONGPASS */
    KV_REDIS_FULL,   /* OOM */
    KV_REDIS_OTHER_TYPE,
};
/* Of an error reply; fills *to for the first two kinds. */
enum kv_redis_error kv_redis_explain(const char *text, size_t len, struct kv_redis_place *to);

/* Of element i of CLUSTER SLOTS's reply: which slots, and who serves them.  False = wrong. */
bool kv_redis_range(const redisReply *slots, size_t i, unsigned *first, unsigned *last,
                    struct kv_redis_place *master);

#endif

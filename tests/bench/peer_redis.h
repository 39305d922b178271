/* Redis as a peer of the store: a server of its own, in memory only, on a unix socket. */
#ifndef TESTS_BENCH_PEER_REDIS_H
#define TESTS_BENCH_PEER_REDIS_H

#include <hiredis/hiredis.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct peer_redis {
    pid_t pid;
    redisContext *link;
};

/* False when there is no redis-server on this machine. */
bool peer_redis_start(struct peer_redis *r, const char *dir);
void peer_redis_stop(struct peer_redis *r);
/* Median time to SET and to GET `batch` pipelined values of `chunk` bytes; ends the program when
 * Redis fails. */
void peer_redis_time(struct peer_redis *r, const uint8_t *from, size_t chunk, size_t batch,
                     size_t total, double *set_us, double *get_us);

#endif

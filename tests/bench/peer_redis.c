#include "tests/bench/peer_redis.h"

#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/clock.h"

extern char **environ;

enum { START_MS = 5000, POLL_US = 20000, VALUES_MAX = 4096 };

bool peer_redis_start(struct peer_redis *r, const char *dir)
{
    char path[128], log[128];
    const char *argv[] = {"redis-server", "--port",    "0", "--unixsocket",
                          path,           "--save",    "",  "--appendonly",
                          "no",           "--logfile", log, NULL};
    int64_t deadline = lh_now_ms() + START_MS;

    *r = (struct peer_redis){0};
    snprintf(path, sizeof path, "%s/redis.sock", dir);
    snprintf(log, sizeof log, "%s/redis.log", dir);
    if (posix_spawnp(&r->pid, argv[0], NULL, NULL, (char **)argv, environ))
        return false;
    while (!r->link && lh_ms_left(deadline)) {
        usleep(POLL_US);
        r->link = redisConnectUnix(path);
        if (r->link && r->link->err) {
            redisFree(r->link);
            r->link = NULL;
        }
    }
    if (!r->link)
        peer_redis_stop(r);
    return r->link != NULL;
}

void peer_redis_stop(struct peer_redis *r)
{
    if (r->link)
        redisFree(r->link);
    kill(r->pid, SIGKILL);
    waitpid(r->pid, NULL, 0);
}

static void take_replies(struct peer_redis *r, size_t n, size_t want)
{
    for (size_t i = 0; i < n; i++) {
        redisReply *reply = NULL;
        bool ok = redisGetReply(r->link, (void **)&reply) == REDIS_OK && reply &&
                  reply->type != REDIS_REPLY_ERROR && (!want || reply->len == want);
        if (!ok) {
            fprintf(stderr, "redis: %s\n", r->link->errstr);
            exit(EXIT_FAILURE);
        }
        freeReplyObject(reply);
    }
}

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return (x > y) - (x < y);
}

static double median(int64_t *took, size_t n)
{
    qsort(took, n, sizeof *took, by_value);
    return (double)took[n / 2];
}

void peer_redis_time(struct peer_redis *r, const uint8_t *from, size_t chunk, size_t batch,
                     size_t total, double *set_us, double *get_us)
{
    static int64_t set[VALUES_MAX], get[VALUES_MAX];
    size_t n = total / chunk / batch;

    for (int round = 0; round < 2; round++)
        for (size_t i = 0; i < n; i++) {
            int64_t at = lh_now_us();
            for (size_t k = i * batch; k < (i + 1) * batch; k++)
                redisAppendCommand(r->link, "SET k%d %b", (int)k, from + k * chunk, chunk);
            take_replies(r, batch, 0);
            set[i] = lh_now_us() - at;
            at = lh_now_us();
            for (size_t k = i * batch; k < (i + 1) * batch; k++)
                redisAppendCommand(r->link, "GET k%d", (int)k);
            take_replies(r, batch, chunk);
            get[i] = lh_now_us() - at;
        }
    *set_us = median(set, n);
    *get_us = median(get, n);
}

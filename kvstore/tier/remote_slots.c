#include "kvstore/tier/remote_slots.h"

#include <stdlib.h>
#include <string.h>

#include "proto/cleanup.h"

enum { PORT_MAX = 65535 };

uint16_t kv_redis_slot(const char *key, size_t len)
{
    uint16_t crc = 0;

    for (size_t i = 0; i < len; i++) {
        crc ^= (uint16_t)((uint8_t)key[i] << 8);
        for (int bit = 0; bit < 8; bit++)
            crc = (uint16_t)(crc & 0x8000 ? crc << 1 ^ 0x1021 : crc << 1);
    }
    return crc % KV_REDIS_SLOTS;
}

static bool parse_port(const char *text, size_t len, int *port)
{
    *port = 0;
    for (size_t i = 0; i < len; i++) {
        if (text[i] < '0' || text[i] > '9' || *port > PORT_MAX)
            return false;
        *port = *port * 10 + text[i] - '0';
    }
    return *port >= 1 && *port <= PORT_MAX;
}

static bool copy_host(const char *text, size_t len, struct kv_redis_place *out)
{
    if (len >= sizeof out->host || memchr(text, 0, len))
        return false;
    memcpy(out->host, text, len);
    out->host[len] = 0;
    return true;
}

bool kv_redis_parse_place(const char *text, size_t len, struct kv_redis_place *out)
{
    const char *colon = memrchr(text, ':', len);
    size_t host = colon ? (size_t)(colon - text) : 0;

    return colon && copy_host(text, host, out) && parse_port(colon + 1, len - host - 1, &out->port);
}

/* "MOVED 3999 127.0.0.1:6381": the last word. */
static bool redirection(const char *text, size_t len, struct kv_redis_place *to)
{
    const char *space = memrchr(text, ' ', len);

    return space && kv_redis_parse_place(space + 1, len - (size_t)(space + 1 - text), to);
}

enum kv_redis_error kv_redis_explain(const char *text, size_t len, struct kv_redis_place *to)
{
    static const struct {
        const char *word;
        enum kv_redis_error meaning;
    } words[] = {{"MOVED ", KV_REDIS_MOVED},        {"ASK ", KV_REDIS_ASK},
                 {"CLUSTERDOWN", KV_REDIS_AWAY},    {"TRYAGAIN", KV_REDIS_AWAY},
                 {"LOADING", KV_REDIS_AWAY},        {"MASTERDOWN", KV_REDIS_AWAY},
                 {"NOAUTH", KV_REDIS_DENIED},       {"NOPERM", KV_REDIS_DENIED},
                 {"WRONGPASS", KV_REDIS_DENIED},    {"OOM", KV_REDIS_FULL},
                 {"WRONGTYPE", KV_REDIS_OTHER_TYPE}};

    for (size_t i = 0; i < LH_ARRAY_SIZE(words); i++) {
        size_t n = strlen(words[i].word);
        if (len < n || memcmp(text, words[i].word, n) != 0)
            continue;
        bool redirected = words[i].meaning == KV_REDIS_MOVED || words[i].meaning == KV_REDIS_ASK;
        return redirected && !redirection(text, len, to) ? KV_REDIS_FAILED : words[i].meaning;
    }
    return KV_REDIS_FAILED;
}

static bool is_slot(const redisReply *r)
{
    return r->type == REDIS_REPLY_INTEGER && r->integer >= 0 && r->integer < KV_REDIS_SLOTS;
}

/* [first, last, [host, port, ...], replicas...]; a host that is not known is nil or empty. */
bool kv_redis_range(const redisReply *slots, size_t i, unsigned *first, unsigned *last,
                    struct kv_redis_place *master)
{
    const redisReply *r = slots->element[i];

    if (r->type != REDIS_REPLY_ARRAY || r->elements < 3 || !is_slot(r->element[0]) ||
        !is_slot(r->element[1]) || r->element[0]->integer > r->element[1]->integer)
        return false;
    const redisReply *m = r->element[2];
    if (m->type != REDIS_REPLY_ARRAY || m->elements < 2 ||
        m->element[1]->type != REDIS_REPLY_INTEGER || m->element[1]->integer < 1 ||
        m->element[1]->integer > PORT_MAX)
        return false;
    const redisReply *host = m->element[0];
    *first = (unsigned)r->element[0]->integer;
    *last = (unsigned)r->element[1]->integer;
    *master = (struct kv_redis_place){.port = (int)m->element[1]->integer};
    return host->type == REDIS_REPLY_NIL ||
           (host->type == REDIS_REPLY_STRING && copy_host(host->str, (size_t)host->len, master));
}

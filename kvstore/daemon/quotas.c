/* kvstore.quotas of the job: "acme=2GiB, lab=512MiB+20GiB, *=1GiB".  A tenant, bytes of memory, and
 * after a '+' bytes of the disk tier; 0 or no '+' = no bound there.  '*' is everybody else, each
 * for himself. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvstore/daemon/request.h"
#include "proto/cleanup.h"

static bool read_bytes(const char **at, uint64_t *bytes)
{
    static const struct {
        const char *name;
        unsigned shift;
    } units[] = {{"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}, {"", 0}};
    char *end;

    errno = 0;
    unsigned long long n = strtoull(*at, &end, 10);
    if (**at < '0' || **at > '9' || errno)
        return false;
    for (size_t i = 0; i < LH_ARRAY_SIZE(units); i++) {
        size_t len = strlen(units[i].name);
        if (strncmp(end, units[i].name, len) != 0)
            continue;
        *at = end + len;
        *bytes = n << units[i].shift;
        return n <= UINT64_MAX >> units[i].shift;
    }
    return false;
}

static bool read_quota(const char *at, uint64_t bytes[KV_TIERS])
{
    if (!read_bytes(&at, &bytes[KV_MEMORY]))
        return false;
    if (*at != '+')
        return !*at;
    at++;
    return read_bytes(&at, &bytes[KV_DISK]) && !*at;
}

/* Down to whole pages, but never to none, which would be no bound. */
static uint64_t pages_in(uint64_t bytes, uint32_t page_bytes)
{
    return !bytes || !page_bytes ? 0 : bytes < page_bytes ? 1 : bytes / page_bytes;
}

static int set_quota(struct kv_service *s, char *word, struct lh_error *err)
{
    char *equals = strchr(word, '=');
    uint64_t bytes[KV_TIERS] = {0};
    uint32_t page[KV_TIERS];

    if (!equals || equals == word || equals - word > KV_TENANT_MAX ||
        !read_quota(equals + 1, bytes))
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "kvstore.quotas: \"%s\" is not TENANT=MEMORY or TENANT=MEMORY+DISK, such as "
                       "acme=2GiB+20GiB",
                       word);
    *equals = 0;
    struct kv_tenant *t = kv_tenant_named(&s->index, word, err);
    if (!t)
        return lh_wrap(err, "kvstore.quotas");
    kv_service_page_bytes(s, page);
    for (int tier = 0; tier < KV_TIERS; tier++)
        t->quota[tier] = pages_in(bytes[tier], page[tier]);
    t->has_quota = true;
    if (!strcmp(word, "*") && !s->index.tenants[0].has_quota)
        memcpy(s->index.tenants[0].quota, t->quota, sizeof t->quota);
    return 0;
}

int kv_quotas_parse(struct kv_service *s, const char *text, struct lh_error *err)
{
    lh_autofree char *copy = text ? strdup(text) : NULL;
    char *rest = NULL;
    int r = 0;

    if (text && !copy)
        return lh_fail_errno(err, ENOMEM, "kvstore.quotas");
    for (char *w = copy ? strtok_r(copy, ", ", &rest) : NULL; r == 0 && w;
         w = strtok_r(NULL, ", ", &rest))
        r = set_quota(s, w, err);
    return r;
}

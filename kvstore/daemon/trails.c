#include "kvstore/daemon/trails.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { SETS = 512, TRAIL_WAYS = 8 };

int kv_trails_init(struct kv_trails *t, struct lh_error *err)
{
    t->slots = calloc((size_t)SETS * TRAIL_WAYS, sizeof *t->slots);
    return t->slots ? 0 : lh_fail_errno(err, ENOMEM, "trajectories");
}

void kv_trails_finish(struct kv_trails *t)
{
    free(t->slots);
    t->slots = NULL;
}

/* FNV-1a. */
static struct kv_trail *set_of(const struct kv_trails *t, const char *name)
{
    uint32_t h = 2166136261u;

    for (; *name; name++)
        h = (h ^ (uint8_t)*name) * 16777619u;
    return &t->slots[h % SETS * TRAIL_WAYS];
}

const struct kv_trail *kv_trail_find(const struct kv_trails *t, const char *name)
{
    const struct kv_trail *set = set_of(t, name);

    for (int i = 0; *name && i < TRAIL_WAYS; i++)
        if (!strcmp(set[i].name, name))
            return &set[i];
    return NULL;
}

static struct kv_trail *longest_unused(struct kv_trail *set)
{
    struct kv_trail *best = set;

    for (int i = 1; i < TRAIL_WAYS; i++)
        if (set[i].used_us < best->used_us)
            best = &set[i];
    return best;
}

struct kv_trail *kv_trail_of(struct kv_trails *t, const char *name, const struct kv_key *root,
                             int64_t now_us)
{
    if (!*name)
        return NULL;
    struct kv_trail *at = (struct kv_trail *)kv_trail_find(t, name);
    if (!at || memcmp(&at->root, root, sizeof *root)) {
        at = at ? at : longest_unused(set_of(t, name));
        *at = (struct kv_trail){.root = *root};
        strncpy(at->name, name, sizeof at->name - 1);
    }
    at->used_us = now_us;
    return at;
}

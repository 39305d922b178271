#include "trainer/intake/plan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "trainer/intake/ledger_private.h"
#include "trainer/intake/random.h"

int plan_add(struct plan_split *p, const char *name, const char *family, const uint8_t *digest,
             size_t digest_len, struct lh_error *err)
{
    if ((p->n_tasks & (p->n_tasks - 1)) == 0) {
        size_t room = p->n_tasks ? p->n_tasks * 2 : 1;
        struct plan_task *bigger = realloc(p->tasks, room * sizeof *bigger);
        if (!bigger)
            return lh_fail_errno(err, ENOMEM, "planning %zu tasks", room);
        p->tasks = bigger;
    }
    struct plan_task *t = &p->tasks[p->n_tasks];
    if (digest_len != sizeof t->digest)
        return lh_fail(err, LH_INVALID_ARGUMENT, "task %s has a digest of %zu bytes, not 16", name,
                       digest_len);
    memcpy(t->digest, digest, sizeof t->digest);
    t->name = strdup(name);
    t->family = strdup(family);
    p->n_tasks++;
    return t->name && t->family ? 0 : lh_fail_errno(err, ENOMEM, "planning task %s", name);
}

static int by_family(const void *a, const void *b)
{
    const struct plan_task *x = a, *y = b;
    int c = strcmp(x->family, y->family);

    return c ? c : strcmp(x->name, y->name);
}

int plan_sort(struct plan_split *p, struct lh_error *err)
{
    if (!p->n_tasks)
        return 0;
    qsort(p->tasks, p->n_tasks, sizeof *p->tasks, by_family);
    p->family_first = calloc(p->n_tasks + 1, sizeof *p->family_first);
    if (!p->family_first)
        return lh_fail_errno(err, ENOMEM, "planning %zu tasks", p->n_tasks);
    for (size_t i = 0; i < p->n_tasks; i++)
        if (i == 0 || strcmp(p->tasks[i].family, p->tasks[i - 1].family))
            p->family_first[p->n_families++] = i;
    p->family_first[p->n_families] = p->n_tasks;
    return 0;
}

void plan_finish(struct plan_split *p)
{
    for (size_t i = 0; i < p->n_tasks; i++) {
        free(p->tasks[i].name);
        free(p->tasks[i].family);
    }
    free(p->tasks);
    free(p->family_first);
    *p = (struct plan_split){0};
}

const struct plan_task *plan_find(const struct plan_split *p, const char *name)
{
    for (size_t i = 0; i < p->n_tasks; i++)
        if (!strcmp(p->tasks[i].name, name))
            return &p->tasks[i];
    return NULL;
}

int plan_store(const struct plan_split *p, struct ledger *l, int split, struct lh_error *err)
{
    int r = 0;

    for (size_t i = 0; i < p->n_tasks && r == 0; i++)
        r = db_run(ledger_db(l), err,
                   "INSERT INTO tasks (split, name, family, digest)"
                   " VALUES (?, ?, ?, ?)",
                   "ittb", (int64_t)split, p->tasks[i].name, p->tasks[i].family, p->tasks[i].digest,
                   sizeof p->tasks[i].digest);
    return r;
}

int plan_load(struct plan_split *p, struct ledger *l, int split, struct lh_error *err)
{
    db_autostmt sqlite3_stmt *s =
        db_prepare(ledger_db(l), err, "SELECT name, family, digest FROM tasks WHERE split = ?", "i",
                   (int64_t)split);
    int r = s ? 1 : LH_INTERNAL;

    *p = (struct plan_split){0};
    while (r > 0 && (r = db_step(s, err)) > 0) {
        int a = plan_add(p, column_text(s, 0), column_text(s, 1), sqlite3_column_blob(s, 2),
                         (size_t)sqlite3_column_bytes(s, 2), err);
        r = a < 0 ? a : r;
    }
    return r < 0 ? r : plan_sort(p, err);
}

/* Which family, its first task and size, and how often the family came up before. */
static size_t turn_of(const struct plan_split *p, int64_t index, size_t *first, int64_t *before)
{
    size_t family = (size_t)(index % (int64_t)p->n_families);

    *first = p->family_first[family];
    *before = index / (int64_t)p->n_families;
    return p->family_first[family + 1] - *first;
}

const struct plan_task *plan_random(const struct plan_split *p, uint64_t seed, int64_t index)
{
    size_t first;
    int64_t before;
    size_t n = turn_of(p, index, &first, &before);

    return &p->tasks[first + random_below(seed, (uint64_t)index, n)];
}

const struct plan_task *plan_even(const struct plan_split *p, int64_t index, int64_t total)
{
    int64_t families = (int64_t)p->n_families, per = (total + families - 1) / families;
    size_t first;
    int64_t before;
    size_t n = turn_of(p, index, &first, &before);

    /* Fewer draws than tasks: a stride.  More, or replacements beyond the total: round and round.
     */
    int64_t at = per < (int64_t)n && before < per ? before * (int64_t)n / per : before % (int64_t)n;
    return &p->tasks[first + (size_t)at];
}

struct coordinates {
    uint64_t round, job;
    int64_t index;
    uint64_t member;
};

uint64_t plan_seed(uint64_t job_seed, const char *round, int64_t index, uint32_t member)
{
    struct coordinates c = {XXH3_64bits(round, strlen(round)), job_seed, index, member};

    return XXH3_64bits(&c, sizeof c);
}

void plan_trajectory_id(const char *job_id, const char *round, int64_t index, uint32_t member,
                        char id[LH_ID_SIZE])
{
    struct coordinates c = {XXH3_64bits(round, strlen(round)), XXH3_64bits(job_id, strlen(job_id)),
                            index, member};
    XXH128_canonical_t bytes;
    struct lh_id raw;

    XXH128_canonicalFromHash(&bytes, XXH3_128bits(&c, sizeof c));
    memcpy(raw.bytes, bytes.digest, sizeof raw.bytes);
    lh_id_print(&raw, id);
}

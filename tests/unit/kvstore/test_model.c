/* Random puts, lookups, releases, corruptions and retirements against a naive model of the store:
 * flat arrays, linear searches, the rules of kvstore/index/index.h written down once more in the
 * simplest form.  One page an object, so that the model needs no allocator.  Everything observable
 * must agree after every step: what is found, what is stored, what is refused, how many pages are
 * in use. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "direct.h"

enum {
    PAGES = 256,
    VERSIONS = 3,
    SEQUENCES = 24,
    UNITS = 20,
    NODES = 8192,
    OPEN = 30,
    STEPS = 20000
};

struct m_node {
    struct kv_key hash;
    unsigned root, unit, pins;
    int parent;
    bool exists, visible, state;
    uint64_t used;
};

struct m_ticket {
    uint64_t id;             /* 0 = free */
    unsigned root, first, n; /* units that were granted pages */
    const struct kv_key *chain;
    int at; /* -1 = none */
    bool state;
};

struct m_lease {
    uint64_t id;
    int at;
    unsigned from;
};

struct model {
    struct direct real;
    struct m_node nodes[NODES];
    int n;
    unsigned pages, roots, live[VERSIONS]; /* live: id of the version's root; 0 = closed */
    uint64_t clock;
    struct m_ticket tickets[OPEN];
    struct m_lease leases[OPEN];
    struct kv_key keys[VERSIONS], chains[VERSIONS][SEQUENCES][UNITS];
    bool hoarding; /* grants are kept: the store fills up with what is pinned */
    unsigned hits, misses, refused, aborted, dropped;
};

static int m_find(const struct model *m, unsigned root, const struct kv_key *hash)
{
    for (int i = 0; i < m->n; i++)
        if (m->nodes[i].visible && m->nodes[i].root == root &&
            !memcmp(&m->nodes[i].hash, hash, sizeof *hash))
            return i;
    return -1;
}

static unsigned m_children(const struct model *m, int i)
{
    unsigned n = 0;

    for (int k = 0; k < m->n; k++)
        n += m->nodes[k].exists && m->nodes[k].parent == i;
    return n;
}

static int m_reap(struct model *m, int i)
{
    while (i >= 0 && !m->nodes[i].visible && !m->nodes[i].pins && !m_children(m, i)) {
        m->pages -= 1 + m->nodes[i].state;
        m->nodes[i].exists = false;
        i = m->nodes[i].parent;
    }
    return i;
}

static int m_kill(struct model *m, int i)
{
    m->nodes[i].visible = false;
    int stays = m_reap(m, i);
    return stays == i ? m->nodes[i].parent : stays;
}

static void m_prune(struct model *m, int i)
{
    while (i >= 0 && m->nodes[i].visible && !m->nodes[i].pins && !m->nodes[i].state &&
           !m_children(m, i))
        i = m_kill(m, i);
}

static int m_oldest(const struct model *m, bool superseded)
{
    int best = -1;

    for (int i = 0; i < m->n; i++) {
        const struct m_node *n = &m->nodes[i];
        if (!n->visible || n->pins || (superseded && !n->state) ||
            m_children(m, i) != (superseded ? 1u : 0u))
            continue;
        const struct m_node *b = &m->nodes[best < 0 ? i : best];
        if (best < 0 || n->used < b->used || (n->used == b->used && n->unit > b->unit))
            best = i;
    }
    return best;
}

static bool m_room(struct model *m)
{
    while (m->pages >= PAGES) {
        int state = m_oldest(m, true), leaf = state < 0 ? m_oldest(m, false) : -1;
        if (state < 0 && leaf < 0)
            return false;
        if (state >= 0)
            m->nodes[state].state = false, m->pages--;
        else
            m_prune(m, m_kill(m, leaf));
    }
    m->pages++;
    return true;
}

static void m_unpin(struct model *m, int i)
{
    if (i >= 0 && --m->nodes[i].pins == 0)
        m_prune(m, m_reap(m, i));
}

/* ---- a put and its commit ---- */

static void m_give_up(struct model *m, struct m_ticket *t)
{
    m->pages -= t->n + t->state;
    m_unpin(m, t->at);
    t->id = 0;
}

/* Grants as the real store must: pins first, then page by page.  Returns the code. */
static int m_put(struct model *m, struct m_ticket *t, unsigned root, const struct kv_key *chain,
                 unsigned first, unsigned n)
{
    *t = (struct m_ticket){.root = root, .chain = chain, .first = first, .at = -1};
    if (!root)
        return LH_FAILED_PRECONDITION;
    for (unsigned i = first; i < n && m_find(m, root, &chain[i]) >= 0; i++)
        t->at = m_find(m, root, &chain[i]), t->first = i + 1;
    if (t->at < 0 && first && (t->at = m_find(m, root, &chain[first - 1])) < 0)
        return LH_FAILED_PRECONDITION;
    t->n = 0;
    if (t->first == n && m->nodes[t->at].state) {
        m->nodes[t->at].used = ++m->clock;
        return 0;
    }
    t->id = 1;
    if (t->at >= 0)
        m->nodes[t->at].pins++;
    bool room = true;
    for (unsigned i = t->first; room && i < n; i++)
        t->n += room = m_room(m);
    t->state = room && m_room(m);
    if (t->state)
        return 0;
    m_give_up(m, t);
    return LH_RESOURCE_EXHAUSTED;
}

static int m_link(struct model *m, unsigned root, const struct kv_key *hash, unsigned unit,
                  int parent)
{
    cr_assert(lt(int, m->n, NODES));
    m->nodes[m->n] = (struct m_node){.hash = *hash,
                                     .root = root,
                                     .unit = unit,
                                     .parent = parent,
                                     .exists = true,
                                     .visible = true,
                                     .used = ++m->clock};
    return m->n++;
}

static bool m_is_live(const struct model *m, unsigned root)
{
    for (int v = 0; v < VERSIONS; v++)
        if (root && m->live[v] == root)
            return true;
    return false;
}

static bool m_commit(struct model *m, struct m_ticket *t)
{
    int at = t->at;

    if (!m_is_live(m, t->root) || (at >= 0 && !m->nodes[at].visible)) {
        m_give_up(m, t);
        return false;
    }
    for (unsigned i = t->first; i < t->first + t->n; i++) {
        int there = m_find(m, t->root, &t->chain[i]);
        m->pages -= there >= 0;
        at = there >= 0 ? there : m_link(m, t->root, &t->chain[i], i, at);
    }
    m->pages -= m->nodes[at].state;
    m->nodes[at].state = true;
    m->nodes[at].used = ++m->clock;
    m_unpin(m, t->at);
    t->id = 0;
    return true;
}

/* ---- lookups and what ends them ---- */

static int m_lookup(const struct model *m, unsigned root, const struct kv_key *chain, unsigned n,
                    unsigned at_least)
{
    int best = -1;

    for (unsigned i = 0; i < n; i++) {
        int at = m_find(m, root, &chain[i]);
        if (at < 0)
            break;
        if (m->nodes[at].state && i >= at_least)
            best = at;
    }
    return best;
}

/* What a reader passes is as recent as its hit, unless it stands in line to be dropped already. */
static void m_read(struct model *m, int hit, unsigned from)
{
    m->nodes[hit].used = ++m->clock;
    m->nodes[hit].pins++;
    for (int i = hit; i >= 0 && m->nodes[i].unit >= from; i = m->nodes[i].parent) {
        unsigned children = m_children(m, i);
        if (m->nodes[i].pins || children > 1 || (children == 1 && !m->nodes[i].state))
            m->nodes[i].used = m->clock;
    }
}

static bool m_below(const struct model *m, int i, int top)
{
    while (i >= 0 && i != top)
        i = m->nodes[i].parent;
    return i == top;
}

static void m_drop(struct model *m, int top)
{
    int parent = m->nodes[top].parent;

    for (int i = 0; i < m->n; i++)
        if (m->nodes[i].exists && m_below(m, i, top))
            m->nodes[i].visible = false;
    for (int i = m->n - 1; i >= 0; i--)
        if (m->nodes[i].exists && !m->nodes[i].visible)
            m_reap(m, i);
    m_prune(m, parent);
}

static void m_retire(struct model *m, int keep)
{
    for (int v = 0; v < VERSIONS; v++)
        if (v != keep)
            m->live[v] = 0;
    for (int i = m->n - 1; i >= 0; i--)
        if (m->nodes[i].visible && !m_is_live(m, m->nodes[i].root))
            m_kill(m, i);
}

/* ---- both sides by one step ---- */

static void step_put(struct model *m, int v, int s, struct m_ticket *slot)
{
    const struct kv_key *chain = m->chains[v][s];
    unsigned first = (unsigned)rand() % UNITS, n = first + 1 + (unsigned)rand() % (UNITS - first);
    uint64_t ticket;

    if (rand() % 2)
        first = 0;
    int want = m_put(m, slot, m->live[v], chain, first, n);
    int got = direct_put(&m->real, &m->keys[v], chain, first, n, &ticket);
    cr_assert(eq(int, got, want));
    m->refused += got == LH_RESOURCE_EXHAUSTED;
    cr_assert(eq(int, got == 0 && ticket != 0, slot->id != 0));
    if (slot->id)
        slot->id = ticket;
}

static void step_end_ticket(struct model *m, struct m_ticket *t)
{
    uint64_t id = t->id;
    unsigned n = t->n;

    if (rand() % 8 == 0) {
        m_give_up(m, t);
        direct_release(&m->real, id, false);
        return;
    }
    bool want = m_commit(m, t);
    cr_assert(eq(int, direct_commit(&m->real, id, n), want));
    m->aborted += !want;
}

static void step_lookup(struct model *m, int v, int s, struct m_lease *slot)
{
    unsigned n = 1 + (unsigned)rand() % UNITS, at_least = (unsigned)rand() % n;
    const struct kv_key *chain = m->chains[v][s];
    uint64_t lease;

    if (rand() % 2)
        at_least = 0;
    int want = m_lookup(m, m->live[v], chain, n, at_least);
    size_t units = direct_lookup(&m->real, &m->keys[v], chain, n, at_least, &lease);
    cr_assert(eq(sz, units, want < 0 ? 0 : m->nodes[want].unit + 1));
    m->hits += want >= 0;
    m->misses += want < 0;
    if (want < 0)
        return;
    m_read(m, want, at_least);
    *slot = (struct m_lease){.id = lease, .at = want, .from = at_least};
}

static void step_end_lease(struct model *m, struct m_lease *l)
{
    bool corrupt = rand() % 16 == 0;
    int top = l->at;

    while (m->nodes[top].unit > l->from)
        top = m->nodes[top].parent;
    if (corrupt && m->nodes[top].visible) {
        m_drop(m, top);
        m->dropped++;
    }
    m_unpin(m, l->at);
    direct_release(&m->real, l->id, corrupt);
    l->id = 0;
}

static void step_root(struct model *m, int v)
{
    if (!m->live[v])
        m->live[v] = ++m->roots;
    cr_assert(eq(int, direct_root(&m->real, &m->keys[v], 4096, 4096), 0));
    if (rand() % 200)
        return;
    m_retire(m, v);
    cr_assert(eq(int, direct_retire(&m->real, &m->keys[v]), 0));
    while (kv_service_work(&m->real.service))
        ;
}

static void step(struct model *m)
{
    int v = rand() % VERSIONS, s = rand() % SEQUENCES, slot = rand() % OPEN;
    bool end = !m->hoarding || rand() % 10 == 0;

    switch (rand() % 5) {
    case 0:
        step_root(m, v);
        break;
    case 1:
    case 2:
        if (m->tickets[slot].id && end)
            step_end_ticket(m, &m->tickets[slot]);
        else if (!m->tickets[slot].id)
            step_put(m, v, s, &m->tickets[slot]);
        break;
    default:
        if (m->leases[slot].id && end)
            step_end_lease(m, &m->leases[slot]);
        else if (!m->leases[slot].id)
            step_lookup(m, v, s, &m->leases[slot]);
    }
    cr_assert(eq(u32, m->real.service.pages.used, m->pages));
}

/* Sequences share 4 units among all, 8 between halves: branches like those of groups and forks. */
static void make_chains(struct model *m)
{
    int32_t tokens[UNITS * 16];

    for (int v = 0; v < VERSIONS; v++) {
        struct kv_identity id = {.policy_version = {(uint8_t)v}, .tenant = ""};
        m->keys[v] = kv_root(&id);
        for (int s = 0; s < SEQUENCES; s++) {
            for (int i = 0; i < UNITS * 16; i++)
                tokens[i] = i < 4 * 16 ? 0 : i < 8 * 16 ? s % 2 : s;
            kv_chain(&m->keys[v], tokens, UNITS * 16, 16, m->chains[v][s]);
        }
    }
}

/* The model never reuses a node; nodes that are gone are squeezed out now and then. */
static void compact(struct model *m)
{
    static int to[NODES];
    int n = 0;

    for (int i = 0; i < m->n; i++) {
        to[i] = m->nodes[i].exists ? n : -1;
        if (m->nodes[i].exists)
            m->nodes[n++] = m->nodes[i];
    }
    m->n = n;
    for (int i = 0; i < n; i++)
        if (m->nodes[i].parent >= 0)
            m->nodes[i].parent = to[m->nodes[i].parent];
    for (int i = 0; i < OPEN; i++) {
        if (m->tickets[i].id && m->tickets[i].at >= 0)
            m->tickets[i].at = to[m->tickets[i].at];
        if (m->leases[i].id)
            m->leases[i].at = to[m->leases[i].at];
    }
}

static void run(unsigned seed)
{
    struct model *m = calloc(1, sizeof *m);

    fprintf(stderr, "seed %u (KV_MODEL_SEED repeats it)\n", seed);
    srand(seed);
    direct_open(&m->real, PAGES);
    make_chains(m);
    for (int i = 0; i < STEPS; i++) {
        step(m);
        m->hoarding ^= rand() % 500 == 0;
        if (i % 50)
            continue;
        compact(m);
        direct_check(&m->real);
    }
    cr_assert(m->hits > 300 && m->misses > 500 && m->dropped > 5 && m->refused > 20,
              "too tame: hits %u misses %u refused %u dropped %u", m->hits, m->misses, m->refused,
              m->dropped);
    cr_assert(gt(u64, m->real.service.index.superseded, 50));
    direct_close(&m->real);
    free(m);
}

/* The same seeds every time, so that a failure is the change's and not the hour's; a soak tries new
 * ones. */
Test(model, random_operations_agree_with_a_naive_store, .timeout = 600)
{
    const char *given = getenv("KV_MODEL_SEED");
    bool soak = getenv("LONGHAUL_SOAK");
    unsigned first = given ? (unsigned)strtoul(given, NULL, 10) : soak ? (unsigned)time(NULL) : 1;

    setenv("LONGHAUL_LOG", "error", 1);
    for (unsigned i = 0; i < (given ? 1 : soak ? 500 : 12); i++)
        run(first + i);
}

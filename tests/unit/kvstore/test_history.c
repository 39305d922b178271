/* Random histories of a store with memory and disk, with real bytes: puts, lookups, forks
 * (sequences that share prefixes), evictions from both tiers, new versions, crashes, and bytes that
 * are spoiled while nobody looks.  After every step:
 *
 *   - what is found is the longest boundary there is, by a walk that knows nothing of binary
 * search: every unit before it is there, and its state;
 *   - every byte is the one that was stored, or its checksum says no;
 *   - nothing is found under a version that has been retired (I4), before a crash or after it;
 *   - no page of either tier is lost or held twice, and nothing on disk has a hole before it. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "direct.h"
#include "proto/cleanup.h"

enum {
    MEMORY_PAGES = 256,
    DISK_BYTES = 16 << 20,
    VERSIONS = 3,
    SEQUENCES = 100,
    UNITS = 24,
    BLOCK = 9000,
    STATE = 20000,
    STEPS = 2500
};

struct history {
    struct direct d;
    char path[40];
    struct kv_key keys[VERSIONS], chains[VERSIONS][SEQUENCES][UNITS];
    bool live[VERSIONS];
    unsigned stored, hits, misses, corrupt, crashes, spoiled, from_disk;
};

static size_t longest(struct history *h, int v, const struct kv_key *chain, size_t n)
{
    struct kv_index *ix = &h->d.service.index;
    const struct kv_root *root = kv_root_find(ix, &h->keys[v]);
    size_t best = 0;

    for (size_t i = 0; root && i < n; i++) {
        const struct kv_node *at = kv_node_find(ix, root, &chain[i]);
        if (!at || !kv_object_exists(&at->parts[KV_BLOCK]))
            break;
        if (kv_object_exists(&at->parts[KV_STATE]))
            best = i + 1;
    }
    return best;
}

static void step_put(struct history *h, int v, const struct kv_key *chain)
{
    size_t first = (size_t)rand() % UNITS, n = first + 1 + (size_t)rand() % (UNITS - first);

    if (!h->live[v])
        return;
    h->stored += direct_store(&h->d, &h->keys[v], chain, rand() % 4 ? 0 : first, n);
}

static void step_read(struct history *h, int v, const struct kv_key *chain)
{
    size_t n = 1 + (size_t)rand() % UNITS, at_least = rand() % 3 ? 0 : (size_t)rand() % n;
    kv_service_work(&h->d.service); /* which may evict */
    size_t want = longest(h, v, chain, n);
    unsigned corrupt = h->corrupt;
    uint64_t loaded = h->d.service.exchange.loaded, late = h->d.service.count.late;
    size_t got = direct_read(&h->d, &h->keys[v], chain, n, at_least, 5000, &h->corrupt);

    h->from_disk += h->d.service.exchange.loaded > loaded;
    h->hits += got > 0;
    h->misses += !got;
    cr_assert(h->live[v] || !got, "a retired version served");
    if (h->corrupt == corrupt && h->d.service.count.late == late)
        cr_assert(eq(sz, got, want > at_least ? want : 0));
}

static void step_version(struct history *h, int v)
{
    if (!h->live[v])
        cr_assert(eq(int, direct_root(&h->d, &h->keys[v], BLOCK, STATE), 0));
    h->live[v] = true;
    if (rand() % 60)
        return;
    cr_assert(eq(int, direct_retire(&h->d, &h->keys[v]), 0));
    for (int i = 0; i < VERSIONS; i++)
        h->live[i] = i == v;
}

/* Without a word to anybody.  What was retired stays so only if that reached the file: here it has,
 * for a retirement that did not is one that did not happen before the crash. */
static void step_crash(struct history *h)
{
    if (rand() % 2)
        direct_settle(&h->d, 2000);
    bool settled = !h->d.service.disk.n_stale && !h->d.service.disk.in_flight;
    direct_close(&h->d);
    direct_open_on_disk(&h->d, MEMORY_PAGES, h->path, DISK_BYTES);
    for (int v = 0; v < VERSIONS; v++) {
        bool there = kv_root_find(&h->d.service.index, &h->keys[v]);
        if (settled)
            cr_assert(not(there && !h->live[v]), "a retired version is back");
        h->live[v] = there;
    }
    h->crashes++;
}

static void step_spoil(struct history *h)
{
    struct kv_disk *d = &h->d.service.disk;
    off_t at = (off_t)(d->data_at + (uint64_t)rand() % (d->pages.n / 4 * (uint64_t)d->page_bytes));
    int fd = open(h->path, O_RDWR | O_CLOEXEC);
    uint8_t byte;

    cr_assert(eq(int, (int)pread(fd, &byte, 1, at), 1));
    byte ^= 0x40;
    cr_assert(eq(int, (int)pwrite(fd, &byte, 1, at), 1));
    close(fd);
    h->spoiled++;
}

static void step(struct history *h)
{
    int v = rand() % VERSIONS, dice = rand() % 1000;
    const struct kv_key *chain = h->chains[v][rand() % SEQUENCES];

    if (dice < 30)
        step_version(h, v);
    else if (dice < 34)
        step_crash(h);
    else if (dice < 45)
        step_spoil(h);
    else if (dice < 145)
        direct_settle(&h->d, 50);
    else if (dice < 500)
        step_put(h, v, chain);
    else
        step_read(h, v, chain);
}

/* Sequences share 4 units among all, 12 within groups of ten: branches like those of groups. */
static void make_chains(struct history *h)
{
    int32_t tokens[UNITS * 16];

    for (int v = 0; v < VERSIONS; v++) {
        struct kv_identity id = {.policy_version = {(uint8_t)v}, .tenant = ""};
        h->keys[v] = kv_root(&id);
        for (int s = 0; s < SEQUENCES; s++) {
            for (int i = 0; i < UNITS * 16; i++)
                tokens[i] = i < 4 * 16 ? 0 : i < 12 * 16 ? s / 10 : s;
            kv_chain(&h->keys[v], tokens, UNITS * 16, 16, h->chains[v][s]);
        }
    }
}

/* The same one every time, so that a failure is the change's and not the hour's; a soak tries new
 * ones. */
static unsigned pick_seed(void)
{
    const char *given = getenv("KV_MODEL_SEED");

    if (given)
        return (unsigned)strtoul(given, NULL, 10);
    return getenv("LONGHAUL_SOAK") ? (unsigned)time(NULL) : 1;
}

Test(history, bytes_returned_are_bytes_stored_and_prefixes_have_no_holes, .timeout = 240)
{
    struct history *h = calloc(1, sizeof *h);
    unsigned seed = pick_seed();

    fprintf(stderr, "seed %u (KV_MODEL_SEED repeats it)\n", seed);
    setenv("LONGHAUL_LOG", "error", 1);
    srand(seed);
    strcpy(h->path, "/tmp/kvstore-disk-XXXXXX");
    int fd = mkstemp(h->path);
    cr_assert(ge(int, fd, 0));
    close(fd);
    make_chains(h);
    direct_open_on_disk(&h->d, MEMORY_PAGES, h->path, DISK_BYTES);
    for (int i = 0; i < STEPS; i++) {
        step(h);
        if (i % 20 == 0)
            direct_check(&h->d);
    }
    direct_settle(&h->d, 2000);
    direct_check(&h->d);
    fprintf(stderr, "stored %u hits %u (%u from disk) misses %u corrupt %u of %u crashes %u\n",
            h->stored, h->hits, h->from_disk, h->misses, h->corrupt, h->spoiled, h->crashes);
    cr_assert(h->hits > 50 && h->from_disk > 10 && h->crashes > 3 && h->spoiled > 5, "too tame");
    direct_close(&h->d);
    unlink(h->path);
    free(h);
}

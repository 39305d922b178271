/* What a tier finds in a file that is not as it was left: any half of the last writes, pages that
 * changed places, an end that is missing.  Whatever it is, every byte that is served is the one
 * that was stored, no page is lost or held twice, and the tier can be used again.  The file is a
 * memfd: what is written to it ends with the test. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "direct.h"
#include "proto/cleanup.h"

enum {
    PAGES = 256,
    BYTES = 16 << 20,
    VERSIONS = 2,
    UNITS = 12,
    SEQUENCES = 40,
    PIECE = 512, /* what a device writes whole */
    ROUNDS = 12, /* of a test; ten times as many in soak runs */
    SETTLE_MS = 30000
};

struct image {
    struct direct d;
    int fd;
    char path[40];
    struct kv_key roots[VERSIONS], chains[VERSIONS][SEQUENCES][UNITS];
    size_t index_bytes;      /* of the file: up to its data */
    uint8_t *before, *after; /* the file with version 0 and with version 1 */
};

static uint8_t *read_file(const struct image *m)
{
    uint8_t *bytes = malloc(BYTES);

    cr_assert(bytes != NULL);
    cr_assert(eq(int, (int)pread(m->fd, bytes, BYTES, 0), BYTES));
    return bytes;
}

static void write_file(const struct image *m, const uint8_t *bytes)
{
    cr_assert(eq(int, ftruncate(m->fd, BYTES), 0));
    cr_assert(eq(int, (int)pwrite(m->fd, bytes, BYTES, 0), BYTES));
}

static void open_tier(struct image *m)
{
    direct_open_on_disk(&m->d, PAGES, m->path, BYTES);
}

/* Until nothing is being written; the index may follow later. */
static void drain(struct image *m)
{
    do
        direct_settle(&m->d, 1);
    while (m->d.service.disk.in_flight);
}

/* More than memory holds, so that most of it is on disk. */
static void fill(struct image *m, int v)
{
    for (int s = 0; s < SEQUENCES; s++) {
        cr_assert(direct_store(&m->d, &m->roots[v], m->chains[v][s], 0, UNITS));
        drain(m);
    }
    direct_settle(&m->d, SETTLE_MS);
}

static void begin(struct image *m)
{
    int32_t tokens[UNITS * 16];

    memset(m, 0, sizeof *m);
    setenv("LONGHAUL_LOG", "error", 1);
    srand(1);
    m->fd = memfd_create("kv.disk", MFD_CLOEXEC);
    cr_assert(ge(int, m->fd, 0));
    snprintf(m->path, sizeof m->path, "/proc/self/fd/%d", m->fd);
    for (int v = 0; v < VERSIONS; v++) {
        struct kv_identity id = {.policy_version = {(uint8_t)v}, .tenant = ""};
        m->roots[v] = kv_root(&id);
        for (int s = 0; s < SEQUENCES; s++) {
            for (int i = 0; i < UNITS * 16; i++)
                tokens[i] = i < 32 ? 0 : s; /* two units are everybody's */
            kv_chain(&m->roots[v], tokens, UNITS * 16, 16, m->chains[v][s]);
        }
    }
    open_tier(m);
    cr_assert(eq(int, direct_root(&m->d, &m->roots[0], 4096, 8192), 0));
    fill(m, 0);
    m->index_bytes = m->d.service.disk.data_at;
    m->before = read_file(m);
    cr_assert(eq(int, direct_root(&m->d, &m->roots[1], 4096, 8192), 0));
    cr_assert(eq(int, direct_retire(&m->d, &m->roots[1]), 0));
    direct_settle(&m->d, SETTLE_MS);
    fill(m, 1);
    m->after = read_file(m);
    direct_close(&m->d);
}

static void end(struct image *m)
{
    free(m->before);
    free(m->after);
    close(m->fd);
}

static int rounds(void)
{
    return getenv("LONGHAUL_SOAK") ? 10 * ROUNDS : ROUNDS;
}

/* Opens the tier on the file as it is; returns how many sequences came back whole. */
static unsigned serve(struct image *m)
{
    unsigned whole = 0, corrupt = 0;

    open_tier(m);
    direct_check(&m->d);
    for (int v = 0; v < VERSIONS; v++) {
        const struct kv_root *root = kv_root_find(&m->d.service.index, &m->roots[v]);
        for (int s = 0; root && s < SEQUENCES; s++)
            whole += direct_read(&m->d, &m->roots[v], m->chains[v][s], UNITS, 0, SETTLE_MS,
                                 &corrupt) == UNITS;
    }
    direct_check(&m->d);
    cr_assert(eq(int, direct_root(&m->d, &m->roots[1], 4096, 8192), 0));
    fill(m, 1);
    for (int s = 0; s < SEQUENCES; s++) {
        unsigned bad = 0;
        direct_read(&m->d, &m->roots[1], m->chains[1][s], UNITS, 0, SETTLE_MS, &bad);
        if (bad) /* it had been spoiled and not read until now */
            cr_assert(direct_store(&m->d, &m->roots[1], m->chains[1][s], 0, UNITS));
    }
    direct_settle(&m->d, SETTLE_MS);
    direct_check(&m->d);
    direct_close(&m->d);
    return whole;
}

Test(image, as_it_was_left_everything_is_there, .timeout = 120)
{
    struct image m;

    begin(&m);
    cr_assert(gt(u32, serve(&m), SEQUENCES / 2));
    write_file(&m, m.before);
    cr_assert(gt(u32, serve(&m), SEQUENCES / 2), "the file of an hour ago is right as well");
    end(&m);
}

/* Writes have no order and are not atomic: of those since the last quiet moment, any part may have
 * reached the device. */
Test(image, any_part_of_the_last_writes_is_right_or_a_miss, .timeout = 1200)
{
    struct image m;
    lh_autofree uint8_t *torn = malloc(BYTES);

    begin(&m);
    for (int round = 0; round < rounds(); round++) {
        memcpy(torn, m.before, BYTES);
        int share = 1 + rand() % 15; /* from few to almost all */
        for (size_t at = 0; at < BYTES; at += PIECE)
            if (rand() % 16 < share)
                memcpy(torn + at, m.after + at, PIECE);
        write_file(&m, torn);
        serve(&m);
    }
    end(&m);
}

static void exchange(uint8_t *bytes, size_t piece, size_t a, size_t b)
{
    uint8_t saved[4096];

    memcpy(saved, bytes + a * piece, piece);
    memcpy(bytes + a * piece, bytes + b * piece, piece);
    memcpy(bytes + b * piece, saved, piece);
}

Test(image, exchanged_pages_and_slots_are_misses, .timeout = 1200)
{
    struct image m;
    lh_autofree uint8_t *mixed = malloc(BYTES);
    unsigned whole = 0;

    begin(&m);
    size_t data = m.index_bytes / 4096, pages = (size_t)SEQUENCES * UNITS;
    size_t first = kv_disk_sector_at(KV_ROOT_SECTORS) / KV_SLOT;
    for (int round = 0; round < rounds(); round++) {
        memcpy(mixed, m.after, BYTES);
        for (int i = 0; i <= round; i++) {
            exchange(mixed, 4096, data + (size_t)rand() % pages, data + (size_t)rand() % pages);
            exchange(mixed, KV_SLOT, first + (size_t)rand() % pages,
                     first + (size_t)rand() % pages);
        }
        write_file(&m, mixed);
        whole += serve(&m);
    }
    cr_assert(gt(u32, whole, 0), "what was left alone is served");
    end(&m);
}

Test(image, a_file_that_ends_early_is_begun_anew, .timeout = 120)
{
    struct image m;

    begin(&m);
    const size_t ends[] = {0,
                           1,
                           KV_SECTOR - 1,
                           KV_SECTOR,
                           m.index_bytes / 2,
                           m.index_bytes,
                           m.index_bytes + 5000,
                           BYTES - 1};
    for (size_t i = 0; i < LH_ARRAY_SIZE(ends); i++) {
        write_file(&m, m.after);
        cr_assert(eq(int, ftruncate(m.fd, (off_t)ends[i]), 0));
        cr_assert(eq(u32, serve(&m), 0), "%zu bytes", ends[i]);
        write_file(&m, m.after); /* the same with nothing where its end was */
        cr_assert(eq(int, ftruncate(m.fd, (off_t)ends[i]), 0));
        cr_assert(eq(int, ftruncate(m.fd, BYTES), 0));
        serve(&m);
    }
    end(&m);
}

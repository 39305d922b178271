/* Pages that two checkpoints have in common are kept once, and what is read through the stack below
 * is what was there before; what does not fit together is found. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agentenv/criu/image_file.h"
#include "agentenv/criu/memory.h"
#include "agentenv/criu/share.h"
#include "criu/criu.pb-c.h"
#include "proto/cleanup.h"
#include "proto/file.h"

enum { PAGES = 200, HOLE = 100, BASE = 0x400000 };

static char top[64];

static void setup(void)
{
    strcpy(top, "/tmp/longhaul-share-XXXXXX");
    cr_assert(mkdtemp(top) != NULL);
}

static void teardown(void)
{
    cr_assert(eq(int, lh_remove_tree(top, NULL), 0));
}

TestSuite(share, .init = setup, .fini = teardown);

static int dir(const char *name)
{
    lh_autofree char *path = lh_format("%s/%s", top, name);

    mkdir(path, 0710);
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    cr_assert(fd >= 0);
    return fd;
}

static void put(int at, const char *name, const void *data, size_t len)
{
    lh_autoclose int fd = openat(at, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

    cr_assert(eq(int, lh_write_all(fd, data, len, NULL), 0));
}

static void put_run(int fd, uint64_t vaddr, uint64_t pages, uint32_t flags)
{
    Criu__PagemapEntry e = CRIU__PAGEMAP_ENTRY__INIT;

    e.vaddr = vaddr;
    e.has_pages = e.has_flags = 1;
    e.pages = pages;
    e.flags = flags;
    cr_assert(eq(int, image_write(fd, &e.base, NULL), 0));
}

static int begin_map(int at, const char *name)
{
    Criu__PagemapHead head = CRIU__PAGEMAP_HEAD__INIT;
    int fd = openat(at, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

    head.pages_id = 7;
    cr_assert(eq(int, lh_write_all(fd, "\x19\x43\x56\x54\x25\x40\x08\x56", IMAGE_MAGIC, NULL), 0));
    cr_assert(eq(int, image_write(fd, &head.base, NULL), 0));
    return fd;
}

/* What page `i` holds after `n` changes, of which each touches three pages. */
static void fill(uint8_t *page, unsigned i, unsigned n)
{
    unsigned changed = 0;

    for (unsigned k = 1; k <= n; k++)
        if (i == k * 7 % PAGES || i == k * 7 % PAGES + 1 || i == PAGES - 1)
            changed = k;
    memset(page, (int)(1 + i), MEMORY_PAGE);
    memcpy(page, &changed, sizeof changed);
}

/* Two runs with a hole between them, of a task that was dumped after `n` changes. */
static int dump(const char *name, unsigned n)
{
    lh_autofree uint8_t *pages = malloc(PAGES * MEMORY_PAGE);
    int at = dir(name);
    lh_autoclose int map = begin_map(at, "pagemap-3.img");

    for (unsigned i = 0; i < PAGES; i++)
        fill(pages + i * MEMORY_PAGE, i, n);
    put_run(map, BASE, HOLE, MEMORY_PRESENT | 2);
    put_run(map, BASE + 2 * HOLE * MEMORY_PAGE, PAGES - HOLE, MEMORY_PRESENT);
    put(at, "pages-7.img", pages, PAGES * MEMORY_PAGE);
    put(at, "core-3.img", name, strlen(name));
    return at;
}

static void expect(int at, unsigned n)
{
    lh_autofree uint8_t *got = malloc(3 * HOLE * MEMORY_PAGE);
    uint8_t want[MEMORY_PAGE];
    bool known[3 * HOLE];
    struct lh_error e = {0};
    struct memory *opened = NULL;

    cr_assert(eq(int, criu_check(at, &e), 0), "%s", e.message);
    cr_assert(eq(int, memory_open(at, "pagemap-3.img", &opened, &e), 0), "%s", e.message);
    lh_auto(memory) m = opened;
    cr_assert(eq(int, memory_read(m, BASE, 3 * HOLE, got, known, &e), 0), "%s", e.message);
    for (unsigned i = 0; i < 3 * HOLE; i++) {
        bool hole = i >= HOLE && i < 2 * HOLE;
        cr_assert(eq(int, known[i], !hole), "page %u", i);
        fill(want, i < HOLE ? i : i - HOLE, n);
        cr_assert(hole || !memcmp(got + i * MEMORY_PAGE, want, MEMORY_PAGE), "page %u", i);
    }
}

static off_t size_of(int at, const char *name)
{
    struct stat st;

    return fstatat(at, name, &st, 0) == 0 ? st.st_size : -1;
}

Test(share, what_is_the_same_is_kept_once)
{
    lh_autoclose int first = dump("first", 0), second = dump("second", 1), to = dir("to");
    struct criu_shared done;
    struct lh_error e = {0};

    cr_assert(eq(int, criu_share(second, first, to, &done, &e), 0), "%s", e.message);
    cr_expect(eq(u64, done.pages, PAGES));
    cr_expect(eq(u64, done.shared, PAGES - 3));
    cr_expect(eq(i64, size_of(to, "pages-7.img"), 3 * MEMORY_PAGE));
    cr_expect(eq(i64, size_of(to, "core-3.img"), (off_t)strlen("second")));
    cr_expect(criu_shares(to));
    cr_expect(not(criu_shares(second)));
    expect(to, 1);
    lh_autofree char *gone = lh_format("%s/first", top);
    cr_assert(eq(int, lh_remove_tree(gone, &e), 0));
    expect(to, 1);
    cr_expect(eq(int, criu_share(to, second, dir("again"), &done, &e), LH_FAILED_PRECONDITION));
}

Test(share, the_stack_does_not_grow_for_ever)
{
    enum { GENERATIONS = 20 };
    char below[64] = "shared-0", name[64], path[256] = "";
    struct criu_shared done;
    struct lh_error e = {0};

    close(dump(below, 0));
    for (unsigned n = 1; n <= GENERATIONS; n++) {
        snprintf(name, sizeof name, "whole-%u", n);
        lh_autoclose int whole = dump(name, n), base = dir(below);
        snprintf(below, sizeof below, "shared-%u", n);
        lh_autoclose int to = dir(below);
        cr_assert(eq(int, criu_share(whole, base, to, &done, &e), 0), "%s", e.message);
        cr_expect(gt(u64, done.shared, PAGES - 3 * n - 1));
        expect(to, n);
    }
    for (int i = 0; i < 9; i++)
        strcat(path, "parent/");
    lh_autoclose int last = dir(below);
    cr_expect(lt(int, faccessat(last, path, F_OK, 0), 0));
}

Test(share, a_task_that_is_new_stays_whole)
{
    lh_autoclose int first = dump("first", 0), second = dump("second", 1), to = dir("to");
    struct criu_shared done;
    struct lh_error e = {0};

    cr_assert(eq(int, unlinkat(first, "pagemap-3.img", 0), 0));
    cr_assert(eq(int, criu_share(second, first, to, &done, &e), 0), "%s", e.message);
    cr_expect(eq(u64, done.shared, 0));
    expect(to, 1);
}

Test(share, what_is_missing_is_found)
{
    lh_autoclose int first = dump("first", 0), second = dump("second", 1), to = dir("to");
    struct criu_shared done;
    struct lh_error e = {0};

    cr_assert(eq(int, criu_share(second, first, to, &done, &e), 0), "%s", e.message);
    cr_assert(eq(int, unlinkat(to, "parent/pagemap-3.img", 0), 0));
    cr_expect(eq(int, criu_check(to, &e), LH_DATA_LOSS));
    cr_expect(strstr(e.message, "in no image below") != NULL, "%s", e.message);
    put(second, "pages-7.img", "", 0);
    cr_expect(eq(int, criu_check(second, &e), LH_DATA_LOSS));
}

Test(share, maps_that_make_no_sense_are_refused)
{
    static const struct {
        uint64_t a, n, b;
    } maps[] = {
        {BASE, 2, BASE + MEMORY_PAGE},         /* over each other */
        {BASE, 1, 0},                          /* backwards */
        {BASE + 1, 1, BASE + 2 * MEMORY_PAGE}, /* inside a page */
        {BASE, UINT64_MAX / 2, BASE},          /* beyond all memory */
    };

    for (size_t i = 0; i < LH_ARRAY_SIZE(maps); i++) {
        lh_autofree char *name = lh_format("bad-%zu", i);
        lh_autoclose int at = dir(name), map = begin_map(at, "pagemap-3.img");
        struct lh_error e = {0};
        put_run(map, maps[i].a, maps[i].n, MEMORY_PRESENT);
        put_run(map, maps[i].b, 1, MEMORY_PRESENT);
        cr_expect(eq(int, criu_check(at, &e), LH_DATA_LOSS), "%zu: %s", i, e.message);
    }
}

#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/crc.h"
#include "proto/error.h"
#include "proto/file.h"
#include "proto/hex.h"
#include "proto/id.h"
#include "proto/log.h"
#include "proto/process.h"

Test(error, context_grows_while_unwinding)
{
    struct lh_error e = {0};

    cr_assert(eq(int, lh_fail_errno(&e, ENOSPC, "writing %s", "seg-1"), LH_RESOURCE_EXHAUSTED));
    cr_assert(eq(int, lh_wrap(&e, "commit of turn %d", 3), LH_RESOURCE_EXHAUSTED));
    cr_assert(
        eq(str, e.message, (char *)"commit of turn 3: writing seg-1: No space left on device"));
    cr_assert(eq(str, (char *)lh_status_name(e.code), (char *)"RESOURCE_EXHAUSTED"));
    cr_assert(eq(int, lh_fail(NULL, LH_NOT_FOUND, "nobody listens"), LH_NOT_FOUND));
}

Test(error, long_messages_are_cut_not_overrun)
{
    struct lh_error e = {0};
    char big[3000];

    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = 0;
    lh_fail(&e, LH_INTERNAL, "%s", big);
    lh_wrap(&e, "%s", big);
    cr_assert(eq(sz, strlen(e.message), sizeof e.message - 1));
}

Test(id, round_trip_order_and_bad_text)
{
    char a[LH_ID_SIZE], b[LH_ID_SIZE], again[LH_ID_SIZE];
    struct lh_id id;

    lh_id_new_text(a);
    usleep(2000);
    lh_id_new_text(b);
    cr_assert(lt(str, a, b), "ids sort by time");
    cr_assert(lh_id_parse(a, &id));
    lh_id_print(&id, again);
    cr_assert(eq(str, a, again));
    cr_assert(not(lh_id_text_valid("8ZZZZZZZZZZZZZZZZZZZZZZZZZ")), "more than 128 bits");
    cr_assert(lh_id_text_valid("7ZZZZZZZZZZZZZZZZZZZZZZZZZ"));
    cr_assert(not(lh_id_text_valid("01ARZ3NDEKTSV4RRFFQ69G5FA")), "25 characters");
    cr_assert(not(lh_id_text_valid("01ARZ3NDEKTSV4RRFFQ69G5FAI")), "no such digit");
    cr_assert(not(lh_id_text_valid("../../etc/passwd0000000000")));
}

Test(hex, round_trip_and_bad_text)
{
    const uint8_t bytes[3] = {0x00, 0xa5, 0xff};
    uint8_t again[3];
    char text[7];

    lh_hex_print(bytes, sizeof bytes, text);
    cr_assert(eq(str, text, (char *)"00a5ff"));
    cr_assert(lh_hex_parse("00A5fF", again, sizeof again));
    cr_assert(eq(int, memcmp(bytes, again, sizeof bytes), 0));
    static const char *const bad[] = {"",       "00a5f",  "00a5ff0", "00a5fg",
                                      " 0a5ff", "0x00a5", "+0a5ff"};
    for (size_t i = 0; i < LH_ARRAY_SIZE(bad); i++)
        cr_assert(not(lh_hex_parse(bad[i], again, sizeof again)), "%s", bad[i]);
}

/* One whose supervisor died before it could ask to be told. */
Test(process, it_notices_a_supervisor_that_is_gone)
{
    cr_assert(lh_follow_supervisor(SIGTERM), "no supervisor at all");
    lh_autofree char *parent = lh_format("%d", getppid()), *other = lh_format("%d", getpid());
    setenv(LH_SUPERVISED, parent, 1);
    cr_assert(lh_follow_supervisor(0));
    setenv(LH_SUPERVISED, other, 1);
    cr_assert(not(lh_follow_supervisor(0)));
}

Test(crc, known_values)
{
    cr_assert(eq(u32, lh_crc32c(0, "123456789", 9), 0xe3069283u));
    uint32_t part = lh_crc32c(0, "1234", 4);
    cr_assert(eq(u32, lh_crc32c(part, "56789", 5), 0xe3069283u));
    cr_assert(eq(u32, lh_crc32c(0, "", 0), 0));
}

Test(crc, a_copy_has_the_checksum_of_its_source)
{
    uint8_t from[300], to[300];

    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (uint8_t)(i * 37);
    for (size_t n = 0; n < 280; n++) {
        memset(to, 0xee, sizeof to);
        cr_assert(eq(u32, lh_crc32c_copy(5, to + 3, from + 1, n), lh_crc32c(5, from + 1, n)));
        cr_assert(memcmp(to + 3, from + 1, n) == 0 && to[2] == 0xee && to[3 + n] == 0xee);
    }
}

static uint32_t bit_by_bit(uint32_t crc, const uint8_t *p, size_t len)
{
    for (crc = ~crc; len; len--) {
        crc ^= *p++;
        for (int k = 0; k < 8; k++)
            crc = crc & 1 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
    }
    return ~crc;
}

/* Large pieces are folded and stored past the caches; lengths and alignments around every edge. */
Test(crc, large_pieces_have_the_checksum_of_their_bits)
{
    enum { ROOM = 300000 };
    lh_autofree uint8_t *from = malloc(ROOM), *to = malloc(ROOM);

    srand(1);
    for (size_t i = 0; i < ROOM; i++)
        from[i] = (uint8_t)rand();
    for (int i = 0; i < 400; i++) {
        size_t most = i % 40 ? 4000 : ROOM - 200, n = (size_t)rand() % most;
        size_t at = (size_t)rand() % 70, gap = 1 + (size_t)rand() % 70;
        uint32_t start = (uint32_t)rand(), want = bit_by_bit(start, from + at, n);
        memset(to, 0xee, n + 200);
        cr_assert(eq(u32, lh_crc32c(start, from + at, n), want));
        cr_assert(eq(u32, lh_crc32c_copy(start, to + gap, from + at, n), want));
        cr_assert(memcmp(to + gap, from + at, n) == 0 && to[gap - 1] == 0xee &&
                  to[gap + n] == 0xee);
    }
}

Test(file, write_is_atomic_and_read_is_bounded)
{
    char dir[] = "/tmp/lh-base-XXXXXX";
    struct lh_error e = {0};
    size_t len;

    cr_assert(mkdtemp(dir) != NULL);
    lh_autofree char *path = lh_format("%s/a/b/c", dir);
    lh_autofree char *parent = lh_format("%s/a/b", dir);
    cr_assert(eq(int, lh_make_dirs(parent, 0700, &e), 0));
    cr_assert(eq(int, lh_write_file(path, "hello", 5, 0600, &e), 0));
    lh_autofree char *got = lh_read_file(path, 5, &len, &e);
    cr_assert(eq(str, got, (char *)"hello"));
    cr_assert(lh_read_file(path, 4, &len, &e) == NULL);
    cr_assert(eq(int, e.code, LH_RESOURCE_EXHAUSTED));
    cr_assert(eq(int, lh_write_file("/nonexistent/x", "y", 1, 0600, &e), LH_NOT_FOUND));
    cr_assert(eq(int, lh_remove_tree(dir, &e), 0));
    cr_assert(access(dir, F_OK) < 0);
    cr_assert(eq(int, lh_remove_tree(dir, &e), 0), "absent is fine");
}

Test(file, what_says_that_it_is_empty_is_read_to_its_end)
{
    struct lh_error e = {0};
    size_t len = 0;
    lh_autofree char *boot = lh_read_file("/proc/sys/kernel/random/boot_id", 64, &len, &e);
    lh_autofree char *cpu = lh_read_file("/proc/cpuinfo", 64 << 20, &len, &e);

    cr_assert(boot && cpu, "%s", e.message);
    cr_expect(eq(sz, strlen(boot), 37));
    cr_expect(eq(sz, strlen(cpu), len));
    cr_expect(gt(sz, len, 40));
    cr_expect(lh_read_file("/proc/cpuinfo", 40, &len, &e) == NULL);
    cr_expect(eq(int, e.code, LH_RESOURCE_EXHAUSTED));
}

Test(file, remove_tree_does_not_follow_links)
{
    char dir[] = "/tmp/lh-base-XXXXXX", keep[] = "/tmp/lh-keep-XXXXXX";
    struct lh_error e = {0};

    cr_assert(mkdtemp(dir) && mkdtemp(keep));
    lh_autofree char *link = lh_format("%s/link", dir);
    cr_assert(eq(int, symlink(keep, link), 0));
    cr_assert(eq(int, lh_remove_tree(dir, &e), 0));
    cr_assert(eq(int, rmdir(keep), 0), "the target is still there");
}

Test(log, levels_by_component, .init = NULL)
{
    setenv("LONGHAUL_LOG", "warn,rollout=debug", 1);
    cr_assert(lh_log_enabled("rollout", LH_DEBUG));
    cr_assert(not(lh_log_enabled("kvstored", LH_INFO)));
    cr_assert(lh_log_enabled("kvstored", LH_ERROR));
}

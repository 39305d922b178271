/* A process image is believed with its code only: every change of name, content or number of files
 * changes it, another key gives another, and a key that others can read is none. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agentenv/snapshot/mac.h"
#include "proto/file.h"

static char dir[64];

static const char *at(const char *name)
{
    static char paths[8][256];
    static int next;
    char *p = paths[next++ % 8];

    snprintf(p, sizeof paths[0], "%s/%s", dir, name);
    return p;
}

static void put(const char *name, const char *text, mode_t mode)
{
    cr_assert(eq(int, lh_write_file(at(name), text, strlen(text), mode, NULL), 0));
}

static void setup(void)
{
    strcpy(dir, "/tmp/longhaul-mac-XXXXXX");
    cr_assert(mkdtemp(dir) != NULL);
    cr_assert(eq(int, mkdir(at("images"), 0700), 0));
    put("images/core-1.img", "memory", 0600);
    put("images/pages-1.img", "pages", 0600);
}

static void teardown(void)
{
    cr_assert(eq(int, lh_remove_tree(dir, NULL), 0));
}

TestSuite(mac, .init = setup, .fini = teardown);

static void mac(const struct mac_key *key, uint8_t out[MAC_BYTES])
{
    struct lh_error e = {0};

    cr_assert(eq(int, mac_of_dir(key, at("images"), out, &e), 0), "%s", e.message);
}

Test(mac, sees_every_change)
{
    struct mac_key key = {{1, 2, 3}}, other = {{1, 2, 4}};
    uint8_t first[MAC_BYTES], now[MAC_BYTES];
    struct lh_error e = {0};

    mac(&key, first);
    mac(&key, now);
    cr_expect(mac_equal(first, now));
    mac(&other, now);
    cr_expect(not(mac_equal(first, now)));
    put("images/pages-1.img", "pagez", 0600);
    mac(&key, now);
    cr_expect(not(mac_equal(first, now)));
    put("images/pages-1.img", "pages", 0600);
    put("images/extra.img", "", 0600);
    mac(&key, now);
    cr_expect(not(mac_equal(first, now)));
    cr_assert(eq(int, unlink(at("images/extra.img")), 0));
    cr_assert(eq(int, rename(at("images/core-1.img"), at("images/core-2.img")), 0));
    mac(&key, now);
    cr_expect(not(mac_equal(first, now)));
    cr_assert(eq(int, symlink("/etc/passwd", at("images/link")), 0));
    cr_expect(lt(int, mac_of_dir(&key, at("images"), now, &e), 0), "a link is not covered");
}

Test(mac, keys_are_kept_close)
{
    struct mac_key a, b;
    struct lh_error e = {0};

    cr_assert(eq(int, mac_key_create(at("key"), &e), 0), "%s", e.message);
    cr_assert(eq(int, mac_key_load(at("key"), &a, &e), 0), "%s", e.message);
    cr_assert(eq(int, mac_key_load(at("key"), &b, &e), 0), "%s", e.message);
    cr_expect(eq(int, memcmp(&a, &b, sizeof a), 0));
    cr_expect(eq(int, mac_key_create(at("key"), &e), LH_ALREADY_EXISTS));
    cr_assert(eq(int, chmod(at("key"), 0640), 0));
    cr_expect(eq(int, mac_key_load(at("key"), &a, &e), LH_PERMISSION_DENIED));
    put("short", "0123", 0600);
    cr_expect(eq(int, mac_key_load(at("short"), &a, &e), LH_INVALID_ARGUMENT));
    cr_expect(eq(int, mac_key_load(at("none"), &a, &e), LH_NOT_FOUND));
    put("raw", "0123456789abcdef0123456789abcdeg", 0600);
    cr_expect(eq(int, mac_key_load(at("raw"), &a, &e), 0), "%s", e.message);
}

/* What comes from outside is believed with its code only: every change changes it, another key
 * gives another, and a key that others can read is none. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agentenv/snapshot/mac.h"
#include "proto/cleanup.h"
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
}

static void teardown(void)
{
    cr_assert(eq(int, lh_remove_tree(dir, NULL), 0));
}

TestSuite(mac, .init = setup, .fini = teardown);

static void mac(const struct mac_key *key, const char *text, uint8_t out[MAC_BYTES])
{
    struct lh_error e = {0};

    cr_assert(eq(int, mac_of_text(key, text, out, &e), 0), "%s", e.message);
}

Test(mac, sees_every_change)
{
    static const char *const others[] = {"{\"files\": [3]}\n", "{\"files\": [2]}", "",
                                         "{\"files\": [2]}\n\n"};
    struct mac_key key = {{1, 2, 3}}, other = {{1, 2, 4}};
    uint8_t first[MAC_BYTES], now[MAC_BYTES];

    mac(&key, "{\"files\": [2]}\n", first);
    mac(&key, "{\"files\": [2]}\n", now);
    cr_expect(mac_equal(first, now));
    mac(&other, "{\"files\": [2]}\n", now);
    cr_expect(not(mac_equal(first, now)));
    for (size_t i = 0; i < LH_ARRAY_SIZE(others); i++) {
        mac(&key, others[i], now);
        cr_expect(not(mac_equal(first, now)), "%s", others[i]);
    }
}

static uint64_t count_files(void)
{
    uint64_t n = 0;
    lh_autoclosedir DIR *d = opendir(dir);

    cr_assert(d != NULL);
    for (const struct dirent *e; (e = readdir(d));)
        n += e->d_name[0] != '.';
    return n;
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
    cr_assert(eq(int, mac_key_load(at("key"), &b, &e), 0), "%s", e.message);
    cr_expect(eq(int, memcmp(&a, &b, sizeof a), 0), "the first one stays");
    cr_expect(eq(u64, count_files(), 1), "nothing else is left behind");
    cr_assert(eq(int, chmod(at("key"), 0640), 0));
    cr_expect(eq(int, mac_key_load(at("key"), &a, &e), LH_PERMISSION_DENIED));
    put("short", "0123", 0600);
    cr_expect(eq(int, mac_key_load(at("short"), &a, &e), LH_INVALID_ARGUMENT));
    cr_expect(eq(int, mac_key_load(at("none"), &a, &e), LH_NOT_FOUND));
    put("raw", "0123456789abcdef0123456789abcdeg", 0600);
    cr_expect(eq(int, mac_key_load(at("raw"), &a, &e), 0), "%s", e.message);
}

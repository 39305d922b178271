/* Layers with the same effect have the same address, any difference in effect gives another one. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "agentenv/sandbox/box.h"
#include "agentenv/snapshot/address.h"
#include "proto/file.h"
#include "tests/must_work.h"

static char dir[64];

static void setup(void)
{
    NEEDS("sandbox", getuid() == 0, "trusted attributes and whiteouts need root");
    strcpy(dir, "/tmp/longhaul-address-XXXXXX");
    cr_assert(mkdtemp(dir) != NULL);
}

static void teardown(void)
{
    cr_assert(eq(int, lh_remove_tree(dir, NULL), 0));
}

TestSuite(address, .init = setup, .fini = teardown, .timeout = 60);

static const char *at(const char *layer, const char *name)
{
    static char paths[8][256];
    static int next;
    char *p = paths[next++ % 8];

    snprintf(p, sizeof paths[0], "%s/%s/%s", dir, layer, name);
    return p;
}

static void put(const char *layer, const char *name, const char *text)
{
    lh_autofclose FILE *f = fopen(at(layer, name), "w");

    cr_assert(f != NULL, "%m");
    fputs(text, f);
}

/* Belongs to the sandbox, and one time everywhere, so that only what a test changes differs. */
static void settle(const char *layer)
{
    char command[512];

    snprintf(command, sizeof command,
             "find %s/%s ! -type c -exec chown -h %d:%d {} + && "
             "find %s/%s ! -type c -exec touch -h -d @1000000000 {} +",
             dir, layer, BOX_UID_BASE, BOX_UID_BASE, dir, layer);
    cr_assert(eq(int, system(command), 0));
}

static void make(const char *layer)
{
    cr_assert(eq(int, mkdir(at(layer, ""), 0755), 0), "%m");
    cr_assert(eq(int, mkdir(at(layer, "d"), 0755), 0));
    put(layer, "d/f", "content");
    put(layer, "g", "");
    cr_assert(eq(int, symlink("d/f", at(layer, "l")), 0));
    cr_assert(eq(int, link(at(layer, "d/f"), at(layer, "second")), 0));
    cr_assert(eq(int, mknod(at(layer, "gone"), S_IFCHR, makedev(0, 0)), 0));
    settle(layer);
}

static const char *address(const char *layer)
{
    static char texts[4][LAYER_ADDRESS_SIZE];
    static int next;
    char *text = texts[next++ % 4];
    struct lh_error e = {0};

    cr_assert(eq(int, layer_address(at(layer, ""), text, NULL, &e), 0), "%s", e.message);
    return text;
}

Test(address, does_not_depend_on_how_it_came_about)
{
    make("a");
    cr_assert(eq(int, mkdir(at("b", ""), 0755), 0));
    cr_assert(eq(int, mknod(at("b", "gone"), S_IFCHR, makedev(0, 0)), 0));
    put("b", "second", "content");
    cr_assert(eq(int, mkdir(at("b", "d"), 0755), 0));
    cr_assert(eq(int, link(at("b", "second"), at("b", "d/f")), 0));
    cr_assert(eq(int, symlink("d/f", at("b", "l")), 0));
    put("b", "g", "");
    settle("b");
    cr_assert(eq(int, setxattr(at("b", "d"), "trusted.overlay.origin", "host", 4, 0), 0));
    cr_assert(eq(int, setxattr(at("b", "d"), "trusted.overlay.impure", "y", 1, 0), 0));
    cr_expect(eq(str, (char *)address("a"), (char *)address("b")));
}

Test(address, is_blind_to_holes)
{
    make("a");
    make("b");
    cr_assert(eq(int, truncate(at("a", "g"), 1 << 20), 0));
    lh_autofree char *zeros = calloc(1, 1 << 20);
    lh_autoclose int fd = open(at("b", "g"), O_WRONLY);
    cr_assert(eq(int, lh_write_all(fd, zeros, 1 << 20, NULL), 0));
    settle("a");
    settle("b");
    cr_expect(eq(str, (char *)address("a"), (char *)address("b")));
}

static void change_content(void)
{
    put("b", "d/f", "c0ntent");
    settle("b");
}

static void change_name(void)
{
    cr_assert(eq(int, rename(at("b", "g"), at("b", "h")), 0));
    settle("b");
}

static void change_mode(void)
{
    cr_assert(eq(int, chmod(at("b", "g"), 0600), 0));
}

static void change_owner(void)
{
    cr_assert(eq(int, chown(at("b", "g"), BOX_UID_BASE + 7, BOX_UID_BASE), 0));
}

static void change_time(void)
{
    const struct timespec t[2] = {{1000000000, 0}, {1000000000, 1}};

    cr_assert(eq(int, utimensat(AT_FDCWD, at("b", "d/f"), t, 0), 0));
}

static void change_target(void)
{
    cr_assert(eq(int, unlink(at("b", "l")), 0));
    cr_assert(eq(int, symlink("d/g", at("b", "l")), 0));
    settle("b");
}

static void break_link(void)
{
    cr_assert(eq(int, unlink(at("b", "second")), 0));
    put("b", "second", "content");
    settle("b");
}

static void mark_opaque(void)
{
    cr_assert(eq(int, setxattr(at("b", "d"), "trusted.overlay.opaque", "y", 1, 0), 0));
}

static void set_attribute(void)
{
    cr_assert(eq(int, setxattr(at("b", "g"), "user.note", "x", 1, 0), 0));
}

static void drop_whiteout(void)
{
    cr_assert(eq(int, unlink(at("b", "gone")), 0));
    settle("b");
}

static void whiteout_to_pipe(void)
{
    cr_assert(eq(int, unlink(at("b", "gone")), 0));
    cr_assert(eq(int, mkfifo(at("b", "gone"), 0), 0));
    settle("b");
}

Test(address, tells_every_difference)
{
    void (*const changes[])(void) = {change_content, change_name,   change_mode,     change_owner,
                                     change_time,    change_target, break_link,      mark_opaque,
                                     set_attribute,  drop_whiteout, whiteout_to_pipe};

    make("a");
    for (size_t i = 0; i < LH_ARRAY_SIZE(changes); i++) {
        make("b");
        cr_assert(eq(str, (char *)address("a"), (char *)address("b")));
        changes[i]();
        cr_expect(ne(str, (char *)address("a"), (char *)address("b")), "change %zu", i);
        cr_assert(eq(int, lh_remove_tree(at("b", ""), NULL), 0));
    }
}

Test(address, refuses_what_a_layer_cannot_hold)
{
    char text[LAYER_ADDRESS_SIZE];
    struct lh_error e = {0};

    make("a");
    cr_assert(eq(int, mknod(at("a", "dev"), S_IFCHR, makedev(1, 3)), 0));
    cr_assert(eq(int, lchown(at("a", "dev"), BOX_UID_BASE, BOX_UID_BASE), 0));
    cr_expect(eq(int, layer_address(at("a", ""), text, NULL, &e), LH_FAILED_PRECONDITION));
    cr_assert(eq(int, unlink(at("a", "dev")), 0));
    cr_assert(eq(int, chown(at("a", "g"), 0, 0), 0));
    cr_expect(eq(int, layer_address(at("a", ""), text, NULL, &e), LH_FAILED_PRECONDITION));
    cr_expect(strstr(e.message, "g in a layer belongs to 0:0") != NULL, "%s", e.message);
}

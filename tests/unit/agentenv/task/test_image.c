#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agentenv/task/tree.h"
#include "proto/cleanup.h"
#include "proto/file.h"

static char dir[64];

static void open_dir(void)
{
    strcpy(dir, "/tmp/longhaul-tree-XXXXXX");
    cr_assert(mkdtemp(dir) != NULL);
    cr_assert(eq(int, chdir(dir), 0));
}

static void close_dir(void)
{
    lh_remove_tree(dir, NULL);
}

TestSuite(tree, .init = open_dir, .fini = close_dir);

static void shell(const char *command)
{
    cr_assert(eq(int, system(command), 0), "%s", command);
}

static int take(const char *from, const char *to, uint8_t digest[TREE_DIGEST], struct lh_error *e)
{
    lh_autofree char *source = lh_format("%s/%s", dir, from);
    lh_autofree char *target = lh_format("%s/%s", dir, to);
    uint64_t bytes;

    cr_assert(eq(int, mkdir(target, 0755), 0));
    return tree_import(&(struct tree_source){.path = source}, target, digest, &bytes, e);
}

#define MAKE_TREE                                                                                  \
    "mkdir -p src/bin src/etc/deep; echo one >src/bin/one; chmod 4755 src/bin/one;"                \
    "ln -s one src/bin/link; echo two >src/etc/deep/two; chown 5:6 src/etc/deep/two;"              \
    "truncate -s 1M src/sparse; echo end >>src/sparse; mkdir -m 1777 src/tmp"

Test(tree, a_directory_and_its_tars_are_the_same_image)
{
    uint8_t a[TREE_DIGEST], b[TREE_DIGEST];
    struct lh_error e = {0};

    shell(MAKE_TREE);
    shell("tar -C src -cf plain.tar .");
    cr_assert(eq(int, take("src", "a", a, &e), 0), "%s", e.message);
    cr_assert(eq(int, take("plain.tar", "b", b, &e), 0), "%s", e.message);
    cr_assert(eq(int, memcmp(a, b, TREE_DIGEST), 0));
    shell("diff -r --no-dereference src a && diff -r --no-dereference src b");
    shell("[ \"$(stat -c %u:%g:%a b/etc/deep/two b/bin/one b/tmp)\" = "
          "\"$(stat -c %u:%g:%a src/etc/deep/two src/bin/one src/tmp)\" ]");
}

Test(tree, any_difference_is_another_image)
{
    static const char *const changes[] = {
        "echo One >src/bin/one",  "chmod 755 src/bin/one",    "ln -sf two src/bin/link",
        "mv src/sparse src/full", "chown 7 src/etc/deep/two", "truncate -s 2M src/sparse",
    };
    uint8_t first[TREE_DIGEST], next[TREE_DIGEST];
    struct lh_error e = {0};

    shell(MAKE_TREE);
    cr_assert(eq(int, take("src", "first", first, &e), 0), "%s", e.message);
    for (size_t i = 0; i < LH_ARRAY_SIZE(changes); i++) {
        lh_autofree char *to = lh_format("next%zu", i);

        shell("rm -rf src && " MAKE_TREE);
        shell(changes[i]);
        cr_assert(eq(int, take("src", to, next, &e), 0), "%s", e.message);
        cr_assert(ne(int, memcmp(first, next, TREE_DIGEST), 0), "%s", changes[i]);
    }
}

Test(tree, hostile_archives_are_refused_and_touch_nothing_outside)
{
    static const char *const hostile[][2] = {
        {"mkdir s; cd s; echo x >x; tar --transform 's,x,../escaped,' -Pcf ../h.tar x",
         "leaves the tree"},
        {"mkdir s; cd s; echo x >x; tar --transform 's,x,/tmp/longhaul-escaped,' -Pcf ../h.tar x",
         "leaves the tree"},
        {"mkdir s; cd s; echo x >x; tar --transform 's,x,a/../../escaped,' -Pcf ../h.tar x",
         "leaves the tree"},
        {"mkdir -p s/d; cd s; ln -s /tmp out; echo x >d/f; tar --transform 's,^d,out,' -cf "
         "../h.tar "
         "out d/f",
         "h.tar"},
        {"mkdir s; cd s; echo x >a; ln a b; tar --transform 's,^a,/etc/passwd,;s,^b,c,' -Pcf "
         "../h.tar "
         "a b",
         ""},
        {"head -c 5000 /dev/urandom >h.tar", "h.tar"},
        {"mkdir s; echo x >s/x; tar -cf h.tar s; truncate -s 700 h.tar; printf x >>h.tar", "h.tar"},
        {": >h.tar", "h.tar"},
    };

    for (size_t i = 0; i < LH_ARRAY_SIZE(hostile); i++) {
        uint8_t digest[TREE_DIGEST];
        struct lh_error e = {0};

        shell("rm -rf s t h.tar");
        shell(hostile[i][0]);
        cr_expect(lt(int, take("h.tar", "t", digest, &e), 0), "%s", hostile[i][0]);
        cr_expect(strstr(e.message, hostile[i][1]) != NULL, "%s: %s", hostile[i][0], e.message);
        cr_expect(ne(int, access("escaped", F_OK), 0));
        cr_expect(ne(int, access("/tmp/longhaul-escaped", F_OK), 0));
        cr_expect(ne(int, access("/tmp/f", F_OK), 0));
    }
}

Test(tree, devices_are_left_out)
{
    uint8_t digest[TREE_DIGEST];
    struct lh_error e = {0};

    shell("mkdir -p src/dev; mknod src/dev/mem c 1 1; mkfifo src/pipe; echo x >src/x");
    cr_assert(eq(int, take("src", "t", digest, &e), 0), "%s", e.message);
    shell("[ -f t/x ] && [ ! -e t/dev/mem ] && [ ! -e t/pipe ]");
}

Test(tree, a_skeleton_fills_gaps_and_follows_no_link)
{
    struct lh_error e = {0};

    shell("mkdir -p a/dev b outside; echo mine >a/dev/null; ln -s ../outside b/dev");
    cr_assert(eq(int, tree_add_skeleton("a", &e), 0), "%s", e.message);
    cr_assert(eq(int, tree_add_skeleton("a", &e), 0), "%s", e.message);
    cr_assert(eq(int, tree_add_skeleton("b", &e), 0), "%s", e.message);
    shell("[ \"$(cat a/dev/null)\" = mine ] && [ -f a/dev/zero ] && [ -d a/dev/pts ]");
    shell("[ $(stat -c %a a/tmp) = 1777 ] && [ $(readlink a/dev/fd) = /proc/self/fd ]");
    shell("[ -d b/work ] && [ -z \"$(ls -A outside)\" ]");
}

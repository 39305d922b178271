/* Sealing: the layer holds what was written, bit for bit, and never changes again. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "proto/file.h"
#include "tests/unit/agentenv/lab.h"

TestSuite(seal, .init = lab_init, .fini = lab_fini, .timeout = 120);

static char layer_path[128];

static void seal(struct box *b, const char *name, bool want_live)
{
    struct lh_error err = {0};
    bool live = !want_live;

    snprintf(layer_path, sizeof layer_path, "%s/%s", lab.dir, name);
    cr_assert(box_seal(b, layer_path, &live, &err) == 0, "%s", err.message);
    cr_assert(live == want_live, "%s: live = %d", name, live);
}

/* A box over the sealed layer and the image, as a fork or resume makes it. */
static struct box *start_above(const char *layer, const char *id)
{
    struct box_layer unused, layers[2] = {{layer, false}, {lab.root, true}};
    struct box_spec spec = lab_spec(&lab, id, &unused);
    struct lh_error err = {0};

    spec.layers = layers;
    spec.n_layers = 2;
    struct box *b = box_start(lab.host, &spec, &err);
    cr_assert(b != NULL, "%s", err.message);
    return b;
}

/* A digest of the tree: names, kinds, modes, owners, sizes, contents. */
static char *digest(const char *dir)
{
    static char line[2][64];
    static int turn;
    lh_autofree char *cmd =
        lh_format("cd %s && { find . -printf '%%P %%y %%m %%U %%G %%n %%l\\n' | sort; "
                  "find . -type f -print0 | sort -z | xargs -0 cat; } | sha256sum",
                  dir);
    FILE *f = popen(cmd, "r");
    char *to = line[turn ^= 1];

    cr_assert(f && fgets(to, 64, f));
    pclose(f);
    return to;
}

/* Everything overlay keeps in an upper directory, and what copies get wrong. */
static const char mixed_work[] =
    "set -e; cd /root; echo data > file; ln file linked; ln -s /etc/base soft; mkfifo fifo; "
    "dd if=/dev/zero of=sparse bs=1 count=1 seek=20000000 2>/dev/null; echo changed > /etc/base; "
    "rm /usr/share/keep/2; mkdir dir; chown 1000:77 dir; chmod 2750 dir; echo x > dir/x; "
    "rm -r /work; mkdir /work; echo new > /work/new; rm -r /usr/share/keep; mkdir /usr/share/keep; "
    "echo only > /usr/share/keep/only; chmod 4755 file; touch -d '2001-02-03 04:05:06' dir/x";

static const char mixed_check[] =
    "set -e; cd /root; [ $(stat -c %h file) = 2 ]; [ file -ef linked ]; [ -p fifo ]; "
    "[ $(stat -c %s sparse) = 20000001 ]; [ $(stat -c %b sparse) -lt 1000 ]; "
    "[ $(cat /etc/base) = changed ]; [ $(readlink soft) = /etc/base ]; "
    "[ \"$(stat -c '%u %g %a' dir)\" = '1000 77 2750' ]; [ $(stat -c %a file) = 4755 ]; "
    "[ $(date -r dir/x +%Y%m%d) = 20010203 ]; "
    "[ $(ls /usr/share/keep) = only ]; [ $(ls /work) = new ]; rm -r /usr/share/keep; echo fine";

Test(seal, live_when_init_is_alone)
{
    struct box *b = lab_start(&lab, "one");

    lab_out(b, mixed_work);
    seal(b, "layer", true);
    char *before = digest(layer_path);
    cr_assert(eq(str, (char *)lab_out(b, mixed_check), (char *)"fine"), "the box goes on");
    lab_out(b, "echo later > /root/later; rm /root/file; echo z >> /etc/base");
    cr_assert(eq(str, digest(layer_path), before), "the layer does not change");

    struct box *fork = start_above(layer_path, "fork");
    cr_assert(eq(str, (char *)lab_out(fork, mixed_check), (char *)"fine"));
    cr_assert(
        eq(str, (char *)lab_out(fork, "ls /root/later 2>/dev/null || echo none"), (char *)"none"));
    cr_assert(box_destroy(fork, NULL) == 0);
    cr_assert(box_destroy(b, NULL) == 0);
}

Test(seal, live_many_times_in_a_row)
{
    enum { TIMES = 40 };
    struct box *b = lab_start(&lab, "one");
    char name[32], script[64];

    for (int i = 0; i < TIMES; i++) {
        snprintf(script, sizeof script, "echo %d > /root/%d", i, i);
        lab_out(b, script);
        snprintf(name, sizeof name, "layer-%d", i);
        seal(b, name, true);
    }
    cr_assert(eq(str, (char *)lab_out(b, "cat /root/* | wc -l; cat /root/39"), (char *)"40\n39"));
    lab_out(b, "test -e /dev/pts/ptmx && echo > /dev/null && test -r /proc/self/stat");
    cr_assert(box_destroy(b, NULL) == 0);
}

Test(seal, by_copy_while_something_runs)
{
    struct box *b = lab_start(&lab, "one");

    lab_out(b, mixed_work);
    lab_out(b, "(cd /work; exec sleep 100) > /dev/null 2>&1 &");
    seal(b, "layer", false);
    char *before = digest(layer_path);
    lab_out(b, "ps | grep [s]leep && echo later > /root/later");
    cr_assert(eq(str, digest(layer_path), before), "the layer does not change");

    struct box *fork = start_above(layer_path, "fork");
    cr_assert(eq(str, (char *)lab_out(fork, mixed_check), (char *)"fine"));
    cr_assert(box_destroy(fork, NULL) == 0);
    cr_assert(eq(str, (char *)lab_out(b, mixed_check), (char *)"fine"));
    cr_assert(box_destroy(b, NULL) == 0);
}

Test(seal, by_copy_equals_live)
{
    struct box *a = lab_start(&lab, "a"), *c = lab_start(&lab, "c");
    char live[64];

    lab_out(a, mixed_work);
    lab_out(c, mixed_work);
    seal(a, "live", true);
    snprintf(live, sizeof live, "%s", digest(layer_path));
    lab_out(c, "sleep 100 > /dev/null 2>&1 &");
    seal(c, "copied", false);
    cr_assert(eq(str, digest(layer_path), live));
    lh_autofree char *opaque = lh_format("%s/usr/share/keep", layer_path);
    char value[8] = "";
    cr_assert(getxattr(opaque, "trusted.overlay.opaque", value, sizeof value) == 1);
    cr_assert(eq(chr, value[0], 'y'));
    cr_assert(box_destroy(a, NULL) == 0);
    cr_assert(box_destroy(c, NULL) == 0);
}

Test(seal, a_frozen_box_stays_frozen_and_an_existing_layer_is_refused)
{
    struct box *b = lab_start(&lab, "one");
    bool live;

    cr_assert(box_freeze(b, NULL) == 0);
    seal(b, "layer", true);
    cr_assert(eq(int, box_seal(b, layer_path, &live, NULL), LH_ALREADY_EXISTS));
    cr_assert(box_thaw(b, NULL) == 0);
    cr_assert(eq(str, (char *)lab_out(b, "echo on > /root/x && cat /root/x"), (char *)"on"));
    cr_assert(box_destroy(b, NULL) == 0);
}

Test(seal, a_box_is_adopted_after_a_seal_but_not_in_the_middle_of_one)
{
    struct box *b = lab_start(&lab, "one");
    struct box_layer unused, layers[2] = {{layer_path, false}, {lab.root, true}};
    struct box_spec spec = lab_spec(&lab, "one", &unused);
    struct box_identity who = box_identity(b);
    struct lh_error err = {0};

    seal(b, "layer", true);
    box_close(b);
    spec.layers = layers;
    spec.n_layers = 2;
    b = box_adopt(lab.host, &spec, &who, &err);
    cr_assert(b != NULL, "%s", err.message);
    seal(b, "layer-2", true);
    box_close(b);

    lh_autofree char *trace = lh_format("%s/upper.99", spec.dir);
    cr_assert(mkdir(trace, 0755) == 0);
    cr_assert(box_adopt(lab.host, &spec, &who, &err) == NULL);
    cr_assert(eq(int, err.code, LH_FAILED_PRECONDITION));
    cr_assert(box_destroy_named(lab.host, "one", spec.dir, NULL) == 0);
}

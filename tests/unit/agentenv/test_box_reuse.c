/* What one sandbox leaves to the next: nothing that could be noticed. */
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

TestSuite(reuse, .init = lab_init, .fini = lab_fini, .timeout = 120);

static void destroy(struct box *b)
{
    struct lh_error err = {0};

    cr_assert(box_destroy(b, &err) == 0, "%s", err.message);
}

/* ---- a box over the files of another ---- */

/* In memory unless it is called "disk". */
static struct box *start_over(struct box *below, const char *id)
{
    lh_autofree char *path = lh_format("%s/top", lab.dir);
    struct box_layer unused, top = {path, true};
    struct box_spec spec = lab_spec(&lab, id, &unused);
    struct lh_error err = {0};

    cr_assert(mkdir(path, 0755) == 0);
    spec.layers = &top;
    spec.below = below;
    spec.in_memory = strcmp(id, "disk") != 0;
    spec.limits.disk_bytes = 4 << 20;
    if (spec.in_memory)
        cr_assert(rmdir(spec.dir) == 0);
    struct box *b = box_start(lab.host, &spec, &err);
    cr_assert(b != NULL, "%s", err.message);
    cr_assert(rmdir(path) == 0); /* the overlay has it */
    return b;
}

static void try_over(const char *id)
{
    struct box *below = lab_start(&lab, "one");

    lab_out(below, "echo mine >/work/a && echo b >/work/b && rm /etc/group");
    struct box *b = start_over(below, id);
    cr_assert(eq(str, (char *)lab_out(b, "cat /work/a"), (char *)"mine"));
    lab_out(b, "echo theirs >/work/a; rm /work/b; mkdir /work/c; echo x >/tmp/x");
    cr_assert(eq(str, (char *)lab_out(b, "cat /work/a; ls /work"), (char *)"theirs\na\nc"));
    cr_assert(eq(str, (char *)lab_out(below, "cat /work/a; ls /work /tmp; ls /etc"),
                 (char *)"mine\n/tmp:\n\n/work:\na\nb\nbase\npasswd"));
    destroy(b);
    lab_out(below, "echo more >>/work/a");
    destroy(below);
}

Test(reuse, a_box_over_another_sees_its_files_and_changes_none)
{
    try_over("disk");
}

Test(reuse, nor_does_one_in_memory)
{
    try_over("memory");
}

Test(reuse, a_box_in_memory_has_its_disk_limit_and_more_memory)
{
    struct box *below = lab_start(&lab, "one"), *b = start_over(below, "memory");
    struct box_usage u;

    struct lab_result *r = lab_sh(b, "head -c 3000000 /dev/zero >/tmp/a && echo fits", 10000);
    cr_assert(eq(str, r->out, (char *)"fits\n"), "%s", r->err);
    cr_assert(box_usage(b, &u, NULL) == 0);
    cr_assert(ge(u64, u.disk_bytes, (uint64_t)3000000));
    for (int i = 0; i < 2; i++) /* neither one file nor many may be larger */
        lab_sh(b, "for i in 1 2 3; do head -c 3000000 /dev/zero >/tmp/b$i; done", 10000);
    cr_assert(box_usage(b, &u, NULL) == 0);
    cr_assert(le(u64, u.disk_bytes, (uint64_t)(5 << 20)));
    cr_assert(eq(u64, u.oom_kills, (uint64_t)0));
    destroy(b);
    destroy(below);
}

/* ---- the directory ---- */

static bool reset_after(const char *script, const char *attribute)
{
    struct box *b = lab_start(&lab, "one");
    lh_autofree char *dir = lh_format("%s/one", lab.dir), *upper = lh_format("%s/upper.0", dir);

    lab_out(b, script);
    if (attribute)
        cr_assert(setxattr(upper, attribute, "x", 1, 0) == 0);
    cr_assert(box_kill(b, NULL) == 0);
    box_close(b);
    cr_assert(box_destroy_named(lab.host, "one", NULL, NULL) == 0);
    bool clean = box_reset_dir(dir);
    if (!clean)
        cr_assert(box_destroy_named(lab.host, "one", dir, NULL) == 0);
    return clean;
}

Test(reuse, a_directory_that_was_emptied_serves_the_next_box)
{
    cr_assert(reset_after("mkdir -p /a/b && echo 1 >/a/b/c; rm /etc/passwd; chmod 700 /tmp", NULL));
    struct box *b = lab_start(&lab, "one");
    lab_out(b, "test -e /etc/passwd && ! test -e /a && test $(stat -c %a /tmp) = 1777");
    destroy(b);
}

Test(reuse, one_whose_root_was_changed_does_not)
{
    cr_assert(not(reset_after("chmod 700 /", NULL)));
    cr_assert(not(reset_after("chown 5:5 /", NULL)));
    cr_assert(not(reset_after("true", "user.note")));
    cr_assert(reset_after("true", NULL));
}

Test(reuse, nor_one_that_holds_something_else)
{
    lh_autofree char *extra = lh_format("%s/one/upper.1", lab.dir);

    cr_assert(reset_after("true", NULL));
    cr_assert(mkdir(extra, 0755) == 0);
    lh_autofree char *dir = lh_format("%s/one", lab.dir);
    cr_assert(not(box_reset_dir(dir)));
    cr_assert(box_destroy_named(lab.host, "one", dir, NULL) == 0);
}

/* ---- the network namespace ---- */

static void net_of(struct box *b, char text[128])
{
    snprintf(text, 128, "%s", lab_out(b, "readlink /proc/self/ns/net"));
}

Test(reuse, throw_away_boxes_that_live_have_network_namespaces_of_their_own)
{
    static const char count[] = "grep -c . /proc/net/unix /proc/net/dev /proc/net/tcp";
    struct box *base = lab_start(&lab, "one"), *a = start_over(base, "a"),
               *b = start_over(base, "b");
    char net_a[128], net_b[128], net_c[128], host[128] = "";

    net_of(a, net_a);
    net_of(b, net_b);
    cr_assert(readlink("/proc/self/ns/net", host, sizeof host - 1) > 0);
    cr_assert(ne(str, net_a, net_b));
    cr_assert(ne(str, net_a, host));
    destroy(a);
    struct box *c = start_over(base, "c");
    net_of(c, net_c);
    cr_assert(eq(str, net_c, net_a)); /* it was empty */
    snprintf(net_a, sizeof net_a, "%s", lab_out(base, count));
    cr_assert(eq(str, (char *)lab_out(c, count), net_a)); /* as in one that was never used */
    destroy(b);
    destroy(c);
    destroy(base);
}

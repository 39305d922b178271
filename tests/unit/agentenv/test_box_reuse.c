/* What one sandbox leaves to the next: nothing that could be noticed. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "proto/clock.h"
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

    struct lab_result *r =
        lab_sh(b, "head -c 3000000 /dev/zero >/tmp/a && echo fits", LAB_PATIENCE_MS);
    cr_assert(eq(str, r->out, (char *)"fits\n"), "%s", r->err);
    cr_assert(box_usage(b, &u, NULL) == 0);
    cr_assert(ge(u64, u.disk_bytes, (uint64_t)3000000));
    for (int i = 0; i < 2; i++) /* neither one file nor many may be larger */
        lab_sh(b, "for i in 1 2 3; do head -c 3000000 /dev/zero >/tmp/b$i; done", LAB_PATIENCE_MS);
    cr_assert(box_usage(b, &u, NULL) == 0);
    cr_assert(le(u64, u.disk_bytes, (uint64_t)(5 << 20)));
    cr_assert(eq(u64, u.oom_kills, (uint64_t)0));
    destroy(b);
    destroy(below);
}

/* Its layer lies in another file system. */
Test(reuse, a_box_in_memory_is_sealed_to_disk)
{
    struct box *below = lab_start(&lab, "one"), *b = start_over(below, "memory");
    lh_autofree char *layer = lh_format("%s/layer", lab.dir), *file = lh_format("%s/work/a", layer);
    struct lh_error err = {0};
    char text[3000] = "";
    bool live;

    lab_out(b, "echo begin >/work/a; dd if=/dev/zero of=/work/a bs=1 seek=2M count=0 2>/dev/null; "
               "echo end >>/work/a");
    cr_assert(box_seal(b, layer, &live, &err) == 0, "%s", err.message);
    FILE *f = fopen(file, "r");
    cr_assert(f != NULL && fgets(text, sizeof text, f) != NULL);
    cr_assert(eq(str, text, (char *)"begin\n"));
    cr_assert(fseek(f, 2 << 20, SEEK_SET) == 0 && fgets(text, sizeof text, f) != NULL);
    cr_assert(eq(str, text, (char *)"end\n"));
    fclose(f);
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

/* ---- namespaces ---- */

static const char both[] = "readlink /proc/self/ns/net; readlink /proc/self/ns/user";

static void namespaces_of(struct box *b, char text[128])
{
    snprintf(text, 128, "%s", lab_out(b, both));
}

static void namespaces_here(char text[128])
{
    char net[64] = "", user[64] = "";

    cr_assert(readlink("/proc/self/ns/net", net, sizeof net - 1) > 0);
    cr_assert(readlink("/proc/self/ns/user", user, sizeof user - 1) > 0);
    snprintf(text, 128, "%s\n%s", net, user);
}

Test(reuse, boxes_that_live_share_no_namespace_and_an_empty_one_serves_again)
{
    static const char count[] = "grep -c . /proc/net/unix /proc/net/dev /proc/net/tcp";
    struct box *a = lab_start(&lab, "a"), *b = lab_start(&lab, "b");
    char of_a[128], of_b[128], of_c[128], host[128];

    namespaces_of(a, of_a);
    namespaces_of(b, of_b);
    namespaces_here(host);
    cr_assert(ne(str, of_a, of_b));
    cr_assert(ne(str, of_a, host));
    destroy(a);
    struct box *c = lab_start(&lab, "c");
    namespaces_of(c, of_c);
    /* It was empty, once the kernel's workers had let the last sockets go. */
    for (int i = 0; i < 100 && strcmp(of_c, of_a) != 0; i++) {
        destroy(c);
        usleep(100000);
        c = lab_start(&lab, "c");
        namespaces_of(c, of_c);
    }
    cr_assert(eq(str, of_c, of_a));
    snprintf(of_b, sizeof of_b, "%s", lab_out(b, count));
    cr_assert(eq(str, (char *)lab_out(c, count), of_b)); /* as in one that was never used */
    destroy(b);
    destroy(c);
}

/* Nothing leaves a box without a network, but the attempt is counted where all may read it. */
Test(reuse, a_namespace_whose_counters_moved_does_not_serve_again)
{
    static const char read_all[] = "cat /proc/net/snmp /proc/net/netstat /proc/net/snmp6";
    struct box *a = lab_start(&lab, "a");
    lh_autofree char *fresh = strdup(lab_out(a, read_all));
    char of_a[128], of_next[128];

    namespaces_of(a, of_a);
    lab_out(a, "! wget -q -O - http://10.0.0.1/ 2>/dev/null");
    cr_assert(ne(str, (char *)lab_out(a, read_all), fresh));
    destroy(a);
    for (int i = 0; i < 5; i++) {
        struct box *next = lab_start(&lab, "next");
        namespaces_of(next, of_next);
        cr_assert(ne(str, of_next, of_a));
        cr_assert(eq(str, (char *)lab_out(next, read_all), fresh));
        destroy(next);
        usleep(50000); /* the kernel's workers let the last sockets go */
    }
}

Test(reuse, a_box_with_a_loopback_gets_none_that_another_had)
{
    struct box *a = lab_start(&lab, "a");
    struct lh_error err = {0};
    char of_a[128], of_b[128];

    namespaces_of(a, of_a);
    destroy(a); /* its namespaces are kept */
    struct box_layer layer;
    struct box_spec spec = lab_spec(&lab, "b", &layer);
    spec.network = BOX_NET_LOOPBACK;
    struct box *b = box_start(lab.host, &spec, &err);
    cr_assert(b != NULL, "%s", err.message);
    namespaces_of(b, of_b);
    cr_assert(ne(str, of_b, of_a));
    destroy(b);
}

/* ---- init, which is a fork of the spawner ---- */

/* Those of the last command are closed when init has heard that its result was taken. */
static void await_descriptors(struct box *b, const char *want)
{
    lh_autofree char *list = lh_format("ls /proc/%d/fd | tr '\\n' ' '", box_identity(b).init_pid);
    int64_t deadline_ms = lh_now_ms() + LAB_PATIENCE_MS;
    char text[128] = "";

    do {
        FILE *f = popen(list, "r");
        cr_assert(f != NULL && fgets(text, sizeof text, f) != NULL);
        pclose(f);
    } while (strcmp(text, want) && lh_ms_left(deadline_ms));
    cr_assert(eq(str, text, (char *)want));
}

Test(reuse, init_has_nothing_of_the_spawner)
{
    static const char mask[] = "00000000000000fb", none[] = "0000000000000000";
    struct box *b = lab_start(&lab, "one");
    char want[256];

    snprintf(want, sizeof want, "CapInh:\t%s\nCapPrm:\t%s\nCapEff:\t%s\nCapBnd:\t%s\nCapAmb:\t%s",
             none, mask, mask, mask, none);
    cr_assert(eq(str, (char *)lab_out(b, "grep ^Cap /proc/1/status"), want));
    cr_assert(
        eq(str, (char *)lab_out(b, "grep ^NoNewPrivs /proc/1/status"), (char *)"NoNewPrivs:\t1"));
    cr_assert(eq(str, (char *)lab_out(b, "tr -d '\\0' </proc/1/cmdline"), (char *)"agentenv-init"));
    lab_out(b, "! cat /proc/1/maps && ! ls /proc/1/fd && ! cat /proc/1/environ");
    await_descriptors(b, "0 1 2 3 4 5 6 ");
    destroy(b);
}

/* What an agent or an image may try.  Names of the list: docs/DESIGN.md, section 3.3. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/file.h"
#include "tests/unit/agentenv/lab.h"

TestSuite(hostile, .init = lab_init, .fini = lab_fini, .timeout = 300);

static void destroy(struct box *b)
{
    struct lh_error err = {0};

    cr_assert(box_destroy(b, &err) == 0, "%s", err.message);
}

/* The host listens where the probe will knock. */
static int listen_abstract(const char *name)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);

    memcpy(a.sun_path + 1, name, strlen(name));
    cr_assert(bind(fd, (void *)&a, (socklen_t)(sizeof a.sun_family + 1 + strlen(name))) == 0);
    cr_assert(listen(fd, 4) == 0);
    return fd;
}

static int listen_tcp(int *port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t len = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    cr_assert(bind(fd, (void *)&a, len) == 0 && listen(fd, 4) == 0);
    cr_assert(getsockname(fd, (void *)&a, &len) == 0);
    *port = ntohs(a.sin_port);
    return fd;
}

static void probe(const char *user, enum box_network network)
{
    struct box_layer layer;
    struct box_spec spec = lab_spec(&lab, "probed", &layer);
    char script[128], name[32];
    int port, abstract, tcp, probes = 0, holes = -1, unclear = -1;

    snprintf(name, sizeof name, "probe-%d-%d", getpid(), network);
    abstract = listen_abstract(name);
    tcp = listen_tcp(&port);
    spec.network = network;
    struct box *b = box_start(lab.host, &spec, NULL);
    cr_assert(b != NULL);
    snprintf(script, sizeof script, "probe --inside-sandbox %s %d", name, port);
    const char *argv[] = {"sh", "-c", script, NULL};
    struct lab_result *r = lab_exec(
        b,
        &(struct box_exec_spec){.exec_id = "p", .argv = argv, .user = user, .timeout_ms = 60000});
    cr_assert(r->rc == 0, "%s", r->error.message);
    const char *sum = strstr(r->out, "probes ");
    cr_assert(sum && sscanf(sum, "probes %d, holes %d, unclear %d", &probes, &holes, &unclear) == 3,
              "%s", r->out);
    cr_assert(ge(int, probes, 96));
    cr_assert(holes == 0 && unclear == 0 && r->exec.status == 0, "%s", r->out);
    destroy(b);
    close(abstract);
    close(tcp);
}

Test(hostile, probes_find_no_hole_as_root_or_user)
{
    lab_install(&lab, PROBE, "probe");
    probe("", BOX_NET_NONE);
    probe("", BOX_NET_LOOPBACK);
    probe("user", BOX_NET_NONE);
}

Test(hostile, the_probe_refuses_to_run_on_a_host)
{
    cr_assert(ne(int, system(PROBE " > /dev/null 2>&1"), 0));
}

Test(hostile, a_memory_bomb_is_an_oom_and_the_sandbox_goes_on)
{
    struct box *b = lab_start(&lab, "bomb"), *other = lab_start(&lab, "other");
    struct box_usage u;
    struct lab_result *r = lab_sh(b, "echo begun; tail /dev/zero", 60000);

    cr_assert(r->rc == 0, "%s", r->error.message);
    cr_assert(r->exec.oom_killed, "status %d", r->exec.status);
    cr_assert(eq(str, r->out, (char *)"begun\n"));
    cr_assert(eq(str, (char *)lab_out(b, "echo on"), (char *)"on"));
    cr_assert(eq(str, (char *)lab_out(other, "echo unharmed"), (char *)"unharmed"));
    cr_assert(box_usage(b, &u, NULL) == 0);
    cr_assert(ge(u64, u.oom_kills, 1));
    cr_assert(le(u64, u.memory_bytes, 64 << 20));
    r = lab_sh(b, "exit 9", LAB_PATIENCE_MS);
    cr_assert(not(r->exec.oom_killed), "an earlier kill is not this one's");
    destroy(b);
    destroy(other);
}

Test(hostile, a_fork_bomb_is_contained_while_another_sandbox_works)
{
    struct box *b = lab_start(&lab, "bomb"), *other = lab_start(&lab, "other");
    struct box_usage u;

    lab_sh(b, "f() { sleep 30 & f & }; f; sleep 20", 1500);
    lab_sh(b, "for i in $(seq 200); do sleep 60 > /dev/null 2>&1 & done; exit 0", 3000);
    cr_assert(eq(str, (char *)lab_out(other, "echo unharmed"), (char *)"unharmed"));
    cr_assert(box_usage(b, &u, NULL) == 0);
    cr_assert(le(u32, u.processes, 64));
    destroy(b);
    destroy(other);
}

Test(hostile, open_files_and_disk_are_bounded)
{
    struct box *b = lab_start(&lab, "bomb");
    struct lab_result *r = lab_sh(b, "ulimit -n", LAB_PATIENCE_MS);

    cr_assert(eq(str, r->out, (char *)"128\n"));
    r = lab_sh(b, "head -c 100000000 /dev/zero > /root/one", 30000);
    cr_assert(r->exec.status != 0, "one file of 100 MB: %d", r->exec.status);
    r = lab_sh(b, "for i in $(seq 60); do head -c 10000000 /dev/zero > /root/$i; sleep 0.2; done",
               60000);
    cr_assert(r->exec.disk_exceeded, "status %d", r->exec.status);
    lab_out(b, "rm /root/*; echo room");
    destroy(b);
}

Test(hostile, an_image_with_links_for_dev_and_proc_reaches_nothing)
{
    struct stat before, after;
    lh_autofree char *trap = lh_format("%s/trap", lab.dir);
    lh_autofree char *cmd = lh_format(
        "cd %s && mkdir %s && ln -s %s proc && ln -s ../../../../../..%s dev && ln -s / tmp",
        lab.root, trap, trap, trap);

    cr_assert(system(cmd) == 0);
    cr_assert(stat("/dev/null", &before) == 0);
    struct box *b = lab_start(&lab, "links");
    lab_out(b, "test -d /proc/self && test -c /dev/null && test ! -L /dev && test ! -L /tmp && "
               "echo x > /dev/null && ls /dev/pts/ptmx");
    cr_assert(stat("/dev/null", &after) == 0);
    cr_assert(before.st_uid == after.st_uid && before.st_mode == after.st_mode);
    cr_assert(rmdir(trap) == 0, "nothing was put into the host's directory");
    destroy(b);
}

Test(hostile, host_paths_cannot_be_reached_through_files_of_the_box)
{
    static const struct {
        const char *path;
        int code; /* 0 = opens, but inside */
    } cases[] = {{"/link-up", 0},
                 {"/root/../../../../etc/base", 0},
                 {"/abs", LH_NOT_FOUND},
                 {"/proc/1/root/etc/base", LH_INVALID_ARGUMENT},
                 {"/dev/null", LH_INVALID_ARGUMENT},
                 {"/magic", LH_INVALID_ARGUMENT}};
    struct box *b = lab_start(&lab, "one");
    struct lh_error err = {0};

    lab_out(b, "ln -s ../../../../../etc/base /link-up; ln -s /work/../../../tmp/nothing /abs; "
               "ln -s /proc/self/root/etc/base /magic");
    lh_autoclose int root = box_root_fd(b, &err);
    cr_assert(root >= 0, "%s", err.message);
    for (size_t i = 0; i < LH_ARRAY_SIZE(cases); i++) {
        lh_autoclose int fd = box_open_in(root, cases[i].path, O_RDONLY, 0, &err);
        char text[16] = "";
        if (cases[i].code == 0) {
            cr_expect(fd >= 0 && read(fd, text, 4) == 4 && strcmp(text, "base") == 0, "%s",
                      cases[i].path);
        } else {
            cr_expect(fd < 0, "%s", cases[i].path);
        }
    }
    destroy(b);
}

/* Deeper than any path can name and than descriptors would last. */
Test(hostile, a_bottomless_directory_is_removed)
{
    struct box *b = lab_start(&lab, "deep");
    lh_autofree char *dir = lh_format("%s/deep", lab.dir);

    lab_out(b,
            "set -e; cd /root; p=$(printf 'd/%.0s' $(seq 1000)); for i in 1 2 3; do mkdir -p $p; "
            "cd -P $p; done; echo x > x");
    struct box_usage u;
    cr_assert(box_usage(b, &u, NULL) == 0);
    destroy(b);
    cr_assert(access(dir, F_OK) < 0);
}

/* ---- nothing is left ------------------------------------------------------------------------ */

struct census {
    int processes, cgroups, mounts, namespaces, files;
};

static int count_lines(const char *cmd)
{
    FILE *f = popen(cmd, "r");
    int n = -1;

    cr_assert(f && fscanf(f, "%d", &n) == 1);
    pclose(f);
    return n;
}

/* Only what carries this lab's names: other programs of the machine come and go.  A mount namespace
 * is counted by the overlay in it; the other namespaces of a sandbox have the same holders. */
static struct census take_census(void)
{
    lh_autofree char *processes =
        lh_format("grep -l '/%s/' /proc/[0-9]*/cgroup 2>/dev/null | wc -l", lab.parent);
    lh_autofree char *cgroups =
        lh_format("ls -d /sys/fs/cgroup/%s/*/ /sys/fs/cgroup/*/%s/*/ 2>/dev/null | wc -l",
                  lab.parent, lab.parent);
    lh_autofree char *mounts = lh_format("grep -c '%s' /proc/self/mountinfo || true", lab.dir);
    lh_autofree char *namespaces =
        lh_format("grep -l '%s' /proc/[0-9]*/mountinfo 2>/dev/null | wc -l", lab.dir);
    lh_autofree char *files = lh_format("find %s | wc -l", lab.dir);

    return (struct census){count_lines(processes), count_lines(cgroups), count_lines(mounts),
                           count_lines(namespaces), count_lines(files)};
}

static bool same(const struct census *a, const struct census *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

Test(hostile, I7_many_sandboxes_leave_nothing)
{
    int n = getenv("LONGHAUL_SOAK") ? 1000 : 200;
    struct box *first = lab_start(&lab, "first");
    struct census before = take_census(), none = {0};
    char id[16];

    cr_assert(before.processes == 1 && before.namespaces == 1 && before.cgroups > 0,
              "the census sees the first sandbox");
    destroy(first);
    before = take_census();
    cr_assert(before.processes == none.processes && before.cgroups == none.cgroups);

    for (int i = 0; i < n; i++) {
        snprintf(id, sizeof id, "s%d", i);
        struct box *b = lab_start(&lab, id);
        lab_out(b, "echo x > /root/x; sleep 100 > /dev/null 2>&1 &");
        destroy(b);
    }
    struct census after = take_census();
    cr_assert(same(&before, &after), "processes %d, cgroups %d, mounts %d, namespaces %d, files %d",
              after.processes - before.processes, after.cgroups - before.cgroups,
              after.mounts - before.mounts, after.namespaces - before.namespaces,
              after.files - before.files);
}

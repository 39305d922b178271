/* bench_away [ROUNDS [SANDBOXES]]: sandboxes put away, brought back and forked, of 6 processes and
 * of one that holds 100 MiB; then many of them, idle, and a daemon that starts among them.  All
 * through the daemon and gRPC; medians.
 *
 * The peer of a hibernation is the criu program, called by hand on the same tree with the same
 * options, in a mount namespace where it can keep its cache of kernel data; it leaves the tree
 * running.  Of a resume there is none, since root and cgroups of a restore are ours to make. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/file.h"
#include "tests/bench/bench.h"
#include "tests/bench/daemon_kit.h"

enum { MAX_ROUNDS = 31, CHILDREN = 16, WORKERS = 4 };

static int rounds = 7, many = 500;

static const struct tree {
    const char *name, *script;
    double hibernate_ms, resume_ms, fork_ms;
} trees[] = {
    {"6 processes", "for i in 1 2 3 4 5; do sleep 1000 >/dev/null 2>&1 & done", 40, 30, 300},
    {"100 MiB", "/witness start 100", 90, 80, 1300},
};

/* ---- criu by hand ---- */

/* The pid of init: the first in the sandbox's cgroup. */
static pid_t init_of(const char *id)
{
    lh_autofree char *path = lh_format("%s/%s/cgroup.procs", kit_cgroups(), id);
    lh_autofclose FILE *f = path ? fopen(path, "re") : NULL;
    int pid;

    return f && fscanf(f, "%d", &pid) == 1 ? pid : -1;
}

static double dump_once(pid_t init)
{
    lh_autofree char *command = lh_format(
        "rm -rf %s/raw && mkdir %s/raw && cd %s/raw && binds=; for m in /dev/null /dev/zero"
        " /dev/full /dev/random /dev/urandom /dev/tty /proc/kallsyms /proc/keys /proc/cmdline"
        " /proc/config.gz /proc/kcore /proc/kmsg /proc/timer_list /proc/modules /proc/sched_debug;"
        " do binds=\"$binds --external mnt[$m]:$m\"; done;"
        " for c in /usr/local/libexec/longhaul/criu /usr/local/sbin/criu /usr/sbin/criu; do"
        " [ ! -x $c ] || exec $c dump -t %d -D . --leave-running --manage-cgroups=ignore"
        " --tcp-established --file-locks --network-lock skip --empty-ns net --ghost-limit 64M"
        " $binds -v2 -o raw.log; done; exit 1",
        kit_dir, kit_dir, kit_dir, init);
    int64_t start_us = lh_now_us();

    if (command && system(command) == 0)
        return kit_ms_since(start_us);
    lh_autofree char *reason = lh_format("grep -h Error %s/raw/raw.log | head -n 3 >&2", kit_dir);
    if (reason && system(reason))
        fprintf(stderr, "criu by hand gives no reason\n");
    return 0;
}

/* In a child with a mount namespace of its own; the first round fills the cache. */
static double dump_by_hand(pid_t init)
{
    double ms[MAX_ROUNDS], median = 0;
    int fds[2], status;

    if (init < 0 || pipe2(fds, O_CLOEXEC) < 0)
        return 0;
    pid_t pid = fork();
    if (pid == 0) {
        bool ok = unshare(CLONE_NEWNS) == 0 &&
                  mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
                  mount("tmpfs", "/run", "tmpfs", 0, NULL) == 0 && dump_once(init) > 0;
        for (int i = 0; ok && i < rounds; i++)
            ok = (ms[i] = dump_once(init)) > 0;
        median = ok ? kit_median(ms, rounds) : 0;
        _exit(write(fds[1], &median, sizeof median) == sizeof median ? 0 : 1);
    }
    close(fds[1]);
    if (read(fds[0], &median, sizeof median) != sizeof median)
        median = 0;
    close(fds[0]);
    waitpid(pid, &status, 0);
    return median;
}

/* ---- one sandbox ---- */

static int start_tree(const struct tree *t, char id[LH_ID_SIZE], struct lh_error *err)
{
    int r = kit_create(id, NULL, err);

    return r < 0 ? r : kit_shell(id, t->script, err);
}

static int there_and_back(const struct tree *t, const char *id, double raw_ms, bool *ok,
                          struct lh_error *err)
{
    static const char *const methods[] = {"Hibernate", "Resume"};
    double ms[LH_ARRAY_SIZE(methods)][MAX_ROUNDS];
    char name[64];

    for (int i = 0; i < rounds; i++)
        for (size_t k = 0; k < LH_ARRAY_SIZE(methods); k++) {
            int64_t start_us = lh_now_us();
            int r = kit_change(methods[k], id, err);
            if (r < 0)
                return r;
            ms[k][i] = kit_ms_since(start_us);
        }
    double away = kit_median(ms[0], rounds), back = kit_median(ms[1], rounds);
    snprintf(name, sizeof name, "hibernate, %s", t->name);
    *ok &= bench_at_most(name, away, raw_ms, t->hibernate_ms, "ms");
    snprintf(name, sizeof name, "  at most 1.15 x criu by hand, %s", t->name);
    if (raw_ms > 0)
        *ok &= bench_at_most(name, away, raw_ms, 1.15 * raw_ms, "ms");
    else
        bench_unmeasured(name, "criu by hand failed");
    snprintf(name, sizeof name, "resume, %s", t->name);
    *ok &= bench_at_most(name, back, 0, t->resume_ms, "ms");
    return 0;
}

static int fork_rounds(const struct tree *t, const char *id, bool *ok, struct lh_error *err)
{
    enum { FORKS = 3 };
    char children[CHILDREN][LH_ID_SIZE], name[64];
    double ms[FORKS];

    for (int i = 0; i < FORKS; i++) {
        int64_t start_us = lh_now_us();
        int r = kit_fork(id, CHILDREN, children, err);
        ms[i] = kit_ms_since(start_us);
        for (int k = 0; r == 0 && k < CHILDREN; k++)
            r = kit_remove(children[k], err);
        if (r < 0)
            return r;
    }
    snprintf(name, sizeof name, "fork %d, %s", CHILDREN, t->name);
    *ok &= bench_at_most(name, kit_median(ms, FORKS), 0, t->fork_ms, "ms");
    return 0;
}

/* No daemon runs meanwhile: what init shares with one lies outside of the tree. */
static int measure_raw(const char *id, double *raw_ms, struct lh_error *err)
{
    double ms;

    kit_kill();
    *raw_ms = dump_by_hand(init_of(id));
    return kit_start(&ms, err);
}

static int bench_tree(const struct tree *t, bool *ok, struct lh_error *err)
{
    char id[LH_ID_SIZE];
    double raw_ms = 0;
    int r = start_tree(t, id, err);

    if (r == 0)
        r = measure_raw(id, &raw_ms, err);
    if (r == 0)
        r = there_and_back(t, id, raw_ms, ok, err);
    if (r == 0)
        r = fork_rounds(t, id, ok, err);
    return r < 0 ? r : kit_remove(id, err);
}

/* ---- many ---- */

struct crowd {
    char (*ids)[LH_ID_SIZE];
    int (*each)(char id[LH_ID_SIZE], struct lh_error *err);
    atomic_int next;
    pthread_mutex_t lock;
    struct lh_error err;
};

static void *work(void *arg)
{
    struct crowd *c = arg;

    for (int i; (i = atomic_fetch_add(&c->next, 1)) < many;) {
        struct lh_error err = {0};
        if (c->each(c->ids[i], &err) < 0) {
            LH_LOCKED(&c->lock);
            c->err = err;
            return NULL;
        }
    }
    return NULL;
}

static int for_all(char (*ids)[LH_ID_SIZE], int (*each)(char *, struct lh_error *),
                   struct lh_error *err)
{
    struct crowd c = {.ids = ids, .each = each, .lock = PTHREAD_MUTEX_INITIALIZER};
    pthread_t threads[WORKERS];
    int n = 0;

    while (n < WORKERS && pthread_create(&threads[n], NULL, work, &c) == 0)
        n++;
    while (n > 0)
        pthread_join(threads[--n], NULL);
    if (c.err.code)
        *err = c.err;
    return c.err.code;
}

static int create(char id[LH_ID_SIZE], struct lh_error *err)
{
    return kit_create(id, NULL, err);
}

static int hibernate(char id[LH_ID_SIZE], struct lh_error *err)
{
    return kit_change("Hibernate", id, err);
}

/* Of its own, not shared with files: what grows with what it keeps. */
static double daemon_kib(void)
{
    lh_autofree char *path = lh_format("/proc/%d/status", kit_daemon());
    lh_autofclose FILE *f = path ? fopen(path, "re") : NULL;
    char line[256];
    double kib = 0;

    while (f && fgets(line, sizeof line, f))
        sscanf(line, "RssAnon: %lf", &kib);
    return kib;
}

/* Cgroups that are left, each with a process at least. */
static int count_running(void)
{
    lh_autoclosedir DIR *d = opendir(kit_cgroups());
    int n = 0;

    for (const struct dirent *e; d && (e = readdir(d));)
        n += e->d_type == DT_DIR && e->d_name[0] != '.';
    return n;
}

static int restart(const char *what, bool *ok, struct lh_error *err)
{
    double ms;
    char name[64];

    kit_kill();
    int r = kit_start(&ms, err);
    snprintf(name, sizeof name, "daemon restart, %d %s", many, what);
    if (r == 0)
        *ok &= bench_at_most(name, ms, 0, 1000, "ms");
    return r;
}

static int bench_many(bool *ok, struct lh_error *err)
{
    lh_autofree char(*ids)[LH_ID_SIZE] = calloc((size_t)many, sizeof *ids);
    char name[64];
    double ms;

    int r = ids ? for_all(ids, create, err) : lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory");
    if (r == 0)
        r = restart("running", ok, err);
    if (r == 0)
        r = for_all(ids, hibernate, err);
    if (r < 0)
        return r;
    snprintf(name, sizeof name, "%d hibernated: sandboxes with processes", many);
    *ok &= bench_at_most(name, count_running(), 0, 0.5, "");
    double full = daemon_kib();
    r = restart("hibernated", ok, err);
    double fresh = daemon_kib();
    if (r == 0)
        r = kit_remove_all(err);
    kit_kill();
    if (r == 0)
        r = kit_start(&ms, err);
    double empty = daemon_kib();
    *ok &= bench_at_most("  daemon memory of each, since restarted", (fresh - empty) / many, 0, 20,
                         "KiB");
    bench_at_most("  since it hibernated them, allocator's too", (full - empty) / many, 0, 0,
                  "KiB");
    return r;
}

int main(int argc, char **argv)
{
    struct lh_error err = {0};
    bool ok = true;

    rounds = argc > 1 ? atoi(argv[1]) : rounds;
    many = argc > 2 ? atoi(argv[2]) : many;
    if (rounds < 1 || rounds > MAX_ROUNDS || many < 1)
        return 2;
    int r = kit_prepare(&err);
    if (r == 0)
        r = kit_open(&err);
    for (size_t i = 0; r == 0 && i < LH_ARRAY_SIZE(trees); i++)
        r = bench_tree(&trees[i], &ok, &err);
    if (r == 0)
        r = bench_many(&ok, &err);
    if (r < 0)
        fprintf(stderr, "bench_away: %s\n", err.message);
    kit_close();
    return r < 0 || !ok;
}

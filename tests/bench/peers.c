#include "tests/bench/peers.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/file.h"
#include "tests/bench/daemon_kit.h"
#include "tests/bench/floor.h"

enum { ROUNDS = 60, WARM_UP = 5, WORKERS = 4, LOAD_MS = 2000, NAME_SIZE = 64 };

extern char **environ;

struct place {
    const char *root, *dir;
};

static int run(const char *const *argv)
{
    pid_t pid;
    int status;

    if (posix_spawnp(&pid, argv[0], NULL, NULL, (char *const *)argv, environ))
        return -1;
    return waitpid(pid, &status, 0) == pid && status == 0 ? 0 : -1;
}

static int run_spawn(const struct place *p, const char *name)
{
    char command[256];

    (void)name;
    snprintf(command, sizeof command, "%s/bin/true", p->root);
    return run((const char *const[]){command, NULL});
}

static int run_bwrap(const struct place *p, const char *name)
{
    (void)name;
    return run((const char *const[]){"bwrap", "--unshare-all", "--bind", p->root, "/", "--proc",
                                     "/proc", "--dev", "/dev", "/bin/true", NULL});
}

static int run_crun(const struct place *p, const char *name)
{
    return run((const char *const[]){"crun", "--cgroup-manager=cgroupfs", "run", "--bundle", p->dir,
                                     name, NULL});
}

/* crun refuses a host with both kinds of cgroups; hidden from it, the second is not missed. */
static int prepare_crun(const struct place *p)
{
    lh_autofree char *make = lh_format(
        "cd %s && rm -f config.json && crun spec && sed -i 's/\"terminal\": true/\"terminal\": "
        "false/;s/\"sh\"/\"\\/bin\\/true\"/;s|\"rootfs\"|\"%s\"|' config.json",
        p->dir, p->root);

    if (!make || system(make) || unshare(CLONE_NEWNS) < 0 ||
        mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        return -1;
    if (access("/sys/fs/cgroup/unified", F_OK) == 0 &&
        mount("tmpfs", "/sys/fs/cgroup/unified", "tmpfs", 0, NULL) < 0)
        return -1;
    return 0;
}

static int run_floor(const struct place *p, const char *name)
{
    return floor_run(p->root, p->dir, name);
}

static int prepare_floor(const struct place *p)
{
    return floor_prepare(p->dir);
}

static const struct {
    const char *name;
    int (*prepare)(const struct place *p); /* in the child; NULL = nothing */
    int (*run)(const struct place *p, const char *name);
} peers[PEERS] = {
    [PEER_FLOOR] = {"bare system calls", prepare_floor, run_floor},
    [PEER_BWRAP] = {"bwrap", NULL, run_bwrap},
    [PEER_CRUN] = {"crun", prepare_crun, run_crun},
    [PEER_SPAWN] = {"spawn alone", NULL, run_spawn},
};

const char *peer_name(enum peer which)
{
    return peers[which].name;
}

/* ---- measuring ---- */

static double measure_ms(enum peer which, const struct place *p)
{
    double ms[ROUNDS];
    char name[NAME_SIZE];

    for (int i = 0; i < WARM_UP + ROUNDS; i++) {
        int64_t start_us = lh_now_us();
        snprintf(name, sizeof name, "bench-%d-%d", getpid(), i);
        if (peers[which].run(p, name) < 0)
            return 0;
        if (i >= WARM_UP)
            ms[i - WARM_UP] = kit_ms_since(start_us);
    }
    return kit_median(ms, ROUNDS);
}

/* How many a worker has done comes by the pipe. */
_Noreturn static void work(enum peer which, const struct place *p, int to)
{
    int64_t until_ms = lh_now_ms() + LOAD_MS;
    char name[NAME_SIZE];
    unsigned n = 0;

    while (lh_now_ms() < until_ms) {
        snprintf(name, sizeof name, "bench-%d-%u", getpid(), n);
        n += peers[which].run(p, name) == 0;
    }
    _exit(write(to, &n, sizeof n) == sizeof n ? 0 : 1);
}

static double measure_rate(enum peer which, const struct place *p)
{
    int64_t start_us = lh_now_us();
    unsigned n, sum = 0;
    int fds[2];

    if (pipe2(fds, O_CLOEXEC) < 0)
        return 0;
    for (int i = 0; i < WORKERS; i++)
        if (fork() == 0)
            work(which, p, fds[1]);
    close(fds[1]);
    while (read(fds[0], &n, sizeof n) == sizeof n)
        sum += n;
    close(fds[0]);
    while (wait(NULL) > 0)
        ;
    return sum * 1000 / kit_ms_since(start_us);
}

_Noreturn static void measure(enum peer which, const struct place *p, int to)
{
    struct peer_figures f = {0};

    if (!peers[which].prepare || peers[which].prepare(p) == 0)
        f.ms = measure_ms(which, p);
    if (f.ms > 0)
        f.per_second = measure_rate(which, p);
    else
        fprintf(stderr, "peer %s not measured: %s\n", peers[which].name, strerror(errno));
    _exit(write(to, &f, sizeof f) == sizeof f ? 0 : 1);
}

struct peer_figures peer_measure(enum peer which, const char *root, const char *dir)
{
    lh_autofree char *own = lh_format("%s/peer-%d", dir, which);
    struct place p = {root, own};
    struct peer_figures f = {0};
    int fds[2], status;

    if (!own || mkdir(own, 0755) < 0 || pipe2(fds, O_CLOEXEC) < 0)
        return f;
    pid_t pid = fork();
    if (pid == 0)
        measure(which, &p, fds[1]);
    close(fds[1]);
    if (pid > 0 && read(fds[0], &f, sizeof f) != sizeof f)
        f = (struct peer_figures){0};
    close(fds[0]);
    waitpid(pid, &status, 0);
    return f;
}

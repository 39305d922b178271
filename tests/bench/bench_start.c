/* bench_start [SECONDS]: what clients wait for most often: a sandbox for one command, a command in
 * one that runs, freeze and thaw, and the time that a snapshot of the files holds it up.  All
 * through the daemon and gRPC, the registry written; medians.
 *
 * Peers of the same run: bubblewrap and crun with the same root file system and command, and the
 * bare system calls that make and end such a sandbox (floor.h), which is what this kernel can do.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/file.h"
#include "tests/bench/bench.h"
#include "tests/bench/daemon_kit.h"
#include "tests/bench/peers.h"

enum { ROUNDS = 200, WARM_UP = 20, WORKERS = 8, SNAPSHOTS = 60 };

static struct peer_figures peer[PEERS];

/* ---- a sandbox for one command ---- */

static int start_true_remove(struct lh_error *err)
{
    char id[LH_ID_SIZE];
    int r = kit_create(id, NULL, err);

    if (r == 0)
        r = kit_exec(id, (const char *const[]){"/bin/true", NULL}, err);
    return r < 0 ? r : kit_remove(id, err);
}

static bool row_of_starts(double ms)
{
    bool ok = bench_at_most("start + true + remove, beside the bare calls", ms, peer[PEER_FLOOR].ms,
                            3.5, "ms");

    for (int i = PEER_BWRAP; i <= PEER_CRUN; i++) {
        char name[64];
        snprintf(name, sizeof name, "start + true + remove, beside %s", peer_name(i));
        if (peer[i].ms > 0)
            ok &= bench_at_most(name, ms, peer[i].ms, peer[i].ms, "ms");
        else
            bench_unmeasured(name, "no such peer here");
    }
    return ok;
}

static int bench_starts(bool *ok, struct lh_error *err)
{
    static double ms[ROUNDS];

    for (int i = -WARM_UP; i < ROUNDS; i++) {
        int64_t start_us = lh_now_us();
        int r = start_true_remove(err);
        if (r < 0)
            return r;
        if (i >= 0)
            ms[i] = kit_ms_since(start_us);
    }
    *ok &= row_of_starts(kit_median(ms, ROUNDS));
    return 0;
}

static int bench_sustained(int seconds, bool *ok, struct lh_error *err)
{
    struct kit_rate rate;
    int r = kit_load(start_true_remove, WORKERS, seconds, &rate, err);

    if (r < 0)
        return r;
    *ok &= bench_row("the same, 8 clients, beside the bare calls", rate.per_second,
                     peer[PEER_FLOOR].per_second, 400, "sandboxes/s");
    for (int i = PEER_BWRAP; i <= PEER_CRUN; i++) {
        char name[64];
        double theirs = peer[i].per_second;
        snprintf(name, sizeof name, "the same, beside %s", peer_name(i));
        if (theirs > 0)
            *ok &= bench_row(name, rate.per_second, theirs, theirs, "sandboxes/s");
    }
    bench_at_most("  CPU of each, the kernel's threads included", rate.cpu_ms, 0, 0, "ms");
    return 0;
}

/* ---- in one that runs ---- */

static int bench_exec(const char *id, bool *ok, struct lh_error *err)
{
    static double ms[ROUNDS];

    for (int i = -WARM_UP; i < ROUNDS; i++) {
        int64_t start_us = lh_now_us();
        int r = kit_exec(id, (const char *const[]){"/bin/true", NULL}, err);
        if (r < 0)
            return r;
        if (i >= 0)
            ms[i] = kit_ms_since(start_us);
    }
    *ok &= bench_at_most("exec /bin/true, beside a spawn of it", kit_median(ms, ROUNDS),
                         peer[PEER_SPAWN].ms, 1.2, "ms");
    return 0;
}

static int bench_freeze(const char *id, bool *ok, struct lh_error *err)
{
    static const char *const methods[] = {"Freeze", "Thaw"}, *const rows[] = {"freeze, 6 processes",
                                                                              "thaw, 6 processes"};
    static double ms[LH_ARRAY_SIZE(methods)][ROUNDS];

    for (int i = 0; i < ROUNDS; i++)
        for (size_t k = 0; k < LH_ARRAY_SIZE(methods); k++) {
            int64_t start_us = lh_now_us();
            int r = kit_change(methods[k], id, err);
            if (r < 0)
                return r;
            ms[k][i] = kit_ms_since(start_us);
        }
    for (size_t k = 0; k < LH_ARRAY_SIZE(methods); k++)
        *ok &= bench_at_most(rows[k], kit_median(ms[k], ROUNDS), 0, 0.5, "ms");
    return 0;
}

/* Looks at the sandbox's cgroup from outside: how long it said that it is frozen, or was about to
 * be. */
struct observer {
    pthread_t thread;
    int freeze; /* its cgroup.freeze */
    atomic_bool end;
    double stopped_ms;
};

static void *observe(void *arg)
{
    struct observer *o = arg;
    int64_t since_us = 0;
    char c;

    while (!o->end || since_us) {
        bool frozen = pread(o->freeze, &c, 1, 0) == 1 && c == '1';
        if (frozen && !since_us)
            since_us = lh_now_us();
        if (!frozen && since_us) {
            o->stopped_ms += kit_ms_since(since_us);
            since_us = 0;
        }
        usleep(20);
    }
    return NULL;
}

static int snapshot_once(const char *id, int freeze, double *all_ms, double *stopped_ms,
                         struct lh_error *err)
{
    struct observer o = {.freeze = freeze};

    if (pthread_create(&o.thread, NULL, observe, &o))
        return lh_fail(err, LH_INTERNAL, "no thread");
    int64_t start_us = lh_now_us();
    int r = kit_snapshot(id, err);
    *all_ms = kit_ms_since(start_us);
    o.end = true;
    pthread_join(o.thread, NULL);
    *stopped_ms = o.stopped_ms;
    return r;
}

static int bench_snapshot(const char *id, const char *what, bool *ok, struct lh_error *err)
{
    static double all_ms[SNAPSHOTS], stopped_ms[SNAPSHOTS];
    lh_autofree char *path = lh_format("%s/%s/cgroup.freeze", kit_cgroups(), id);
    lh_autoclose int freeze = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    char name[64];
    int r = freeze < 0 ? lh_fail_errno(err, errno, "%s", path) : 0;

    for (int i = 0; r == 0 && i < SNAPSHOTS; i++) {
        r = kit_shell(id, "echo x >/tmp/x", err);
        if (r == 0)
            r = snapshot_once(id, freeze, &all_ms[i], &stopped_ms[i], err);
    }
    if (r < 0)
        return r;
    snprintf(name, sizeof name, "snapshot fsonly, %s: stopped", what);
    *ok &= bench_at_most(name, kit_median(stopped_ms, SNAPSHOTS), 0, 2, "ms");
    bench_at_most("  the whole call, flushed to disk", kit_median(all_ms, SNAPSHOTS), 0, 0, "ms");
    return 0;
}

static int bench_running(bool *ok, struct lh_error *err)
{
    char id[LH_ID_SIZE];
    int r = kit_create(id, NULL, err);

    if (r == 0)
        r = bench_exec(id, ok, err);
    if (r == 0)
        r = bench_snapshot(id, "init alone", ok, err);
    if (r == 0)
        r = kit_shell(id, "for i in 1 2 3 4 5; do sleep 1000 >/dev/null 2>&1 & done", err);
    if (r == 0)
        r = bench_freeze(id, ok, err);
    if (r == 0)
        r = bench_snapshot(id, "5 processes run", ok, err);
    return r < 0 ? r : kit_remove(id, err);
}

int main(int argc, char **argv)
{
    int seconds = argc > 1 ? atoi(argv[1]) : 5;
    struct lh_error err = {0};
    bool ok = true;

    int r = kit_prepare(&err);
    lh_autofree char *root = lh_format("%s/root", kit_dir);
    for (int i = 0; r == 0 && root && i < PEERS; i++)
        peer[i] = peer_measure(i, root, kit_dir);
    if (r == 0)
        r = kit_open(&err);
    if (r == 0)
        r = bench_starts(&ok, &err);
    if (r == 0)
        r = bench_sustained(seconds, &ok, &err);
    if (r == 0)
        r = bench_running(&ok, &err);
    if (r < 0)
        fprintf(stderr, "bench_start: %s\n", err.message);
    kit_close();
    return r < 0 || !ok;
}

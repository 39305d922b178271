/* bench_checkpoint [ROUNDS]: a sandbox put away and brought back, with agentenv-witness holding 1
 * MiB and 100 MiB in it.  The peer of the dump is the criu program itself, called by hand on the
 * same tree with the same options; of the restore there is none, since its root and cgroups are
 * ours to make.  Medians, milliseconds; nothing is flushed to disk. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/sandbox/box.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "tests/bench/bench.h"

enum { MAX_ROUNDS = 51 };

static char dir[] = "/var/tmp/checkpoint-bench-XXXXXX";
static struct box_host *host;

struct lab {
    char root[80], box[80], images[80];
    struct box_layer layers[2 + MAX_ROUNDS];
    char sealed[MAX_ROUNDS][96];
    size_t n_layers;
};

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *ms, int n)
{
    qsort(ms, (size_t)n, sizeof *ms, by_size);
    return ms[n / 2];
}

static double ms_since(int64_t start_us)
{
    return (double)(lh_now_us() - start_us) / 1000;
}

static struct box_spec spec_of(struct lab *l)
{
    return (struct box_spec){.id = "bench",
                             .dir = l->box,
                             .layers = l->layers,
                             .n_layers = l->n_layers,
                             .limits = {1000, 512 << 20, 64, 256, 64 << 20, 64 << 10},
                             .network = BOX_NET_LOOPBACK};
}

static int hold(struct box *b, const char *mib, struct lh_error *err)
{
    const char *const argv[] = {"/witness", "start", mib, NULL};
    struct box_exec_spec spec = {.exec_id = "hold", .argv = argv, .timeout_ms = 60000};
    struct box_exec_result r;
    int rc = box_exec(b, &spec, &r, err);

    return rc < 0 || r.status == 0 ? rc : lh_fail(err, LH_INTERNAL, "witness: %d", r.status);
}

static int fresh_images(const struct lab *l, struct lh_error *err)
{
    int r = lh_remove_tree(l->images, err);

    return r < 0 || mkdir(l->images, 0700) == 0 ? r : lh_fail_errno(err, errno, "%s", l->images);
}

/* By hand: the options of agentenv/criu/engine.c, and the masks of this kernel. */
static double raw_dump(const struct lab *l, pid_t init)
{
    lh_autofree char *command = lh_format(
        "binds=; for m in /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty "
        "/proc/kallsyms"
        " /proc/keys /proc/cmdline /proc/config.gz /proc/kcore /proc/kmsg /proc/timer_list "
        "/proc/modules"
        " /proc/sched_debug; do binds=\"$binds --external mnt[$m]:$m\"; done;"
        " for c in /usr/local/libexec/longhaul/criu /usr/local/sbin/criu /usr/sbin/criu; do"
        " [ ! -x $c ] || exec $c dump -t %d -D %s --leave-running --manage-cgroups=ignore"
        " --tcp-established --file-locks --network-lock skip --empty-ns net --ghost-limit 64M"
        " $binds -v2 -o raw.log; done; exit 1",
        init, l->images);
    int64_t start_us = lh_now_us();

    return command && system(command) == 0 ? ms_since(start_us) : -1;
}

/* One way and back; the box goes on on a chain that is one layer longer. */
static int there_and_back(struct lab *l, struct box *b, int i, double *away, double *back,
                          struct lh_error *err)
{
    int64_t start_us = lh_now_us();
    int r;

    snprintf(l->sealed[i], sizeof l->sealed[i], "%s/sealed-%d", dir, i);
    if ((r = box_checkpoint(b, l->images, err)) < 0 || (r = box_put_away(b, err)) < 0 ||
        (r = box_take_upper(l->box, l->sealed[i], err)) < 0)
        return r;
    *away = ms_since(start_us);
    memmove(l->layers + 1, l->layers, l->n_layers++ * sizeof *l->layers);
    l->layers[0] = (struct box_layer){l->sealed[i], false};
    start_us = lh_now_us();
    if ((r = box_set_layers(b, l->layers, l->n_layers, err)) < 0 ||
        (r = box_restore(b, l->images, err)) < 0)
        return r;
    *back = ms_since(start_us);
    return 0;
}

static int bench(const char *mib, int rounds, struct lh_error *err)
{
    static struct lab l;
    double away[MAX_ROUNDS], back[MAX_ROUNDS], raw[MAX_ROUNDS];
    char name[64];

    l.n_layers = 1;
    snprintf(l.root, sizeof l.root, "%s/root", dir);
    snprintf(l.box, sizeof l.box, "%s/box-%s", dir, mib);
    snprintf(l.images, sizeof l.images, "%s/images", dir);
    l.layers[0] = (struct box_layer){l.root, true};
    struct box_spec spec = spec_of(&l);
    struct box *b = mkdir(l.box, 0755) == 0 ? box_start(host, &spec, err) : NULL;
    if (!b)
        return lh_wrap(err, "starting");
    struct box_identity who = box_identity(b);
    int r = hold(b, mib, err);
    box_close(b); /* init is alone with its descriptors then */
    for (int i = 0; r == 0 && i < rounds; i++)
        if ((r = fresh_images(&l, err)) == 0 && (raw[i] = raw_dump(&l, who.init_pid)) < 0)
            r = lh_fail(err, LH_INTERNAL, "criu by hand; see %s/raw.log", l.images);
    b = r == 0 ? box_adopt(host, &spec, &who, err) : NULL;
    r = b ? 0 : err->code;
    for (int i = 0; r == 0 && i < rounds; i++)
        if ((r = fresh_images(&l, err)) == 0)
            r = there_and_back(&l, b, i, &away[i], &back[i], err);
    box_close(b);
    struct lh_error end = {0};
    if (box_destroy_named(host, "bench", l.box, &end) < 0)
        fprintf(stderr, "%s\n", end.message);
    for (int i = 0; i < rounds; i++)
        lh_remove_tree(l.sealed[i], NULL);
    if (r < 0)
        return r;
    snprintf(name, sizeof name, "hibernate, %s MiB", mib);
    bench_row(name, median(away, rounds), median(raw, rounds), 0, "ms");
    snprintf(name, sizeof name, "resume, %s MiB", mib);
    bench_row(name, median(back, rounds), 0, 0, "ms");
    return 0;
}

static int prepare(struct lh_error *err)
{
    lh_autofree char *witness = box_find_program("agentenv-witness", err);
    lh_autofree char *command =
        witness ? lh_format("mkdir -p %s/root/tmp && cp %s %s/root/witness", dir, witness, dir)
                : NULL;

    if (!command || system(command))
        return lh_wrap(err, "the root file system");
    return 0;
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 9, version, r;
    struct lh_error err = {0};

    if (rounds < 1 || rounds > MAX_ROUNDS || !mkdtemp(dir))
        return 2;
    host = box_host_create(&(struct box_host_options){.cgroup_parent = "bench-checkpoint"}, &err);
    r = host ? box_host_criu(host, &version, &err) : err.code;
    if (r == 0)
        r = prepare(&err);
    if (r == 0 && (r = bench("1", rounds, &err)) == 0)
        r = bench("100", rounds, &err);
    box_host_destroy(host);
    lh_remove_tree(dir, NULL);
    if (r < 0)
        fprintf(stderr, "bench_checkpoint: %s\n", err.message);
    return r < 0;
}

/* bench_sandbox [SECONDS]: sandboxes started, used for one /bin/true and removed, per second, with
 * 1, 2 and 4 at a time; latency of an exec in a running sandbox; of a live seal. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/sandbox/box.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "tests/bench/bench.h"

enum { MAX_WORKERS = 4, MAX_SAMPLES = 20000 };

static char dir[] = "/tmp/sandbox-bench-XXXXXX", root[64];
static struct box_host *host;
static int64_t until_ms;

struct worker {
    unsigned index, done, failed;
    double ms[MAX_SAMPLES];
};

static struct worker workers[MAX_WORKERS];

static int fail(const char *what, const struct lh_error *err)
{
    fprintf(stderr, "%s: %s\n", what, err->message);
    return -1;
}

static struct box *start(const char *id, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/%s", dir, id);
    struct box_layer layer = {root, true};
    struct box_spec spec = {.id = id,
                            .dir = path,
                            .layers = &layer,
                            .n_layers = 1,
                            .limits = {1000, 64 << 20, 64, 256, 64 << 20, 64 << 10}};

    if (!path || mkdir(path, 0755) < 0)
        return lh_fail_errno(err, errno, "directory of %s", id), NULL;
    return box_start(host, &spec, err);
}

static int run_true(struct box *b, const char *exec_id, struct lh_error *err)
{
    static const char *const argv[] = {"/bin/true", NULL};
    struct box_exec_spec spec = {.exec_id = exec_id, .argv = argv, .timeout_ms = 10000};
    struct box_exec_result r;
    int rc = box_exec(b, &spec, &r, err);

    return rc < 0 || r.status == 0 ? rc : lh_fail(err, LH_INTERNAL, "/bin/true: %d", r.status);
}

static int cycle(const struct worker *w, struct lh_error *err)
{
    char id[32];

    snprintf(id, sizeof id, "w%u-%u", w->index, w->done);
    struct box *b = start(id, err);
    if (!b)
        return err->code;
    int r = run_true(b, "x", err);
    return box_destroy(b, r < 0 ? NULL : err) < 0 || r < 0 ? LH_INTERNAL : 0;
}

static void *work(void *arg)
{
    struct worker *w = arg;

    while (lh_now_ms() < until_ms && w->done < MAX_SAMPLES) {
        struct lh_error err = {0};
        int64_t t = lh_now_us();
        if (cycle(w, &err) < 0) {
            w->failed++;
            fail("cycle", &err);
            break;
        }
        w->ms[w->done++] = (double)(lh_now_us() - t) / 1000;
    }
    return NULL;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void report(const char *name, double *ms, unsigned n)
{
    char row[64];

    qsort(ms, n, sizeof *ms, compare);
    snprintf(row, sizeof row, "sandbox: %s, median", name);
    bench_row(row, ms[n / 2], 0, 0, "ms");
    snprintf(row, sizeof row, "sandbox: %s, 99 %%", name);
    bench_row(row, ms[n * 99 / 100], 0, 0, "ms");
}

static int bench_starts(unsigned n_workers, int seconds)
{
    static double all[MAX_WORKERS * MAX_SAMPLES];
    pthread_t threads[MAX_WORKERS];
    char name[64];
    unsigned done = 0, failed = 0;
    int64_t t = lh_now_us();

    until_ms = lh_now_ms() + seconds * 1000;
    for (unsigned i = 0; i < n_workers; i++) {
        workers[i].index = n_workers * 10 + i;
        workers[i].done = workers[i].failed = 0;
        if (pthread_create(&threads[i], NULL, work, &workers[i]) != 0)
            return -1;
    }
    for (unsigned i = 0; i < n_workers; i++) {
        pthread_join(threads[i], NULL);
        memcpy(all + done, workers[i].ms, workers[i].done * sizeof *all);
        done += workers[i].done;
        failed += workers[i].failed;
    }
    double s = (double)(lh_now_us() - t) / 1e6;
    snprintf(name, sizeof name, "sandbox: start+exec+rm, %u threads", n_workers);
    bench_row(name, done / s, 0, 0, "sandboxes/s");
    snprintf(name, sizeof name, "start+exec+rm, %u", n_workers);
    if (done)
        report(name, all, done);
    return failed ? -1 : 0;
}

static int bench_exec(struct box *b, struct lh_error *err)
{
    enum { N = 300 };
    static double ms[N];
    char id[16];

    for (int i = 0; i < N; i++) {
        int64_t t = lh_now_us();
        snprintf(id, sizeof id, "e%d", i);
        if (run_true(b, id, err) < 0)
            return err->code;
        ms[i] = (double)(lh_now_us() - t) / 1000;
    }
    report("exec /bin/true", ms, N);
    return 0;
}

static int bench_seal(struct box *b, struct lh_error *err)
{
    enum { N = 50 };
    static double ms[N];

    for (int i = 0; i < N; i++) {
        lh_autofree char *layer = lh_format("%s/layer-%d", dir, i);
        bool live = false;
        int64_t t = lh_now_us();
        if (!layer || box_seal(b, layer, &live, err) < 0)
            return err->code;
        ms[i] = (double)(lh_now_us() - t) / 1000;
        if (!live)
            return lh_fail(err, LH_INTERNAL, "seal %d was not live", i);
    }
    report("live seal", ms, N);
    return 0;
}

static int bench_one_box(void)
{
    struct lh_error err = {0};
    struct box *b = start("steady", &err);

    if (!b)
        return fail("start", &err);
    int r = bench_exec(b, &err) < 0 || bench_seal(b, &err) < 0 ? fail("one box", &err) : 0;
    return box_destroy(b, &err) < 0 ? fail("remove", &err) : r;
}

/* With the mount points that an imported image has: a start then makes no files.  The directory is
 * marked as the daemon marks its own (core.c), or figures depend on what /tmp has seen before. */
static int make_root(struct lh_error *err)
{
    lh_autofree char *cmd = lh_format(
        "chattr -f +T %s; mkdir -p %s && cd %s && mkdir -p bin proc dev/pts dev/shm tmp && chmod "
        "1777 dev/shm tmp "
        "&& "
        "cd dev && touch null zero full random urandom tty && ln -s pts/ptmx ptmx && "
        "ln -s /proc/self/fd fd && for i in 0:in 1:out 2:err; do ln -s /proc/self/fd/${i%%:*} "
        "std${i#*:}; done && cp /bin/busybox ../bin && ln -s busybox ../bin/true",
        dir, root, root);

    if (!cmd || system(cmd) != 0)
        return lh_fail(err, LH_FAILED_PRECONDITION, "no root: apt-get install busybox-static");
    return 0;
}

static int prepare(struct lh_error *err)
{
    if (!mkdtemp(dir))
        return lh_fail_errno(err, errno, "%s", dir);
    snprintf(root, sizeof root, "%s/root", dir);
    if (make_root(err) < 0)
        return err->code;
    host = box_host_create(&(struct box_host_options){.cgroup_parent = dir + strlen("/tmp/")}, err);
    return host ? 0 : err->code;
}

int main(int argc, char **argv)
{
    int seconds = argc > 1 ? atoi(argv[1]) : 3, r;
    struct lh_error err = {0};

    if (prepare(&err) < 0)
        return fail("bench_sandbox", &err) < 0;
    r = bench_one_box();
    for (unsigned n = 1; n <= MAX_WORKERS && r == 0; n *= 2)
        r = bench_starts(n, seconds);
    box_host_destroy(host);
    lh_remove_tree(dir, NULL);
    return r < 0;
}

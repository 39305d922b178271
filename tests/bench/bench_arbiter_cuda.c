/* The arbiter on one GPU: two processes, as in a job, one card.
 *
 *   switch   64 GiB of KV cache re-lent to the trainer and back, 50 cycles
 *   park     16 GiB of optimizer state to host memory and back, beside a plain pinned copy
 *   publish  new weights seen by the other process, with nothing copied
 *   death    the rollout process killed; its memory is lent on
 *
 * `bench-arbiter-cuda ARBITERD [GIB_KV GIB_PARKED]`; the same program is the rollout process. */
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/arbiter.h"
#include "proto/clock.h"
#include "proto/cuda_driver.h"
#include "proto/file.h"
#include "tests/bench/bench.h"

#ifndef LONGHAUL_CUDA
int main(void)
{
    fprintf(stderr, "bench_arbiter_cuda: this build was made without CUDA\n");
    return 77;
}
#else

extern char **environ;

enum { CYCLES = 50, DEADLINE_MS = 20000, WEIGHTS = 1 << 30, STEPS = 20 };
#define GIB   ((size_t)1 << 30)
#define KV    LONGHAUL__ARBITER__V1__CLASS__CLASS_KV
#define GRADS LONGHAUL__ARBITER__V1__CLASS__CLASS_GRADIENTS
#define OPT   LONGHAUL__ARBITER__V1__CLASS__CLASS_OPTIMIZER
#define W     LONGHAUL__ARBITER__V1__CLASS__CLASS_WEIGHTS
#define DROP  LONGHAUL__ARBITER__V1__PARK__PARK_DISCARD
#define HOST  LONGHAUL__ARBITER__V1__PARK__PARK_HOST
#define KEEP  LONGHAUL__ARBITER__V1__PARK__PARK_KEEP

struct bench {
    const struct cuda_driver *d;
    struct arbiter *a;
    CUstream stream;
    struct lh_error err;
};

static void must(const struct bench *b, int rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "bench_arbiter_cuda: %s: %s\n", what, b->err.message);
    exit(1); /* a bench's own main */
}

static void must_cuda(struct bench *b, CUresult r, const char *what)
{
    must(b, cuda_driver_check(b->d, r, what, &b->err), what);
}

static void join(struct bench *b, const char *dir, const char *name, bool leader)
{
    lh_autofree char *socket = lh_format("%s/run/arbiter.sock", dir);
    struct arbiter_options o = {.path = socket, .client = name, .leader = leader};

    b->d = cuda_driver(&b->err);
    must(b, b->d ? cuda_driver_use(b->d, &b->err) : b->err.code, "the GPU");
    must_cuda(b, b->d->cuStreamCreate(&b->stream, CU_STREAM_NON_BLOCKING), "stream");
    b->a = arbiter_connect(&o, &b->err);
    must(b, b->a ? 0 : b->err.code, "arbiterd");
}

/* One word at each MiB of a region, written by the GPU, or compared. */
static void mark(struct bench *b, uint64_t at, size_t bytes, unsigned seed)
{
    for (size_t i = 0; i < bytes; i += 1 << 20)
        must_cuda(b, b->d->cuMemsetD32Async(at + i, seed + (unsigned)(i >> 20), 1, b->stream),
                  "writing");
    must_cuda(b, b->d->cuStreamSynchronize(b->stream), "writing");
}

static size_t differ(struct bench *b, uint64_t at, size_t bytes, unsigned seed)
{
    size_t wrong = 0;

    for (size_t i = 0; i < bytes; i += 1 << 20) {
        unsigned word = 0;

        must_cuda(b, b->d->cuMemcpyDtoHAsync(&word, at + i, sizeof word, b->stream), "reading");
        must_cuda(b, b->d->cuStreamSynchronize(b->stream), "reading");
        wrong += word != seed + (unsigned)(i >> 20);
    }
    return wrong;
}

/* ---- the rollout process: holds KV, reads weights, says when it saw a version ---- */

struct seen {
    int64_t at_us;
    uint64_t step;
    unsigned word; /* the first of the weights, read by the GPU's copy */
};

static int rollout(const char *dir, size_t kv_bytes)
{
    struct bench b = {0};
    const struct arbiter_weights_header *h = NULL;
    const void *header = NULL;
    uint64_t kv, weights, step, last = 0;
    uint8_t id[16];
    size_t bytes;

    join(&b, dir, "rollout-0", false);
    must(&b,
         arbiter_declare_device(b.a, "kv", KV, kv_bytes, ARBITER_IN(ARBITER_ROLLOUT), DROP, &kv,
                                &b.err),
         "kv");
    must(&b, arbiter_attach(b.a, "header", &header, &bytes, &b.err), "header");
    must(&b, arbiter_attach_device(b.a, "weights", &weights, &bytes, &b.err), "weights");
    h = header;
    printf("ready\n");
    fflush(stdout);
    while (!arbiter_lost(b.a)) {
        struct seen s = {0};

        usleep(50);
        if (!arbiter_weights_read(h, &step, id) || step == last)
            continue;
        must_cuda(&b, b.d->cuMemcpyDtoHAsync(&s.word, weights, sizeof s.word, b.stream), "reading");
        must_cuda(&b, b.d->cuStreamSynchronize(b.stream), "reading");
        s.at_us = lh_now_us();
        s.step = last = step;
        if (write(STDOUT_FILENO, &s, sizeof s) != sizeof s)
            return 1;
    }
    return 0;
}

/* ---- the trainer process ---- */

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double switch_to(struct bench *b, enum arbiter_phase phase)
{
    struct arbiter_switch s;
    int64_t from = lh_now_us();

    must(b, arbiter_switch_phase(b->a, phase, DEADLINE_MS, &s, &b->err), "switch");
    must(b, arbiter_wait_phase(b->a, phase, lh_now_ms() + DEADLINE_MS, &b->err), "phase");
    return (double)(lh_now_us() - from) / 1e3;
}

static void print_times(const char *name, double *ms, int n, size_t bytes)
{
    qsort(ms, (size_t)n, sizeof *ms, by_size);
    printf("%-36s median %8.2f ms, slowest %8.2f ms", name, ms[n / 2], ms[n - 1]);
    if (bytes)
        printf(", %.1f GB/s", (double)bytes / ms[n / 2] / 1e6);
    printf("\n");
    fflush(stdout);
}

static void bench_switch(struct bench *b, size_t bytes)
{
    double to_train[CYCLES], to_rollout[CYCLES];
    unsigned long long outside = 0;
    uint64_t grads;

    must(b,
         arbiter_declare_device(b->a, "gradients", GRADS, bytes, ARBITER_IN(ARBITER_TRAIN), DROP,
                                &grads, &b->err),
         "gradients");
    switch_to(b, ARBITER_ROLLOUT); /* the first ones import and allocate */
    switch_to(b, ARBITER_TRAIN);
    switch_to(b, ARBITER_ROLLOUT);
    outside = cuda_driver_used_bytes();
    for (int i = 0; i < CYCLES; i++) {
        to_train[i] = switch_to(b, ARBITER_TRAIN);
        if (i % 10 == 0) {
            mark(b, grads, bytes, (unsigned)i);
            if (differ(b, grads, bytes, (unsigned)i))
                printf("WRONG CONTENT after a switch\n");
        }
        to_rollout[i] = switch_to(b, ARBITER_ROLLOUT);
    }
    printf("%zu GiB re-lent, 2 processes, %d cycles; residual is checked at each switch\n",
           bytes / GIB, CYCLES);
    print_times("ROLLOUT to TRAIN", to_train, CYCLES, 0);
    print_times("TRAIN to ROLLOUT", to_rollout, CYCLES, 0);
    printf("%-36s %.1f MiB, then %+.1f MiB\n", "used on the card after the cycles",
           (double)cuda_driver_used_bytes() / (1 << 20),
           ((double)cuda_driver_used_bytes() - (double)outside) / (1 << 20));
}

static double plain_copy(struct bench *b, uint64_t at, size_t bytes, void *pinned, bool out)
{
    int64_t from = lh_now_us();

    must_cuda(b,
              out ? b->d->cuMemcpyDtoHAsync(pinned, at, bytes, b->stream)
                  : b->d->cuMemcpyHtoDAsync(at, pinned, bytes, b->stream),
              "copy");
    must_cuda(b, b->d->cuStreamSynchronize(b->stream), "copy");
    return (double)(lh_now_us() - from) / 1e3;
}

static void bench_park(struct bench *b, size_t bytes)
{
    enum { ROUNDS = 5 };
    double out[ROUNDS], in[ROUNDS], plain_out[ROUNDS], plain_in[ROUNDS];
    size_t wrong = 0, copied = bytes / 4;
    uint64_t opt;
    void *pinned = NULL;

    switch_to(b, ARBITER_TRAIN);
    must(b,
         arbiter_declare_device(b->a, "optimizer", OPT, bytes, ARBITER_IN(ARBITER_TRAIN), HOST,
                                &opt, &b->err),
         "optimizer");
    must_cuda(b, b->d->cuMemHostAlloc(&pinned, copied, 0), "pinned memory");
    mark(b, opt, bytes, 7);
    switch_to(b, ARBITER_ROLLOUT); /* allocates the pinned memory */
    switch_to(b, ARBITER_TRAIN);
    for (int i = 0; i < ROUNDS; i++) {
        wrong += differ(b, opt, bytes, 7 + (unsigned)i);
        mark(b, opt, bytes, 8 + (unsigned)i);
        plain_out[i] = plain_copy(b, opt, copied, pinned, true);
        plain_in[i] = plain_copy(b, opt, copied, pinned, false);
        out[i] = switch_to(b, ARBITER_ROLLOUT);
        in[i] = switch_to(b, ARBITER_TRAIN);
    }
    b->d->cuMemFreeHost(pinned);
    printf("%zu GiB parked in host memory, the whole switch counted; %zu words wrong\n",
           bytes / GIB, wrong);
    print_times("pinned copy to host", plain_out, ROUNDS, copied);
    print_times("parked", out, ROUNDS, bytes);
    print_times("pinned copy to device", plain_in, ROUNDS, copied);
    print_times("restored", in, ROUNDS, bytes);
}

static void bench_publish(struct bench *b, struct arbiter_weights_header *h, uint64_t weights,
                          int from)
{
    double ms[STEPS];
    uint8_t id[16] = {1};
    struct seen s;
    int wrong = 0;

    for (unsigned i = 0; i < STEPS; i++) {
        arbiter_weights_begin(h);
        mark(b, weights, 4, 100 + i);
        int64_t at = lh_now_us();
        arbiter_weights_publish(h, 100 + i, id);
        if (read(from, &s, sizeof s) != sizeof s)
            must(b, lh_fail(&b->err, LH_INTERNAL, "rollout ended"), "publish");
        ms[i] = (double)(s.at_us - at) / 1e3;
        wrong += s.step != 100 + i || s.word != 100 + i;
        usleep(2000);
    }
    printf("weights published, 0 bytes copied: the segment is the same in both; %d wrong\n", wrong);
    print_times("publish to first read by the other", ms, STEPS, 0);
}

static void bench_death(struct bench *b, pid_t child)
{
    unsigned long long before;

    switch_to(b, ARBITER_ROLLOUT);
    before = cuda_driver_used_bytes();
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    printf("rollout killed: switch to TRAIN in %.2f ms", switch_to(b, ARBITER_TRAIN));
    printf(", used on the card %+.1f MiB\n",
           ((double)cuda_driver_used_bytes() - (double)before) / (1 << 20));
}

static pid_t start(char *const argv[], int *out)
{
    posix_spawn_file_actions_t actions;
    int pipe_fds[2];
    pid_t pid = 0;

    if (pipe2(pipe_fds, O_CLOEXEC) < 0)
        return 0;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pipe_fds[1], out ? 1 : 99);
    if (posix_spawn(&pid, argv[0], &actions, NULL, argv, environ))
        pid = 0;
    posix_spawn_file_actions_destroy(&actions);
    close(pipe_fds[1]);
    if (out)
        *out = pipe_fds[0];
    else
        close(pipe_fds[0]);
    return pid;
}

static void bench_all(struct bench *b, const char *self, char *dir, char *kv_gib, size_t parked)
{
    char role[] = "--rollout", line[8] = {0};
    char *const argv[] = {(char *)self, role, dir, kv_gib, NULL};
    struct arbiter_weights_header *h;
    void *header = NULL;
    uint64_t weights = 0;
    int from = -1;
    pid_t child;

    must(b,
         arbiter_declare(b->a, "header", W, ARBITER_WEIGHTS_OFFSET, ARBITER_ALL_PHASES, KEEP,
                         &header, &b->err),
         "header");
    must(b,
         arbiter_declare_device(b->a, "weights", W, WEIGHTS, ARBITER_ALL_PHASES, KEEP, &weights,
                                &b->err),
         "weights");
    h = header;
    child = start(argv, &from);
    if (!child || read(from, line, 6) != 6)
        must(b, lh_fail(&b->err, LH_INTERNAL, "the rollout process did not start"), "start");
    bench_switch(b, strtoull(kv_gib, NULL, 10) * GIB);
    bench_publish(b, h, weights, from);
    if (parked)
        bench_park(b, parked * GIB);
    bench_death(b, child);
}

int main(int argc, char **argv)
{
    struct lh_error err = {0};
    struct bench b = {0};
    char dir[] = "/tmp/bench-arbiter-XXXXXX", sixty_four[] = "64", self[4096] = {0};
    lh_autofree char *run = NULL;
    pid_t daemon;

    if (argc > 3 && !strcmp(argv[1], "--rollout"))
        return rollout(argv[2], strtoull(argv[3], NULL, 10) * GIB);
    if (argc < 2 || !cuda_driver(&err)) {
        fprintf(stderr, "bench_arbiter_cuda: %s\n", argc < 2 ? "which ARBITERD?" : err.message);
        return 77;
    }
    if (!mkdtemp(dir) || !(run = lh_format("%s/run", dir)) || mkdir(run, 0700) ||
        readlink("/proc/self/exe", self, sizeof self - 1) < 0)
        return 1;
    daemon = start((char *const[]){argv[1], dir, NULL}, NULL);
    if (!daemon)
        return 1;
    sleep(1);
    join(&b, dir, "trainer-0", true);
    bench_all(&b, self, dir, argc > 2 ? argv[2] : sixty_four,
              argc > 3 ? strtoull(argv[3], NULL, 10) : 16);
    arbiter_destroy(b.a);
    kill(daemon, SIGTERM);
    waitpid(daemon, NULL, 0);
    lh_remove_tree(dir, NULL);
    return 0;
}
#endif

/* Tokens a second of the quickstart model on one core, beside what they would be if its matrix
 * products ran at the speed of a large sgemm on this machine (2 operations a weight and token
 * forward, 6 with backward; the embedding is a look-up). */
#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/bench/bench.h"
#include "trainer/policy.h"

enum { SQUARE = 1024, LENGTH = 100, PAGE = 16, MAX_BATCH = 32, MILLISECONDS = 700 };

struct bench {
    struct policy_model *m;
    float *w;
    double peak, weights; /* operations a second; weights in matrix products */
    int32_t ids[LENGTH];
};

/* CPU time of this thread: a busy machine slows the run, not the figures. */
static int64_t cpu_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static void *memory(size_t bytes)
{
    size_t size = (bytes + 64) / 64 * 64;
    void *p = aligned_alloc(64, size);

    if (p)
        memset(p, 0, size);
    return p;
}

static double sgemm_peak(void)
{
    size_t n = (size_t)SQUARE * SQUARE;
    float *a = memory(3 * n * sizeof *a);
    int64_t from, took;
    int rounds = 0;

    if (!a)
        return 0;
    for (size_t i = 0; i < 2 * n; i++)
        a[i] = (float)(i % 7) - 3;
    openblas_set_num_threads(1);
    from = cpu_us();
    do {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, SQUARE, SQUARE, SQUARE, 1, a, SQUARE,
                    a + n, SQUARE, 0, a + 2 * n, SQUARE);
        rounds++;
        took = cpu_us() - from;
    } while (took < MILLISECONDS * 1000);
    free(a);
    return 2.0 * SQUARE * SQUARE * SQUARE * rounds / (double)took * 1e6;
}

/* Beside what sgemm would do if nothing but the multiplications cost time. */
static void report(const struct bench *b, const char *what, double tokens_per_s, int operations)
{
    char name[64];

    snprintf(name, sizeof name, "policy: %s", what);
    bench_row(name, tokens_per_s, b->peak / (operations * b->weights), 0, "tokens/s");
}

/* Sequences that share one arena, rewound to position 0 when they are full. */
struct batch {
    struct policy_exec *x;
    void *arena, *memory;
    float **pages, *logits;
    struct policy_chunk chunks[MAX_BATCH];
};

static int batch_init(struct batch *k, const struct bench *b, int size, int tokens,
                      struct lh_error *err)
{
    size_t bytes = policy_exec_bytes(b->m, size * tokens), pages = LENGTH / PAGE + 1;
    size_t page = PAGE * policy_kv_floats(b->m), state = policy_state_floats(b->m);
    float *at;

    k->arena = memory(bytes);
    k->memory = at = memory((size_t)size * (pages * page + state) * sizeof *at);
    k->pages = calloc((size_t)size * pages, sizeof *k->pages);
    k->logits = memory((size_t)size * POLICY_BYTE_VOCAB * sizeof *k->logits);
    if (!k->arena || !at || !k->pages || !k->logits)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "bench: out of memory");
    for (int i = 0; i < size; i++) {
        float **own = k->pages + (size_t)i * pages;

        for (size_t p = 0; p < pages; p++, at += page)
            own[p] = at;
        k->chunks[i] = (struct policy_chunk){b->ids, tokens, 0, own, at, tokens - 1};
        at += state;
    }
    k->x = policy_exec_create(b->m, b->w, k->arena, bytes, size * tokens, PAGE, err);
    return k->x ? 0 : err->code;
}

static void batch_finish(struct batch *k)
{
    policy_exec_destroy(k->x);
    free(k->arena);
    free(k->memory);
    free(k->pages);
    free(k->logits);
}

static int bench_forward(const struct bench *b, const char *what, int size, int tokens,
                         struct lh_error *err)
{
    struct batch k = {0};
    int rc = batch_init(&k, b, size, tokens, err);
    int64_t from = cpu_us(), took = 0, done = 0;

    while (!rc && took < MILLISECONDS * 1000) {
        rc = policy_forward(k.x, k.chunks, size, k.logits, err);
        for (int i = 0; i < size; i++)
            k.chunks[i].start = (k.chunks[i].start + tokens) % (LENGTH / tokens * tokens);
        done += (int64_t)size * tokens;
        took = cpu_us() - from;
    }
    if (!rc)
        report(b, what, (double)done / (double)took * 1e6, 2);
    batch_finish(&k);
    return rc;
}

static int bench_training(const struct bench *b, struct lh_error *err)
{
    size_t bytes = policy_trainer_bytes(b->m, LENGTH);
    lh_autofree void *arena = memory(bytes);
    lh_autofree float *grads = memory(policy_model_floats(b->m) * sizeof *grads);
    lh_auto(policy_trainer) t = policy_trainer_create(b->m, b->w, arena, bytes, LENGTH, err);
    float logprobs[LENGTH], d[LENGTH];
    int64_t from = cpu_us(), took = 0, done = 0;
    int rc = t && grads ? 0 : LH_RESOURCE_EXHAUSTED;

    for (int i = 0; i < LENGTH; i++)
        d[i] = 1e-3f;
    while (!rc && took < MILLISECONDS * 1000) {
        rc = policy_train_forward(t, b->ids, LENGTH, 1, logprobs, err);
        if (!rc)
            rc = policy_train_backward(t, d, grads, err);
        done += LENGTH;
        took = cpu_us() - from;
    }
    if (!rc)
        report(b, "training, sequences of 100", (double)done / (double)took * 1e6, 6);
    return rc;
}

static int run(struct bench *b, struct lh_error *err)
{
    int rc;

    bench_row("sgemm 1024, one core", b->peak / 1e9, 0, 0, "Gflop/s");
    rc = bench_forward(b, "decode, batch 1", 1, 1, err);
    if (!rc)
        rc = bench_forward(b, "decode, batch 8", 8, 1, err);
    if (!rc)
        rc = bench_forward(b, "decode, batch 32", 32, 1, err);
    if (!rc)
        rc = bench_forward(b, "prefill, chunks of 100", 1, LENGTH, err);
    return rc ? rc : bench_training(b, err);
}

int main(int argc, char **argv)
{
    struct lh_error err = {0};
    struct bench b = {.m = policy_model_open(argc > 1 ? argv[1] : QUICKSTART_MODEL, &err)};
    int rc = b.m ? 0 : err.code;

    b.w = b.m ? memory(policy_model_floats(b.m) * sizeof *b.w) : NULL;
    if (b.w) {
        const struct policy_config *c = policy_model_config(b.m);

        policy_init(b.m, b.w, 1);
        b.weights = (double)policy_model_floats(b.m) - (double)c->vocab * c->hidden;
        b.peak = sgemm_peak();
        for (int i = 0; i < LENGTH; i++)
            b.ids[i] = i * 37 % c->vocab;
        rc = run(&b, &err);
    }
    if (rc)
        fprintf(stderr, "bench_policy: %s\n", err.message);
    free(b.w);
    policy_model_destroy(b.m);
    return rc || !b.w;
}

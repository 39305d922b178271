/* The policy on a GPU: prefill, decode and a training step of the 474 M parameter model of
 * docs/PERFORMANCE.md, beside the floors: a large matrix product and the bytes of the weights.
 * Weights are noise of the right size; their values change no time.
 *
 * `bench-policy-cuda [BACKEND [prefill | decode | train]]` */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/cleanup.h"
#include "proto/clock.h"
#include "tests/bench/bench.h"
#include "trainer/policy/backend.h"
#include "trainer/policy/model.h"

#define FOUR(x) x "," x "," x "," x
#define LAYERS  "\"linear_attention\",\"linear_attention\",\"linear_attention\",\"full_attention\""
#define SPARSE  "\"sparse\",\"sparse\",\"sparse\",\"sparse\""

static const char config[] =
    "{\"model_type\": \"kimi_linear\", \"vocab_size\": 32768, \"hidden_size\": 1280,"
    "\"linear_num_heads\": 10, \"linear_head_dim\": 128, \"num_attention_heads\": 10,"
    "\"kv_lora_rank\": 512, \"qk_nope_head_dim\": 128, \"qk_rope_head_dim\": 64,"
    "\"v_head_dim\": 128, \"intermediate_size\": 3456, \"moe_intermediate_size\": 512,"
    "\"num_experts\": 8, \"num_experts_per_token\": 4, \"num_shared_experts\": 1,"
    "\"q_lora_rank\": null, \"rms_norm_eps\": 1e-5, \"routed_scaling_factor\": 2.446,"
    "\"moe_renormalize\": true, \"num_hidden_layers\": 16, \"layer_types\": [" FOUR(
        LAYERS) "], \"mlp_layer_types\": [\"dense\",\"sparse\",\"sparse\",\"sparse\"," SPARSE
                "," SPARSE "," SPARSE "]}";

enum { T = 8192, BATCH = 64, PAGE = 64, CONTEXT = 1024 };

struct bench {
    struct policy_model *m;
    void *weights;
    struct lh_error err;
};

static void *take(struct bench *b, size_t bytes)
{
    void *p = policy_alloc(b->m, bytes, &b->err);

    if (!p) {
        fprintf(stderr, "bench_policy_cuda: %s\n", b->err.message);
        exit(1); /* a bench's own main */
    }
    return p;
}

/* Zero, in pieces that fit a host buffer. */
static void *take_clear(struct bench *b, size_t bytes)
{
    enum { PIECE = 64 << 20 };
    lh_autofree char *zeros = calloc(1, PIECE);
    char *p = take(b, bytes);

    for (size_t at = 0; at < bytes; at += PIECE)
        policy_put(b->m, p + at, zeros, bytes - at < PIECE ? bytes - at : PIECE, &b->err);
    return p;
}

static void fill(const struct policy_model *m, float *w)
{
    uint32_t x = 1;

    for (size_t i = 0; i < m->n_params; i++) {
        const struct policy_param *p = &m->params[i];
        float scale = p->dims > 1 ? 1.7f / sqrtf((float)p->shape[p->dims - 1]) : 0;
        float base = m->start[i] == START_ONE ? 1 : 0;

        for (size_t j = 0; j < p->count; j++) {
            x = x * 1664525u + 1013904223u;
            w[p->offset + j] = base + scale * ((float)(x >> 8) / (1 << 23) - 1);
        }
    }
}

static double seconds(int64_t from_us)
{
    return (double)(lh_now_us() - from_us) / 1e6;
}

/* Waits for the device. */
static void settle(struct bench *b)
{
    float x;

    if (policy_get(b->m, &x, b->weights, policy_number_bytes(b->m), &b->err))
        fprintf(stderr, "bench_policy_cuda: %s\n", b->err.message);
}

struct sequences {
    struct policy_chunk chunks[BATCH];
    void *arena, *pages, *tables, *states;
    float *logits;
    struct policy_exec *x;
};

static void open_sequences(struct bench *b, struct sequences *s, int n, int tokens, int context,
                           const int32_t *ids)
{
    int per = (context + PAGE - 1) / PAGE;
    size_t page = PAGE * policy_kv_floats(b->m) * policy_number_bytes(b->m);
    size_t state = policy_state_floats(b->m), bytes = policy_exec_bytes(b->m, n * tokens);
    lh_autofree float **table = calloc((size_t)(n * per), sizeof *table);

    s->arena = take_clear(b, bytes);
    s->pages = take_clear(b, (size_t)(n * per) * page);
    s->states = take_clear(b, (size_t)n * state * sizeof(float));
    s->tables = take(b, (size_t)(n * per) * sizeof *table);
    s->logits = take(b, (size_t)n * (size_t)b->m->config.vocab * sizeof(float));
    for (int i = 0; i < n * per; i++)
        table[i] = (float *)(void *)((char *)s->pages + (size_t)i * page);
    policy_put(b->m, s->tables, table, (size_t)(n * per) * sizeof *table, &b->err);
    s->x = policy_exec_create(b->m, b->weights, s->arena, bytes, n * tokens, PAGE, &b->err);
    for (int i = 0; i < n; i++)
        s->chunks[i] = (struct policy_chunk){ids,
                                             tokens,
                                             context - tokens,
                                             (float **)s->tables + i * per,
                                             (float *)s->states + (size_t)i * state,
                                             tokens - 1};
}

static void close_sequences(struct bench *b, struct sequences *s)
{
    policy_exec_destroy(s->x);
    policy_free(b->m, s->arena);
    policy_free(b->m, s->pages);
    policy_free(b->m, s->states);
    policy_free(b->m, s->tables);
    policy_free(b->m, s->logits);
}

/* Tokens a second of n sequences of `tokens` new ones each. */
static double forward_rate(struct bench *b, int n, int tokens, int context, int rounds,
                           const int32_t *ids)
{
    struct sequences s;
    int64_t from = 0;

    open_sequences(b, &s, n, tokens, context, ids);
    for (int i = -1; i < rounds; i++) { /* the first is not counted */
        if (i == 0) {
            settle(b);
            from = lh_now_us();
        }
        if (policy_forward(s.x, s.chunks, n, s.logits, &b->err))
            fprintf(stderr, "bench_policy_cuda: %s\n", b->err.message);
    }
    settle(b);
    close_sequences(b, &s);
    return (double)n * tokens * rounds / seconds(from);
}

static double training_rate(struct bench *b, int tokens, int rounds, const int32_t *ids)
{
    size_t bytes = policy_trainer_bytes(b->m, tokens), floats = policy_model_floats(b->m);
    void *arena = take(b, bytes);
    float *grads = take_clear(b, floats * sizeof *grads);
    lh_autofree float *d = calloc((size_t)tokens, 2 * sizeof *d);
    struct policy_trainer *t =
        policy_trainer_create(b->m, b->weights, arena, bytes, tokens, &b->err);
    int64_t from = 0, forward = 0, start;

    for (int i = 0; i < tokens; i++)
        d[i] = 1e-3f;
    for (int i = -1; i < rounds; i++) {
        if (i == 0)
            from = lh_now_us(), forward = 0;
        start = lh_now_us();
        if (policy_train_forward(t, ids, tokens, 1, d + tokens, &b->err))
            fprintf(stderr, "bench_policy_cuda: %s\n", b->err.message);
        forward += lh_now_us() - start;
        policy_train_backward(t, d, grads, &b->err);
        settle(b);
    }
    printf("%-36s %10.3f GiB, forward %.3f s of %.3f s a step\n", "  activations",
           (double)bytes / (1 << 30), (double)forward / 1e6 / rounds, seconds(from) / rounds);
    policy_trainer_destroy(t);
    policy_free(b->m, arena);
    policy_free(b->m, grads);
    return (double)tokens * rounds / seconds(from);
}

static void measure_prefill(struct bench *b, const int32_t *ids, double active, double bytes)
{
    double rate = forward_rate(b, 1, T, T, 2, ids);

    bench_row("prefill of 8192", rate, 0, 0, "tokens/s");
    bench_row("  of matrix products", 2e-12 * active * rate, 0, 0, "Tflop/s");
    (void)bytes;
}

static void measure_decode(struct bench *b, const int32_t *ids, double active, double bytes)
{
    double rate = forward_rate(b, BATCH, 1, CONTEXT, 20, ids);

    bench_row("decode, batch 64, context 1024", rate, 0, 0, "tokens/s");
    bench_row("  weights read at", 1e-12 * rate / BATCH * bytes, 0, 0, "TB/s");
    (void)active;
}

static void measure_training(struct bench *b, const int32_t *ids, double active, double bytes)
{
    double rate = training_rate(b, T, 2, ids);

    bench_row("training, a sequence of 8192", rate, 0, 0, "tokens/s");
    bench_row("  of matrix products", 6e-12 * active * rate, 0, 0, "Tflop/s");
    (void)bytes;
}

static const struct measurement {
    const char *name;
    void (*run)(struct bench *b, const int32_t *ids, double active, double bytes);
} measurements[] = {
    {"prefill", measure_prefill}, {"decode", measure_decode}, {"train", measure_training}};

static int run(const char *backend, const char *only)
{
    struct bench b = {.m = policy_model_parse(config, sizeof config - 1, "bench", &b.err)};
    lh_autofree float *w = NULL;
    lh_autofree int32_t *ids = calloc(T, sizeof *ids);
    size_t floats, active;

    if (!b.m || policy_model_use(b.m, backend, &b.err)) {
        fprintf(stderr, "bench_policy_cuda: %s\n", b.err.message);
        return 77;
    }
    floats = policy_model_floats(b.m);
    active = floats - (size_t)b.m->config.vocab * 1280 -
             (size_t)15 * 4 * 3 * 512 * 1280; /* embeddings; experts not chosen */
    w = calloc(floats, sizeof *w);
    fill(b.m, w);
    b.weights = take(&b, floats * policy_number_bytes(b.m));
    policy_put_weights(b.m, b.weights, w, &b.err);
    for (int i = 0; i < T; i++)
        ids[i] = i * 37 % b.m->config.vocab;
    printf("== %s: %zu M parameters, %zu M active\n", backend, floats / 1000000, active / 1000000);
    for (size_t i = 0; i < LH_ARRAY_SIZE(measurements); i++)
        if (!only || !strcmp(only, measurements[i].name))
            measurements[i].run(&b, ids, (double)active,
                                (double)(floats * policy_number_bytes(b.m)));
    if (b.err.code)
        fprintf(stderr, "bench_policy_cuda: %s\n", b.err.message);
    policy_free(b.m, b.weights);
    policy_model_destroy(b.m);
    return b.err.code ? 1 : 0;
}

int main(int argc, char **argv)
{
    int rc = run(argc > 1 ? argv[1] : "cuda-bf16", argc > 2 ? argv[2] : NULL);

    return rc || argc > 1 ? rc : run("cuda", NULL);
}

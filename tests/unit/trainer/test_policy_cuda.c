/* The CUDA backend in float32 against the CPU backend: the golden model, and models whose heads
 * have the sizes that kernels are written for.  Skipped without a GPU; LONGHAUL_MUST_WORK=gpu
 * forbids that. */
#include "tests/unit/trainer/policy_util.h"

#include <math.h>

#include "tests/must_work.h"
#include "trainer/policy/verify.h"

#define SIZES                                                                                      \
    "\"model_type\": \"kimi_linear\", \"vocab_size\": 301, \"hidden_size\": 160,"                  \
    "\"intermediate_size\": 200, \"moe_intermediate_size\": 72, \"num_experts\": 8,"               \
    "\"num_experts_per_token\": 3, \"rms_norm_eps\": 1e-5, \"num_hidden_layers\": 4,"              \
    "\"routed_scaling_factor\": 2.5, "                                                             \
    "\"layer_types\": [\"linear_attention\", \"full_attention\", \"linear_attention\","            \
    "\"full_attention\"], "

#define MLPS(type) "\"mlp_layer_types\": [\"dense\", \"" type "\", \"" type "\", \"" type "\"]"

/* The sizes of the published model. */
#define WIDE                                                                                       \
    "{" SIZES "\"linear_head_dim\": 128, \"linear_num_heads\": 3, \"num_attention_heads\": 5,"     \
    "\"kv_lora_rank\": 512, \"qk_nope_head_dim\": 128, \"qk_rope_head_dim\": 64,"                  \
    "\"v_head_dim\": 128, \"num_shared_experts\": 1, \"q_lora_rank\": null,"                       \
    "\"moe_renormalize\": true, " MLPS("sparse") "}"

/* The same without experts: a rounding cannot flip a choice. */
#define DENSE                                                                                      \
    "{" SIZES "\"linear_head_dim\": 128, \"linear_num_heads\": 3, \"num_attention_heads\": 5,"     \
    "\"kv_lora_rank\": 512, \"qk_nope_head_dim\": 128, \"qk_rope_head_dim\": 64,"                  \
    "\"v_head_dim\": 128, \"num_shared_experts\": 1, \"q_lora_rank\": null,"                       \
    "\"moe_renormalize\": true, " MLPS("dense") "}"

/* Everything else: low-rank queries, no shared expert, no renormalisation, odd sizes. */
#define ODD                                                                                        \
    "{" SIZES "\"linear_head_dim\": 64, \"linear_num_heads\": 2, \"num_attention_heads\": 3,"      \
    "\"kv_lora_rank\": 40, \"qk_nope_head_dim\": 24, \"qk_rope_head_dim\": 12,"                    \
    "\"v_head_dim\": 20, \"q_lora_rank\": 36, \"moe_renormalize\": false,"                         \
    "\"linear_conv_kernel_dim\": 3, \"tie_word_embeddings\": true, " MLPS("sparse") "}"

static const char *no_gpu(void)
{
    static struct lh_error err;
    lh_auto(policy_model) m = util_open(GOLDEN);

    return policy_model_use(m, "cuda", &err) ? err.message : NULL;
}

#define NEEDS_GPU()                                                                                \
    do {                                                                                           \
        const char *why = no_gpu();                                                                \
        cr_assert(!why || !must_work("gpu"), "gpu must work here: %s", why);                       \
        if (why)                                                                                   \
            cr_skip_test("SKIPPED, gpu is missing: %s", why);                                      \
    } while (0)

struct side {
    struct policy_model *m;
    void *weights; /* of the backend */
};

static void *take(const struct side *s, size_t bytes)
{
    struct lh_error err = {0};
    lh_autofree void *zeros = calloc(1, bytes);
    void *p = policy_alloc(s->m, bytes, &err);

    cr_assert(p && zeros && !policy_put(s->m, p, zeros, bytes, &err), "%s", err.message);
    return p;
}

static void open_side(struct side *s, const char *config, const char *backend)
{
    struct lh_error err = {0};
    lh_autofree char *dir = util_config_dir(config);
    lh_autofree float *w = NULL;

    s->m = util_open(dir);
    cr_assert(!lh_remove_tree(dir, NULL));
    cr_assert(!policy_model_use(s->m, backend, &err), "%s", err.message);
    w = util_weights(s->m, 7);
    s->weights = take(s, policy_model_floats(s->m) * policy_number_bytes(s->m));
    cr_assert(!policy_put_weights(s->m, s->weights, w, &err), "%s", err.message);
}

static void close_side(struct side *s)
{
    policy_free(s->m, s->weights);
    policy_model_destroy(s->m);
}

static double relative(const float *got, const float *want, size_t n)
{
    double error = 0, most = 1e-30;

    for (size_t i = 0; i < n; i++) {
        double e = fabs((double)got[i] - (double)want[i]);

        error = e > error || isnan(e) ? e : error;
        most = fmax(most, fabs((double)want[i]));
    }
    return error / most;
}

/* Three sequences in ragged steps, decode among them; logits of every row, in order of steps. */
enum { SEQS = 3, STEPS = 5, LENGTH = 160, PAGES = LENGTH / UTIL_PAGE };
static const int steps[STEPS][SEQS] = {
    {37, 16, 1}, {1, 33, 64}, {1, 1, 1}, {20, 0, 17}, {1, 15, 1}};

static void run_steps(const struct side *s, float *logits)
{
    struct lh_error err = {0};
    int vocab = policy_model_config(s->m)->vocab, at[SEQS] = {0};
    size_t bytes = policy_exec_bytes(s->m, LENGTH), done = 0;
    size_t page = UTIL_PAGE * policy_kv_floats(s->m) * policy_number_bytes(s->m);
    void *arena = take(s, bytes), *states = take(s, SEQS * policy_state_floats(s->m) * 4);
    char *pages = take(s, SEQS * PAGES * page);
    float **tables = take(s, SEQS * PAGES * sizeof *tables), *table[SEQS * PAGES];
    float *made = take(s, LENGTH * (size_t)vocab * sizeof *made);
    int32_t tokens[SEQS][LENGTH];
    struct policy_exec *x =
        policy_exec_create(s->m, s->weights, arena, bytes, LENGTH, UTIL_PAGE, &err);

    for (size_t i = 0; i < SEQS * PAGES; i++) /* in no order */
        table[i] = (float *)(void *)(pages + i * 7 % (SEQS * PAGES) * page);
    cr_assert(x && !policy_put(s->m, tables, table, sizeof table, &err), "%s", err.message);
    for (int i = 0; i < SEQS; i++)
        util_tokens(s->m, (uint64_t)i, tokens[i], LENGTH);
    for (int step = 0; step < STEPS; step++) {
        struct policy_chunk chunks[SEQS];
        size_t rows = 0;
        int n = 0;

        for (int i = 0; i < SEQS; i++) {
            if (!steps[step][i])
                continue;
            chunks[n++] =
                (struct policy_chunk){tokens[i] + at[i],
                                      steps[step][i],
                                      at[i],
                                      tables + i * PAGES,
                                      (float *)states + (size_t)i * policy_state_floats(s->m),
                                      0};
            at[i] += steps[step][i];
            rows += (size_t)steps[step][i];
        }
        cr_assert(!policy_forward(x, chunks, n, made, &err), "%s", err.message);
        cr_assert(!policy_get(s->m, logits + done * (size_t)vocab, made,
                              rows * (size_t)vocab * sizeof *made, &err),
                  "%s", err.message);
        done += rows;
    }
    policy_exec_destroy(x);
    policy_free(s->m, arena);
    policy_free(s->m, states);
    policy_free(s->m, pages);
    policy_free(s->m, tables);
    policy_free(s->m, made);
}

/* Log-probabilities and gradients of one sequence. */
static void run_training(const struct side *s, int n, float *logprobs, float *grads)
{
    struct lh_error err = {0};
    size_t bytes = policy_trainer_bytes(s->m, n), size = policy_model_floats(s->m) * sizeof(float);
    void *arena = take(s, bytes), *made = take(s, size);
    lh_autofree int32_t *tokens = malloc((size_t)n * sizeof *tokens);
    lh_autofree float *d = malloc((size_t)n * sizeof *d);
    struct policy_trainer *t = policy_trainer_create(s->m, s->weights, arena, bytes, n, &err);

    cr_assert(t, "%s", err.message);
    util_tokens(s->m, 9, tokens, n);
    for (int i = 0; i < n - 1; i++)
        d[i] = (float)util_pick(8, (uint64_t)i, 100) / 50 - 1;
    cr_assert(!policy_train_forward(t, tokens, n, 0.8f, logprobs, &err) &&
                  !policy_train_backward(t, d, made, &err) &&
                  !policy_get(s->m, grads, made, size, &err),
              "%s", err.message);
    policy_trainer_destroy(t);
    policy_free(s->m, arena);
    policy_free(s->m, made);
}

/* Of gradients laid out as a and b lay them; prints each tensor that is off, returns the worst. */
static double gradient_gap(const struct policy_model *a, const float *got,
                           const struct policy_model *b, const float *want, double bound)
{
    size_t n;
    const struct policy_param *p = policy_model_params(a, &n), *q = policy_model_params(b, &n);
    double worst = 0;

    for (size_t i = 0; i < n; i++) {
        double x = relative(got + p[i].offset, want + q[i].offset, p[i].count);

        if (!(x <= bound))
            fprintf(stderr, "%-60s %.2e\n", p[i].name, x);
        worst = x > worst || isnan(x) ? x : worst;
    }
    return worst;
}

/* Bounds of logits and log-probabilities, and of gradients, over the largest of each. */
struct bounds {
    double values, gradients;
};

static const struct bounds exact = {1e-4, 1e-3}, rounded = {5e-2, 1.5e-1};

static void compare(const char *config, const char *backend, struct bounds bound, int n)
{
    struct side cpu, gpu;
    size_t rows = 0, floats, others;
    double logits, logprobs, gradients;

    open_side(&cpu, config, "cpu");
    open_side(&gpu, config, backend);
    floats = policy_model_floats(cpu.m);
    others = policy_model_floats(gpu.m);
    for (int i = 0; i < STEPS * SEQS; i++)
        rows += (size_t)steps[i / SEQS][i % SEQS];
    rows *= (size_t)policy_model_config(cpu.m)->vocab;
    lh_autofree float *a = calloc(rows, 4), *b = calloc(rows, 4), *p = calloc((size_t)n, 4);
    lh_autofree float *q = calloc((size_t)n, 4), *g = calloc(floats, 4), *h = calloc(others, 4);
    lh_autofree float *again = calloc(others, 4);

    run_steps(&cpu, a);
    run_steps(&gpu, b);
    logits = relative(b, a, rows);
    run_training(&cpu, n, p, g);
    run_training(&gpu, n, q, h);
    logprobs = relative(q, p, (size_t)n - 1);
    gradients = gradient_gap(gpu.m, h, cpu.m, g, bound.gradients);
    run_training(&gpu, n, q, again);
    fprintf(stderr, "%s: logits %.2e logprobs %.2e gradients %.2e\n", backend, logits, logprobs,
            gradients);
    cr_assert(logits <= bound.values, "logits %g", logits);
    cr_assert(logprobs <= bound.values, "log-probabilities %g", logprobs);
    cr_assert(gradients <= bound.gradients, "gradients %g", gradients);
    cr_assert(!memcmp(h, again, others * 4), "two runs of backward differ");
    close_side(&cpu);
    close_side(&gpu);
}

Test(policy_cuda, golden_within_bounds)
{
    struct lh_error err = {0};
    struct policy_report r;

    NEEDS_GPU();
    cr_assert(!policy_verify(GOLDEN, GOLDEN "/reference.safetensors", "cuda", stderr, &r, &err),
              "%s", err.message);
    cr_assert(policy_report_passes(&r));
}

Test(policy_cuda, published_sizes_as_on_the_cpu)
{
    NEEDS_GPU();
    compare(WIDE, "cuda", exact, 131);
}

Test(policy_cuda, odd_sizes_as_on_the_cpu)
{
    NEEDS_GPU();
    compare(ODD, "cuda", exact, 64);
}

Test(policy_cuda, bf16_near_the_cpu)
{
    NEEDS_GPU();
    compare(DENSE, "cuda-bf16", rounded, 131);
}

Test(policy_cuda, a_machine_without_says_so_in_one_line)
{
    const char *why = no_gpu();
    lh_auto(policy_model) m = util_open(GOLDEN);

    cr_assert(!strcmp(policy_model_backend(m), "cpu"));
    cr_assert(!why || (!strncmp(why, "cuda: ", 6) && !strchr(why, '\n')), "%s", why);
}

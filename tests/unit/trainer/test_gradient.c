/* Gradients of batches, and checkpoints. */
#include <dirent.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/trainer/policy_util.h"
#include "trainer/learn/adamw.h"
#include "trainer/learn/checkpoint.h"
#include "trainer/learn/gradient.h"

enum { SEQUENCES = 11, MAX = 40 };

/* A batch whose log-probabilities were recorded as rollout does: chunk by chunk. */
struct fixture {
    struct policy_model *model;
    float *weights;
    int32_t tokens[SEQUENCES][MAX];
    float recorded[SEQUENCES][MAX];
    uint8_t mask[SEQUENCES][MAX], current[SEQUENCES][MAX];
    struct gradient_sequence seq[SEQUENCES];
    struct gradient_memory memory;
};

static void record(struct fixture *f, int i, int n)
{
    const int vocab = policy_model_config(f->model)->vocab;
    struct lh_error err = {0};
    struct util_seq kv;
    void *arena;
    struct policy_exec *x = util_exec(f->model, f->weights, MAX, &arena);
    float *logits = util_alloc((size_t)MAX * (size_t)vocab * sizeof *logits);

    util_seq_init(&kv, f->model, MAX);
    for (int at = 0, cut; at < n; at += cut) {
        cut = 1 + util_pick(3, (uint64_t)(i * MAX + at), 6);
        cut = at + cut > n ? n - at : cut;
        const struct policy_chunk c = {.tokens = f->tokens[i] + at,
                                       .n = cut,
                                       .start = at,
                                       .pages = kv.pages,
                                       .state = kv.state};
        cr_assert(!policy_forward(x, &c, 1, logits, &err), "%s", err.message);
        for (int k = 0; k < cut && at + k + 1 < n; k++)
            f->recorded[i][at + k + 1] = policy_logprob(logits + (size_t)k * (size_t)vocab, vocab,
                                                        1, f->tokens[i][at + k + 1]);
    }
    free(logits);
    util_seq_finish(&kv);
    policy_exec_destroy(x);
    free(arena);
}

/* The golden model routes experts, the quickstart's is smooth. */
static struct fixture *setup(const char *dir)
{
    struct lh_error err = {0};
    struct fixture *f = calloc(1, sizeof *f);

    f->model = util_open(dir);
    f->weights = util_weights(f->model, 7);
    if (!strcmp(dir, GOLDEN))
        cr_assert(!policy_load(f->model, dir, f->weights, &err), "%s", err.message);
    for (int i = 0; i < SEQUENCES; i++) {
        int n = 5 + util_pick(1, (uint64_t)i, MAX - 5);
        util_tokens(f->model, (uint64_t)i + 100, f->tokens[i], n);
        record(f, i, n);
        for (int k = 0; k < n; k++)
            f->mask[i][k] = f->current[i][k] = k % 5 != 0;
        f->seq[i] = (struct gradient_sequence){.tokens = f->tokens[i],
                                               .behaviour = f->recorded[i],
                                               .mask = f->mask[i],
                                               .current = f->current[i],
                                               .n = (uint32_t)n,
                                               .temperature = 1,
                                               .advantage = i % 3 - 0.5};
    }
    f->memory.arena_bytes = gradient_arena_bytes(f->model, GRADIENT_SHARDS, MAX);
    f->memory.arena = util_alloc(f->memory.arena_bytes);
    f->memory.shards = util_alloc(GRADIENT_SHARDS * policy_model_floats(f->model) * sizeof(float));
    return f;
}

static void teardown(struct fixture *f)
{
    policy_model_destroy(f->model);
    free(f->weights);
    free(f->memory.arena);
    free(f->memory.shards);
    free(f);
}

static const struct objective objective = {
    .log_min = -0.2877f, .log_max = 0.3001f, .tau = 0.08f, .tokens = 150};

static struct gradient_result compute(struct fixture *f, const float *weights, unsigned threads)
{
    struct gradient_result r;
    struct lh_error err = {0};

    cr_assert(!gradient_compute(f->model, weights, &objective, f->seq, SEQUENCES, threads, MAX,
                                &f->memory, NULL, &r, &err),
              "%s", err.message);
    return r;
}

Test(gradient, I10_bytes_do_not_depend_on_the_number_of_threads)
{
    struct fixture *f = setup(GOLDEN);
    const size_t bytes = policy_model_floats(f->model) * sizeof(float);
    float *one = util_alloc(bytes);
    struct gradient_result a = compute(f, f->weights, 1);

    memcpy(one, f->memory.shards, bytes);
    cr_assert(a.norm > 0);
    for (unsigned threads = 2; threads <= 4; threads += 2) {
        struct gradient_result b = compute(f, f->weights, threads);
        cr_assert(memcmp(one, f->memory.shards, bytes) == 0, "%u threads", threads);
        cr_assert(a.loss == b.loss && a.norm == b.norm);
    }
    free(one);
    teardown(f);
}

static void flip_last_bit(float *weight)
{
    uint32_t bits;

    memcpy(&bits, weight, 4);
    bits ^= 1;
    memcpy(weight, &bits, 4);
}

/* One bit of one weight may vanish in the rounding of a sum; of one weight in each tensor, not all
 * do. */
Test(gradient, what_rollout_recorded_is_recomputed_to_the_bit_and_one_bit_of_a_weight_shows)
{
    struct fixture *f = setup(GOLDEN);
    struct gradient_result r = compute(f, f->weights, 2);
    bool shown = false;
    size_t n;
    const struct policy_param *p = policy_model_params(f->model, &n);

    cr_assert(r.current_tokens > 100);
    cr_assert(r.logprob_gap == 0, "gap %g", r.logprob_gap);
    for (size_t i = 0; i < n && !shown; i++) {
        float *weight = &f->weights[p[i].offset + p[i].count / 2];
        flip_last_bit(weight);
        shown = compute(f, f->weights, 2).logprob_gap > 0;
        flip_last_bit(weight);
    }
    cr_assert(shown, "the gap does not see a changed weight");
    teardown(f);
}

/* Along the gradient the loss must change by |g|^2 per unit. */
static void check_direction(struct fixture *f)
{
    const size_t n = policy_model_floats(f->model);
    float *moved = util_alloc(n * sizeof *moved);
    double loss[2];
    struct gradient_result r = compute(f, f->weights, 1);
    float *g = util_alloc(n * sizeof *g);

    memcpy(g, f->memory.shards, n * sizeof *g);
    double h = 2e-3 / r.norm;
    for (int side = 0; side < 2; side++) {
        for (size_t i = 0; i < n; i++)
            moved[i] = f->weights[i] + (float)((side ? h : -h) * g[i]);
        loss[side] = compute(f, moved, 1).loss;
    }
    double slope = (loss[1] - loss[0]) / (2 * h), expected = r.norm * r.norm;
    cr_assert(fabs(slope - expected) < 0.02 * expected, "slope %g, gradient says %g", slope,
              expected);
    free(moved);
    free(g);
}

Test(gradient, policy_gradient_is_the_slope_of_the_loss)
{
    struct fixture *f = setup(QUICKSTART_MODEL);

    check_direction(f);
    teardown(f);
}

Test(gradient, cloning_gradient_is_the_slope_of_the_loss)
{
    struct fixture *f = setup(QUICKSTART_MODEL);

    for (int i = 0; i < SEQUENCES; i++)
        f->seq[i].behaviour = NULL, f->seq[i].current = NULL;
    check_direction(f);
    teardown(f);
}

Test(gradient, no_advantage_no_gradient)
{
    struct fixture *f = setup(GOLDEN);

    for (int i = 0; i < SEQUENCES; i++)
        f->seq[i].advantage = 0;
    struct gradient_result r = compute(f, f->weights, 2);
    cr_assert(r.norm == 0 && r.loss == 0);
    cr_assert(r.current_tokens > 100, "the gap is measured all the same");
    teardown(f);
}

Test(gradient, a_sequence_beyond_the_context_and_a_stop_are_errors)
{
    struct fixture *f = setup(GOLDEN);
    struct gradient_result r;
    struct lh_error err = {0};
    atomic_bool stop = true;

    int e = gradient_compute(f->model, f->weights, &objective, f->seq, SEQUENCES, 2, MAX,
                             &f->memory, &stop, &r, &err);
    cr_assert(e == LH_CANCELLED);
    f->seq[4].n = MAX + 1;
    e = gradient_compute(f->model, f->weights, &objective, f->seq, SEQUENCES, 2, MAX, &f->memory,
                         NULL, &r, &err);
    cr_assert(e == LH_OUT_OF_RANGE, "%s", err.message);
    teardown(f);
}

/* ---- checkpoints ---- */

static size_t count_entries(const char *path)
{
    struct dirent **names = NULL;
    int n = scandir(path, &names, NULL, alphasort);

    for (int i = 0; i < n; i++)
        free(names[i]);
    free(names);
    return (size_t)n;
}

Test(checkpoint, comes_back_whole_and_only_the_newest_are_kept)
{
    struct fixture *f = setup(GOLDEN);
    const size_t n = policy_model_floats(f->model);
    char dir[] = "/tmp/trainer-checkpoint-XXXXXX", name[CHECKPOINT_NAME];
    struct lh_error err = {0};
    struct checkpoint_state s = {.seed = 9, .warm_steps = 4, .cursor = 17}, back = {.seed = 9};
    struct checkpoint_arrays a = {f->weights, util_alloc(n * 4), util_alloc(n * 4)},
                             b = {util_alloc(n * 4), util_alloc(n * 4), util_alloc(n * 4)};

    cr_assert(mkdtemp(dir));
    cr_assert(checkpoint_latest(dir, name, &err) == LH_NOT_FOUND);
    a.m[3] = 0.25f;
    a.v[n - 1] = 7;
    policy_model_fingerprint(f->model, s.fingerprint);
    memcpy(back.fingerprint, s.fingerprint, 16);
    for (s.version.step = 5; s.version.step < 9; s.version.step++)
        cr_assert(!checkpoint_write(dir, 2, f->model, &s, &a, &err), "%s", err.message);
    lh_autofree char *parent = lh_format("%s/checkpoints", dir);
    cr_assert(count_entries(parent) == 2 + 2 + 1, "two checkpoints and latest");
    cr_assert(!checkpoint_latest(dir, name, &err) && !strcmp(name, "step-000008"));
    cr_assert(!checkpoint_load(dir, name, f->model, &back, &b, &err), "%s", err.message);
    cr_assert(back.version.step == 8 && back.cursor == 17 && back.warm_steps == 4);
    cr_assert(!memcmp(a.weights, b.weights, n * 4) && !memcmp(a.m, b.m, n * 4) &&
              !memcmp(a.v, b.v, n * 4));
    back.seed = 10;
    cr_assert(checkpoint_load(dir, name, f->model, &back, &b, &err) == LH_FAILED_PRECONDITION);
    cr_assert(!lh_remove_tree(dir, &err));
    free(a.m), free(a.v), free(b.weights), free(b.m), free(b.v);
    teardown(f);
}

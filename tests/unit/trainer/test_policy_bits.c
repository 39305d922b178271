/* Rollout and trainer agree to the bit, however rollout cut and mixed its work (policy.h). */
#include "tests/unit/trainer/policy_util.h"

#include <pthread.h>

enum { SEQS = 6, LENGTH = 83, BATCH = 160 };

struct fixture {
    struct policy_model *m;
    float *w, *want; /* want [SEQS][LENGTH - 1] log-probabilities of the trainer */
    int32_t ids[SEQS][LENGTH];
};

static float *trained(const struct policy_model *m, const float *w, int32_t ids[SEQS][LENGTH])
{
    struct lh_error err = {0};
    void *arena;
    struct policy_trainer *t = util_trainer(m, w, LENGTH, &arena);
    float *out = util_alloc(SEQS * (LENGTH - 1) * sizeof *out);

    for (int i = 0; i < SEQS; i++)
        cr_assert(!policy_train_forward(t, ids[i], LENGTH, 0.8f, out + i * (LENGTH - 1), &err),
                  "%s", err.message);
    policy_trainer_destroy(t);
    free(arena);
    return out;
}

static void set_up(struct fixture *f, const char *dir)
{
    struct lh_error err = {0};

    f->m = util_open(dir);
    f->w = util_alloc(policy_model_floats(f->m) * sizeof *f->w);
    if (strcmp(dir, GOLDEN))
        policy_init(f->m, f->w, 7);
    else
        cr_assert(!policy_load(f->m, dir, f->w, &err), "%s", err.message);
    for (int i = 0; i < SEQS; i++)
        util_tokens(f->m, 100 + (uint64_t)i, f->ids[i], LENGTH);
    f->want = trained(f->m, f->w, f->ids);
}

static void tear_down(struct fixture *f)
{
    policy_model_destroy(f->m);
    free(f->w);
    free(f->want);
}

/* Log-probabilities of a chunk's targets against the trainer's, by their bits. */
static void compare(const struct fixture *f, int seq, int start, int n, const float *logits)
{
    int vocab = policy_model_config(f->m)->vocab;

    for (int t = start; t < start + n && t < LENGTH - 1; t++) {
        float got = policy_logprob(logits + (t - start) * vocab, vocab, 0.8f, f->ids[seq][t + 1]);
        float want = f->want[seq * (LENGTH - 1) + t];

        cr_assert(!memcmp(&got, &want, sizeof got), "sequence %d position %d: %a, trainer %a", seq,
                  t, (double)got, (double)want);
    }
}

/* A random selection of sequences, each advanced by a random number of tokens, until all are done.
 * most = 1 is plain decode; most = LENGTH may take a whole sequence at once. */
static void run_mix(const struct fixture *f, uint64_t seed, int most)
{
    struct lh_error err = {0};
    int vocab = policy_model_config(f->m)->vocab, at[SEQS] = {0}, left = SEQS * LENGTH;
    uint64_t draw = 0;
    struct util_seq s[SEQS];
    void *arena;
    struct policy_exec *x = util_exec(f->m, f->w, BATCH, &arena);
    float *logits = util_alloc((size_t)BATCH * (size_t)vocab * sizeof *logits);

    for (int i = 0; i < SEQS; i++)
        util_seq_init(&s[i], f->m, LENGTH);
    while (left > 0) {
        struct policy_chunk c[SEQS];
        int of[SEQS], n = 0, rows = 0, row = 0;

        for (int k = 0, first = util_pick(seed, draw++, SEQS); k < SEQS; k++) {
            int i = (first + k) % SEQS, rest = LENGTH - at[i];
            int len = 1 + util_pick(seed, draw++, most);

            len = len < rest ? len : rest;
            if (!rest || rows + len > BATCH || util_pick(seed, draw++, 3) == 0)
                continue;
            c[n] = (struct policy_chunk){f->ids[i] + at[i], len, at[i], s[i].pages, s[i].state, 0};
            of[n++] = i;
            rows += len;
        }
        cr_assert(!policy_forward(x, c, n, logits, &err), "%s", err.message);
        for (int k = 0; k < n; row += c[k++].n) {
            compare(f, of[k], at[of[k]], c[k].n, logits + (size_t)row * (size_t)vocab);
            at[of[k]] += c[k].n;
            left -= c[k].n;
        }
    }
    for (int i = 0; i < SEQS; i++)
        util_seq_finish(&s[i]);
    policy_exec_destroy(x);
    free(logits);
    free(arena);
}

static void all_mixes(const char *dir)
{
    static const int most[] = {1, 2, 5, 17, 40, LENGTH};
    struct fixture f;

    set_up(&f, dir);
    for (uint64_t seed = 1; seed <= 3; seed++)
        for (size_t i = 0; i < LH_ARRAY_SIZE(most); i++)
            run_mix(&f, seed * 1000 + i, most[i]);
    tear_down(&f);
}

Test(policy_bits, any_cut_and_mix_equals_the_trainer_golden_moe)
{
    all_mixes(GOLDEN);
}

Test(policy_bits, any_cut_and_mix_equals_the_trainer_quickstart)
{
    all_mixes(QUICKSTART_MODEL);
}

Test(policy_bits, last_bit_of_a_weight_shows)
{
    struct fixture f;
    size_t n, different = 0;
    const struct policy_param *p;
    uint32_t bits;
    float *got;

    set_up(&f, GOLDEN);
    p = policy_model_params(f.m, &n);
    for (size_t i = 0; i < n; i++)
        if (!strcmp(p[i].name, "model.layers.2.self_attn.v_proj.weight")) {
            float *w = f.w + p[i].offset + p[i].count / 2;

            memcpy(&bits, w, sizeof bits);
            bits ^= 1;
            memcpy(w, &bits, sizeof bits);
        }
    got = trained(f.m, f.w, f.ids);
    for (int i = 0; i < SEQS * (LENGTH - 1); i++)
        different += memcmp(&got[i], &f.want[i], sizeof *got) != 0;
    cr_assert(different > 0);
    free(got);
    tear_down(&f);
}

/* Trainers of several threads over one model, and where their gradients go. */
struct worker {
    const struct fixture *f;
    float *grads;
    int rc;
};

static void *work(void *arg)
{
    struct worker *k = arg;
    void *arena;
    struct policy_trainer *t = util_trainer(k->f->m, k->f->w, LENGTH, &arena);
    float logprobs[LENGTH], d[LENGTH];

    for (int i = 0; i < LENGTH; i++)
        d[i] = 1e-2f * (float)(i % 5 - 2);
    for (int i = 0; !k->rc && i < SEQS; i++) {
        k->rc = policy_train_forward(t, k->f->ids[i], LENGTH, 1, logprobs, NULL);
        if (!k->rc)
            k->rc = policy_train_backward(t, d, k->grads, NULL);
    }
    policy_trainer_destroy(t);
    free(arena);
    return NULL;
}

Test(policy_bits, gradients_do_not_depend_on_the_thread)
{
    enum { THREADS = 4 };
    struct fixture f;
    struct worker k[THREADS + 1];
    pthread_t id[THREADS];
    size_t bytes;

    set_up(&f, QUICKSTART_MODEL);
    bytes = policy_model_floats(f.m) * sizeof(float);
    for (int i = 0; i <= THREADS; i++)
        k[i] = (struct worker){&f, util_alloc(bytes), 0};
    work(&k[THREADS]);
    for (int i = 0; i < THREADS; i++)
        cr_assert(!pthread_create(&id[i], NULL, work, &k[i]));
    for (int i = 0; i < THREADS; i++)
        pthread_join(id[i], NULL);
    for (int i = 0; i <= THREADS; i++) {
        cr_expect(!k[i].rc && !memcmp(k[i].grads, k[THREADS].grads, bytes), "thread %d", i);
        free(k[i].grads);
    }
    tear_down(&f);
}

/* The reference names gradients after the modules of the implementation that made it, which fuses
 * parameters that the files keep apart; `parts` says where ours lie in theirs. */
#include "trainer/policy/verify.h"

#include <math.h>
#include <string.h>

#include "proto/file.h"
#include "trainer/policy/safetensors.h"
#include "trainer/policy/verify_memory.h"

struct run {
    FILE *out;
    struct policy_model *m;
    struct safetensors *ref;
    void *weights;
    int sequences, length, vocab;
    struct policy_report *report;
};

/* Growing comparison of one quantity. */
struct gap {
    double error, magnitude;
    size_t compared;
};

static void gap_add(struct gap *g, const float *got, const float *want, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        double e = fabs((double)got[i] - (double)want[i]);

        g->error = e > g->error || isnan(e) ? e : g->error;
        g->magnitude = fmax(g->magnitude, fabs((double)want[i]));
    }
    g->compared += n;
}

static double gap_relative(const struct gap *g)
{
    return g->magnitude > 0 ? g->error / g->magnitude : g->error;
}

static double print_gap(const struct run *r, const char *name, const struct gap *g, double bound)
{
    double x = gap_relative(g);

    fprintf(r->out, "%-68s %10.2e  %s\n", name, x, x <= bound ? "ok" : "TOO LARGE");
    return x;
}

static const struct policy_bounds exact = {1e-4, 1e-4, 1e-4, 1e-3, true};
static const struct policy_bounds rounded = {3 * 0.652, 3 * 0.0584, 3 * 0.0584, 3 * 1.388, false};

bool policy_report_passes(const struct policy_report *r)
{
    const struct policy_bounds *b = r->bounds;

    return r->logits <= b->logits && r->logprobs <= b->logprobs && r->loss <= b->loss &&
           r->gradients <= b->gradients && (r->greedy || !b->greedy);
}

/* The tensor `name`, of a type and a number of elements (0 = any). */
static const void *need(const struct run *r, const char *name, enum safetensors_type type,
                        size_t count, struct lh_error *err)
{
    const struct safetensor *t = safetensors_find(r->ref, name);

    if (!t || t->type != type || (count && t->count != count)) {
        lh_fail(err, LH_INVALID_ARGUMENT, "reference: tensor %s is missing or of another shape",
                name);
        return NULL;
    }
    return t->data;
}

static void *copy_of(const void *data, size_t count)
{
    void *p = malloc(count * 4);

    return p ? memcpy(p, data, count * 4) : NULL; /* the map is not aligned */
}

static int check_logits(struct run *r, struct policy_exec *x, const int32_t *ids, const float *want,
                        struct lh_error *err)
{
    size_t size = (size_t)r->length * (size_t)r->vocab, bytes = size * sizeof(float);
    lh_autofree float *logits = malloc(bytes);
    AUTO_MEMORY made = {.m = r->m};
    struct gap g = {0};
    int rc = logits ? memory_take(&made, bytes, true, err)
                    : lh_fail(err, LH_RESOURCE_EXHAUSTED, "logits: out of memory");

    for (int i = 0; !rc && i < r->sequences; i++) {
        struct verify_sequence s = {0};

        rc = verify_sequence_init(&s, r->m, r->length, err);
        if (!rc) {
            struct policy_chunk c = {ids + i * r->length, r->length, 0, s.pages, s.state, 0};

            rc = policy_forward(x, &c, 1, made.at, err);
            if (!rc)
                rc = policy_get(r->m, logits, made.at, bytes, err);
            gap_add(&g, logits, want + (size_t)i * size, size);
        }
        verify_sequence_finish(&s);
    }
    r->report->logits = print_gap(r, "logits", &g, r->report->bounds->logits);
    return rc;
}

/* Greedy continuation, one token at a time, of the first `prompt` ids. */
static int check_greedy(struct run *r, struct policy_exec *x, const int32_t *want, int total,
                        int prompt, struct lh_error *err)
{
    size_t bytes = (size_t)r->vocab * sizeof(float);
    lh_autofree float *logits = malloc(bytes);
    AUTO_MEMORY made = {.m = r->m};
    struct verify_sequence s = {0};
    int same = prompt, rc = verify_sequence_init(&s, r->m, total, err);

    if (!rc)
        rc = logits ? memory_take(&made, bytes, true, err)
                    : lh_fail(err, LH_RESOURCE_EXHAUSTED, "logits: out of memory");
    for (int at = 0; !rc && same < total; at = same++) {
        struct policy_chunk c = {want + at, same - at, at, s.pages, s.state, same - at - 1};

        rc = policy_forward(x, &c, 1, made.at, err);
        if (!rc)
            rc = policy_get(r->m, logits, made.at, bytes, err);
        if (!rc && policy_sample(logits, r->vocab, 0, 0, 0) != want[same])
            break;
    }
    verify_sequence_finish(&s);
    r->report->greedy = !rc && same == total;
    fprintf(r->out, "%-68s %4d of %d  %s\n", "greedy tokens", same - prompt, total - prompt,
            r->report->greedy ? "ok" : "DIFFERENT");
    return rc;
}

static int check_rollout(struct run *r, const int32_t *ids, struct lh_error *err)
{
    size_t bytes = policy_exec_bytes(r->m, r->length);
    AUTO_MEMORY arena = {.m = r->m};
    lh_autofree float *want = NULL;
    lh_autofree int32_t *continued = NULL;
    lh_auto(policy_exec) x = NULL;
    size_t size = (size_t)r->sequences * (size_t)r->length * (size_t)r->vocab;
    const void *logits = need(r, "logits", ST_F32, size, err);
    const void *greedy = need(r, "greedy", ST_I32, 0, err);
    int total, prompt, rc;

    if (!logits || !greedy)
        return LH_INVALID_ARGUMENT;
    total = (int)safetensors_find(r->ref, "greedy")->count;
    want = copy_of(logits, size);
    continued = copy_of(greedy, (size_t)total);
    if (!want || !continued)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "verify: out of memory");
    rc = memory_take(&arena, bytes, true, err);
    if (rc)
        return rc;
    for (prompt = 0; prompt < total && prompt < r->length && continued[prompt] == ids[prompt];)
        prompt++;
    prompt = prompt < 48 ? prompt : 48;
    if (prompt < 1)
        return lh_fail(err, LH_INVALID_ARGUMENT, "reference: greedy does not continue input_ids");
    x = policy_exec_create(r->m, r->weights, arena.at, bytes, r->length, VERIFY_PAGE_TOKENS, err);
    if (!x)
        return LH_INTERNAL;
    rc = check_logits(r, x, ids, want, err);
    return rc ? rc : check_greedy(r, x, continued, total, prompt, err);
}

/* Where a parameter of ours lies in a tensor of the reference. */
static const struct part {
    const char *ours, *theirs;
    int index; /* in units of our size */
} parts[] = {
    {"q_conv1d.weight", "conv1d.weight", 0},
    {"k_conv1d.weight", "conv1d.weight", 1},
    {"v_conv1d.weight", "conv1d.weight", 2},
    {"A_log", "forget_gate.A_log", 0},
    {"dt_bias", "forget_gate.dt_bias", 0},
    {"f_a_proj.weight", "forget_gate.f_a_proj.weight", 0},
    {"f_b_proj.weight", "forget_gate.f_b_proj.weight", 0},
};

/* "....experts.E.w1.weight": gate rows, then up rows, of all experts in one tensor. */
static const struct part expert_parts[] = {
    {"w1.weight", "gate_up_proj", 0},
    {"w3.weight", "gate_up_proj", 1},
    {"w2.weight", "down_proj", 0},
};

static const struct safetensor *find_part(const struct run *r, const char *name,
                                          const struct policy_param *p, size_t *at)
{
    const char *tail = strstr(name, ".experts.");
    int expert, len;
    lh_autofree char *theirs = NULL;

    *at = 0;
    if (tail && sscanf(tail, ".experts.%d.%n", &expert, &len) == 1) {
        for (size_t i = 0; i < LH_ARRAY_SIZE(expert_parts); i++)
            if (!strcmp(tail + len, expert_parts[i].ours)) {
                int per_expert = i < 2 ? 2 : 1;

                *at = (size_t)(expert * per_expert + expert_parts[i].index) * p->count;
                theirs =
                    lh_format("%.*s.experts.%s", (int)(tail - name), name, expert_parts[i].theirs);
            }
        return theirs ? safetensors_find(r->ref, theirs) : NULL;
    }
    for (size_t i = 0; i < LH_ARRAY_SIZE(parts); i++) {
        size_t skip = strlen(name) - strlen(parts[i].ours);

        if (strlen(name) < strlen(parts[i].ours) || strcmp(name + skip, parts[i].ours))
            continue;
        *at = (size_t)parts[i].index * p->count;
        theirs = lh_format("%.*s%s", (int)skip, name, parts[i].theirs);
        return theirs ? safetensors_find(r->ref, theirs) : NULL;
    }
    return NULL;
}

static const struct safetensor *find_gradient(const struct run *r, const struct policy_param *p,
                                              size_t *at)
{
    static const char block[] = ".block_sparse_moe.";
    const char *b = strstr(p->name, block);
    lh_autofree char *name =
        b ? lh_format("grad.%.*s.mlp.%s", (int)(b - p->name), p->name, b + strlen(block))
          : lh_format("grad.%s", p->name);
    const struct safetensor *t = name ? safetensors_find(r->ref, name) : NULL;

    *at = 0;
    return t || !name ? t : find_part(r, name, p, at);
}

static int compare_gradient(const struct run *r, const struct policy_param *p, const float *grads,
                            struct gap *gaps, struct lh_error *err)
{
    size_t at;
    const struct safetensor *t = find_gradient(r, p, &at);
    lh_autofree float *want = NULL;

    if (strstr(p->name, "e_score_correction_bias")) /* takes part in a choice only: no gradient */
        return 0;
    if (!t || t->type != ST_F32 || at + p->count > t->count)
        return lh_fail(err, LH_INVALID_ARGUMENT, "reference: no gradient that fits %s", p->name);
    want = copy_of((const float *)t->data + at, p->count);
    if (!want)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "verify: out of memory");
    gap_add(&gaps[t - safetensors_at(r->ref, 0)], grads + p->offset, want, p->count);
    return 0;
}

static int check_gradients(struct run *r, const float *grads, struct lh_error *err)
{
    size_t n, tensors = safetensors_count(r->ref);
    const struct policy_param *p = policy_model_params(r->m, &n);
    lh_autofree struct gap *gaps = calloc(tensors, sizeof *gaps);

    if (!gaps)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "verify: out of memory");
    for (size_t i = 0; i < n; i++) {
        int rc = compare_gradient(r, &p[i], grads, gaps, err);

        if (rc)
            return rc;
    }
    for (size_t i = 0; i < tensors; i++) {
        const struct safetensor *t = safetensors_at(r->ref, i);
        double x;

        if (strncmp(t->name, "grad.", 5))
            continue;
        if (gaps[i].compared != t->count)
            return lh_fail(err, LH_INVALID_ARGUMENT, "reference: %s belongs to no parameter",
                           t->name);
        x = print_gap(r, t->name, &gaps[i], r->report->bounds->gradients);
        r->report->gradients = x > r->report->gradients || isnan(x) ? x : r->report->gradients;
    }
    return 0;
}

/* loss = -sum(weight * logprob) / all positions. */
static int train_all(struct run *r, struct policy_trainer *t, const int32_t *ids, const float *want,
                     const float *loss_weights, float *grads, double *loss, struct lh_error *err)
{
    int n = r->length - 1;
    lh_autofree float *logprobs = malloc(2 * (size_t)n * sizeof *logprobs);
    float *d = logprobs + n, count = (float)(r->sequences * n);
    struct gap g = {0};
    int rc = logprobs ? 0 : lh_fail(err, LH_RESOURCE_EXHAUSTED, "verify: out of memory");

    for (int i = 0; !rc && i < r->sequences; i++) {
        rc = policy_train_forward(t, ids + i * r->length, r->length, 1, logprobs, err);
        if (rc)
            break;
        gap_add(&g, logprobs, want + i * n, (size_t)n);
        for (int j = 0; j < n; j++) {
            d[j] = -loss_weights[i * n + j] / count;
            *loss += (double)d[j] * (double)logprobs[j];
        }
        rc = policy_train_backward(t, d, grads, err);
    }
    r->report->logprobs = print_gap(r, "logprobs", &g, r->report->bounds->logprobs);
    return rc;
}

static int check_training(struct run *r, const int32_t *ids, struct lh_error *err)
{
    size_t bytes = policy_trainer_bytes(r->m, r->length);
    size_t positions = (size_t)r->sequences * (size_t)(r->length - 1);
    size_t size = policy_model_floats(r->m) * sizeof(float);
    AUTO_MEMORY arena = {.m = r->m};
    AUTO_MEMORY made = {.m = r->m};
    lh_autofree float *grads = malloc(size);
    lh_autofree float *logprobs = NULL, *weights = NULL;
    lh_auto(policy_trainer) t = NULL;
    const void *a = need(r, "logprobs", ST_F32, positions, err);
    const void *b = a ? need(r, "loss_weights", ST_F32, positions, err) : NULL;
    const void *c = b ? need(r, "loss", ST_F32, 1, err) : NULL;
    struct gap g = {0};
    double sum = 0;
    float loss, want;
    int rc;

    if (!c)
        return LH_INVALID_ARGUMENT;
    logprobs = copy_of(a, positions);
    weights = copy_of(b, positions);
    if (!grads || !logprobs || !weights)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "verify: out of memory");
    rc = memory_take(&arena, bytes, true, err);
    if (!rc)
        rc = memory_take(&made, size, false, err);
    if (rc)
        return rc;
    t = policy_trainer_create(r->m, r->weights, arena.at, bytes, r->length, err);
    rc = t ? train_all(r, t, ids, logprobs, weights, made.at, &sum, err) : LH_INTERNAL;
    if (!rc)
        rc = policy_get(r->m, grads, made.at, size, err);
    if (rc)
        return rc;
    memcpy(&want, c, sizeof want);
    loss = (float)sum;
    gap_add(&g, &loss, &want, 1);
    r->report->loss = print_gap(r, "loss", &g, r->report->bounds->loss);
    return check_gradients(r, grads, err);
}

static int verify(struct run *r, const char *dir, struct lh_error *err)
{
    const struct safetensor *t = safetensors_find(r->ref, "input_ids");
    size_t bytes = policy_model_floats(r->m) * sizeof(float);
    AUTO_MEMORY weights = {.m = r->m};
    lh_autofree int32_t *ids = NULL;
    lh_autofree float *host = NULL;
    int rc;

    if (!t || t->type != ST_I32 || t->dims != 2 || t->shape[1] < 2 || t->count > 1 << 20 ||
        !t->count)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "reference: input_ids must be I32 [sequences, length]");
    r->sequences = (int)t->shape[0];
    r->length = (int)t->shape[1];
    r->vocab = policy_model_config(r->m)->vocab;
    ids = copy_of(t->data, t->count);
    host = malloc(bytes);
    if (!ids || !host)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "verify: out of memory");
    rc = policy_load(r->m, dir, host, err);
    if (!rc)
        rc =
            memory_take(&weights, policy_model_floats(r->m) * policy_number_bytes(r->m), true, err);
    if (!rc)
        rc = policy_put_weights(r->m, weights.at, host, err);
    r->weights = weights.at;
    fprintf(r->out, "%-68s %10s\n", "", "error");
    if (!rc)
        rc = check_rollout(r, ids, err);
    return rc ? rc : check_training(r, ids, err);
}

int policy_verify(const char *model_dir, const char *reference, const char *backend, FILE *out,
                  struct policy_report *report, struct lh_error *err)
{
    lh_auto(policy_model) m = policy_model_open(model_dir, err);
    lh_auto(safetensors) ref = m ? safetensors_open(reference, err) : NULL;
    struct run r = {.out = out, .m = m, .ref = ref, .report = report};
    int rc;

    memset(report, 0, sizeof *report);
    if (!ref)
        return LH_INVALID_ARGUMENT;
    rc = policy_model_use(m, backend, err);
    report->bounds = policy_number_bytes(m) == 2 ? &rounded : &exact;
    if (!rc)
        rc = verify(&r, model_dir, err);
    return rc ? lh_wrap(err, "verifying %s with %s", model_dir, reference) : 0;
}

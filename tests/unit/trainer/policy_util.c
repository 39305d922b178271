#include "tests/unit/trainer/policy_util.h"

#include "trainer/policy/random.h"

void *util_alloc(size_t bytes)
{
    size_t size = (bytes + 64) / 64 * 64;
    void *p = aligned_alloc(64, size);

    cr_assert(p, "out of memory");
    return memset(p, 0, size);
}

struct policy_model *util_open(const char *dir)
{
    struct lh_error err = {0};
    struct policy_model *m = policy_model_open(dir, &err);

    cr_assert(m, "%s", err.message);
    return m;
}

char *util_config_dir(const char *json)
{
    struct lh_error err = {0};
    char *dir = strdup("/tmp/policy-test-XXXXXX");
    lh_autofree char *path = NULL;

    cr_assert(mkdtemp(dir));
    path = lh_format("%s/config.json", dir);
    cr_assert(!lh_write_file(path, json, strlen(json), 0644, &err), "%s", err.message);
    return dir;
}

float *util_weights(const struct policy_model *m, uint64_t seed)
{
    float *w = util_alloc(policy_model_floats(m) * sizeof *w);

    policy_init(m, w, seed);
    return w;
}

struct policy_exec *util_exec(const struct policy_model *m, const float *w, int max_tokens,
                              void **arena)
{
    struct lh_error err = {0};
    size_t bytes = policy_exec_bytes(m, max_tokens);
    struct policy_exec *x;

    *arena = util_alloc(bytes);
    x = policy_exec_create(m, w, *arena, bytes, max_tokens, UTIL_PAGE, &err);
    cr_assert(x, "%s", err.message);
    return x;
}

struct policy_trainer *util_trainer(const struct policy_model *m, const float *w, int max_tokens,
                                    void **arena)
{
    struct lh_error err = {0};
    size_t bytes = policy_trainer_bytes(m, max_tokens);
    struct policy_trainer *t;

    *arena = util_alloc(bytes);
    t = policy_trainer_create(m, w, *arena, bytes, max_tokens, &err);
    cr_assert(t, "%s", err.message);
    return t;
}

void util_seq_init(struct util_seq *s, const struct policy_model *m, int tokens)
{
    size_t n = ((size_t)tokens + UTIL_PAGE - 1) / UTIL_PAGE, page = UTIL_PAGE * policy_kv_floats(m);
    size_t state = policy_state_floats(m), size = (n * page + state) * sizeof *s->memory;

    s->memory = util_alloc(size);
    memset(s->memory, 0xff, n * page * sizeof *s->memory); /* NaN: pages need no clearing */
    s->state = s->memory + n * page;
    s->pages = calloc(n, sizeof *s->pages);
    for (size_t i = 0; i < n; i++)
        s->pages[i] = s->memory + (n - 1 - i) * page; /* any order */
}

void util_seq_finish(struct util_seq *s)
{
    free(s->memory);
    free(s->pages);
}

void util_tokens(const struct policy_model *m, uint64_t seed, int32_t *to, int n)
{
    for (int i = 0; i < n; i++)
        to[i] = util_pick(seed, (uint64_t)i, policy_model_config(m)->vocab);
}

int util_pick(uint64_t seed, uint64_t i, int below)
{
    return (int)(policy_uniform(seed, i) * below);
}

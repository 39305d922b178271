/* What must hold between the fields of a task; each function is one statement about it. */
#include <jansson.h>
#include <math.h>
#include <string.h>

#include "agentenv/task/validate.h"
#include "proto/cleanup.h"

typedef Longhaul__Task__V1__Environment Environment;
typedef Longhaul__Task__V1__File File;
typedef Longhaul__Task__V1__Verifier Verifier;

#define BAD(err, ...) lh_fail(err, LH_INVALID_ARGUMENT, __VA_ARGS__)

static int has_its_parts(const Task *t, struct lh_error *err)
{
    if (!t->environment)
        return BAD(err, "environment is missing; it names the image at least");
    if (!t->verifier)
        return BAD(err, "verifier is missing; its command judges the result");
    return 0;
}

static bool is_below(const char *path, const char *directory)
{
    size_t n = strlen(directory);

    return !strncmp(path, directory, n) && (!path[n] || path[n] == '/');
}

/* What the sandbox mounts itself, and where the verifier's layer goes. */
static const char *reserved_for(const char *path)
{
    static const char *const places[] = {"/proc", "/sys", "/dev", TASK_VERIFIER_DIR};

    for (size_t i = 0; i < LH_ARRAY_SIZE(places); i++)
        if (is_below(path, places[i]))
            return places[i];
    return NULL;
}

static int environment_files_are_free(const Task *t, struct lh_error *err)
{
    const Environment *e = t->environment;

    for (size_t i = 0; i < e->n_files; i++) {
        const char *place = reserved_for(e->files[i]->path);

        if (place)
            return BAD(err, "environment.files[%zu].path '%.200s' is in %s, which is reserved", i,
                       e->files[i]->path, place);
    }
    const char *place = reserved_for(task_workdir(t));
    return place ? BAD(err, "environment.workdir is in %s, which is reserved", place) : 0;
}

static int verifier_files_are_its_own(const Task *t, struct lh_error *err)
{
    const Verifier *v = t->verifier;

    for (size_t i = 0; i < v->n_files; i++) {
        const char *path = v->files[i]->path;

        if (!is_below(path, TASK_VERIFIER_DIR) || is_below(path, TASK_VERIFIER_DIR "/bin") ||
            !strcmp(path, TASK_VERIFIER_DIR))
            return BAD(err, "verifier.files[%zu].path '%.200s' is not below %s/, or in its bin", i,
                       path, TASK_VERIFIER_DIR);
    }
    return 0;
}

static size_t files_bytes(File *const *files, size_t n)
{
    size_t sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += files[i]->content.len;
    return sum;
}

static int files_fit(const Task *t, struct lh_error *err)
{
    size_t sum = files_bytes(t->environment->files, t->environment->n_files) +
                 files_bytes(t->verifier->files, t->verifier->n_files);

    return sum > TASK_FILES_MAX
               ? BAD(err, "its files have %zu bytes together, the limit is %d", sum, TASK_FILES_MAX)
               : 0;
}

/* With the slash before any other byte, so that a directory is followed by what is in it. */
static int by_path(const void *a, const void *b)
{
    const char *x = (*(File *const *)a)->path, *y = (*(File *const *)b)->path;

    while (*x && *x == *y)
        x++, y++;
    int left = *x == '/' ? 1 : (unsigned char)*x, right = *y == '/' ? 1 : (unsigned char)*y;
    return left - right;
}

/* No path twice, none a directory of another. */
static int paths_differ(const char *field, File *const *files, size_t n, struct lh_error *err)
{
    lh_autofree File **sorted = n > 1 ? calloc(n, sizeof *sorted) : NULL;

    if (n < 2)
        return 0;
    if (!sorted)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory to compare %zu files", n);
    memcpy(sorted, files, n * sizeof *sorted);
    qsort(sorted, n, sizeof *sorted, by_path);
    for (size_t i = 1; i < n; i++)
        if (is_below(sorted[i]->path, sorted[i - 1]->path))
            return BAD(err, "%s names '%.200s' and '%.200s', which cannot both be files", field,
                       sorted[i - 1]->path, sorted[i]->path);
    return 0;
}

static int environment_paths_differ(const Task *t, struct lh_error *err)
{
    return paths_differ("environment.files", t->environment->files, t->environment->n_files, err);
}

static int verifier_paths_differ(const Task *t, struct lh_error *err)
{
    return paths_differ("verifier.files", t->verifier->files, t->verifier->n_files, err);
}

static int variables_have_sources(const Task *t, struct lh_error *err)
{
    const Environment *e = t->environment;

    for (size_t i = 0; i < e->n_env; i++) {
        if (e->env[i]->source_case == LONGHAUL__TASK__V1__ENV_VAR__SOURCE__NOT_SET)
            return BAD(err, "environment.env[%zu] %s has neither value nor secret_ref", i,
                       e->env[i]->name);
        for (size_t k = 0; k < i; k++)
            if (!strcmp(e->env[i]->name, e->env[k]->name))
                return BAD(err, "environment.env names %s twice", e->env[i]->name);
    }
    return 0;
}

static int tools_are_described(const Task *t, struct lh_error *err)
{
    for (size_t i = 0; i < t->n_tools; i++) {
        const char *schema = t->tools[i]->json_schema;
        json_error_t where;

        for (size_t k = 0; k < i; k++)
            if (!strcmp(t->tools[i]->name, t->tools[k]->name))
                return BAD(err, "tools names %s twice", t->tools[i]->name);
        if (!*schema)
            continue;
        json_t *json = json_loads(schema, JSON_REJECT_DUPLICATES, &where);
        bool object = json_is_object(json);
        json_decref(json);
        if (!object)
            return BAD(err, "tools[%zu].json_schema is not a JSON object: line %d: %s", i,
                       json ? 1 : where.line, json ? "another type" : where.text);
    }
    return 0;
}

static int budgets_agree(const Task *t, struct lh_error *err)
{
    const Longhaul__Task__V1__Budgets *b = t->budgets;

    if (!b)
        return 0;
    if (b->total_tokens && b->turn_tokens > b->total_tokens)
        return BAD(err, "budgets.turn_tokens %u is above total_tokens %u", b->turn_tokens,
                   b->total_tokens);
    if (b->context_tokens && b->turn_tokens > b->context_tokens)
        return BAD(err, "budgets.turn_tokens %u is above context_tokens %u", b->turn_tokens,
                   b->context_tokens);
    return 0;
}

/* Only what the agent has done so far can be scored after its time is up. */
static int truncation_has_something_to_score(const Task *t, struct lh_error *err)
{
    static const struct {
        const char *name;
        enum task_phase phase;
    } phases[] = {{"boot", TASK_BOOT},
                  {"setup", TASK_SETUP},
                  {"verify", TASK_VERIFY},
                  {"teardown", TASK_TEARDOWN}};

    for (size_t i = 0; i < LH_ARRAY_SIZE(phases); i++)
        if (task_timeout(t, phases[i].phase).on_timeout ==
            LONGHAUL__TASK__V1__ON_TIMEOUT__ON_TIMEOUT_TRUNCATE_AND_SCORE)
            return BAD(err, "timeouts.%s.on_timeout cannot be TRUNCATE_AND_SCORE", phases[i].name);
    return 0;
}

static int reward_has_a_range(const Task *t, struct lh_error *err)
{
    struct task_reward r = task_reward(t);

    if (!isfinite(r.min) || !isfinite(r.max) || !isfinite(r.pass_mark))
        return BAD(err, "verifier.reward_min, reward_max and pass_mark must be finite");
    if (!(r.min <= 0 && 0 < r.max))
        return BAD(err,
                   "verifier.reward_min %g and reward_max %g: 0, the reward of doing nothing, "
                   "must be in the range and below its end",
                   r.min, r.max);
    if (!(0 < r.pass_mark && r.pass_mark <= r.max))
        return BAD(err, "verifier.pass_mark %g is not above 0 and at most reward_max %g",
                   r.pass_mark, r.max);
    return 0;
}

static int carries_only_into_a_fresh_sandbox(const Task *t, struct lh_error *err)
{
    const Verifier *v = t->verifier;
    bool fresh = v->isolation == LONGHAUL__TASK__V1__ISOLATION__ISOLATION_FRESH;

    if (fresh && !v->n_carry)
        return BAD(err, "verifier.carry is empty: with isolation FRESH nothing of the agent's work "
                        "would be judged");
    if (!fresh && v->n_carry)
        return BAD(err, "verifier.carry is for isolation FRESH; a fork has all files already");
    for (size_t i = 0; i < v->n_carry; i++)
        if (reserved_for(v->carry[i]))
            return BAD(err, "verifier.carry[%zu] '%.200s' is reserved", i, v->carry[i]);
    return 0;
}

int task_relations(const Task *task, struct lh_error *err)
{
    static int (*const statements[])(const Task *t, struct lh_error *err) = {
        has_its_parts, /* first: the others look into them */
        environment_files_are_free,
        verifier_files_are_its_own,
        files_fit,
        environment_paths_differ,
        verifier_paths_differ,
        variables_have_sources,
        tools_are_described,
        budgets_agree,
        truncation_has_something_to_score,
        reward_has_a_range,
        carries_only_into_a_fresh_sandbox,
    };

    for (size_t i = 0; i < LH_ARRAY_SIZE(statements); i++) {
        int r = statements[i](task, err);

        if (r < 0)
            return r;
    }
    return 0;
}

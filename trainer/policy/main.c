/* longhaul-policy: what one does with a model directory by hand. */
#include <argp.h>
#include <errno.h>
#include <string.h>

#include "proto/file.h"
#include "proto/process.h"
#include "trainer/policy/model.h"
#include "trainer/policy/verify.h"

enum { EXIT_FAILED = 1 };

struct options {
    const char *verb, *args[2];
    int n_args;
    uint64_t seed;
    const char *backend;
};

static int fail(const struct lh_error *err)
{
    fprintf(stderr, "longhaul policy: %s\n", err->message);
    return EXIT_FAILED;
}

static int run_verify(const struct options *o)
{
    struct lh_error err = {0};
    struct policy_report r;

    if (policy_verify(o->args[0], o->args[1], o->backend, stdout, &r, &err))
        return fail(&err);
    if (!policy_report_passes(&r)) {
        fprintf(stderr, "longhaul policy: %s does not compute what %s says\n", o->args[0],
                o->args[1]);
        return EXIT_FAILED;
    }
    printf("all within bounds; the largest error of a gradient is %.2e\n", r.gradients);
    return 0;
}

static void print_shape(const struct policy_param *p)
{
    char text[96];
    int len = 0;

    for (int d = 0; d < p->dims; d++)
        len += snprintf(text + len, sizeof text - (size_t)len, "%s%lld", d ? " x " : "",
                        (long long)p->shape[d]);
    printf("%-64s %20s %12zu\n", p->name, text, p->count);
}

static int run_show(const struct options *o)
{
    struct lh_error err = {0};
    lh_auto(policy_model) m = policy_model_open(o->args[0], &err);
    const struct policy_param *p;
    size_t n;

    if (!m)
        return fail(&err);
    p = policy_model_params(m, &n);
    for (size_t i = 0; i < n; i++)
        print_shape(&p[i]);
    printf("%zu parameters in %zu tensors; a token caches %zu floats, a sequence %zu\n",
           policy_model_floats(m), n, policy_kv_floats(m), policy_state_floats(m));
    return 0;
}

/* Nothing that is there is written over. */
static int check_absent(const char *dir, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/config.json", dir);

    if (!path)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%s: out of memory", dir);
    if (!access(path, F_OK))
        return lh_fail(err, LH_ALREADY_EXISTS, "%s exists; choose another directory", path);
    return 0;
}

static int run_init(const struct options *o)
{
    struct lh_error err = {0};
    size_t len;
    lh_autofree char *text = lh_read_file(o->args[0], CONFIG_MAX_BYTES, &len, &err);
    lh_auto(policy_model) m = text ? policy_model_parse(text, len, o->args[0], &err) : NULL;
    lh_autofree float *weights = NULL;

    if (!m || check_absent(o->args[1], &err))
        return fail(&err);
    weights = malloc(policy_model_floats(m) * sizeof *weights);
    if (!weights) {
        lh_fail(&err, LH_RESOURCE_EXHAUSTED, "%zu parameters do not fit in memory",
                policy_model_floats(m));
        return fail(&err);
    }
    policy_init(m, weights, o->seed);
    if (policy_save(m, o->args[1], weights, &err))
        return fail(&err);
    printf("%s: %zu parameters, seed %llu\n", o->args[1], policy_model_floats(m),
           (unsigned long long)o->seed);
    return 0;
}

static const struct verb {
    const char *name;
    int n_args;
    int (*run)(const struct options *o);
} verbs[] = {{"verify", 2, run_verify}, {"init", 2, run_init}, {"show", 1, run_show}};

static error_t parse_option(int key, char *arg, struct argp_state *state)
{
    struct options *o = state->input;
    char *end;

    switch (key) {
    case 's':
        errno = 0;
        o->seed = strtoull(arg, &end, 10);
        if (errno || end == arg || *end || *arg == '-')
            argp_error(state, "--seed takes a number, not '%s'", arg);
        return 0;
    case 'b':
        o->backend = arg;
        return 0;
    case ARGP_KEY_ARG:
        if (!o->verb)
            o->verb = arg;
        else if (o->n_args < 2)
            o->args[o->n_args++] = arg;
        else
            argp_error(state, "too many arguments");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int main(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"seed", 's', "N", 0, "init: seed of the first weights (default 0)", 0},
        {"backend", 'b', "NAME", 0, "verify: cpu (default) or cuda", 0},
        {0}};
    static const struct argp argp = {
        options,
        parse_option,
        "verify MODEL_DIR REFERENCE.safetensors\ninit CONFIG.json OUT_DIR\nshow MODEL_DIR",
        "Checks, makes and shows model directories.\v"
        "verify compares logits, log-probabilities, loss, every gradient and the greedy "
        "continuation "
        "with a reference, prints the largest error over the largest magnitude of each, and exits "
        "1 "
        "past the bounds (1e-4; gradients 1e-3).",
        NULL,
        NULL,
        NULL};
    struct options o = {.backend = "cpu"};

    argp_err_exit_status = LH_EXIT_USAGE;
    argp_parse(&argp, argc, argv, 0, NULL, &o);
    for (size_t i = 0; o.verb && i < LH_ARRAY_SIZE(verbs); i++)
        if (!strcmp(o.verb, verbs[i].name) && o.n_args == verbs[i].n_args)
            return verbs[i].run(&o);
    argp_help(&argp, stderr, ARGP_HELP_STD_USAGE, argv[0]);
    return LH_EXIT_USAGE;
}

/* start and resume: a sandbox from an image, a snapshot or a task. */
#include <stdio.h>
#include <string.h>

#include "agentenv/cli/verbs.h"
#include "proto/id.h"
#include "proto/parse.h"

enum { MAX_RULES = 64 };

struct start {
    const char *source, *name, *owner, *key;
    Longhaul__Task__V1__Limits limits;
    Longhaul__Task__V1__Network network;
    struct cli_policy policy;
    bool task;
    V1(PublishedPort) port[MAX_RULES], *ports[MAX_RULES];
    char *egress[MAX_RULES];
    size_t n_ports, n_egress;
};

enum { OPT_PIDS = 256, OPT_NETWORK, OPT_ALLOW, OPT_KEY, OPT_TASK };

static const struct argp_option start_options[] = {
    {"name", 'n', "NAME", 0, "Unique among the living; usable instead of the id", 0},
    {"memory", 'm', "SIZE", 0, "Limit; default 256M", 0},
    {"pids", OPT_PIDS, "N", 0, "Processes at a time; default 128", 0},
    {"cpu", 'c', "CORES", 0, "Limit, e.g. 0.5; default 1", 0},
    {"network", OPT_NETWORK, "KIND", 0, "none (default) or loopback", 0},
    {"allow", OPT_ALLOW, "HOST:PORT", 0,
     "What it may reach by TCP: a name, address or network, and PORT[,PORT...]; many times", 0},
    {"publish", 'p', "[HOSTPORT:]PORT", 0,
     "Its PORT appears on 127.0.0.1 of the daemon's machine, at any free one by default", 0},
    {"owner", CLI_OPT_OWNER, "TEXT", 0, "Free text, for ls and rm --owner", 0},
    {"key", OPT_KEY, "KEY", 0, "Idempotency key: the same key gives the same sandbox", 0},
    {"task", OPT_TASK, 0, 0, "The argument names a task: its image, files and setup", 0},
    {0},
};

static void add_port(struct start *s, const char *arg, struct argp_state *state)
{
    V1(PublishedPort) *p = &s->port[s->n_ports];
    unsigned host = 0, port = 0;
    int end = 0;

    longhaul__sandbox__v1__published_port__init(p);
    s->ports[s->n_ports++] = p;
    if ((sscanf(arg, "%u:%u%n", &host, &port, &end) != 2 || arg[end]) &&
        (host = 0, sscanf(arg, "%u%n", &port, &end) != 1 || arg[end]))
        argp_error(state, "--publish \"%s\": PORT or HOSTPORT:PORT", arg);
    p->host_port = host;
    p->port = port;
}

static void add_rule(struct start *s, int key, char *arg, struct argp_state *state)
{
    if (s->n_egress + s->n_ports == MAX_RULES)
        argp_error(state, "more than %d rules", MAX_RULES);
    if (key == OPT_ALLOW)
        s->egress[s->n_egress++] = arg;
    else
        add_port(s, arg, state);
}

static Longhaul__Task__V1__Network network_of(struct argp_state *state, const char *kind)
{
    if (!strcmp(kind, "loopback"))
        return LONGHAUL__TASK__V1__NETWORK__NETWORK_LOOPBACK;
    if (strcmp(kind, "none"))
        argp_error(state, "--network is none or loopback, not \"%s\"", kind);
    return LONGHAUL__TASK__V1__NETWORK__NETWORK_NONE;
}

static error_t parse_start(int key, char *arg, struct argp_state *state)
{
    struct start *s = state->input;
    const struct {
        int key;
        const char **to;
    } strings[] = {{'n', &s->name}, {CLI_OPT_OWNER, &s->owner}, {OPT_KEY, &s->key}};

    for (size_t i = 0; i < LH_ARRAY_SIZE(strings); i++)
        if (strings[i].key == key) {
            *strings[i].to = arg;
            return 0;
        }
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &s->policy;
        return 0;
    case 'm':
        s->limits.memory_bytes = cli_size(state, "--memory", arg);
        return 0;
    case 'c':
        s->limits.cpu_millis = (uint32_t)(cli_number(state, "--cpu", arg, 1024) * 1000 + 0.5);
        return 0;
    case OPT_PIDS:
        s->limits.pids = (uint32_t)cli_number(state, "--pids", arg, 1e6);
        return 0;
    case OPT_NETWORK:
        s->network = network_of(state, arg);
        return 0;
    case OPT_TASK:
        s->task = true;
        return 0;
    case OPT_ALLOW:
    case 'p':
        add_rule(s, key, arg, state);
        return 0;
    case ARGP_KEY_ARG:
    case ARGP_KEY_NO_ARGS:
        if (s->source || !arg)
            argp_error(state, "one image or snapshot");
        s->source = arg;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static void fill_source(const struct start *s, V1(CreateRequest) * req)
{
    if (s->task) {
        req->source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_TASK;
        req->task = (char *)s->source;
    } else if (lh_id_text_valid(s->source)) {
        req->source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_SNAPSHOT;
        req->snapshot = (char *)s->source;
    } else {
        req->source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_IMAGE;
        req->image = (char *)s->source;
    }
}

int start_verb(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_child children[] = {{&cli_policy_argp, 0, "By the clock:", 1}, {0}};
    const struct argp argp = {.options = start_options,
                              .parser = parse_start,
                              .args_doc = "IMAGE|SNAPSHOT",
                              .doc = "Starts a sandbox and prints its id.",
                              .children = children};
    V1(CreateRequest) req = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__INIT;
    V1(Policy) policy = LONGHAUL__SANDBOX__V1__POLICY__INIT;
    V1(NetworkRules) rules = LONGHAUL__SANDBOX__V1__NETWORK_RULES__INIT;
    lh_automsg(V1(Sandbox)) made = NULL;
    struct start s = {.limits = LONGHAUL__TASK__V1__LIMITS__INIT};
    char key[LH_ID_SIZE];

    cli_parse(&argp, argc, argv, &s);
    lh_id_new_text(key);
    req.idempotency_key = s.key ? (char *)s.key : key;
    if (s.name)
        req.name = (char *)s.name;
    if (s.owner)
        req.owner = (char *)s.owner;
    req.limits = &s.limits;
    req.network = s.network;
    rules.egress = s.egress;
    rules.n_egress = s.n_egress;
    rules.ports = s.ports;
    rules.n_ports = s.n_ports;
    req.rules = &rules;
    fill_source(&s, &req);
    if (cli_policy_fill(&s.policy, &policy))
        req.policy = &policy;
    req.ttl_ms = s.policy.ttl_ms;
    int r = cli_call(cli, "Create", &req.base, &longhaul__sandbox__v1__sandbox__descriptor, CALL_MS,
                     (ProtobufCMessage **)&made, err);
    return r < 0 ? r : cli_print_sandbox(cli, made, err);
}

/* A sandbox is asked for first: with one word only, which is no snapshot. */
int resume_verb(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    struct lh_error none = {0};

    if (argc < 2)
        return resume_sandbox(cli, argc, argv, err); /* whose parser says what is missing */
    if (argc == 2 && argv[1][0] != '-') {
        int r = resume_sandbox(cli, argc, argv, &none);
        if (r != LH_NOT_FOUND || !lh_id_text_valid(argv[1]))
            return r < 0 ? lh_fail(err, r, "%s", none.message) : r;
    }
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-?") ||
            (argv[i][0] != '-' && lh_id_text_valid(argv[i])))
            return start_verb(cli, argc, argv, err);
    return lh_fail(err, LH_INVALID_ARGUMENT,
                   "which one? give a sandbox, or an id as in `agentenv snapshot ls`");
}

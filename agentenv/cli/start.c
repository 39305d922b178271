/* start and resume: a sandbox from an image, a snapshot or a task. */
#include <stdio.h>
#include <string.h>

#include "agentenv/cli/verbs.h"
#include "proto/id.h"
#include "proto/parse.h"

enum { MAX_RULES = 64 };

struct start {
    const char *source, *name, *memory, *pids, *cpu, *network, *ttl, *owner, *key;
    const char *freeze, *hibernate;
    bool task, keep, pin;
    V1(PublishedPort) port[MAX_RULES], *ports[MAX_RULES];
    char *egress[MAX_RULES];
    size_t n_ports, n_egress;
};

enum {
    OPT_PIDS = 256,
    OPT_NETWORK,
    OPT_ALLOW,
    OPT_TTL,
    OPT_KEY,
    OPT_TASK,
    OPT_FREEZE,
    OPT_HIBERNATE,
    OPT_KEEP,
    OPT_PIN
};

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
    {"ttl", OPT_TTL, "TIME", 0, "Remove it after this long", 0},
    {"ttl-hibernate", OPT_KEEP, 0, 0, "Hibernate it then instead", 0},
    {"idle-freeze", OPT_FREEZE, "TIME", 0, "Freeze it when nobody has used it this long", 0},
    {"idle-hibernate", OPT_HIBERNATE, "TIME", 0, "Hibernate it then; the next command wakes it", 0},
    {"pin", OPT_PIN, 0, 0, "None of these happens before it is unpinned (SetPolicy)", 0},
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

static error_t parse_start(int key, char *arg, struct argp_state *state)
{
    struct start *s = state->input;
    const struct {
        int key;
        const char **to;
    } strings[] = {{'n', &s->name},
                   {'m', &s->memory},
                   {OPT_PIDS, &s->pids},
                   {'c', &s->cpu},
                   {OPT_NETWORK, &s->network},
                   {OPT_TTL, &s->ttl},
                   {OPT_FREEZE, &s->freeze},
                   {OPT_HIBERNATE, &s->hibernate},
                   {CLI_OPT_OWNER, &s->owner},
                   {OPT_KEY, &s->key}};

    for (size_t i = 0; i < LH_ARRAY_SIZE(strings); i++)
        if (strings[i].key == key) {
            *strings[i].to = arg;
            return 0;
        }
    if ((key == OPT_ALLOW || key == 'p') && s->n_egress + s->n_ports == MAX_RULES)
        argp_error(state, "more than %d rules", MAX_RULES);
    if (key == OPT_ALLOW) {
        s->egress[s->n_egress++] = arg;
    } else if (key == 'p') {
        add_port(s, arg, state);
    } else if (key == OPT_TASK || key == OPT_KEEP || key == OPT_PIN) {
        *(key == OPT_TASK ? &s->task : key == OPT_KEEP ? &s->keep : &s->pin) = true;
    } else if (key == ARGP_KEY_ARG && !s->source) {
        s->source = arg;
    } else if (key == ARGP_KEY_ARG || key == ARGP_KEY_NO_ARGS) {
        argp_error(state, "one image or snapshot");
    } else {
        return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

static int fill_limits(const struct start *s, Longhaul__Task__V1__Limits *l, struct lh_error *err)
{
    double cores = 0, pids = 0;
    int r = 0;

    if (s->memory)
        r = cli_size(s->memory, &l->memory_bytes, err);
    if (r == 0 && s->cpu)
        r = cli_number(s->cpu, 1024, &cores, "--cpu", err);
    if (r == 0 && s->pids)
        r = cli_number(s->pids, 1e6, &pids, "--pids", err);
    l->cpu_millis = (uint32_t)(cores * 1000 + 0.5);
    l->pids = (uint32_t)pids;
    return r;
}

static int fill_network(const struct start *s, V1(CreateRequest) * req, struct lh_error *err)
{
    if (!s->network)
        return 0;
    if (!strcmp(s->network, "loopback"))
        req->network = LONGHAUL__TASK__V1__NETWORK__NETWORK_LOOPBACK;
    else if (!strcmp(s->network, "none"))
        req->network = LONGHAUL__TASK__V1__NETWORK__NETWORK_NONE;
    else
        return lh_fail(err, LH_INVALID_ARGUMENT, "--network is none or loopback, not \"%s\"",
                       s->network);
    return 0;
}

static int fill_policy(const struct start *s, V1(CreateRequest) * req, V1(Policy) * p,
                       struct lh_error *err)
{
    int r = 0;

    p->hibernate_at_ttl = s->keep;
    p->pinned = s->pin;
    if (s->freeze)
        r = cli_duration(s->freeze, &p->freeze_after_ms, err);
    if (r == 0 && s->hibernate)
        r = cli_duration(s->hibernate, &p->hibernate_after_ms, err);
    if (s->keep || s->pin || s->freeze || s->hibernate)
        req->policy = p;
    return r;
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
    const struct argp argp = {
        start_options, parse_start, "IMAGE|SNAPSHOT", "Starts a sandbox and prints its id.", NULL,
        NULL,          NULL};
    V1(CreateRequest) req = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__INIT;
    Longhaul__Task__V1__Limits limits = LONGHAUL__TASK__V1__LIMITS__INIT;
    V1(Policy) policy = LONGHAUL__SANDBOX__V1__POLICY__INIT;
    V1(NetworkRules) rules = LONGHAUL__SANDBOX__V1__NETWORK_RULES__INIT;
    lh_automsg(V1(Sandbox)) made = NULL;
    struct start s = {0};
    char key[LH_ID_SIZE];
    int r;

    cli_parse(&argp, argc, argv, &s);
    lh_id_new_text(key);
    req.idempotency_key = s.key ? (char *)s.key : key;
    if (s.name)
        req.name = (char *)s.name;
    if (s.owner)
        req.owner = (char *)s.owner;
    req.limits = &limits;
    rules.egress = s.egress;
    rules.n_egress = s.n_egress;
    rules.ports = s.ports;
    rules.n_ports = s.n_ports;
    req.rules = &rules;
    fill_source(&s, &req);
    if ((r = fill_limits(&s, &limits, err)) < 0 || (r = fill_network(&s, &req, err)) < 0 ||
        (r = fill_policy(&s, &req, &policy, err)) < 0 ||
        (s.ttl && (r = cli_duration(s.ttl, &req.ttl_ms, err)) < 0))
        return r;
    r = cli_call(cli, "Create", &req.base, &longhaul__sandbox__v1__sandbox__descriptor, CALL_MS,
                 (ProtobufCMessage **)&made, err);
    return r < 0 ? r : cli_print_sandbox(cli, made, err);
}

/* A sandbox is asked for first: with one word only, which is no snapshot. */
int resume_verb(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    struct lh_error none = {0};

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

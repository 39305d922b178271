#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "agentenv/cli/verbs.h"
#include "agentenv/sandbox/box.h"
#include "proto/file.h"
#include "proto/id.h"
#include "proto/parse.h"

/* ---- printing ---- */

void cli_time(int64_t unix_ms, char out[24])
{
    time_t t = (time_t)(unix_ms / 1000);
    struct tm tm;

    out[0] = 0;
    if (localtime_r(&t, &tm))
        strftime(out, 24, "%Y-%m-%d %H:%M:%S", &tm);
}

const char *cli_enum_name(const ProtobufCEnumDescriptor *type, int value, const char *prefix)
{
    const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(type, value);
    size_t len = strlen(prefix);

    if (!v)
        return "UNKNOWN";
    return strncmp(v->name, prefix, len) ? v->name : v->name + len;
}

static const char *state_name(int state)
{
    return cli_enum_name(&longhaul__sandbox__v1__state__descriptor, state, "STATE_");
}

static const char *cause_name(int cause)
{
    return cause ? cli_enum_name(&longhaul__sandbox__v1__death_cause__descriptor, cause, "DEATH_")
                 : "";
}

static json_t *sandbox_json(const V1(Sandbox) * s)
{
    char when[24];

    cli_time(s->created_ms, when);
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:I, s:s, s:s, s:I, s:i, s:I, s:I}", "id",
                     s->id, "name", s->name, "state", state_name((int)s->state), "cause",
                     cause_name((int)s->cause), "image", s->image, "snapshot", s->snapshot, "task",
                     s->task, "attempt", (json_int_t)s->attempt, "owner", s->owner, "created", when,
                     "created_ms", (json_int_t)s->created_ms, "init_pid", s->init_pid,
                     "memory_bytes", (json_int_t)s->memory_bytes, "processes",
                     (json_int_t)s->processes);
}

static const char *const sandbox_columns[] = {
    "id", "name", "state", "cause", "image", "memory_bytes", "processes", "owner", "created", NULL};

/* A verb that makes one thing prints its id, so that ID=$(agentenv start …) works; JSON if asked.
 */
static int print_sandbox(struct cli *cli, const V1(Sandbox) * s, struct lh_error *err)
{
    if (cli->json_asked)
        return cli_print(cli, json_pack("[o]", sandbox_json(s)), sandbox_columns, err);
    puts(s->id);
    return 0;
}

int cli_new_id_print(struct cli *cli, const char *id, struct lh_error *err)
{
    static const char *const columns[] = {"id", NULL};

    if (cli->json_asked)
        return cli_print(cli, json_pack("[{s:s}]", "id", id), columns, err);
    puts(id);
    return 0;
}

/* ---- start, resume ---- */

struct start {
    const char *source, *name, *memory, *pids, *cpu, *network, *ttl, *owner, *key;
    bool task;
};

enum { OPT_PIDS = 256, OPT_NETWORK, OPT_TTL, OPT_OWNER, OPT_KEY, OPT_TASK, OPT_ALL = 'a' };

static const struct argp_option start_options[] = {
    {"name", 'n', "NAME", 0, "Unique among the living; usable instead of the id", 0},
    {"memory", 'm', "SIZE", 0, "Limit; default 256M", 0},
    {"pids", OPT_PIDS, "N", 0, "Processes at a time; default 128", 0},
    {"cpu", 'c', "CORES", 0, "Limit, e.g. 0.5; default 1", 0},
    {"network", OPT_NETWORK, "KIND", 0, "none (default) or loopback", 0},
    {"ttl", OPT_TTL, "TIME", 0, "Remove it after this long", 0},
    {"owner", OPT_OWNER, "TEXT", 0, "Free text, for ls and rm --owner", 0},
    {"key", OPT_KEY, "KEY", 0, "Idempotency key: the same key gives the same sandbox", 0},
    {"task", OPT_TASK, 0, 0, "The argument names a task: its image, files and setup", 0},
    {0},
};

static error_t parse_start(int key, char *arg, struct argp_state *state)
{
    struct start *s = state->input;
    const struct {
        int key;
        const char **to;
    } strings[] = {{'n', &s->name},        {'m', &s->memory},          {OPT_PIDS, &s->pids},
                   {'c', &s->cpu},         {OPT_NETWORK, &s->network}, {OPT_TTL, &s->ttl},
                   {OPT_OWNER, &s->owner}, {OPT_KEY, &s->key}};

    for (size_t i = 0; i < LH_ARRAY_SIZE(strings); i++)
        if (strings[i].key == key) {
            *strings[i].to = arg;
            return 0;
        }
    if (key == OPT_TASK) {
        s->task = true;
    } else if (key == ARGP_KEY_ARG && !s->source) {
        s->source = arg;
    } else if (key == ARGP_KEY_ARG || key == ARGP_KEY_NO_ARGS) {
        argp_error(state, "one image or snapshot");
    } else {
        return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

static int parse_number(const char *text, double max, double *out, const char *what,
                        struct lh_error *err)
{
    char *end;

    *out = strtod(text, &end);
    if (end == text || *end || !(*out > 0 && *out <= max))
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s \"%s\": a number above 0, at most %g", what,
                       text, max);
    return 0;
}

static int fill_limits(const struct start *s, Longhaul__Task__V1__Limits *l, struct lh_error *err)
{
    double cores = 0, pids = 0;
    int r = 0;

    if (s->memory)
        r = cli_size(s->memory, &l->memory_bytes, err);
    if (r == 0 && s->cpu)
        r = parse_number(s->cpu, 1024, &cores, "--cpu", err);
    if (r == 0 && s->pids)
        r = parse_number(s->pids, 1e6, &pids, "--pids", err);
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

static int start(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    const struct argp argp = {
        start_options, parse_start, "IMAGE|SNAPSHOT", "Starts a sandbox and prints its id.", NULL,
        NULL,          NULL};
    V1(CreateRequest) req = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__INIT;
    Longhaul__Task__V1__Limits limits = LONGHAUL__TASK__V1__LIMITS__INIT;
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
    fill_source(&s, &req);
    if ((r = fill_limits(&s, &limits, err)) < 0 || (r = fill_network(&s, &req, err)) < 0 ||
        (s.ttl && (r = cli_duration(s.ttl, &req.ttl_ms, err)) < 0))
        return r;
    r = cli_call(cli, "Create", &req.base, &longhaul__sandbox__v1__sandbox__descriptor, CALL_MS,
                 (ProtobufCMessage **)&made, err);
    return r < 0 ? r : print_sandbox(cli, made, err);
}

static int resume(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    for (int i = 1; i < argc; i++)
        if (argv[i][0] != '-' && lh_id_text_valid(argv[i]))
            return start(cli, argc, argv, err);
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-?"))
            return start(cli, argc, argv, err);
    return lh_fail(err, LH_INVALID_ARGUMENT,
                   "which snapshot? give an id as in `agentenv snapshot ls`");
}

/* ---- freeze, thaw ---- */

/* Verbs whose only arguments are words: at least min, at most max of them. */
struct words {
    int min, max;
    int n;
    char **argv;
    const char *owner;
    bool all;
};

static error_t parse_words(int key, char *arg, struct argp_state *state)
{
    struct words *w = state->input;

    switch (key) {
    case ARGP_KEY_ARG:
        if (w->n == w->max)
            argp_error(state, "too many arguments, from \"%s\" on", arg);
        w->argv[w->n++] = arg;
        return 0;
    case ARGP_KEY_END:
        if (w->n < w->min)
            argp_error(state, "arguments are missing");
        return 0;
    case OPT_OWNER:
        w->owner = arg;
        return 0;
    case OPT_ALL:
        w->all = true;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static int change(struct cli *cli, int argc, char **argv, const char *method, const char *doc,
                  struct lh_error *err)
{
    const struct argp argp = {NULL, parse_words, "ID", doc, NULL, NULL, NULL};
    V1(SandboxAttempt) req = LONGHAUL__SANDBOX__V1__SANDBOX_ATTEMPT__INIT;
    lh_automsg(V1(Sandbox)) after = NULL;
    char *id[1];
    struct words w = {.min = 1, .max = 1, .argv = id};

    cli_parse(&argp, argc, argv, &w);
    req.id = id[0];
    req.attempt = CURRENT_ATTEMPT;
    int r = cli_call(cli, method, &req.base, &longhaul__sandbox__v1__sandbox__descriptor, CALL_MS,
                     (ProtobufCMessage **)&after, err);
    return r < 0 || !cli->json_asked ? r : print_sandbox(cli, after, err);
}

static int freeze(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    return change(cli, argc, argv, "Freeze", "Stops every process of a sandbox where it is.", err);
}

static int thaw(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    return change(cli, argc, argv, "Thaw", "Lets a frozen sandbox go on.", err);
}

/* ---- rm ---- */

static int remove_one(struct cli *cli, const char *id, const char *owner, uint32_t *removed,
                      struct lh_error *err)
{
    V1(RemoveRequest) req = LONGHAUL__SANDBOX__V1__REMOVE_REQUEST__INIT;
    lh_automsg(V1(RemoveReply)) reply = NULL;

    if (id)
        req.id = (char *)id;
    else
        req.owner_prefix = (char *)owner;
    req.attempt = CURRENT_ATTEMPT;
    int r = cli_call(cli, "Remove", &req.base, &longhaul__sandbox__v1__remove_reply__descriptor,
                     CALL_MS, (ProtobufCMessage **)&reply, err);
    if (r == 0)
        *removed += reply->removed;
    return r;
}

static int list(struct cli *cli, const char *owner, bool all, V1(ListSandboxesReply) * *reply,
                struct lh_error *err)
{
    V1(ListSandboxesRequest) req = LONGHAUL__SANDBOX__V1__LIST_SANDBOXES_REQUEST__INIT;

    if (owner)
        req.owner_prefix = (char *)owner;
    req.all = all;
    return cli_call(cli, "List", &req.base,
                    &longhaul__sandbox__v1__list_sandboxes_reply__descriptor, CALL_MS,
                    (ProtobufCMessage **)reply, err);
}

static int remove_all(struct cli *cli, uint32_t *removed, struct lh_error *err)
{
    lh_automsg(V1(ListSandboxesReply)) reply = NULL;
    int r = list(cli, NULL, true, &reply, err), first = 0;

    for (size_t i = 0; r == 0 && i < reply->n_sandboxes; i++) {
        struct lh_error why = {0};
        int one = remove_one(cli, reply->sandboxes[i]->id, NULL, removed, &why);
        if (one < 0 && one != LH_NOT_FOUND && first == 0)
            first = lh_fail(err, one, "%s", why.message);
    }
    return r < 0 ? r : first;
}

static int remove_named(struct cli *cli, const struct words *w, uint32_t *removed)
{
    int status = 0;

    for (int i = 0; i < w->n; i++) {
        struct lh_error why = {0};
        if (remove_one(cli, w->argv[i], NULL, removed, &why) == 0)
            continue;
        fprintf(stderr, "agentenv rm: %s\n", why.message);
        status = why.code == LH_UNAVAILABLE ? CLI_AGAIN : CLI_FAILED;
    }
    return status;
}

static int rm(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_option options[] = {
        {"all", OPT_ALL, 0, 0, "Every sandbox, dead ones too", 0},
        {"owner", OPT_OWNER, "PREFIX", 0, "Every sandbox whose owner begins so", 0},
        {0},
    };
    static const char *const columns[] = {"removed", NULL};
    const struct argp argp = {
        options, parse_words, "[ID...]", "Removes sandboxes with everything they are.",
        NULL,    NULL,        NULL};
    struct words w = {.max = argc};
    uint32_t removed = 0;
    int r;

    w.argv = calloc((size_t)argc + 1, sizeof *w.argv);
    lh_autofree char **owned = w.argv;
    if (!owned)
        return lh_fail_errno(err, ENOMEM, "rm");
    cli_parse(&argp, argc, argv, &w);
    if (w.all)
        r = remove_all(cli, &removed, err);
    else if (w.owner)
        r = remove_one(cli, NULL, w.owner, &removed, err);
    else if (w.n)
        r = remove_named(cli, &w, &removed);
    else
        r = lh_fail(err, LH_INVALID_ARGUMENT, "which sandbox? give ids, --owner or --all");
    if (r < 0 || !cli->json_asked)
        return r;
    int printed =
        cli_print(cli, json_pack("[{s:I}]", "removed", (json_int_t)removed), columns, err);
    return printed < 0 ? printed : r;
}

/* ---- ls ---- */

static int list_sandboxes(struct cli *cli, const struct words *w, struct lh_error *err)
{
    lh_automsg(V1(ListSandboxesReply)) reply = NULL;
    int r = list(cli, w->owner, w->all, &reply, err);
    json_t *rows = json_array();

    for (size_t i = 0; r == 0 && i < reply->n_sandboxes; i++)
        json_array_append_new(rows, sandbox_json(reply->sandboxes[i]));
    if (r == 0)
        return cli_print(cli, rows, sandbox_columns, err);
    json_decref(rows);
    return r;
}

static void mode_text(uint32_t mode, char out[11])
{
    static const char types[] = "?pc?d?b?-?l?s???";

    out[0] = types[mode >> 12 & 15];
    for (int i = 0; i < 9; i++)
        out[1 + i] = mode & (0400u >> i) ? "rwx"[i % 3] : '-';
    out[10] = 0;
}

static int list_files(struct cli *cli, char *id, char *path, struct lh_error *err)
{
    static const char *const columns[] = {"mode", "size", "modified", "name", "target", NULL};
    V1(ListFilesRequest) req = LONGHAUL__SANDBOX__V1__LIST_FILES_REQUEST__INIT;
    lh_automsg(V1(ListFilesReply)) reply = NULL;

    req.id = id;
    req.path = path;
    int r =
        cli_call(cli, "ListFiles", &req.base, &longhaul__sandbox__v1__list_files_reply__descriptor,
                 CALL_MS, (ProtobufCMessage **)&reply, err);
    if (r < 0)
        return r;
    json_t *rows = json_array();
    for (size_t i = 0; i < reply->n_files; i++) {
        const V1(FileInfo) *f = reply->files[i];
        char mode[11], when[24];
        mode_text(f->mode, mode);
        cli_time(f->mtime_ms, when);
        json_array_append_new(rows, json_pack("{s:s, s:I, s:s, s:s, s:s}", "mode", mode, "size",
                                              (json_int_t)f->size, "modified", when, "name",
                                              f->name[0] ? f->name : path, "target", f->target));
    }
    return cli_print(cli, rows, columns, err);
}

bool cli_remote_path(char *arg, char **id, char **path)
{
    char *colon = strchr(arg, ':');

    if (!colon || colon == arg || memchr(arg, '/', (size_t)(colon - arg)))
        return false;
    *colon = 0;
    *id = arg;
    *path = colon + 1;
    return true;
}

static int ls(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_option options[] = {
        {"all", OPT_ALL, 0, 0, "Dead sandboxes too", 0},
        {"owner", OPT_OWNER, "PREFIX", 0, "Only those whose owner begins so", 0},
        {0},
    };
    const struct argp argp = {
        options, parse_words, "[ID:/PATH]", "Lists sandboxes, or files of one.", NULL, NULL, NULL};
    char *arg[1], *id, *path;
    struct words w = {.max = 1, .argv = arg};

    cli_parse(&argp, argc, argv, &w);
    if (w.n == 0)
        return list_sandboxes(cli, &w, err);
    if (!cli_remote_path(arg[0], &id, &path))
        return lh_fail(err, LH_INVALID_ARGUMENT, "\"%s\" is not of the form ID:/PATH", arg[0]);
    return list_files(cli, id, path, err);
}

/* ---- fork ---- */

static int fork_sandbox(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    const struct argp argp = {
        NULL, parse_words, "ID N", "Starts N sandboxes over the files that ID has now.",
        NULL, NULL,        NULL};
    V1(ForkRequest) req = LONGHAUL__SANDBOX__V1__FORK_REQUEST__INIT;
    lh_automsg(V1(ForkReply)) reply = NULL;
    char *arg[2], key[LH_ID_SIZE];
    struct words w = {.min = 2, .max = 2, .argv = arg};
    double count;

    cli_parse(&argp, argc, argv, &w);
    int r = parse_number(arg[1], 64, &count, "N", err);
    lh_id_new_text(key);
    if (r < 0)
        return r;
    req.id = arg[0];
    req.idempotency_key = key;
    req.count = (uint32_t)count;
    req.attempt = CURRENT_ATTEMPT;
    r = cli_call(cli, "Fork", &req.base, &longhaul__sandbox__v1__fork_reply__descriptor, CALL_MS,
                 (ProtobufCMessage **)&reply, err);
    if (r < 0)
        return r;
    json_t *rows = cli->json_asked ? json_array() : NULL;
    for (size_t i = 0; i < reply->n_children; i++)
        if (rows)
            json_array_append_new(rows, sandbox_json(reply->children[i]));
        else
            puts(reply->children[i]->id);
    return rows ? cli_print(cli, rows, sandbox_columns, err) : 0;
}

/* ---- watch, doctor ---- */

static int print_event(void *ctx, const ProtobufCMessage *message, struct lh_error *err)
{
    const V1(Event) *e = (const void *)message;
    const struct cli *cli = ctx;
    char when[24];

    cli_time(e->at_ms, when);
    if (cli->json)
        printf(
            "{\"at_ms\": %lld, \"sandbox\": \"%s\", \"from\": \"%s\", \"to\": \"%s\", \"cause\": "
            "\"%s\"}\n",
            (long long)e->at_ms, e->sandbox, state_name((int)e->from), state_name((int)e->to),
            cause_name((int)e->cause));
    else
        printf("%s  %s  %s -> %s %s\n", when, e->sandbox, state_name((int)e->from),
               state_name((int)e->to), cause_name((int)e->cause));
    return fflush(stdout) ? lh_fail_errno(err, errno, "writing an event") : 0;
}

static int watch(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    const struct argp argp = {
        NULL, parse_words, "",  "Prints every change of state as it happens, until interrupted.",
        NULL, NULL,        NULL};
    V1(Empty) req = LONGHAUL__SANDBOX__V1__EMPTY__INIT;
    struct words w = {0};

    cli_parse(&argp, argc, argv, &w);
    return cli_stream(cli, "Watch", &req.base, &longhaul__sandbox__v1__event__descriptor, INT32_MAX,
                      print_event, cli, err);
}

static void collect_problem(void *ctx, const char *text)
{
    json_array_append_new(ctx, json_pack("{s:s}", "problem", text));
}

static int doctor(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const char *const columns[] = {"problem", NULL};
    const struct argp argp = {
        NULL, parse_words, "",  "Checks what sandboxes need of this machine, and says what to do.",
        NULL, NULL,        NULL};
    struct words w = {0};
    json_t *rows = json_array();

    cli_parse(&argp, argc, argv, &w);
    if (!rows)
        return lh_fail_errno(err, ENOMEM, "doctor");
    int problems = box_selftest(collect_problem, rows);
    if (problems == 0 && !cli->json) {
        puts("This machine has what sandboxes need.");
        json_decref(rows);
        return 0;
    }
    int r = cli_print(cli, rows, columns, err);
    return r < 0 ? r : problems ? CLI_FAILED : 0;
}

const struct cli_verb sandbox_verbs[] = {
    {"start", "IMAGE|SNAPSHOT", "start a sandbox, print its id", start},
    {"resume", "SNAPSHOT", "start a sandbox where a snapshot was taken", resume},
    {"ls", "[ID:/PATH]", "list sandboxes, or files of one", ls},
    {"freeze", "ID", "stop its processes where they are", freeze},
    {"thaw", "ID", "let them go on", thaw},
    {"fork", "ID N", "N sandboxes over the files of one", fork_sandbox},
    {"rm", "ID...", "remove sandboxes", rm},
    {"watch", "", "print changes of state as they happen", watch},
    {"doctor", "", "check this machine", doctor},
    {0},
};

/* `agentenv task …`: register a file of tasks with progress, list, show as text format, remove. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "agentenv/cli/cli.h"
#include "agentenv/cli/harbor.h"
#include "agentenv/cli/image.h"
#include "agentenv/task/harbor.h"
#include "agentenv/task/task.h"
#include "longhaul/task/v1/service.pb-c.h"
#include "proto/hex.h"
#include "proto/json.h"
#include "proto/parse.h"
#include "proto/text.h"

enum { REGISTER_MS = 4 * 3600 * 1000, CALL_MS = 60000, BATCH_BYTES = 8 << 20 };

/* ---- splits ---- */

static const struct {
    const char *name;
    Longhaul__Task__V1__Split split;
} splits[] = {
    {"", LONGHAUL__TASK__V1__SPLIT__SPLIT_UNSPECIFIED},
    {"train", LONGHAUL__TASK__V1__SPLIT__SPLIT_TRAIN},
    {"eval", LONGHAUL__TASK__V1__SPLIT__SPLIT_EVAL},
};

static int find_split(const char *name)
{
    for (size_t i = 0; i < LH_ARRAY_SIZE(splits); i++)
        if (!strcmp(splits[i].name, name))
            return splits[i].split;
    return -1;
}

static const char *split_name(unsigned split)
{
    return split < LH_ARRAY_SIZE(splits) ? splits[split].name : "?";
}

/* ---- register ---- */

struct registering {
    const char *file;
    int split; /* of Harbor directories */
    bool no_verify;
    uint32_t parallel;
    bool terminal;
    size_t done, total, registered, unchanged, refused;
};

static error_t parse_register(int key, char *arg, struct argp_state *state)
{
    struct registering *g = state->input;

    switch (key) {
    case 'n':
        g->no_verify = true;
        return 0;
    case 'p':
        g->parallel = (uint32_t)strtoul(arg, NULL, 10);
        if (g->parallel < 1 || g->parallel > 64)
            argp_error(state, "--parallel takes 1 to 64, not '%s'", arg);
        return 0;
    case 's':
        g->split = find_split(arg);
        if (g->split < 0)
            argp_error(state, "--split takes train or eval, not '%s'", arg);
        return 0;
    case ARGP_KEY_ARG:
        if (g->file)
            argp_usage(state);
        g->file = arg;
        return 0;
    case ARGP_KEY_END:
        if (!g->file)
            argp_usage(state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static int show_progress(void *ctx, const ProtobufCMessage *message, struct lh_error *err)
{
    const Longhaul__Task__V1__RegisterReply *reply = (const void *)message;
    struct registering *g = ctx;

    g->done++;
    g->registered += reply->accepted && !reply->unchanged;
    g->unchanged += reply->unchanged;
    if (!reply->accepted) {
        g->refused++;
        fprintf(stderr, "%s%s\n", g->terminal ? "\r\033[K" : "", reply->error);
    }
    if (g->terminal)
        fprintf(stderr, "\r%zu of %zu tasks, %zu refused", g->done, g->total, g->refused);
    return 0;
}

/* As many tasks from `first` on as fit a message. */
static size_t batch_length(const TaskSet *set, size_t first)
{
    size_t n = 0, bytes = 0;

    while (first + n < set->n_tasks) {
        bytes += protobuf_c_message_get_packed_size(&set->tasks[first + n]->base);
        if (n && bytes > BATCH_BYTES)
            break;
        n++;
    }
    return n;
}

static int register_all(struct cli *cli, const TaskSet *set, struct registering *g,
                        struct lh_error *err)
{
    for (size_t first = 0, n; first < set->n_tasks; first += n) {
        Longhaul__Task__V1__RegisterRequest req = LONGHAUL__TASK__V1__REGISTER_REQUEST__INIT;
        TaskSet part = LONGHAUL__TASK__V1__TASK_SET__INIT;

        n = batch_length(set, first);
        part.n_tasks = n;
        part.tasks = set->tasks + first;
        req.set = &part;
        req.no_verify = g->no_verify;
        req.parallel = g->parallel;
        int r = cli_stream(cli, "/longhaul.task.v1.Tasks/Add", &req.base,
                           &longhaul__task__v1__register_reply__descriptor, REGISTER_MS,
                           show_progress, g, err);
        if (r < 0)
            return r;
    }
    return 0;
}

static int task_register(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_option options[] = {
        {"no-verify", 'n', NULL, 0, "Skip the oracle and nop runs; the tasks say so", 0},
        {"parallel", 'p', "N", 0, "Verification runs at a time (default 4)", 0},
        {"split", 's', "train|eval", 0, "Of Harbor directories, which say none (default eval)", 0},
        {0},
    };
    static const struct argp argp = {
        .options = options,
        .parser = parse_register,
        .args_doc = "FILE|DIRECTORY",
        .doc = "Registers the tasks of FILE, a longhaul.task.v1.TaskSet in binary protobuf, text "
               "format or proto3 JSON, or of DIRECTORY, a Harbor / Terminal-Bench 2 task or a "
               "directory of some, whose images are built.",
    };
    struct registering g = {.terminal = isatty(STDERR_FILENO),
                            .split = LONGHAUL__TASK__V1__SPLIT__SPLIT_EVAL};

    int r = cli_parse(&argp, argc, argv, &g);
    if (r)
        return r;
    lh_automsg(TaskSet) set =
        is_directory(g.file) ? harbor_load_all(cli, g.file, g.split, err) : task_load(g.file, err);
    if (!set)
        return err->code;
    g.total = set->n_tasks;
    if (!g.total)
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s has no task", g.file);
    r = register_all(cli, set, &g, err);
    if (g.terminal)
        fputs("\r\033[K", stderr);
    printf("%zu task%s: %zu registered, %zu unchanged, %zu refused\n", g.total,
           g.total == 1 ? "" : "s", g.registered, g.unchanged, g.refused);
    return r < 0 ? r : g.refused ? CLI_FAILED : 0;
}

/* ---- ls ---- */

static error_t parse_ls(int key, char *arg, struct argp_state *state)
{
    Longhaul__Task__V1__ListTasksRequest *req = state->input;
    int split;

    switch (key) {
    case 's':
        split = find_split(arg);
        if (split < 0)
            argp_error(state, "--split takes train or eval, not '%s'", arg);
        req->split = split;
        return 0;
    case 'q':
        req->quarantined = true;
        return 0;
    case ARGP_KEY_ARG:
        if (*req->name_prefix)
            argp_usage(state);
        req->name_prefix = arg;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static void print_digest(const ProtobufCBinaryData *b, char text[2 * TASK_DIGEST + 1])
{
    lh_hex_print(b->data, b->len < TASK_DIGEST ? b->len : TASK_DIGEST, text);
}

static json_t *task_row(const Longhaul__Task__V1__TaskSummary *t)
{
    char digest[2 * TASK_DIGEST + 1];

    print_digest(&t->digest, digest);
    return json_pack("{s:s, s:I, s:s, s:s, s:s, s:b, s:b}", "name", t->name, "revision",
                     (json_int_t)t->revision, "split", split_name(t->split), "family", t->family,
                     "digest", digest, "verified", (int)t->verified, "quarantined",
                     (int)t->quarantined);
}

static int task_ls(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_option options[] = {
        {"split", 's', "train|eval", 0, "Only these", 0},
        {"quarantined", 'q', NULL, 0, "Only those that no job draws, see task release", 0},
        {0},
    };
    static const struct argp argp = {
        .options = options,
        .parser = parse_ls,
        .args_doc = "[PREFIX]",
        .doc = "Lists the tasks, or those whose names begin with PREFIX.",
    };
    static const char *const columns[] = {"name",   "revision", "split",       "family",
                                          "digest", "verified", "quarantined", NULL};
    Longhaul__Task__V1__ListTasksRequest req = LONGHAUL__TASK__V1__LIST_TASKS_REQUEST__INIT;
    lh_automsg(Longhaul__Task__V1__ListTasksReply) list = NULL;

    int r = cli_parse(&argp, argc, argv, &req);
    if (r)
        return r;
    r = cli_call(cli, "/longhaul.task.v1.Tasks/List", &req.base,
                 &longhaul__task__v1__list_tasks_reply__descriptor, CALL_MS,
                 (ProtobufCMessage **)&list, err);
    if (r < 0)
        return r;
    json_t *rows = json_array();
    for (size_t i = 0; i < list->n_tasks; i++)
        json_array_append_new(rows, task_row(list->tasks[i]));
    return cli_print(cli, rows, columns, err);
}

/* ---- show, rm, release ---- */

struct naming {
    Longhaul__Task__V1__TaskName req;
    bool json;
};

static error_t parse_name(int key, char *arg, struct argp_state *state)
{
    struct naming *n = state->input;
    Longhaul__Task__V1__TaskName *req = &n->req;

    if (key == 'J') {
        n->json = true;
        return 0;
    }
    if (key == ARGP_KEY_ARG && !*req->name) {
        req->name = arg;
        return 0;
    }
    if (key == ARGP_KEY_ARG || (key == ARGP_KEY_END && !*req->name))
        argp_usage(state);
    return key == ARGP_KEY_END ? 0 : ARGP_ERR_UNKNOWN;
}

/* What it prints can be registered again. */
static int task_show(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_option options[] = {
        {"json", 'J', NULL, 0, "As proto3 JSON", 0},
        {0},
    };
    static const struct argp argp = {
        .options = options,
        .parser = parse_name,
        .args_doc = "NAME",
        .doc = "Prints a task in text format; it can be registered again, also from JSON.",
    };
    struct naming naming = {.req = LONGHAUL__TASK__V1__TASK_NAME__INIT};
    lh_automsg(Longhaul__Task__V1__RegisteredTask) t = NULL;
    char digest[2 * TASK_DIGEST + 1];

    int r = cli_parse(&argp, argc, argv, &naming);
    if (r)
        return r;
    r = cli_call(cli, "/longhaul.task.v1.Tasks/Show", &naming.req.base,
                 &longhaul__task__v1__registered_task__descriptor, CALL_MS, (ProtobufCMessage **)&t,
                 err);
    if (r < 0)
        return r;
    TaskSet set = LONGHAUL__TASK__V1__TASK_SET__INIT;
    set.n_tasks = 1;
    set.tasks = &t->task;
    if (naming.json) {
        lh_autofree char *text = lh_json_print(&set.base, err);
        return text && fputs(text, stdout) >= 0 ? 0 : LH_RESOURCE_EXHAUSTED;
    }
    print_digest(&t->digest, digest);
    printf("# digest %s, %s%s, infrastructure failures in a row: %u\n", digest,
           t->verified ? "verified" : "not verified", t->quarantined ? ", in quarantine" : "",
           t->infra_failures);
    lh_text_print(stdout, &set.base);
    return 0;
}

static int task_rm(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp argp = {
        .parser = parse_name,
        .args_doc = "NAME",
        .doc = "Removes a task from the registry.",
    };
    struct naming naming = {.req = LONGHAUL__TASK__V1__TASK_NAME__INIT};
    lh_automsg(Longhaul__Task__V1__RemoveTaskReply) done = NULL;

    int r = cli_parse(&argp, argc, argv, &naming);
    if (r)
        return r;
    return cli_call(cli, "/longhaul.task.v1.Tasks/Remove", &naming.req.base,
                    &longhaul__task__v1__remove_task_reply__descriptor, CALL_MS,
                    (ProtobufCMessage **)&done, err);
}

static int task_release(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp argp = {
        .parser = parse_name,
        .args_doc = "NAME",
        .doc = "Ends the quarantine of a task; its failures are counted from 0 again.",
    };
    Longhaul__Task__V1__TaskName req = LONGHAUL__TASK__V1__TASK_NAME__INIT;
    lh_automsg(Longhaul__Task__V1__ReleaseTaskReply) done = NULL;

    int r = cli_parse(&argp, argc, argv, &req);
    if (r)
        return r;
    return cli_call(cli, "/longhaul.task.v1.Tasks/Release", &req.base,
                    &longhaul__task__v1__release_task_reply__descriptor, CALL_MS,
                    (ProtobufCMessage **)&done, err);
}

static error_t parse_export(int key, char *arg, struct argp_state *state)
{
    char **words = state->input;

    if (key == ARGP_KEY_ARG && state->arg_num < 2) {
        words[state->arg_num] = arg;
        return 0;
    }
    if (key == ARGP_KEY_ARG || (key == ARGP_KEY_END && state->arg_num < 2))
        argp_usage(state);
    return key == ARGP_KEY_END ? 0 : ARGP_ERR_UNKNOWN;
}

static int task_export(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp argp = {
        .parser = parse_export,
        .args_doc = "NAME DIRECTORY",
        .doc = "Writes the Harbor directory that a task was registered from, unchanged.",
    };
    Longhaul__Task__V1__TaskName req = LONGHAUL__TASK__V1__TASK_NAME__INIT;
    lh_automsg(Longhaul__Task__V1__RegisteredTask) t = NULL;
    char *words[2] = {0};

    int r = cli_parse(&argp, argc, argv, words);
    if (r)
        return r;
    req.name = words[0];
    r = cli_call(cli, "/longhaul.task.v1.Tasks/Show", &req.base,
                 &longhaul__task__v1__registered_task__descriptor, CALL_MS, (ProtobufCMessage **)&t,
                 err);
    return r < 0 ? r : harbor_export(t->task, words[1], err);
}

const struct cli_verb task_verbs[] = {
    {"task register", "FILE|DIRECTORY", "verify and register tasks", task_register},
    {"task ls", "[PREFIX]", "list tasks", task_ls},
    {"task show", "NAME", "print a task in text format", task_show},
    {"task export", "NAME DIRECTORY", "write a Harbor task's directory again", task_export},
    {"task rm", "NAME", "remove a task", task_rm},
    {"task release", "NAME", "end the quarantine of a task", task_release},
    {"image import", "NAME PATH", "take in a root file system or image", image_import},
    {"image build", "NAME DIRECTORY", "build one from a Dockerfile or commands", image_build},
    {"image ls", "", "list images", image_ls},
    {"image rm", "NAME", "remove an image nobody uses", image_rm},
    {NULL, NULL, NULL, NULL},
};

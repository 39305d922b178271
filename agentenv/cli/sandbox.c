/* The verbs that change sandboxes. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "agentenv/cli/verbs.h"
#include "proto/id.h"
#include "proto/parse.h"

error_t cli_parse_words(int key, char *arg, struct argp_state *state)
{
    struct cli_words *w = state->input;

    switch (key) {
    case ARGP_KEY_ARG:
        if (w->n == w->max)
            argp_error(state, "too many arguments, from \"%s\" on", arg);
        w->argv[w->n++] = arg;
        return 0;
    case ARGP_KEY_END:
        if (w->n < w->min && !w->all && !w->owner)
            argp_error(state, "arguments are missing");
        return 0;
    case CLI_OPT_OWNER:
        w->owner = arg;
        return 0;
    case CLI_OPT_ALL:
        w->all = true;
        return 0;
    case CLI_OPT_ENGINE:
        w->engine = arg;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ---- freeze, thaw ---- */

static int change(struct cli *cli, int argc, char **argv, const char *method, const char *doc,
                  struct lh_error *err)
{
    const struct argp argp = {NULL, cli_parse_words, "ID", doc, NULL, NULL, NULL};
    V1(SandboxAttempt) req = LONGHAUL__SANDBOX__V1__SANDBOX_ATTEMPT__INIT;
    lh_automsg(V1(Sandbox)) after = NULL;
    char *id[1];
    struct cli_words w = {.min = 1, .max = 1, .argv = id};

    cli_parse(&argp, argc, argv, &w);
    req.id = id[0];
    req.attempt = CURRENT_ATTEMPT;
    int r = cli_call(cli, method, &req.base, &longhaul__sandbox__v1__sandbox__descriptor, CALL_MS,
                     (ProtobufCMessage **)&after, err);
    return r < 0 || !cli->json_asked ? r : cli_print_sandbox(cli, after, err);
}

static int freeze(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    return change(cli, argc, argv, "Freeze", "Stops every process of a sandbox where it is.", err);
}

static int thaw(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    return change(cli, argc, argv, "Thaw", "Lets a frozen sandbox go on.", err);
}

static int hibernate(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    return change(cli, argc, argv, "Hibernate",
                  "Puts a sandbox away: its processes go to disk and take no memory.", err);
}

static int rollback(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    const struct argp argp = {NULL,
                              cli_parse_words,
                              "ID [SNAPSHOT]",
                              "Makes a sandbox what it was at a snapshot, by default at its "
                              "checkpoint; what came after is lost.",
                              NULL,
                              NULL,
                              NULL};
    V1(RollbackRequest) req = LONGHAUL__SANDBOX__V1__ROLLBACK_REQUEST__INIT;
    lh_automsg(V1(Sandbox)) after = NULL;
    char *words[2];
    struct cli_words w = {.min = 1, .max = 2, .argv = words};

    cli_parse(&argp, argc, argv, &w);
    req.id = words[0];
    if (w.n == 2)
        req.snapshot = words[1];
    req.attempt = CURRENT_ATTEMPT;
    int r = cli_call(cli, "Rollback", &req.base, &longhaul__sandbox__v1__sandbox__descriptor,
                     CALL_MS, (ProtobufCMessage **)&after, err);
    return r < 0 || !cli->json_asked ? r : cli_print_sandbox(cli, after, err);
}

int resume_sandbox(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    return change(cli, argc, argv, "Resume", "Lets a hibernated sandbox go on.", err);
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

static int remove_all(struct cli *cli, uint32_t *removed, struct lh_error *err)
{
    lh_automsg(V1(ListSandboxesReply)) reply = NULL;
    int r = cli_list_sandboxes(cli, NULL, true, &reply, err), first = 0;

    for (size_t i = 0; r == 0 && i < reply->n_sandboxes; i++) {
        struct lh_error why = {0};
        int one = remove_one(cli, reply->sandboxes[i]->id, NULL, removed, &why);
        if (one < 0 && one != LH_NOT_FOUND && first == 0)
            first = lh_fail(err, one, "%s", why.message);
    }
    return r < 0 ? r : first;
}

static int remove_named(struct cli *cli, const struct cli_words *w, uint32_t *removed)
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
        {"all", CLI_OPT_ALL, 0, 0, "Every sandbox, dead ones too", 0},
        {"owner", CLI_OPT_OWNER, "PREFIX", 0, "Every sandbox whose owner begins so", 0},
        {0},
    };
    static const char *const columns[] = {"removed", NULL};
    const struct argp argp = {options, cli_parse_words,
                              "ID...", "Removes sandboxes with everything they are.",
                              NULL,    NULL,
                              NULL};
    struct cli_words w = {.min = 1, .max = argc};
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
    else
        r = remove_named(cli, &w, &removed);
    if (r < 0 || !cli->json_asked)
        return r;
    int printed =
        cli_print(cli, json_pack("[{s:I}]", "removed", (json_int_t)removed), columns, err);
    return printed < 0 ? printed : r;
}

/* ---- fork ---- */

/* An id is that of a sandbox or, when there is none, of a snapshot. */
static int call_fork(struct cli *cli, V1(ForkRequest) * req, V1(ForkReply) * *reply,
                     struct lh_error *err)
{
    struct lh_error first = {0};
    int r = cli_call(cli, "Fork", &req->base, &longhaul__sandbox__v1__fork_reply__descriptor,
                     CALL_MS, (ProtobufCMessage **)reply, &first);

    if (r == LH_NOT_FOUND && lh_id_text_valid(req->id)) {
        req->snapshot = req->id;
        req->id = (char *)"";
        return cli_call(cli, "Fork", &req->base, &longhaul__sandbox__v1__fork_reply__descriptor,
                        CALL_MS, (ProtobufCMessage **)reply, err);
    }
    return r < 0 ? lh_fail(err, r, "%s", first.message) : r;
}

struct fork_args {
    struct cli_words words; /* first: cli_parse_words() takes it for these */
    double count;
};

static error_t parse_fork(int key, char *arg, struct argp_state *state)
{
    struct fork_args *f = state->input;

    if (key == ARGP_KEY_ARG && f->words.n == 1)
        f->count = cli_number(state, "N", arg, 64);
    return cli_parse_words(key, arg, state);
}

static int fork_sandbox(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_option options[] = {
        {"engine", CLI_OPT_ENGINE, "NAME", 0,
         "fsonly: the files alone; criu: processes as well; default: these if there are any", 0},
        {0}};
    const struct argp argp = {
        options, parse_fork, "ID|SNAPSHOT N", "Starts N sandboxes that are what ID is now.", NULL,
        NULL,    NULL};
    V1(ForkRequest) req = LONGHAUL__SANDBOX__V1__FORK_REQUEST__INIT;
    lh_automsg(V1(ForkReply)) reply = NULL;
    char *arg[2], key[LH_ID_SIZE];
    struct fork_args f = {.words = {.min = 2, .max = 2, .argv = arg}};

    cli_parse(&argp, argc, argv, &f);
    lh_id_new_text(key);
    req.id = arg[0];
    req.idempotency_key = key;
    req.count = (uint32_t)f.count;
    req.engine = (char *)(f.words.engine ? f.words.engine : "");
    req.attempt = CURRENT_ATTEMPT;
    int r = call_fork(cli, &req, &reply, err);
    if (r < 0)
        return r;
    json_t *rows = cli->json_asked ? json_array() : NULL;
    for (size_t i = 0; i < reply->n_children; i++)
        if (rows)
            json_array_append_new(rows, cli_sandbox_json(reply->children[i]));
        else
            puts(reply->children[i]->id);
    return rows ? cli_print(cli, rows, cli_sandbox_columns, err) : 0;
}

/* ---- engines ---- */

/* A row for each engine, and one for each problem with one that is not offered. */
static int engines_rows(struct cli *cli, json_t *rows, struct lh_error *err)
{
    V1(Empty) req = LONGHAUL__SANDBOX__V1__EMPTY__INIT;
    lh_automsg(V1(EnginesReply)) reply = NULL;
    int r = cli_call(cli, "Engines", &req.base, &longhaul__sandbox__v1__engines_reply__descriptor,
                     CALL_MS, (ProtobufCMessage **)&reply, err);

    for (size_t i = 0; r == 0 && i < reply->n_engines; i++)
        json_array_append_new(rows,
                              json_pack("{s:s, s:s}", "engine", reply->engines[i], "problem", ""));
    for (size_t i = 0; r == 0 && i < reply->n_problems; i++)
        json_array_append_new(rows,
                              json_pack("{s:s, s:s}", "engine", "", "problem", reply->problems[i]));
    return r;
}

static int engines(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const char *const columns[] = {"engine", "problem", NULL};
    const struct argp argp = {
        NULL, cli_parse_words,
        "",   "Lists the engines of snapshots that the daemon offers, best first.",
        NULL, NULL,
        NULL};
    struct cli_words w = {0};

    cli_parse(&argp, argc, argv, &w);
    json_t *rows = json_array();
    int r = rows ? engines_rows(cli, rows, err) : lh_fail_errno(err, ENOMEM, "engines");
    return r < 0 ? r : cli_print(cli, rows, columns, err);
}

const struct cli_verb sandbox_verbs[] = {
    {"start", "IMAGE|SNAPSHOT", "start a sandbox, print its id", start_verb},
    {"resume", "ID|SNAPSHOT", "wake one, or start where one was", resume_verb},
    {"ls", "[ID:/PATH]", "list sandboxes, or files of one", ls_verb},
    {"stat", "ID:/PATH", "what a file of a sandbox is", stat_verb},
    {"freeze", "ID", "stop its processes where they are", freeze},
    {"thaw", "ID", "let them go on", thaw},
    {"hibernate", "ID", "put it away: no processes, no memory", hibernate},
    {"rollback", "ID [SNAPSHOT]", "make it what it was", rollback},
    {"fork", "ID|SNAPSHOT N", "N sandboxes over the files of one", fork_sandbox},
    {"rm", "ID...", "remove sandboxes", rm},
    {"policy", "ID", "what happens to it by the clock", policy_verb},
    {"watch", "[ID:/PATH]", "changes of state, or of files, live", watch_verb},
    {"engines", "", "what snapshots can be made of", engines},
    {"doctor", "", "what this machine offers and lacks", doctor_verb},
    {0},
};

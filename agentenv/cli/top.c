/* top and metrics: what goes on. */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "agentenv/cli/verbs.h"
#include "proto/parse.h"

enum { EVERY_DEFAULT_MS = 2000, SHOWN = 40 };

static const char *const columns[] = {"id",        "name",  "state", "memory_bytes",
                                      "processes", "image", "owner", NULL};

static int by_memory(const void *a, const void *b)
{
    V1(Sandbox) *const *x = a, *const *y = b;

    return (*x)->memory_bytes < (*y)->memory_bytes   ? 1
           : (*x)->memory_bytes > (*y)->memory_bytes ? -1
                                                     : 0;
}

static void print_totals(const V1(ListSandboxesReply) * list)
{
    unsigned processes = 0, running = 0;
    uint64_t memory = 0;

    for (size_t i = 0; i < list->n_sandboxes; i++) {
        const V1(Sandbox) *s = list->sandboxes[i];
        running += s->state == LONGHAUL__SANDBOX__V1__STATE__STATE_RUNNING;
        processes += s->processes;
        memory += s->memory_bytes;
    }
    printf("%zu sandboxes, %u running, %u processes, %.1f MiB\n\n", list->n_sandboxes, running,
           processes, (double)memory / 1048576);
}

/* One picture: the largest first. */
static int show(struct cli *cli, struct lh_error *err)
{
    lh_automsg(V1(ListSandboxesReply)) reply = NULL;
    int r = cli_list_sandboxes(cli, NULL, false, &reply, err);
    json_t *rows = json_array();

    if (r < 0) {
        json_decref(rows);
        return r;
    }
    if (reply->n_sandboxes)
        qsort(reply->sandboxes, reply->n_sandboxes, sizeof *reply->sandboxes, by_memory);
    if (!cli->json)
        print_totals(reply);
    for (size_t i = 0; i < reply->n_sandboxes && (cli->json || i < SHOWN); i++)
        json_array_append_new(rows, cli_sandbox_json(reply->sandboxes[i]));
    return cli_print(cli, rows, columns, err);
}

struct top_args {
    uint32_t every_ms;
    double times; /* 0 = until interrupted */
};

static error_t parse_top(int key, char *arg, struct argp_state *state)
{
    struct top_args *a = state->input;

    if (key == 'd')
        a->every_ms = cli_duration(state, "--delay", arg);
    else if (key == 'n')
        a->times = cli_number(state, "--number", arg, 1e9);
    else if (key == ARGP_KEY_ARG)
        argp_error(state, "no arguments");
    else
        return ARGP_ERR_UNKNOWN;
    return 0;
}

static int top(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_option options[] = {
        {"delay", 'd', "TIME", 0, "Between two pictures; default 2s", 0},
        {"number", 'n', "N", 0, "Of pictures; default: until interrupted, 1 in a pipe", 0},
        {0},
    };
    const struct argp argp = {
        options, parse_top, "",  "Shows sandboxes as they are, those with most memory first.",
        NULL,    NULL,      NULL};
    struct top_args a = {.every_ms = EVERY_DEFAULT_MS};

    cli_parse(&argp, argc, argv, &a);
    if (!a.times && !isatty(STDOUT_FILENO))
        a.times = 1;
    for (double i = 1;; i++) {
        if (isatty(STDOUT_FILENO))
            fputs("\033[H\033[J", stdout); /* home, and the screen is empty */
        int r = show(cli, err);
        if (r < 0 || i == a.times)
            return r;
        usleep((useconds_t)a.every_ms * 1000);
    }
}

static int metrics(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    const struct argp argp = {NULL, cli_parse_words,
                              "",   "Prints the daemon's metrics in Prometheus' text format.",
                              NULL, NULL,
                              NULL};
    V1(Empty) req = LONGHAUL__SANDBOX__V1__EMPTY__INIT;
    lh_automsg(V1(MetricsReply)) reply = NULL;
    struct cli_words w = {0};

    cli_parse(&argp, argc, argv, &w);
    int r = cli_call(cli, "Metrics", &req.base, &longhaul__sandbox__v1__metrics_reply__descriptor,
                     CALL_MS, (ProtobufCMessage **)&reply, err);
    if (r == 0)
        fputs(reply->text, stdout);
    return r;
}

const struct cli_verb top_verbs[] = {
    {"top", "", "sandboxes as they are, again and again", top},
    {"metrics", "", "what the daemon counts", metrics},
    {0},
};

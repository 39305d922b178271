/* watch: what changes, a line each as it happens, objects of JSON in a pipe. */
#include <errno.h>
#include <stdio.h>

#include "agentenv/cli/verbs.h"
#include "proto/file.h"
#include "proto/parse.h"

/* Takes the reference to `event`.  A file's name is the agent's: it must not move the cursor. */
static int print_line(const struct cli *cli, json_t *event, const char *text, struct lh_error *err)
{
    if (!event)
        return lh_fail_errno(err, ENOMEM, "an event");
    if (cli->json)
        json_dumpf(event, stdout, JSON_COMPACT);
    for (const char *p = text; *p && !cli->json; p++)
        putchar((unsigned char)*p < 32 || *p == 127 ? '?' : *p);
    json_decref(event);
    putchar('\n');
    return fflush(stdout) ? lh_fail_errno(err, errno, "writing an event") : 0;
}

static int print_state(void *ctx, const ProtobufCMessage *message, struct lh_error *err)
{
    const V1(Event) *e = (const void *)message;
    const char *from = cli_state_name((int)e->from), *to = cli_state_name((int)e->to);
    const char *cause = cli_cause_name((int)e->cause);
    char when[24], text[192];

    cli_time(e->at_ms, when);
    snprintf(text, sizeof text, "%s  %s  %s -> %s %s", when, e->sandbox, from, to, cause);
    return print_line(ctx,
                      json_pack("{s:I, s:s, s:s, s:s, s:s}", "at_ms", (json_int_t)e->at_ms,
                                "sandbox", e->sandbox, "from", from, "to", to, "cause", cause),
                      text, err);
}

static int print_change(void *ctx, const ProtobufCMessage *message, struct lh_error *err)
{
    const V1(FileEvent) *e = (const void *)message;
    const char *change =
        cli_enum_name(&longhaul__sandbox__v1__file_change__descriptor, (int)e->change, "FILE_");
    lh_autofree char *text =
        lh_format("%-10s  %s%s", change, e->path, e->directory && e->path[0] ? "/" : "");

    if (!text)
        return lh_fail_errno(err, ENOMEM, "an event");
    return print_line(ctx,
                      json_pack("{s:s, s:s, s:b}", "change", change, "path", e->path, "directory",
                                (int)e->directory),
                      text, err);
}

static int watch_files(struct cli *cli, const struct cli_file *f, struct lh_error *err)
{
    V1(WatchFilesRequest) req = LONGHAUL__SANDBOX__V1__WATCH_FILES_REQUEST__INIT;

    req.id = f->id;
    req.path = f->path;
    req.recursive = f->recursive;
    return cli_stream(cli, "WatchFiles", &req.base, &longhaul__sandbox__v1__file_event__descriptor,
                      INT32_MAX, print_change, cli, err);
}

int watch_verb(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_option options[] = {
        {"recursive", CLI_OPT_RECURSIVE, 0, 0, "Files: in all directories below, too", 0}, {0}};
    const struct argp argp = {options,
                              cli_parse_file,
                              "[ID:/PATH]",
                              "Prints every change of state of a sandbox or, with a path, every "
                              "change of files there as it happens, until interrupted.",
                              NULL,
                              NULL,
                              NULL};
    V1(Empty) req = LONGHAUL__SANDBOX__V1__EMPTY__INIT;
    struct cli_file f = {.optional = true};

    cli_parse(&argp, argc, argv, &f);
    if (f.id)
        return watch_files(cli, &f, err);
    return cli_stream(cli, "Watch", &req.base, &longhaul__sandbox__v1__event__descriptor, INT32_MAX,
                      print_state, cli, err);
}

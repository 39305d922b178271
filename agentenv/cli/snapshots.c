/* snapshot, snapshot ls, retain, release; gc and audit. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "agentenv/cli/verbs.h"
#include "proto/file.h"
#include "proto/id.h"
#include "proto/parse.h"

struct args {
    int min, max, n;
    char *argv[2];
    const char *retain, *key, *owner, *engine;
    uint32_t grace_ms;
    bool content, files_only;
};

enum {
    OPT_RETAIN = 256,
    OPT_KEY,
    OPT_OWNER,
    OPT_GRACE,
    OPT_CONTENT,
    OPT_FILES_ONLY,
    OPT_ENGINE,
    READ_ALL_MS = 3600000, /* a call that reads the whole store */
};

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct args *a = state->input;

    switch (key) {
    case OPT_RETAIN:
        a->retain = arg;
        return 0;
    case OPT_KEY:
        a->key = arg;
        return 0;
    case OPT_OWNER:
        a->owner = arg;
        return 0;
    case OPT_GRACE:
        a->grace_ms = cli_duration(state, "--grace", arg);
        if (a->grace_ms == 0)
            a->grace_ms = 1; /* 0 is the service's default */
        return 0;
    case OPT_ENGINE:
        a->engine = arg;
        return 0;
    case OPT_CONTENT:
        a->content = true;
        return 0;
    case OPT_FILES_ONLY:
        a->files_only = true;
        return 0;
    case ARGP_KEY_ARG:
        if (a->n == a->max)
            argp_error(state, "too many arguments, from \"%s\" on", arg);
        a->argv[a->n++] = arg;
        return 0;
    case ARGP_KEY_END:
        if (a->n < a->min)
            argp_error(state, "arguments are missing");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static int snapshot(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_option options[] = {
        {"retain", OPT_RETAIN, "OWNER", 0,
         "Keep it under this name; without, gc may take it after 10 minutes", 0},
        {"key", OPT_KEY, "KEY", 0, "Idempotency key: the same key gives the same snapshot", 0},
        {"engine", OPT_ENGINE, "NAME", 0, "fsonly (default): files; criu: processes as well", 0},
        {0},
    };
    const struct argp argp = {
        options, parse, "ID", "Takes a snapshot of a sandbox and prints its id.", NULL, NULL, NULL};
    V1(SnapshotRequest) req = LONGHAUL__SANDBOX__V1__SNAPSHOT_REQUEST__INIT;
    lh_automsg(V1(Snapshot)) made = NULL;
    struct args a = {.min = 1, .max = 1};
    char key[LH_ID_SIZE];

    cli_parse(&argp, argc, argv, &a);
    lh_id_new_text(key);
    req.id = a.argv[0];
    req.idempotency_key = a.key ? (char *)a.key : key;
    req.even_dead = true;
    if (a.retain)
        req.retain_owner = (char *)a.retain;
    if (a.engine)
        req.engine = (char *)a.engine;
    req.attempt = CURRENT_ATTEMPT;
    int r = cli_call(cli, "TakeSnapshot", &req.base, &longhaul__sandbox__v1__snapshot__descriptor,
                     CALL_MS, (ProtobufCMessage **)&made, err);
    return r < 0 ? r : cli_new_id_print(cli, made->id, err);
}

static json_t *strings(char **list, size_t n)
{
    json_t *a = json_array();

    for (size_t i = 0; i < n; i++)
        json_array_append_new(a, json_string(list[i]));
    return a;
}

static int snapshot_ls(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_option options[] = {
        {"owner", OPT_OWNER, "PREFIX", 0, "Only those retained by an owner that begins so", 0},
        {0}};
    static const char *const columns[] = {"id",    "sandbox", "image",  "engine",
                                          "bytes", "created", "owners", NULL};
    const struct argp argp = {options, parse, "", "Lists snapshots.", NULL, NULL, NULL};
    V1(ListSnapshotsRequest) req = LONGHAUL__SANDBOX__V1__LIST_SNAPSHOTS_REQUEST__INIT;
    lh_automsg(V1(ListSnapshotsReply)) reply = NULL;
    struct args a = {0};

    cli_parse(&argp, argc, argv, &a);
    if (a.owner)
        req.owner_prefix = (char *)a.owner;
    int r = cli_call(cli, "ListSnapshots", &req.base,
                     &longhaul__sandbox__v1__list_snapshots_reply__descriptor, CALL_MS,
                     (ProtobufCMessage **)&reply, err);
    if (r < 0)
        return r;
    json_t *rows = json_array();
    for (size_t i = 0; i < reply->n_snapshots; i++) {
        const V1(Snapshot) *s = reply->snapshots[i];
        char when[24];
        cli_time(s->created_ms, when);
        json_array_append_new(
            rows, json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:I, s:I, s:s, s:o, s:o, s:o}", "id",
                            s->id, "parent", s->parent, "sandbox", s->sandbox, "image", s->image,
                            "task", s->task, "engine", s->engine, "bytes", (json_int_t)s->bytes,
                            "created_ms", (json_int_t)s->created_ms, "created", when, "layers",
                            strings(s->layers, s->n_layers), "contents",
                            strings(s->contents, s->n_contents), "owners",
                            strings(s->owners, s->n_owners)));
    }
    return cli_print(cli, rows, columns, err);
}

static int owner_verb(struct cli *cli, int argc, char **argv, const char *method, const char *doc,
                      struct lh_error *err)
{
    const struct argp argp = {NULL, parse, "SNAPSHOT OWNER", doc, NULL, NULL, NULL};
    V1(SnapshotOwner) req = LONGHAUL__SANDBOX__V1__SNAPSHOT_OWNER__INIT;
    lh_automsg(V1(Empty)) reply = NULL;
    struct args a = {.min = 2, .max = 2};

    cli_parse(&argp, argc, argv, &a);
    req.snapshot = a.argv[0];
    req.owner = a.argv[1];
    return cli_call(cli, method, &req.base, &longhaul__sandbox__v1__empty__descriptor, CALL_MS,
                    (ProtobufCMessage **)&reply, err);
}

static int snapshot_retain(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    return owner_verb(cli, argc, argv, "Retain", "Keeps a snapshot until OWNER releases it.", err);
}

static int snapshot_release(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    return owner_verb(cli, argc, argv, "Release", "Ends what retain began.", err);
}

/* A path becomes absolute, as the daemon sees it; a store's URL stays. */
static char *location(const char *arg, struct lh_error *err)
{
    bool whole = *arg == '/' || strstr(arg, "://");
    lh_autofree char *cwd = whole ? NULL : getcwd(NULL, 0);
    char *where = whole ? strdup(arg) : cwd ? lh_format("%s/%s", cwd, arg) : NULL;

    if (!where)
        lh_fail_errno(err, errno, "%s", arg);
    return where;
}

static int snapshot_export(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const char *const columns[] = {"digest", "layers", "bytes", NULL};
    const struct argp argp = {NULL,
                              parse,
                              "SNAPSHOT LOCATION",
                              "Writes a snapshot to LOCATION: a file, a directory as file:///PATH, "
                              "or s3://BUCKET/PREFIX.  Prints its digest.",
                              NULL,
                              NULL,
                              NULL};
    V1(ExportSnapshotRequest) req = LONGHAUL__SANDBOX__V1__EXPORT_SNAPSHOT_REQUEST__INIT;
    lh_automsg(V1(ExportSnapshotReply)) reply = NULL;
    struct args a = {.min = 2, .max = 2};

    cli_parse(&argp, argc, argv, &a);
    lh_autofree char *where = location(a.argv[1], err);
    if (!where)
        return LH_RESOURCE_EXHAUSTED;
    req.snapshot = a.argv[0];
    req.location = where;
    int r = cli_call(cli, "ExportSnapshot", &req.base,
                     &longhaul__sandbox__v1__export_snapshot_reply__descriptor, READ_ALL_MS,
                     (ProtobufCMessage **)&reply, err);
    if (r < 0)
        return r;
    if (cli->json && !cli->json_asked) /* DIGEST=$(agentenv snapshot export …) */
        return puts(reply->digest) < 0 ? CLI_FAILED : 0;
    return cli_print(cli,
                     json_pack("[{s:s, s:I, s:I}]", "digest", reply->digest, "layers",
                               (json_int_t)reply->layers, "bytes", (json_int_t)reply->bytes),
                     columns, err);
}

static int snapshot_import(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_option options[] = {
        {"retain", OPT_RETAIN, "OWNER", 0,
         "Keep it under this name; without, gc may take it after 10 minutes", 0},
        {"files-only", OPT_FILES_ONLY, NULL, 0, "Leave its processes where they are", 0},
        {0}};
    const struct argp argp = {options,
                              parse,
                              "LOCATION [DIGEST]",
                              "Takes a snapshot in from LOCATION (see snapshot export) and prints "
                              "its id.  DIGEST says which one of a store, and which one and no "
                              "other of a file.",
                              NULL,
                              NULL,
                              NULL};
    V1(ImportSnapshotRequest) req = LONGHAUL__SANDBOX__V1__IMPORT_SNAPSHOT_REQUEST__INIT;
    lh_automsg(V1(Snapshot)) made = NULL;
    struct args a = {.min = 1, .max = 2};

    cli_parse(&argp, argc, argv, &a);
    lh_autofree char *where = location(a.argv[0], err);
    if (!where)
        return LH_RESOURCE_EXHAUSTED;
    req.location = where;
    req.files_only = a.files_only;
    if (a.n == 2)
        req.digest = a.argv[1];
    if (a.retain)
        req.retain_owner = (char *)a.retain;
    int r = cli_call(cli, "ImportSnapshot", &req.base, &longhaul__sandbox__v1__snapshot__descriptor,
                     READ_ALL_MS, (ProtobufCMessage **)&made, err);
    return r < 0 ? r : cli_new_id_print(cli, made->id, err);
}

static int gc(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_option options[] = {
        {"grace", OPT_GRACE, "TIME", 0, "Take only what has been unowned this long; default 10m",
         0},
        {0}};
    static const char *const columns[] = {"snapshots", "layers", "bytes", NULL};
    const struct argp argp = {options, parse, "",  "Removes snapshots that nobody retains.",
                              NULL,    NULL,  NULL};
    V1(GcRequest) req = LONGHAUL__SANDBOX__V1__GC_REQUEST__INIT;
    lh_automsg(V1(GcReply)) reply = NULL;
    struct args a = {0};

    cli_parse(&argp, argc, argv, &a);
    req.grace_ms = a.grace_ms;
    int r = cli_call(cli, "Gc", &req.base, &longhaul__sandbox__v1__gc_reply__descriptor, CALL_MS,
                     (ProtobufCMessage **)&reply, err);
    if (r < 0)
        return r;
    return cli_print(cli,
                     json_pack("[{s:I, s:I, s:I}]", "snapshots", (json_int_t)reply->snapshots,
                               "layers", (json_int_t)reply->layers, "bytes",
                               (json_int_t)reply->bytes),
                     columns, err);
}

static int audit(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_option options[] = {
        {"content", OPT_CONTENT, NULL, 0,
         "Also read every layer whose content address is known, and compare", 0},
        {0}};
    static const char *const columns[] = {"sandboxes", "snapshots", "layers",
                                          "bytes",     "problems",  NULL};
    const struct argp argp = {options,
                              parse,
                              "",
                              "Checks that everything that exists has a record, and the reverse; "
                              "exit status 1 if not.",
                              NULL,
                              NULL,
                              NULL};
    V1(AuditRequest) req = LONGHAUL__SANDBOX__V1__AUDIT_REQUEST__INIT;
    lh_automsg(V1(AuditReply)) reply = NULL;
    struct args a = {0};

    cli_parse(&argp, argc, argv, &a);
    req.content = a.content;
    int r = cli_call(cli, "Audit", &req.base, &longhaul__sandbox__v1__audit_reply__descriptor,
                     a.content ? READ_ALL_MS : CALL_MS, (ProtobufCMessage **)&reply, err);
    if (r < 0)
        return r;
    r = cli_print(cli,
                  json_pack("[{s:I, s:I, s:I, s:I, s:o}]", "sandboxes",
                            (json_int_t)reply->sandboxes, "snapshots", (json_int_t)reply->snapshots,
                            "layers", (json_int_t)reply->layers, "bytes", (json_int_t)reply->bytes,
                            "problems", strings(reply->problems, reply->n_problems)),
                  columns, err);
    return r < 0 ? r : reply->n_problems ? CLI_FAILED : 0;
}

const struct cli_verb snapshot_verbs[] = {
    {"snapshot", "ID", "take a snapshot, print its id", snapshot},
    {"snapshot ls", "", "list snapshots", snapshot_ls},
    {"snapshot retain", "SNAPSHOT OWNER", "keep a snapshot", snapshot_retain},
    {"snapshot release", "SNAPSHOT OWNER", "let it go", snapshot_release},
    {"snapshot export", "SNAPSHOT LOCATION", "write one to a file or store", snapshot_export},
    {"snapshot import", "LOCATION [DIGEST]", "take one in", snapshot_import},
    {"gc", "", "remove what nobody retains", gc},
    {"audit", "", "check that records and things agree", audit},
    {0},
};

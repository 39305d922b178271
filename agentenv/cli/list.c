/* ls and stat, and how sandboxes and files are shown. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "agentenv/cli/verbs.h"
#include "proto/parse.h"

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

const char *cli_state_name(int state)
{
    return cli_enum_name(&longhaul__sandbox__v1__state__descriptor, state, "STATE_");
}

const char *cli_cause_name(int cause)
{
    return cause ? cli_enum_name(&longhaul__sandbox__v1__death_cause__descriptor, cause, "DEATH_")
                 : "";
}

static json_t *ports_json(const V1(Sandbox) * s)
{
    json_t *list = json_array();

    for (size_t i = 0; list && i < s->n_ports; i++)
        json_array_append_new(list, json_pack("{s:i, s:i}", "port", (int)s->ports[i]->port,
                                              "host_port", (int)s->ports[i]->host_port));
    return list;
}

json_t *cli_sandbox_json(const V1(Sandbox) * s)
{
    char when[24];

    cli_time(s->created_ms, when);
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:I, s:s, s:s, s:I, s:i, s:I, s:I, s:o}",
                     "id", s->id, "name", s->name, "state", cli_state_name((int)s->state), "cause",
                     cli_cause_name((int)s->cause), "image", s->image, "snapshot", s->snapshot,
                     "task", s->task, "attempt", (json_int_t)s->attempt, "owner", s->owner,
                     "created", when, "created_ms", (json_int_t)s->created_ms, "init_pid",
                     s->init_pid, "memory_bytes", (json_int_t)s->memory_bytes, "processes",
                     (json_int_t)s->processes, "ports", ports_json(s));
}

const char *const cli_sandbox_columns[] = {"id",           "name",      "state", "cause",   "image",
                                           "memory_bytes", "processes", "owner", "created", NULL};

/* A verb that makes one thing prints its id, so that ID=$(agentenv start …) works; JSON if asked.
 */
int cli_print_sandbox(struct cli *cli, const V1(Sandbox) * s, struct lh_error *err)
{
    if (cli->json_asked)
        return cli_print(cli, json_pack("[o]", cli_sandbox_json(s)), cli_sandbox_columns, err);
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

int cli_list_sandboxes(struct cli *cli, const char *owner, bool all,
                       V1(ListSandboxesReply) * *reply, struct lh_error *err)
{
    V1(ListSandboxesRequest) req = LONGHAUL__SANDBOX__V1__LIST_SANDBOXES_REQUEST__INIT;

    if (owner)
        req.owner_prefix = (char *)owner;
    req.all = all;
    return cli_call(cli, "List", &req.base,
                    &longhaul__sandbox__v1__list_sandboxes_reply__descriptor, CALL_MS,
                    (ProtobufCMessage **)reply, err);
}

static int print_sandboxes(struct cli *cli, const struct cli_file *w, struct lh_error *err)
{
    lh_automsg(V1(ListSandboxesReply)) reply = NULL;
    int r = cli_list_sandboxes(cli, w->owner, w->all, &reply, err);
    json_t *rows = json_array();

    for (size_t i = 0; r == 0 && i < reply->n_sandboxes; i++)
        json_array_append_new(rows, cli_sandbox_json(reply->sandboxes[i]));
    if (r == 0)
        return cli_print(cli, rows, cli_sandbox_columns, err);
    json_decref(rows);
    return r;
}

static void mode_text(uint32_t mode, char out[11])
{
    static const char types[] = "?pc?d?b?-?l?s???";

    out[0] = types[mode >> 12 & 15];
    for (int i = 0; i < 9; i++)
        out[1 + i] = mode & (0400u >> i) ? "rwx"[i % 3] : '-';
    for (int i = 0; i < 3; i++) /* setuid, setgid, sticky: in the place of x, capital without it */
        if (mode & (04000u >> i))
            out[3 + 3 * i] = (out[3 + 3 * i] == 'x' ? "sst" : "SST")[i];
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

error_t cli_parse_file(int key, char *arg, struct argp_state *state)
{
    struct cli_file *f = state->input;

    switch (key) {
    case ARGP_KEY_ARG:
        if (f->id)
            argp_error(state, "one path");
        if (!cli_remote_path(arg, &f->id, &f->path))
            argp_error(state, "\"%s\" is not of the form ID:/PATH", arg);
        return 0;
    case ARGP_KEY_END:
        if (!f->id && !f->optional)
            argp_error(state, "give a path, as ID:/PATH");
        return 0;
    case CLI_OPT_OWNER:
        f->owner = arg;
        return 0;
    case CLI_OPT_ALL:
    case CLI_OPT_FOLLOW:
    case CLI_OPT_RECURSIVE:
        *(key == CLI_OPT_ALL ? &f->all : key == CLI_OPT_FOLLOW ? &f->follow : &f->recursive) = true;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
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

int ls_verb(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_option options[] = {
        {"all", CLI_OPT_ALL, 0, 0, "Dead sandboxes too", 0},
        {"owner", CLI_OPT_OWNER, "PREFIX", 0, "Only those whose owner begins so", 0},
        {0},
    };
    const struct argp argp = {
        options, cli_parse_file, "[ID:/PATH]", "Lists sandboxes, or files of one.",
        NULL,    NULL,           NULL};
    struct cli_file f = {.optional = true};

    cli_parse(&argp, argc, argv, &f);
    return f.id ? list_files(cli, f.id, f.path, err) : print_sandboxes(cli, &f, err);
}

/* Its name as it was given: that of a link is not that of its target. */
static json_t *stat_json(const V1(FileInfo) * f, const char *path)
{
    char mode[11], when[24];

    mode_text(f->mode, mode);
    cli_time(f->mtime_ms, when);
    return json_pack("{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:s, s:I, s:s}", "path", path, "mode",
                     mode, "uid", (json_int_t)f->uid, "gid", (json_int_t)f->gid, "links",
                     (json_int_t)f->links, "size", (json_int_t)f->size, "allocated_bytes",
                     (json_int_t)f->allocated_bytes, "modified", when, "mtime_ms",
                     (json_int_t)f->mtime_ms, "target", f->target);
}

int stat_verb(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const char *const columns[] = {
        "mode",     "uid",  "gid",    "links", "size", "allocated_bytes",
        "modified", "path", "target", NULL};
    static const struct argp_option options[] = {
        {"follow", CLI_OPT_FOLLOW, 0, 0, "What a symbolic link names, not the link", 0}, {0}};
    const struct argp argp = {
        options, cli_parse_file, "ID:/PATH", "Says what a file of a sandbox is.", NULL, NULL, NULL};
    V1(StatFileRequest) req = LONGHAUL__SANDBOX__V1__STAT_FILE_REQUEST__INIT;
    lh_automsg(V1(FileInfo)) info = NULL;
    struct cli_file f = {0};

    cli_parse(&argp, argc, argv, &f);
    req.id = f.id;
    req.path = f.path;
    req.follow = f.follow;
    int r = cli_call(cli, "StatFile", &req.base, &longhaul__sandbox__v1__file_info__descriptor,
                     CALL_MS, (ProtobufCMessage **)&info, err);
    return r < 0 ? r : cli_print(cli, json_pack("[o]", stat_json(info, f.path)), columns, err);
}

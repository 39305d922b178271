/* token create, ls, rm: who may come by TLS. */
#include <stdio.h>
#include <string.h>

#include "agentenv/cli/verbs.h"
#include "proto/parse.h"

static const char *const columns[] = {
    "name", "scope", "owner_prefix", "max_sandboxes", "created", "expires", NULL};

enum { OPT_TTL = 256, OPT_MAX };

struct create_args {
    const char *name, *owner;
    V1(Scope) scope;
    uint32_t max, ttl_ms;
};

static const struct argp_option create_options[] = {
    {"scope", 's', "SCOPE", 0, "read, use (default) or admin", 0},
    {"owner", CLI_OPT_OWNER, "PREFIX", 0, "Only for what belongs to owners that begin so", 0},
    {"max", OPT_MAX, "N", 0, "Sandboxes of that prefix at a time; default: no limit", 0},
    {"ttl", OPT_TTL, "TIME", 0, "Good for this long; default: until it is revoked", 0},
    {0},
};

static V1(Scope) scope_of(struct argp_state *state, const char *text)
{
    static const char *const names[] = {"read", "use", "admin"};

    for (size_t i = 0; i < LH_ARRAY_SIZE(names); i++)
        if (!strcmp(text, names[i]))
            return (V1(Scope))(LONGHAUL__SANDBOX__V1__SCOPE__SCOPE_READ + i);
    argp_error(state, "--scope \"%s\": read, use or admin", text);
    return LONGHAUL__SANDBOX__V1__SCOPE__SCOPE_UNSPECIFIED;
}

static error_t parse_create(int key, char *arg, struct argp_state *state)
{
    struct create_args *a = state->input;

    if (key == 's')
        a->scope = scope_of(state, arg);
    else if (key == CLI_OPT_OWNER)
        a->owner = arg;
    else if (key == OPT_MAX)
        a->max = (uint32_t)cli_number(state, "--max", arg, UINT32_MAX);
    else if (key == OPT_TTL)
        a->ttl_ms = cli_duration(state, "--ttl", arg);
    else if (key == ARGP_KEY_ARG && !a->name)
        a->name = arg;
    else if (key == ARGP_KEY_ARG || key == ARGP_KEY_NO_ARGS)
        argp_error(state, "one name");
    else
        return ARGP_ERR_UNKNOWN;
    return 0;
}

static json_t *token_json(const V1(Token) * t)
{
    char created[24], expires[24] = "";

    cli_time(t->created_ms, created);
    if (t->expires_ms)
        cli_time(t->expires_ms, expires);
    return json_pack(
        "{s:s, s:s, s:s, s:I, s:s, s:s}", "name", t->name, "scope",
        cli_enum_name(&longhaul__sandbox__v1__scope__descriptor, (int)t->scope, "SCOPE_"),
        "owner_prefix", t->owner_prefix, "max_sandboxes", (json_int_t)t->max_sandboxes, "created",
        created, "expires", expires);
}

static int token_create(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    const struct argp argp = {create_options,
                              parse_create,
                              "NAME",
                              "Makes a token for callers by TLS and prints its secret, once.",
                              NULL,
                              NULL,
                              NULL};
    V1(CreateTokenRequest) req = LONGHAUL__SANDBOX__V1__CREATE_TOKEN_REQUEST__INIT;
    lh_automsg(V1(Token)) made = NULL;
    struct create_args a = {.scope = LONGHAUL__SANDBOX__V1__SCOPE__SCOPE_USE};

    cli_parse(&argp, argc, argv, &a);
    req.name = (char *)a.name;
    if (a.owner)
        req.owner_prefix = (char *)a.owner;
    req.scope = a.scope;
    req.max_sandboxes = a.max;
    req.ttl_ms = a.ttl_ms;
    int r = cli_call(cli, "CreateToken", &req.base, &longhaul__sandbox__v1__token__descriptor,
                     CALL_MS, (ProtobufCMessage **)&made, err);
    if (r == 0)
        puts(made->secret);
    return r;
}

static int token_ls(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    const struct argp argp = {NULL, cli_parse_words, "", "Lists tokens.", NULL, NULL, NULL};
    V1(Empty) req = LONGHAUL__SANDBOX__V1__EMPTY__INIT;
    lh_automsg(V1(ListTokensReply)) reply = NULL;
    struct cli_words w = {0};

    cli_parse(&argp, argc, argv, &w);
    int r = cli_call(cli, "ListTokens", &req.base,
                     &longhaul__sandbox__v1__list_tokens_reply__descriptor, CALL_MS,
                     (ProtobufCMessage **)&reply, err);
    if (r < 0)
        return r;
    json_t *rows = json_array();
    for (size_t i = 0; i < reply->n_tokens; i++)
        json_array_append_new(rows, token_json(reply->tokens[i]));
    return cli_print(cli, rows, columns, err);
}

static int token_rm(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    const struct argp argp = {NULL, cli_parse_words, "NAME", "Revokes a token.", NULL, NULL, NULL};
    V1(TokenName) req = LONGHAUL__SANDBOX__V1__TOKEN_NAME__INIT;
    ProtobufCMessage *reply = NULL;
    char *name[1];
    struct cli_words w = {.min = 1, .max = 1, .argv = name};

    cli_parse(&argp, argc, argv, &w);
    req.name = name[0];
    int r = cli_call(cli, "RevokeToken", &req.base, &longhaul__sandbox__v1__empty__descriptor,
                     CALL_MS, &reply, err);
    lh_message_free(reply);
    return r;
}

const struct cli_verb token_verbs[] = {
    {"token create", "NAME", "a bearer token for TLS", token_create},
    {"token ls", "", "list tokens", token_ls},
    {"token rm", "NAME", "revoke one", token_rm},
    {0},
};

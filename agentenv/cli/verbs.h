/* The verbs of this directory, and what only they use. */
#ifndef AGENTENV_CLI_VERBS_H
#define AGENTENV_CLI_VERBS_H

#include "agentenv/cli/cli.h"
#include "longhaul/sandbox/v1/sandbox.pb-c.h"

#define V1(name) Longhaul__Sandbox__V1__##name

enum { CALL_MS = 90000 };

/* A person at a prompt acts for whatever attempt has the sandbox. */
#define CURRENT_ATTEMPT UINT32_MAX

extern const struct cli_verb sandbox_verbs[], file_verbs[], shell_verbs[], snapshot_verbs[],
    token_verbs[], top_verbs[], manual_verbs[];
/* All tables of the program, ended by NULL. */
extern const struct cli_verb *const cli_tables[];

/* Verbs with a row in another file's table. */
int start_verb(struct cli *cli, int argc, char **argv, struct lh_error *err);
int resume_verb(struct cli *cli, int argc, char **argv, struct lh_error *err);
int resume_sandbox(struct cli *cli, int argc, char **argv, struct lh_error *err);
int doctor_verb(struct cli *cli, int argc, char **argv, struct lh_error *err);
int ls_verb(struct cli *cli, int argc, char **argv, struct lh_error *err);
int stat_verb(struct cli *cli, int argc, char **argv, struct lh_error *err);
int watch_verb(struct cli *cli, int argc, char **argv, struct lh_error *err);
int policy_verb(struct cli *cli, int argc, char **argv, struct lh_error *err);

enum {
    CLI_OPT_OWNER = 512,
    CLI_OPT_ENGINE,
    CLI_OPT_FOLLOW,
    CLI_OPT_ALL = 'a',
    CLI_OPT_RECURSIVE = 'r'
};

/* Verbs whose only arguments are words: at least min, at most max of them. */
struct cli_words {
    int min, max;
    int n;
    char **argv;
    const char *owner, *engine;
    bool all;
};

/* What the daemon does with a sandbox by itself, as far as it was said; options of start and
 * policy.
 */
struct cli_policy {
    uint32_t ttl_ms; /* 0 = not said */
    V1(Policy) said; /* its values, where `set` says so */
    bool set_at_ttl, set_freeze, set_hibernate, set_pinned;
};
extern const struct argp cli_policy_argp;
/* Into *to, whose other fields stay; false when nothing was said. */
bool cli_policy_fill(const struct cli_policy *p, V1(Policy) * to);

error_t cli_parse_words(int key, char *arg, struct argp_state *state);

int cli_list_sandboxes(struct cli *cli, const char *owner, bool all,
                       V1(ListSandboxesReply) * *reply, struct lh_error *err);
extern const char *const cli_sandbox_columns[];
json_t *cli_sandbox_json(const V1(Sandbox) * s);
/* A verb that makes one thing prints its id, so that ID=$(agentenv start …) works; JSON if asked.
 */
int cli_print_sandbox(struct cli *cli, const V1(Sandbox) * s, struct lh_error *err);
const char *cli_state_name(int state);
const char *cli_cause_name(int cause);

/* Splits "ID:/path" in place; false when `arg` is not of that form. */
bool cli_remote_path(char *arg, char **id, char **path);

/* For verbs that take one such path, which may be missing if `optional`. */
struct cli_file {
    char *id, *path; /* NULL = not given */
    bool optional;
    const char *owner; /* options that some of them have */
    bool all, follow, recursive;
};
error_t cli_parse_file(int key, char *arg, struct argp_state *state);
/* Milliseconds since 1970 as local time in 24 characters or less. */
void cli_time(int64_t unix_ms, char out[24]);
/* "CREATING" and so on, without the schema's prefix. */
const char *cli_enum_name(const ProtobufCEnumDescriptor *type, int value, const char *prefix);
int cli_new_id_print(struct cli *cli, const char *id, struct lh_error *err);

#endif

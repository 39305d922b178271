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

enum { CLI_OPT_OWNER = 512, CLI_OPT_ENGINE, CLI_OPT_ALL = 'a' };

/* Verbs whose only arguments are words: at least min, at most max of them. */
struct cli_words {
    int min, max;
    int n;
    char **argv;
    const char *owner, *engine;
    bool all;
};

error_t cli_parse_words(int key, char *arg, struct argp_state *state);

/* A number above 0 and at most max; `what` for the message. */
int cli_number(const char *text, double max, double *out, const char *what, struct lh_error *err);

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
/* Milliseconds since 1970 as local time in 24 characters or less. */
void cli_time(int64_t unix_ms, char out[24]);
/* "CREATING" and so on, without the schema's prefix. */
const char *cli_enum_name(const ProtobufCEnumDescriptor *type, int value, const char *prefix);
int cli_new_id_print(struct cli *cli, const char *id, struct lh_error *err);

#endif

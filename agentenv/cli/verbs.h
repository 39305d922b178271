/* The verbs of this directory, and what only they use. */
#ifndef AGENTENV_CLI_VERBS_H
#define AGENTENV_CLI_VERBS_H

#include "agentenv/cli/cli.h"
#include "longhaul/sandbox/v1/sandbox.pb-c.h"

#define V1(name) Longhaul__Sandbox__V1__##name

enum { CALL_MS = 90000 };

/* A person at a prompt acts for whatever attempt has the sandbox. */
#define CURRENT_ATTEMPT UINT32_MAX

extern const struct cli_verb sandbox_verbs[], file_verbs[], snapshot_verbs[];

/* Splits "ID:/path" in place; false when `arg` is not of that form. */
bool cli_remote_path(char *arg, char **id, char **path);
/* Milliseconds since 1970 as local time in 24 characters or less. */
void cli_time(int64_t unix_ms, char out[24]);
/* "CREATING" and so on, without the schema's prefix. */
const char *cli_enum_name(const ProtobufCEnumDescriptor *type, int value, const char *prefix);
int cli_new_id_print(struct cli *cli, const char *id, struct lh_error *err);

#endif

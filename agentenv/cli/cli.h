/* The `agentenv` command: a table of verbs, each with an argp parser of its own.
 *
 * Exit codes: 0 done; 1 the request failed (the message is on stderr); 2 usage; 75 the daemon is
 * not there, try again.  `agentenv exec` passes on the exit status of the command, 124 after a
 * timeout, and 125 instead of 1 when it could not be run.
 *
 * What is listed appears as a table on a terminal and as JSON in a pipe, or as `-o` says. */
#ifndef AGENTENV_CLI_CLI_H
#define AGENTENV_CLI_CLI_H

#include <argp.h>
#include <jansson.h>
#include <stdbool.h>

#include "proto/error.h"
#include "proto/rpc.h"

enum { CLI_FAILED = 1, CLI_USAGE = 2, CLI_TIMEOUT = 124, CLI_EXEC_FAILED = 125, CLI_AGAIN = 75 };

struct cli {
    const char *socket;  /* of agentenvd; NULL = not given */
    const char *address; /* of one that is asked by TLS instead; NULL = not given */
    const char *token_file, *ca_file;
    struct rpc_channel *channel; /* made by the first call: a verb may fork before it */
    bool json;                   /* how to print lists */
    bool json_asked;             /* by -o, not by being in a pipe */
};

struct cli_verb {
    const char *name; /* "start", or two words: "snapshot ls" */
    const char *args; /* "IMAGE|SNAPSHOT", for the help */
    const char *doc;  /* one line */
    /* argv[0] is the verb.  Returns the exit status, or a negative lh_status with *err, which the
     * caller prints and turns into one. */
    int (*run)(struct cli *cli, int argc, char **argv, struct lh_error *err);
};

/* Verbs of agentenv/task: task …, image ….  Ended by a NULL name. */
extern const struct cli_verb task_verbs[];

/* argp with the program's conventions and common options; options end at the first argument of a
 * verb's own choice.  Usage errors end the program with CLI_USAGE. */
int cli_parse(const struct argp *argp, int argc, char **argv, void *input);

/* One call of longhaul.sandbox.v1.Sandboxes or, with a full "/package.Service/Method", of any
 * service.  The caller frees *reply with lh_message_free(). */
int cli_call(struct cli *cli, const char *method, const ProtobufCMessage *request,
             const ProtobufCMessageDescriptor *reply_type, int timeout_ms, ProtobufCMessage **reply,
             struct lh_error *err);

/* The same for a stream; see rpc_stream(). */
int cli_stream(struct cli *cli, const char *method, const ProtobufCMessage *request,
               const ProtobufCMessageDescriptor *reply_type, int timeout_ms, rpc_each_fn *each,
               void *ctx, struct lh_error *err);

/* The same for rpc_upload_begin(). */
struct rpc_upload *cli_upload(struct cli *cli, const char *method, int timeout_ms,
                              struct lh_error *err);

/* Prints `rows`, an array of objects, as JSON or as a table of `columns` (keys, ended by NULL; the
 * headings are the keys in capitals).  Takes the reference to rows. */
int cli_print(const struct cli *cli, json_t *rows, const char *const *columns,
              struct lh_error *err);

/* Values, for parsers of argp; `option` is what they are of.  Anything else is wrong usage, which
 * argp_error() says.  "512M", "2G", "100k", plain bytes: */
uint64_t cli_size(struct argp_state *state, const char *option, const char *text);
/* "90", "1.5s", "200ms", "5m", "2h" into milliseconds; a bare number is seconds. */
uint32_t cli_duration(struct argp_state *state, const char *option, const char *text);
/* Above 0 and at most max. */
double cli_number(struct argp_state *state, const char *option, const char *text, double max);

#endif

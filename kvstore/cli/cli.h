/* kvstore, the command line of the external KV store: what its files share. */
#ifndef KVSTORE_CLI_CLI_H
#define KVSTORE_CLI_CLI_H

#include <jansson.h>
#include <stdbool.h>

#include "kvstore/client/link.h"

struct cli {
    struct kv_link link;
    const char *job_dir, *socket; /* socket: of kvstored */
    const char *argument;         /* NULL = none */
    bool json;
};

/* Of one command: 0, or a negative lh_status. */
typedef int cli_command(struct cli *c, struct lh_error *err);
cli_command cli_stat, cli_ls, cli_show, cli_verify, cli_drop, cli_explain, cli_bench, cli_metrics,
    cli_man, cli_completion;

extern const struct cli_verb {
    const char *name, *args, *doc;
    cli_command *run;
    enum { CLI_STORE, CLI_JOB, CLI_NOTHING } needs; /* kvstored, a job directory, or neither */
} cli_verbs[];                                      /* the last is empty */
/* argp's text; NULL when memory is out. */
char *cli_help(void);

Longhaul__Kv__V1__Reply *cli_call(struct cli *c, const Longhaul__Kv__V1__Request *q,
                                  struct lh_error *err);

/* A reply whose `stat` is set, or NULL. */
Longhaul__Kv__V1__Reply *cli_ask_stat(struct cli *c, struct lh_error *err);

/* Calls `each` for every root (root == NULL) or every object of one, page by page. */
typedef int cli_each(void *ctx, const Longhaul__Kv__V1__Entry *e, struct lh_error *err);
int cli_list(struct cli *c, const ProtobufCBinaryData *root, cli_each *each, void *ctx,
             struct lh_error *err);

/* Every field of a message under its own name, so that a new one is shown without code; texts only
 * where there is one. */
json_t *cli_fields(const ProtobufCMessage *m);
json_t *cli_hex(const ProtobufCBinaryData *bytes);
/* Prints and frees: a row a line under headings, or JSON.  Columns end with NULL. */
int cli_print_rows(const struct cli *c, json_t *rows, const char *const *columns,
                   struct lh_error *err);
/* The same for one object: a field a line. */
int cli_print_object(const struct cli *c, json_t *object, struct lh_error *err);

#endif

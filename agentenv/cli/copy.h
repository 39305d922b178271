/* Files between this machine and a sandbox, as tar streams. */
#ifndef AGENTENV_CLI_COPY_H
#define AGENTENV_CLI_COPY_H

#include "agentenv/cli/cli.h"

/* As cp -a does: a destination that is a directory, or ends in '/', receives the source under its
 * own name; any other is what the source is called there. */
int copy_in(struct cli *cli, const char *local, const char *id, const char *path,
            struct lh_error *err);
int copy_out(struct cli *cli, const char *id, const char *path, const char *local,
             struct lh_error *err);

#endif

/* Registering Harbor task directories: what `task register DIRECTORY` does before the registry. */
#ifndef AGENTENV_CLI_HARBOR_H
#define AGENTENV_CLI_HARBOR_H

#include <stdbool.h>

#include "agentenv/cli/cli.h"
#include "agentenv/task/task.h"

bool is_directory(const char *path);

/* The task in `dir`, or those in its directories, with their images built.  Any that is malformed
 * or cannot be built is an error, before anything is registered. */
TaskSet *harbor_load_all(struct cli *cli, const char *dir, int split, struct lh_error *err);

#endif

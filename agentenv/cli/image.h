/* `agentenv image …`, rows of the verb table in task.c. */
#ifndef AGENTENV_CLI_IMAGE_H
#define AGENTENV_CLI_IMAGE_H

#include "agentenv/cli/cli.h"

int image_import(struct cli *cli, int argc, char **argv, struct lh_error *err);
int image_ls(struct cli *cli, int argc, char **argv, struct lh_error *err);
int image_build(struct cli *cli, int argc, char **argv, struct lh_error *err);
int image_rm(struct cli *cli, int argc, char **argv, struct lh_error *err);

#endif

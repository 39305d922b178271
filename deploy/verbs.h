/* The verbs of `longhaul`; each parses its own command line and returns the exit status: 0 = done,
 * 1 = failed, 2 = usage. */
#ifndef DEPLOY_VERBS_H
#define DEPLOY_VERBS_H

int verb_run(int argc, char **argv);
int verb_resume(int argc, char **argv);
int verb_eval(int argc, char **argv);
int verb_status(int argc, char **argv);
int verb_stop(int argc, char **argv);

#endif

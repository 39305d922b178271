/* A whole daemon in the test's own process: registry, sandboxes, the quickstart's image. */
#ifndef TESTS_UNIT_AGENTENV_TASK_HOUSE_H
#define TESTS_UNIT_AGENTENV_TASK_HOUSE_H

#include "agentenv/daemon/core.h"
#include "agentenv/task/registry.h"
#include "tests/must_work.h"

struct house {
    char dir[64];
    struct box_host *host;
    struct daemon *d;
};

/* What sandboxes lack on this machine, or NULL.  Forks: before house_open(). */
const char *house_missing(void);
#define NEEDS_SANDBOX()                                                                            \
    do {                                                                                           \
        const char *why_ = house_missing();                                                        \
        NEEDS("sandbox", !why_, why_ ? why_ : "");                                                 \
    } while (0)

void house_open(struct house *h);
/* Fails the test when a sandbox is left. */
void house_close(struct house *h);

/* A sandbox of the candidate, with its files and setup. */
void house_start(struct house *h, const struct candidate *c, char id[LH_ID_SIZE]);
/* One command as the agent's; its output does not matter. */
void house_act(struct house *h, const char *id, const char *command);
/* Ends its PID 1 from outside and waits until it is known to be dead. */
void house_kill(struct house *h, const char *id);
int64_t house_count(struct house *h, const char *table);

#endif

#include "rollout/harness/clean.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/log.h"
#include "rollout/harness/sandbox.h"

LH_LOG_COMPONENT("rollout");

struct clean_job {
    struct tool_job job; /* first */
    struct rpc_channel *agentenv;
    enum clean_what what;
    uint32_t attempt;
    char owner[128], id[64];
};

static void run_clean(struct tool_job *job)
{
    struct clean_job *c = (struct clean_job *)job;
    struct sandbox s = {.agentenv = c->agentenv, .owner = c->owner, .attempt = c->attempt};
    struct lh_error err = {0};
    int r = 0;

    switch (c->what) {
    case CLEAN_ALL:
        r = sandbox_clear(c->agentenv, c->owner, c->attempt, "", &err);
        break;
    case CLEAN_SANDBOX:
        memcpy(s.id, c->id, sizeof s.id);
        sandbox_remove(&s);
        break;
    case CLEAN_SNAPSHOT:
        r = sandbox_release(c->agentenv, c->owner, c->id, &err);
        break;
    }
    if (r < 0)
        lh_warn("left_behind", "owner=%s error=%s", c->owner, err.message);
}

void clean_submit(struct tools *tools, struct rpc_channel *agentenv, const struct clean *c)
{
    struct clean_job *j = malloc(sizeof *j);

    if (!j) {
        lh_warn("left_behind", "owner=%s error=no memory", c->owner);
        return;
    }
    *j = (struct clean_job){{.run = run_clean}, agentenv, c->what, c->attempt, "", ""};
    snprintf(j->owner, sizeof j->owner, "%s", c->owner);
    snprintf(j->id, sizeof j->id, "%s", c->id);
    tools_submit(tools, &j->job);
}

bool clean_finished(struct tool_job *job)
{
    if (job->run != run_clean)
        return false;
    free(job);
    return true;
}

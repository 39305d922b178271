#include "trainer/intake/quarantine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "longhaul/task/v1/service.pb-c.h"
#include "proto/parse.h"

int quarantine_ask(struct rpc_channel *agentenv, int timeout_ms, struct quarantine *q,
                   struct lh_error *err)
{
    Longhaul__Task__V1__ListTasksRequest request = LONGHAUL__TASK__V1__LIST_TASKS_REQUEST__INIT;
    lh_automsg(Longhaul__Task__V1__ListTasksReply) list = NULL;

    request.quarantined = true;
    int r = rpc_unary(agentenv, "/longhaul.task.v1.Tasks/List", &request.base,
                      &longhaul__task__v1__list_tasks_reply__descriptor, timeout_ms,
                      (ProtobufCMessage **)&list, err);
    if (r < 0)
        return lh_wrap(err, "asking for tasks in quarantine");
    char **names = calloc(list->n_tasks + 1, sizeof *names);
    if (!names)
        return lh_fail_errno(err, ENOMEM, "asking for tasks in quarantine");
    for (size_t i = 0; i < list->n_tasks; i++) {
        names[i] = list->tasks[i]->name; /* moved */
        list->tasks[i]->name = (char *)protobuf_c_empty_string;
    }
    *q = (struct quarantine){names, list->n_tasks};
    return 0;
}

static int compare(const void *key, const void *name)
{
    return strcmp(key, *(char *const *)name);
}

bool quarantine_has(const struct quarantine *q, const char *task)
{
    return q->n && bsearch(task, q->names, q->n, sizeof *q->names, compare);
}

void quarantine_finish(struct quarantine *q)
{
    for (size_t i = 0; i < q->n; i++)
        free(q->names[i]);
    free(q->names);
    *q = (struct quarantine){0};
}

/* bench_agentenvd [SECONDS]: sandboxes created and removed a second through the daemon, and whole
 * episodes of a task, with several clients.  bench_start.c has what one client waits for.
 *
 * CPU time is the machine's, from /proc/stat: what a sandbox costs is mostly spent by the kernel,
 * some of it later and in nobody's name.  So nothing else may run meanwhile. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "longhaul/sandbox/v1/sandbox.pb-c.h"
#include "longhaul/task/v1/service.pb-c.h"
#include "proto/clock.h"
#include "proto/parse.h"
#include "tests/bench/bench.h"
#include "tests/bench/daemon_kit.h"

#define V1(name)   Longhaul__Sandbox__V1__##name
#define TASK(name) Longhaul__Task__V1__##name

enum { WORKERS = 8, CALL_MS = 30000 };

static int accepted(void *ctx, const ProtobufCMessage *m, struct lh_error *err)
{
    const TASK(RegisterReply) *r = (const void *)m;

    (void)ctx;
    return r->accepted ? 0 : lh_fail(err, LH_INTERNAL, "task refused: %s", r->error);
}

/* With a file and a verifier, as the quickstart's tasks have them. */
static int add_task(struct lh_error *err)
{
    static const char input[] = "4821\n";
    TASK(File) file = LONGHAUL__TASK__V1__FILE__INIT, *files = &file;
    TASK(Environment) environment = LONGHAUL__TASK__V1__ENVIRONMENT__INIT;
    TASK(Verifier) verifier = LONGHAUL__TASK__V1__VERIFIER__INIT;
    TASK(Message) prompt = LONGHAUL__TASK__V1__MESSAGE__INIT, *prompts = &prompt;
    TASK(Oracle) oracle = LONGHAUL__TASK__V1__ORACLE__INIT;
    TASK(Task) task = LONGHAUL__TASK__V1__TASK__INIT, *tasks = &task;
    TASK(TaskSet) set = LONGHAUL__TASK__V1__TASK_SET__INIT;
    TASK(RegisterRequest) req = LONGHAUL__TASK__V1__REGISTER_REQUEST__INIT;
    char *action = (char *)"cat in >out";

    file.path = (char *)"/work/in";
    file.content = (ProtobufCBinaryData){sizeof input - 1, (uint8_t *)input};
    environment.image = (char *)"bench";
    environment.files = &files;
    environment.n_files = 1;
    verifier.command = (char *)"[ \"$(cat out)\" = 4821 ]";
    prompt.role = LONGHAUL__TASK__V1__ROLE__ROLE_USER;
    prompt.text = (char *)"copy in to out";
    oracle.actions = &action;
    oracle.n_actions = 1;
    task.name = (char *)"bench/copy";
    task.revision = 1;
    task.licence = (char *)"CC0-1.0";
    task.split = LONGHAUL__TASK__V1__SPLIT__SPLIT_TRAIN;
    task.prompt = &prompts;
    task.n_prompt = 1;
    task.environment = &environment;
    task.verifier = &verifier;
    task.oracle = &oracle;
    set.tasks = &tasks;
    set.n_tasks = 1;
    req.set = &set;
    return rpc_stream(kit_channel, "/longhaul.task.v1.Tasks/Add", &req.base,
                      &longhaul__task__v1__register_reply__descriptor, CALL_MS, accepted, NULL,
                      err);
}

static int verify(char *id, struct lh_error *err)
{
    V1(VerifyRequest) req = LONGHAUL__SANDBOX__V1__VERIFY_REQUEST__INIT;
    lh_automsg(TASK(Verdict)) v = NULL;

    req.id = id;
    int r =
        rpc_unary(kit_channel, "/longhaul.sandbox.v1.Sandboxes/Verify", &req.base,
                  &longhaul__task__v1__verdict__descriptor, CALL_MS, (ProtobufCMessage **)&v, err);
    if (r == 0 && !v->passed)
        r = lh_fail(err, LH_INTERNAL, "verdict %d: %s", v->kind, v->message);
    return r;
}

static int create_and_remove(struct lh_error *err)
{
    char id[LH_ID_SIZE];
    int r = kit_create(id, NULL, err);

    return r < 0 ? r : kit_remove(id, err);
}

/* A sandbox of a task, two actions of the agent, the verdict in a fork of the files. */
static int episode(struct lh_error *err)
{
    char id[LH_ID_SIZE];
    int r = kit_create(id, "bench/copy", err);

    if (r == 0)
        r = kit_shell(id, "cat /work/in", err);
    if (r == 0)
        r = kit_shell(id, "cat /work/in >/work/out", err);
    if (r == 0)
        r = verify(id, err);
    return r < 0 ? r : kit_remove(id, err);
}

static const struct load {
    const char *name, *unit;
    int (*once)(struct lh_error *err);
    int workers;
    double limit; /* a second */
} loads[] = {
    {"agentenvd: episodes, 4 at once", "episodes/s", episode, 4, 0},
    {"agentenvd: create and remove, 8 at once", "sandboxes/s", create_and_remove, 8, 200},
};

static bool bench_load(const struct load *l, int seconds, struct lh_error *err)
{
    struct kit_rate rate;
    int r = kit_load(l->once, l->workers, seconds, &rate, err);

    if (r < 0)
        return false;
    bool ok = bench_row(l->name, rate.per_second, 0, l->limit, l->unit);
    bench_at_most("  CPU of each, the kernel's threads included", rate.cpu_ms, 0, 0, "ms");
    return ok;
}

int main(int argc, char **argv)
{
    struct lh_error err = {0};
    bool ok = true;
    int r = kit_prepare(&err);

    if (r == 0)
        r = kit_open(&err);
    if (r == 0)
        r = add_task(&err);
    for (size_t i = 0; r == 0 && i < LH_ARRAY_SIZE(loads); i++)
        ok &= bench_load(&loads[i], argc > 1 ? atoi(argv[1]) : 5, &err);
    if (err.code)
        fprintf(stderr, "bench_agentenvd: %s\n", err.message);
    kit_close();
    return r < 0 || !ok;
}

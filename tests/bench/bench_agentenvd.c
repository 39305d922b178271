/* bench_agentenvd [SECONDS]: sandboxes created and removed a second through the daemon, the round
 * trip of an exec, the snapshot that a turn ends with, and whole episodes of a task.
 *
 * CPU time is the machine's, from /proc/stat: what a sandbox costs is mostly spent by the kernel,
 * some of it later and in nobody's name.  So nothing else may run meanwhile. */
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "longhaul/sandbox/v1/sandbox.pb-c.h"
#include "longhaul/task/v1/service.pb-c.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/id.h"
#include "proto/parse.h"
#include "proto/rpc.h"
#include "tests/bench/bench.h"

#define V1(name)     Longhaul__Sandbox__V1__##name
#define TASK(name)   Longhaul__Task__V1__##name
#define METHOD(name) "/longhaul.sandbox.v1.Sandboxes/" name

enum { WORKERS = 8, SAMPLES = 200, CALL_MS = 30000 };

extern char **environ;
static char dir[] = "/tmp/agentenvd-bench-XXXXXX";
static struct rpc_channel *channel;
static int64_t until_ms;

static int call(const char *method, const ProtobufCMessage *req,
                const ProtobufCMessageDescriptor *type, void *reply, struct lh_error *err)
{
    return rpc_unary(channel, method, req, type, CALL_MS, reply, err);
}

static int import_image(struct lh_error *err)
{
    V1(ImportImageRequest) req = LONGHAUL__SANDBOX__V1__IMPORT_IMAGE_REQUEST__INIT;
    lh_automsg(V1(ImageInfo)) info = NULL;
    lh_autofree char *root = lh_format("%s/root", dir);
    lh_autofree char *make = lh_format(
        "mkdir -p %s/bin %s/proc %s/dev && mkdir -m 1777 %s/tmp && cp /bin/busybox %s/bin && "
        "cd %s/bin && ln -s busybox sh && ln -s busybox true && ln -s busybox cat",
        root, root, root, root, root, root);

    if (!make || system(make))
        return lh_fail(err, LH_INTERNAL, "no image could be made of /bin/busybox");
    req.name = (char *)"bench";
    req.path = root;
    return call(METHOD("ImportImage"), &req.base, &longhaul__sandbox__v1__image_info__descriptor,
                &info, err);
}

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
    return rpc_stream(channel, "/longhaul.task.v1.Tasks/Add", &req.base,
                      &longhaul__task__v1__register_reply__descriptor, CALL_MS, accepted, NULL,
                      err);
}

/* Of the image, or of the task when one is named. */
static int create(char id[LH_ID_SIZE], const char *task, struct lh_error *err)
{
    V1(CreateRequest) req = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__INIT;
    lh_automsg(V1(Sandbox)) s = NULL;
    char key[LH_ID_SIZE];

    lh_id_new_text(key);
    req.idempotency_key = key;
    req.source_case = task ? LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_TASK
                           : LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_IMAGE;
    if (task)
        req.task = (char *)task;
    else
        req.image = (char *)"bench";
    int r = call(METHOD("Create"), &req.base, &longhaul__sandbox__v1__sandbox__descriptor, &s, err);
    if (r == 0)
        snprintf(id, LH_ID_SIZE, "%s", s->id);
    return r;
}

static int remove_box(char *id, struct lh_error *err)
{
    V1(RemoveRequest) req = LONGHAUL__SANDBOX__V1__REMOVE_REQUEST__INIT;
    lh_automsg(V1(RemoveReply)) reply = NULL;

    req.id = id;
    return call(METHOD("Remove"), &req.base, &longhaul__sandbox__v1__remove_reply__descriptor,
                &reply, err);
}

static int ignore(void *ctx, const ProtobufCMessage *m, struct lh_error *err)
{
    (void)ctx;
    (void)m;
    (void)err;
    return 0;
}

static int run(char *id, const char *script, struct lh_error *err)
{
    char *argv[] = {(char *)"/bin/sh", (char *)"-c", (char *)script};
    V1(ExecRequest) req = LONGHAUL__SANDBOX__V1__EXEC_REQUEST__INIT;

    req.id = id;
    req.argv = argv;
    req.n_argv = 3;
    return rpc_stream(channel, METHOD("Exec"), &req.base,
                      &longhaul__sandbox__v1__exec_event__descriptor, CALL_MS, ignore, NULL, err);
}

static int snapshot(char *id, struct lh_error *err)
{
    V1(SnapshotRequest) req = LONGHAUL__SANDBOX__V1__SNAPSHOT_REQUEST__INIT;
    lh_automsg(V1(Snapshot)) s = NULL;
    char key[LH_ID_SIZE];

    lh_id_new_text(key);
    req.id = id;
    req.idempotency_key = key;
    req.retain_owner = (char *)"bench";
    return call(METHOD("TakeSnapshot"), &req.base, &longhaul__sandbox__v1__snapshot__descriptor, &s,
                err);
}

static int verify(char *id, struct lh_error *err)
{
    V1(VerifyRequest) req = LONGHAUL__SANDBOX__V1__VERIFY_REQUEST__INIT;
    lh_automsg(TASK(Verdict)) v = NULL;

    req.id = id;
    int r = call(METHOD("Verify"), &req.base, &longhaul__task__v1__verdict__descriptor, &v, err);
    if (r == 0 && !v->passed)
        r = lh_fail(err, LH_INTERNAL, "verdict %d: %s", v->kind, v->message);
    return r;
}

/* ---- figures ---- */

static int create_and_remove(struct lh_error *err)
{
    char id[LH_ID_SIZE];
    int r = create(id, NULL, err);

    return r < 0 ? r : remove_box(id, err);
}

static int start_true_remove(struct lh_error *err)
{
    char id[LH_ID_SIZE];
    int r = create(id, NULL, err);

    if (r == 0)
        r = run(id, "true", err);
    return r < 0 ? r : remove_box(id, err);
}

/* A sandbox of a task, two actions of the agent, the verdict in a fork of the files. */
static int episode(struct lh_error *err)
{
    char id[LH_ID_SIZE];
    int r = create(id, "bench/copy", err);

    if (r == 0)
        r = run(id, "cat /work/in", err);
    if (r == 0)
        r = run(id, "cat /work/in >/work/out", err);
    if (r == 0)
        r = verify(id, err);
    return r < 0 ? r : remove_box(id, err);
}

static const struct load {
    const char *name, *cpu_name, *unit;
    int (*once)(struct lh_error *err);
    int workers;
    double limit; /* a second */
} loads[] = {
    {"agentenvd: start, true, remove, 1 at once", "  CPU of each", "sandboxes/s", start_true_remove,
     1, 0},
    {"agentenvd: episodes, 4 at once", "  CPU of each", "episodes/s", episode, 4, 0},
    {"agentenvd: create and remove, 8 at once", "  CPU of each", "sandboxes/s", create_and_remove,
     8, 200},
};

struct worker {
    const struct load *load;
    unsigned done;
    bool failed;
};

static void *work(void *arg)
{
    struct worker *w = arg;
    struct lh_error err = {0};

    while (lh_now_ms() < until_ms && !w->failed) {
        w->failed = w->load->once(&err) < 0;
        w->done += !w->failed;
    }
    if (w->failed)
        fprintf(stderr, "%s\n", err.message);
    return NULL;
}

/* Time that processors were busy since the start of the machine, all together. */
static double busy_ms(void)
{
    lh_autofclose FILE *f = fopen("/proc/stat", "re");
    unsigned long user, nice, system, idle, iowait, irq, softirq;

    if (!f || fscanf(f, "cpu %lu %lu %lu %lu %lu %lu %lu", &user, &nice, &system, &idle, &iowait,
                     &irq, &softirq) != 7)
        return 0;
    return (double)(user + nice + system + irq + softirq) * 1000 / (double)sysconf(_SC_CLK_TCK);
}

static bool bench_load(const struct load *l, int seconds)
{
    pthread_t threads[WORKERS];
    struct worker w[WORKERS] = {0};
    double cpu_ms = busy_ms();
    int64_t start_ms = lh_now_ms();
    unsigned done = 0;
    bool ok = true;

    until_ms = start_ms + seconds * 1000;
    for (int i = 0; i < l->workers; i++) {
        w[i].load = l;
        pthread_create(&threads[i], NULL, work, &w[i]);
    }
    for (int i = 0; i < l->workers; i++) {
        pthread_join(threads[i], NULL);
        done += w[i].done;
        ok &= !w[i].failed;
    }
    double s = (double)(lh_now_ms() - start_ms) / 1000;
    ok &= bench_row(l->name, done / s, 0, l->limit, l->unit);
    bench_row(l->cpu_name, (busy_ms() - cpu_ms) / done, 0, 0, "ms");
    return ok;
}

static int by_size(const void *a, const void *b)
{
    const double *x = a, *y = b;

    return (*x > *y) - (*x < *y);
}

static bool bench_turns(struct lh_error *err)
{
    double exec_ms[SAMPLES], snapshot_ms[SAMPLES];
    char id[LH_ID_SIZE];
    int r = create(id, NULL, err);

    for (int i = 0; r == 0 && i < SAMPLES; i++) {
        int64_t a = lh_now_us();
        r = run(id, "echo x > /tmp/x", err);
        int64_t b = lh_now_us();
        if (r == 0)
            r = snapshot(id, err);
        exec_ms[i] = (double)(b - a) / 1000;
        snapshot_ms[i] = (double)(lh_now_us() - b) / 1000;
    }
    if (r < 0 || remove_box(id, err) < 0)
        return false;
    qsort(exec_ms, SAMPLES, sizeof *exec_ms, by_size);
    qsort(snapshot_ms, SAMPLES, sizeof *snapshot_ms, by_size);
    bench_row("agentenvd: exec, median", exec_ms[SAMPLES / 2], 0, 0, "ms");
    bench_row("agentenvd: exec, 95 %", exec_ms[SAMPLES * 95 / 100], 0, 0, "ms");
    bench_row("agentenvd: snapshot, median", snapshot_ms[SAMPLES / 2], 0, 0, "ms");
    bench_row("agentenvd: snapshot, 95 %", snapshot_ms[SAMPLES * 95 / 100], 0, 0, "ms");
    return true;
}

static int bench(int seconds)
{
    struct lh_error err = {0};

    if (import_image(&err) < 0 || add_task(&err) < 0 || !bench_turns(&err)) {
        fprintf(stderr, "%s\n", err.message);
        return 1;
    }
    bool ok = true;
    for (size_t i = 0; i < LH_ARRAY_SIZE(loads); i++)
        ok &= bench_load(&loads[i], seconds);
    return ok ? 0 : 1;
}

int main(int argc, char **argv)
{
    struct lh_error err = {0};
    pid_t pid;
    int status;

    if (!mkdtemp(dir))
        return 1;
    lh_autofree char *state = lh_format("%s/state", dir), *socket = lh_format("%s/s", dir);
    char *daemon[] = {(char *)AGENTENVD,
                      (char *)"--remove-on-exit",
                      (char *)"--state",
                      state,
                      (char *)"--socket",
                      socket,
                      NULL};
    setenv("LONGHAUL_LOG", "warn", 1);
    if (!state || !socket || posix_spawn(&pid, AGENTENVD, NULL, NULL, daemon, environ))
        return 1;
    channel = rpc_channel_create(socket, &err);
    int rc = channel ? bench(argc > 1 ? atoi(argv[1]) : 5) : 1;
    rpc_channel_destroy(channel);
    kill(pid, SIGTERM);
    waitpid(pid, &status, 0);
    lh_remove_tree(dir, NULL);
    return rc;
}

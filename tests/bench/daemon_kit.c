#include "tests/bench/daemon_kit.h"

#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "longhaul/sandbox/v1/sandbox.pb-c.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/parse.h"

#define V1(name)     Longhaul__Sandbox__V1__##name
#define METHOD(name) "/longhaul.sandbox.v1.Sandboxes/" name

enum { CALL_MS = 60000, MAX_WORDS = 6, MAX_WORKERS = 8 };

extern char **environ;
struct rpc_channel *kit_channel;
char kit_dir[] = "/var/tmp/agentenvd-bench-XXXXXX";
static char owner[] = "bench";
static char cgroup[32];
static pid_t daemon_pid;

double kit_ms_since(int64_t start_us)
{
    return (double)(lh_now_us() - start_us) / 1000;
}

static int by_size(const void *a, const void *b)
{
    const double *x = a, *y = b;

    return (*x > *y) - (*x < *y);
}

double kit_median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof *values, by_size);
    return values[n / 2];
}

static int call(const char *method, const ProtobufCMessage *req,
                const ProtobufCMessageDescriptor *type, void *reply, struct lh_error *err)
{
    return rpc_unary(kit_channel, method, req, type, CALL_MS, reply, err);
}

/* ---- the daemon ---- */

static int make_root(struct lh_error *err)
{
    lh_autofree char *make = lh_format(
        "mkdir -p %s/root && cd %s/root && mkdir -p bin proc dev && mkdir -m 1777 tmp &&"
        " cp /bin/busybox bin && for i in sh true cat sleep; do ln -s busybox bin/$i; done &&"
        " cp %s witness",
        kit_dir, kit_dir, AGENTENV_WITNESS);

    if (!make || system(make))
        return lh_fail(err, LH_FAILED_PRECONDITION, "no root: apt-get install busybox-static");
    return 0;
}

static int import_image(struct lh_error *err)
{
    V1(ImportImageRequest) req = LONGHAUL__SANDBOX__V1__IMPORT_IMAGE_REQUEST__INIT;
    lh_automsg(V1(ImageInfo)) info = NULL;
    lh_autofree char *root = lh_format("%s/root", kit_dir);

    req.name = (char *)"bench";
    req.path = root;
    return call(METHOD("ImportImage"), &req.base, &longhaul__sandbox__v1__image_info__descriptor,
                &info, err);
}

static int start_daemon(struct lh_error *err)
{
    lh_autofree char *state = lh_format("%s/state", kit_dir), *socket = lh_format("%s/s", kit_dir);
    char *argv[] = {(char *)AGENTENVD,
                    (char *)"--remove-on-exit",
                    (char *)"--state",
                    state,
                    (char *)"--socket",
                    socket,
                    (char *)"--cgroup",
                    cgroup,
                    NULL};

    setenv("LONGHAUL_LOG", "warn", 0);
    if (!state || !socket || posix_spawn(&daemon_pid, AGENTENVD, NULL, NULL, argv, environ))
        return lh_fail(err, LH_INTERNAL, "%s cannot be started", AGENTENVD);
    kit_channel = rpc_channel_create(socket, err);
    return kit_channel ? 0 : err->code;
}

static int await_daemon(struct lh_error *err)
{
    V1(ListSandboxesRequest) req = LONGHAUL__SANDBOX__V1__LIST_SANDBOXES_REQUEST__INIT;
    lh_automsg(V1(ListSandboxesReply)) reply = NULL;

    req.owner_prefix = (char *)"nobody";
    return call(METHOD("List"), &req.base, &longhaul__sandbox__v1__list_sandboxes_reply__descriptor,
                &reply, err);
}

int kit_prepare(struct lh_error *err)
{
    if (!mkdtemp(kit_dir))
        return lh_fail(err, LH_INTERNAL, "no directory %s", kit_dir);
    snprintf(cgroup, sizeof cgroup, "bench-%d", getpid());
    return make_root(err);
}

int kit_open(struct lh_error *err)
{
    int r = start_daemon(err);

    return r < 0 ? r : import_image(err);
}

const char *kit_cgroups(void)
{
    static const char *const bases[] = {"/sys/fs/cgroup/unified", "/sys/fs/cgroup"};
    static char path[128];

    for (size_t i = 0; i < LH_ARRAY_SIZE(bases); i++) {
        snprintf(path, sizeof path, "%s/%s", bases[i], cgroup);
        if (access(path, F_OK) == 0)
            break;
    }
    return path;
}

void kit_kill(void)
{
    int status;

    rpc_channel_destroy(kit_channel);
    kit_channel = NULL;
    kill(daemon_pid, SIGKILL);
    waitpid(daemon_pid, &status, 0);
    daemon_pid = 0;
}

int kit_start(double *ms, struct lh_error *err)
{
    int64_t start_us = lh_now_us();
    int r = start_daemon(err);

    if (r == 0)
        r = await_daemon(err);
    *ms = kit_ms_since(start_us);
    return r;
}

void kit_close(void)
{
    int status;

    rpc_channel_destroy(kit_channel);
    if (daemon_pid > 0) {
        kill(daemon_pid, SIGTERM);
        waitpid(daemon_pid, &status, 0);
    }
    lh_remove_tree(kit_dir, NULL);
}

pid_t kit_daemon(void)
{
    return daemon_pid;
}

/* ---- sandboxes ---- */

int kit_create(char id[LH_ID_SIZE], const char *task, struct lh_error *err)
{
    V1(CreateRequest) req = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__INIT;
    lh_automsg(V1(Sandbox)) s = NULL;
    char key[LH_ID_SIZE];

    lh_id_new_text(key);
    req.idempotency_key = key;
    req.owner = owner;
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

static int remove_those(const V1(RemoveRequest) * req, struct lh_error *err)
{
    lh_automsg(V1(RemoveReply)) reply = NULL;

    return call(METHOD("Remove"), &req->base, &longhaul__sandbox__v1__remove_reply__descriptor,
                &reply, err);
}

int kit_remove(const char *id, struct lh_error *err)
{
    V1(RemoveRequest) req = LONGHAUL__SANDBOX__V1__REMOVE_REQUEST__INIT;

    req.id = (char *)id;
    return remove_those(&req, err);
}

int kit_remove_all(struct lh_error *err)
{
    V1(RemoveRequest) req = LONGHAUL__SANDBOX__V1__REMOVE_REQUEST__INIT;

    req.owner_prefix = owner;
    return remove_those(&req, err);
}

static int take_event(void *ctx, const ProtobufCMessage *m, struct lh_error *err)
{
    const V1(ExecEvent) *e = (const void *)m;
    int *status = ctx;

    (void)err;
    if (e->event_case == LONGHAUL__SANDBOX__V1__EXEC_EVENT__EVENT_EXIT)
        *status = e->exit->status;
    return 0;
}

int kit_exec(const char *id, const char *const *argv, struct lh_error *err)
{
    V1(ExecRequest) req = LONGHAUL__SANDBOX__V1__EXEC_REQUEST__INIT;
    char *words[MAX_WORDS];
    int status = -1;

    req.id = (char *)id;
    req.argv = words;
    while (req.n_argv < MAX_WORDS && argv[req.n_argv]) {
        words[req.n_argv] = (char *)argv[req.n_argv];
        req.n_argv++;
    }
    int r = rpc_stream(kit_channel, METHOD("Exec"), &req.base,
                       &longhaul__sandbox__v1__exec_event__descriptor, CALL_MS, take_event, &status,
                       err);
    return r < 0 || status == 0 ? r : lh_fail(err, LH_INTERNAL, "%s: status %d", argv[0], status);
}

int kit_shell(const char *id, const char *script, struct lh_error *err)
{
    return kit_exec(id, (const char *const[]){"/bin/sh", "-c", script, NULL}, err);
}

int kit_snapshot(const char *id, struct lh_error *err)
{
    V1(SnapshotRequest) req = LONGHAUL__SANDBOX__V1__SNAPSHOT_REQUEST__INIT;
    lh_automsg(V1(Snapshot)) s = NULL;
    char key[LH_ID_SIZE];

    lh_id_new_text(key);
    req.id = (char *)id;
    req.idempotency_key = key;
    req.retain_owner = owner;
    return call(METHOD("TakeSnapshot"), &req.base, &longhaul__sandbox__v1__snapshot__descriptor, &s,
                err);
}

int kit_change(const char *method, const char *id, struct lh_error *err)
{
    V1(SandboxAttempt) req = LONGHAUL__SANDBOX__V1__SANDBOX_ATTEMPT__INIT;
    lh_automsg(V1(Sandbox)) s = NULL;
    lh_autofree char *path = lh_format(METHOD("%s"), method);

    req.id = (char *)id;
    return call(path, &req.base, &longhaul__sandbox__v1__sandbox__descriptor, &s, err);
}

int kit_fork(const char *id, unsigned n, char (*children)[LH_ID_SIZE], struct lh_error *err)
{
    V1(ForkRequest) req = LONGHAUL__SANDBOX__V1__FORK_REQUEST__INIT;
    lh_automsg(V1(ForkReply)) reply = NULL;
    char key[LH_ID_SIZE];

    lh_id_new_text(key);
    req.id = (char *)id;
    req.idempotency_key = key;
    req.count = n;
    int r = call(METHOD("Fork"), &req.base, &longhaul__sandbox__v1__fork_reply__descriptor, &reply,
                 err);
    if (r == 0 && reply->n_children != n)
        r = lh_fail(err, LH_INTERNAL, "%zu children instead of %u", reply->n_children, n);
    for (size_t i = 0; r == 0 && i < n; i++)
        snprintf(children[i], LH_ID_SIZE, "%s", reply->children[i]->id);
    return r;
}

/* ---- load ---- */

struct worker {
    pthread_t thread;
    int (*once)(struct lh_error *err);
    int64_t until_ms;
    unsigned done;
    struct lh_error err;
};

static void *work(void *arg)
{
    struct worker *w = arg;

    while (w->err.code == 0 && lh_now_ms() < w->until_ms)
        w->done += w->once(&w->err) == 0;
    return NULL;
}

/* Time that processors were busy since the start of the machine, all together. */
static double machine_busy_ms(void)
{
    lh_autofclose FILE *f = fopen("/proc/stat", "re");
    unsigned long user, nice, system, idle, iowait, irq, softirq;

    if (!f || fscanf(f, "cpu %lu %lu %lu %lu %lu %lu %lu", &user, &nice, &system, &idle, &iowait,
                     &irq, &softirq) != 7)
        return 0;
    return (double)(user + nice + system + irq + softirq) * 1000 / (double)sysconf(_SC_CLK_TCK);
}

int kit_load(int (*once)(struct lh_error *err), int workers, int seconds, struct kit_rate *out,
             struct lh_error *err)
{
    struct worker w[MAX_WORKERS] = {0};
    int64_t start_us = lh_now_us();
    double busy_ms = machine_busy_ms();
    unsigned done = 0;
    int begun = 0;

    for (; begun < workers && begun < MAX_WORKERS; begun++) {
        w[begun].once = once;
        w[begun].until_ms = lh_now_ms() + seconds * 1000;
        if (pthread_create(&w[begun].thread, NULL, work, &w[begun]))
            break;
    }
    for (int i = 0; i < begun; i++) {
        pthread_join(w[i].thread, NULL);
        done += w[i].done;
        if (w[i].err.code)
            *err = w[i].err;
    }
    if (err->code || begun < workers || done == 0)
        return err->code ? err->code : lh_fail(err, LH_INTERNAL, "%d threads of a load", begun);
    out->per_second = done * 1000 / kit_ms_since(start_us);
    out->cpu_ms = (machine_busy_ms() - busy_ms) / done;
    return 0;
}

/* bench_agentenvd [SECONDS]: sandboxes created and removed a second through the daemon, the round
 * trip of an exec, and the snapshot that a turn ends with. */
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
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/id.h"
#include "proto/parse.h"
#include "proto/rpc.h"
#include "tests/bench/bench.h"

#define V1(name)     Longhaul__Sandbox__V1__##name
#define METHOD(name) "/longhaul.sandbox.v1.Sandboxes/" name

enum { WORKERS = 4, SAMPLES = 200, CALL_MS = 30000 };

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
        "ln -s busybox %s/bin/sh && ln -s busybox %s/bin/true",
        root, root, root, root, root, root, root);

    if (!make || system(make))
        return lh_fail(err, LH_INTERNAL, "no image could be made of /bin/busybox");
    req.name = (char *)"bench";
    req.path = root;
    return call(METHOD("ImportImage"), &req.base, &longhaul__sandbox__v1__image_info__descriptor,
                &info, err);
}

static int create(char id[LH_ID_SIZE], struct lh_error *err)
{
    V1(CreateRequest) req = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__INIT;
    lh_automsg(V1(Sandbox)) s = NULL;
    char key[LH_ID_SIZE];

    lh_id_new_text(key);
    req.idempotency_key = key;
    req.source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_IMAGE;
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

/* ---- figures ---- */

static void *cycle(void *arg)
{
    unsigned *done = arg;
    struct lh_error err = {0};
    char id[LH_ID_SIZE];

    while (lh_now_ms() < until_ms) {
        if (create(id, &err) < 0 || remove_box(id, &err) < 0) {
            fprintf(stderr, "%s\n", err.message);
            return NULL;
        }
        ++*done;
    }
    return NULL;
}

static bool bench_cycles(int seconds)
{
    pthread_t threads[WORKERS];
    unsigned done[WORKERS] = {0}, total = 0;
    int64_t start_ms = lh_now_ms();

    until_ms = start_ms + seconds * 1000;
    for (int i = 0; i < WORKERS; i++)
        pthread_create(&threads[i], NULL, cycle, &done[i]);
    for (int i = 0; i < WORKERS; i++) {
        pthread_join(threads[i], NULL);
        total += done[i];
    }
    return bench_row("agentenvd: create and remove",
                     total * 1000.0 / (double)(lh_now_ms() - start_ms), 0, 200, "sandboxes/s");
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
    int r = create(id, err);

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

    if (import_image(&err) < 0 || !bench_turns(&err)) {
        fprintf(stderr, "%s\n", err.message);
        return 1;
    }
    return bench_cycles(seconds) ? 0 : 1;
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

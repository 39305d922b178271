#include "world.h"

#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "longhaul/job/v1/job.pb-c.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/parse.h"
#include "proto/process.h"
#include "tests/must_work.h"

const char *world_hibernate = "never";

extern char **environ;

#define SANDBOXES "/longhaul.sandbox.v1.Sandboxes/"

static pid_t spawn(const char *const *argv)
{
    pid_t pid;

    cr_assert(eq(int, posix_spawn(&pid, argv[0], NULL, NULL, (char **)argv, environ), 0));
    return pid;
}

static int reap(pid_t pid, int signal_number)
{
    int status = -1;

    if (signal_number)
        kill(pid, signal_number);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    return status;
}

static char *path_of(const struct world *w, const char *name)
{
    char *p = lh_format("%s/%s", w->dir, name);

    cr_assert(p != NULL);
    return p;
}

/* ---- files ---- */

static void write_job(struct world *w, uint64_t kv_budget_bytes)
{
    Longhaul__Job__V1__Job job = LONGHAUL__JOB__V1__JOB__INIT;
    Longhaul__Job__V1__Model model = LONGHAUL__JOB__V1__MODEL__INIT;
    Longhaul__Job__V1__Rollout r = LONGHAUL__JOB__V1__ROLLOUT__INIT;
    Longhaul__Job__V1__KvStore kv = LONGHAUL__JOB__V1__KV_STORE__INIT;
    lh_autofree char *path = path_of(w, "job.pb");
    size_t len;

    model.path = (char *)TINY_MODEL;
    r.workers = 1;
    r.max_running = 8;
    r.kv_budget_bytes = kv_budget_bytes;
    r.page_tokens = 32;
    r.unit_tokens = 16;
    r.prefill_chunk = 128;
    r.temperature = 1;
    r.context_tokens = 1024;
    r.turn_tokens = 400;
    r.total_tokens = 900;
    r.turns = 6;
    r.hibernate = (char *)world_hibernate;
    kv.memory_bytes = 64 << 20;
    kv.max_inflight_bytes = 16 << 20;
    job.format = 1;
    job.id = w->job_id;
    job.model = &model;
    job.rollout = &r;
    job.kvstore = &kv;
    lh_autofree uint8_t *data = lh_pack(&job.base, &len, NULL);
    cr_assert(eq(int, lh_write_file(path, data, len, 0600, NULL), 0));
}

static void import_image(struct world *w)
{
    Longhaul__Sandbox__V1__ImportImageRequest req =
        LONGHAUL__SANDBOX__V1__IMPORT_IMAGE_REQUEST__INIT;
    lh_autofree char *root = path_of(w, "image");
    lh_autofree char *command = lh_format("sh %s %s", IMAGE_SCRIPT, root);
    ProtobufCMessage *reply = NULL;
    struct lh_error err = {0};

    cr_assert(eq(int, system(command), 0));
    req.name = (char *)"box";
    req.path = root;
    int r = rpc_unary(w->agentenv, SANDBOXES "ImportImage", &req.base,
                      &longhaul__sandbox__v1__image_info__descriptor, 30000, &reply, &err);
    cr_assert(eq(int, r, 0), "%s", err.message);
    lh_message_free(reply);
}

/* ---- processes ---- */

static bool agentenv_answers(struct world *w)
{
    Longhaul__Sandbox__V1__Empty req = LONGHAUL__SANDBOX__V1__EMPTY__INIT;

    for (int i = 0; i < 100; i++) {
        ProtobufCMessage *reply = NULL;
        if (waitpid(w->agentenvd, NULL, WNOHANG) != 0)
            return false;
        if (rpc_unary(w->agentenv, SANDBOXES "Engines", &req.base,
                      &longhaul__sandbox__v1__engines_reply__descriptor, 200, &reply, NULL) == 0) {
            lh_message_free(reply);
            return true;
        }
        usleep(50000);
    }
    return false;
}

bool world_has_criu(struct world *w)
{
    Longhaul__Sandbox__V1__Empty req = LONGHAUL__SANDBOX__V1__EMPTY__INIT;
    lh_automsg(Longhaul__Sandbox__V1__EnginesReply) reply = NULL;
    bool has = false;

    cr_assert(eq(int,
                 rpc_unary(w->agentenv, SANDBOXES "Engines", &req.base,
                           &longhaul__sandbox__v1__engines_reply__descriptor, 60000,
                           (ProtobufCMessage **)&reply, NULL),
                 0));
    for (size_t i = 0; i < reply->n_engines; i++)
        has |= !strcmp(reply->engines[i], "criu");
    return has;
}

static void spawn_agentenv(struct world *w)
{
    lh_autofree char *state = path_of(w, "agentenv"), *socket = path_of(w, "run/agentenv.sock");
    const char *argv[] = {AGENTENVD, "--state",          state, "--socket",
                          socket,    "--remove-on-exit", NULL};

    w->agentenvd = spawn(argv);
}

static void start_agentenv(struct world *w)
{
    lh_autofree char *socket = path_of(w, "run/agentenv.sock");

    spawn_agentenv(w);
    w->agentenv = rpc_channel_create(socket, NULL);
    NEEDS("sandbox", agentenv_answers(w), "agentenvd does not start");
}

static void start_worker(struct world *w)
{
    const char *argv[] = {WORKER, w->dir, "0", NULL};

    w->worker = spawn(argv);
}

void world_publish(struct world *w, uint64_t step)
{
    struct arbiter_weights_header *h = w->weights;
    uint8_t id[16] = {(uint8_t)step, 1};

    arbiter_weights_begin(h);
    policy_init(w->model, (float *)((char *)w->weights + ARBITER_WEIGHTS_OFFSET), step);
    arbiter_weights_publish(h, step, id);
    w->step = step;
}

void world_switch(struct world *w, enum arbiter_phase phase)
{
    struct arbiter_switch s;
    struct lh_error err = {0};

    cr_assert(eq(int, arbiter_switch_phase(w->arbiter, phase, 5000, &s, &err), 0), "%s",
              err.message);
    cr_assert(eq(u64, s.residual_bytes, 0), "I6");
}

static void lend_weights(struct world *w)
{
    lh_autofree char *socket = path_of(w, "run/arbiter.sock");
    struct arbiter_options o = {.path = socket, .client = "trainer-0", .leader = true};
    struct lh_error err = {0};

    w->model = policy_model_open(TINY_MODEL, &err);
    cr_assert(w->model != NULL, "%s", err.message);
    w->arbiter = arbiter_connect(&o, &err);
    cr_assert(w->arbiter != NULL, "%s", err.message);
    size_t bytes = ARBITER_WEIGHTS_OFFSET + policy_model_floats(w->model) * sizeof(float);
    int r = arbiter_declare(w->arbiter, "weights", LONGHAUL__ARBITER__V1__CLASS__CLASS_WEIGHTS,
                            bytes, ARBITER_ALL_PHASES, LONGHAUL__ARBITER__V1__PARK__PARK_KEEP,
                            &w->weights, &err);
    cr_assert(eq(int, r, 0), "%s", err.message);
    world_publish(w, 1);
    world_switch(w, ARBITER_ROLLOUT);
}

void world_open(struct world *w, uint64_t kv_budget_bytes)
{
    const char *arbiterd[] = {ARBITERD, w->dir, NULL}, *kvstored[] = {KVSTORED, w->dir, NULL};
    struct lh_error err = {0};

    *w = (struct world){.dir = "/tmp/rollout-world-XXXXXX"};
    lh_autofree char *pid = lh_format("%d", getpid());
    setenv(LH_SUPERVISED, pid, 1); /* a failed test takes its daemons along */
    cr_assert(mkdtemp(w->dir) != NULL);
    lh_id_new_text(w->job_id);
    lh_autofree char *run = path_of(w, "run");
    cr_assert(eq(int, mkdir(run, 0700), 0));
    write_job(w, kv_budget_bytes);
    start_agentenv(w);
    w->arbiterd = spawn(arbiterd);
    w->kvstored = spawn(kvstored);
    import_image(w);
    world_register_tasks(w);
    lend_weights(w);
    lh_autofree char *endpoint = lh_format("ipc://%s/run/experience.sock", w->dir);
    w->intake = channel_intake_create(endpoint, 1 << 20, &err);
    cr_assert(w->intake != NULL, "%s", err.message);
    start_worker(w);
}

void world_close(struct world *w)
{
    world_forget(w);
    int64_t began = lh_now_ms();
    cr_assert(eq(int, reap(w->worker, SIGTERM), W_EXITCODE(75, 0)),
              "the worker ends cleanly, its job is not done");
    cr_assert(lt(i64, lh_now_ms() - began, 5000));
    cr_assert(eq(sz, world_sandboxes(w), 0));
    cr_assert(eq(sz, world_snapshots(w), 0));
    channel_intake_destroy(w->intake);
    arbiter_destroy(w->arbiter);
    policy_model_destroy(w->model);
    rpc_channel_destroy(w->agentenv);
    reap(w->kvstored, SIGTERM);
    reap(w->arbiterd, SIGTERM);
    reap(w->agentenvd, SIGTERM);
    cr_assert(eq(int, lh_remove_tree(w->dir, NULL), 0));
}

void world_kill_worker(struct world *w)
{
    reap(w->worker, SIGKILL);
    start_worker(w);
}

void world_kill_agentenv(struct world *w)
{
    reap(w->agentenvd, SIGKILL);
    spawn_agentenv(w);
}

size_t world_sandboxes(struct world *w)
{
    Longhaul__Sandbox__V1__ListSandboxesRequest req =
        LONGHAUL__SANDBOX__V1__LIST_SANDBOXES_REQUEST__INIT;
    Longhaul__Sandbox__V1__ListSandboxesReply *reply = NULL;

    req.owner_prefix = w->job_id;
    req.all = true;
    cr_assert(eq(int,
                 rpc_unary(w->agentenv, SANDBOXES "List", &req.base,
                           &longhaul__sandbox__v1__list_sandboxes_reply__descriptor, 5000,
                           (ProtobufCMessage **)&reply, NULL),
                 0));
    size_t n = reply->n_sandboxes;
    lh_message_free(&reply->base);
    return n;
}

size_t world_snapshots(struct world *w)
{
    Longhaul__Sandbox__V1__ListSnapshotsRequest req =
        LONGHAUL__SANDBOX__V1__LIST_SNAPSHOTS_REQUEST__INIT;
    Longhaul__Sandbox__V1__ListSnapshotsReply *reply = NULL;

    req.owner_prefix = w->job_id;
    cr_assert(eq(int,
                 rpc_unary(w->agentenv, SANDBOXES "ListSnapshots", &req.base,
                           &longhaul__sandbox__v1__list_snapshots_reply__descriptor, 5000,
                           (ProtobufCMessage **)&reply, NULL),
                 0));
    size_t n = reply->n_snapshots;
    lh_message_free(&reply->base);
    return n;
}

/* kvstored JOBDIR: see docs/KVSTORE.md. */
#include <argp.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "kvstore/daemon/server.h"
#include "longhaul/job/v1/job.pb-c.h"
#include "proto/cleanup.h"
#include "proto/file.h"
#include "proto/ipc.h"
#include "proto/log.h"
#include "proto/parse.h"
#include "proto/process.h"

LH_LOG_COMPONENT("kvstored");

enum { JOB_BYTES_MAX = 1 << 20 };

const char *argp_program_version = "kvstored " LONGHAUL_VERSION;

static error_t parse_option(int key, char *arg, struct argp_state *state)
{
    const char **dir = state->input;

    if (key == ARGP_KEY_ARG && state->arg_num == 0)
        *dir = arg;
    else if (key == ARGP_KEY_ARG || key == ARGP_KEY_NO_ARGS)
        argp_usage(state);
    else
        return ARGP_ERR_UNKNOWN;
    return 0;
}

static Longhaul__Job__V1__Job *read_job(const char *dir, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/job.pb", dir);
    size_t len;

    if (!path)
        return lh_fail_errno(err, ENOMEM, "reading the job"), NULL;
    lh_autofree char *data = lh_read_file(path, JOB_BYTES_MAX, &len, err);
    if (!data)
        return NULL;
    lh_automsg(Longhaul__Job__V1__Job) job = (void *)lh_parse(
        &longhaul__job__v1__job__descriptor, data, len, (struct lh_parse_limits){0}, err);
    if (!job)
        return lh_wrap(err, "%s", path), NULL;
    if (job->format != 1 || !job->kvstore) {
        lh_fail(err, LH_FAILED_PRECONDITION, "%s is of format %u with%s a kvstore; this is %s",
                path, job->format, job->kvstore ? "" : "out", argp_program_version);
        return NULL;
    }
    return lh_steal(&job);
}

/* SIGTERM and SIGINT arrive as a readable fd, so that nothing is interrupted anywhere else. */
static int open_signals(struct lh_error *err)
{
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    if (sigprocmask(SIG_BLOCK, &set, NULL) < 0)
        return lh_fail_errno(err, errno, "signals");
    int fd = signalfd(-1, &set, SFD_CLOEXEC);
    return fd < 0 ? lh_fail_errno(err, errno, "signalfd") : fd;
}

struct paths {
    const char *socket, *disk, *arbiter;
};

static int serve(const Longhaul__Job__V1__KvStore *options, const struct paths *p,
                 struct kv_lent *lent, int memory_fd, int stop_fd, struct lh_error *err)
{
    struct kv_service service;
    lh_autoclose int listen_fd = ipc_listen(p->socket, err);

    if (listen_fd < 0)
        return listen_fd;
    struct kv_service_options o = {.memory_bytes = options->memory_bytes,
                                   .memory_fd = memory_fd,
                                   .max_inflight_bytes = options->max_inflight_bytes,
                                   .disk_path = options->disk_bytes ? p->disk : NULL,
                                   .disk_bytes = options->disk_bytes,
                                   .remote = {.location = *options->remote ? options->remote : NULL,
                                              .credentials = options->remote_credentials,
                                              .ttl_s = options->remote_ttl_s},
                                   .disk_bytes_per_s = options->disk_bytes_per_s,
                                   .eviction = *options->eviction ? options->eviction : NULL,
                                   .quotas = options->quotas};
    struct kv_server_options so = {
        .listen_fd = listen_fd, .stop_fd = stop_fd, .metrics = options->metrics, .lent = lent};
    int r = kv_service_init(&service, &o, err);
    if (r == 0) {
        lh_info("serving", "socket=%s bytes=%llu page=%u huge=%d lent=%d", p->socket,
                (unsigned long long)service.segment.bytes, service.segment.page_bytes,
                service.segment.huge, lent != NULL);
        r = kv_server_run(&service, &so, err);
        kv_service_finish(&service);
    }
    unlink(p->socket);
    return r;
}

/* In a job, where arbiterd is there first, the memory is arbiterd's; by itself kvstored takes its
 * own. */
static int serve_with_memory(const Longhaul__Job__V1__Job *job, const struct paths *p, int stop_fd,
                             struct lh_error *err)
{
    bool carry = job->rollout && job->rollout->carry;
    lh_autoclose int memory_fd = -1;
    struct kv_lent lent;

    if (access(p->arbiter, F_OK) < 0)
        return serve(job->kvstore, p, NULL, 0, stop_fd, err);
    int r = kv_lent_open(&lent, p->arbiter, job->kvstore->memory_bytes, carry, &memory_fd, err);
    if (r < 0)
        return r;
    r = serve(job->kvstore, p, &lent, memory_fd, stop_fd, err);
    kv_lent_close(&lent);
    return r;
}

static int run(const char *dir, struct lh_error *err)
{
    lh_autofree char *run_dir = lh_format("%s/run", dir);
    lh_autofree char *socket = lh_format("%s/run/kv.sock", dir);
    lh_autofree char *arbiter = lh_format("%s/run/arbiter.sock", dir);
    lh_autofree char *own_disk = lh_format("%s/kv.disk", dir);

    if (!run_dir || !socket || !arbiter || !own_disk)
        return lh_fail_errno(err, ENOMEM, "starting");
    lh_automsg(Longhaul__Job__V1__Job) job = read_job(dir, err);
    if (!job)
        return err->code;
    int r = lh_make_dirs(run_dir, 0700, err);
    if (r < 0)
        return r;
    lh_autoclose int stop_fd = open_signals(err);
    if (stop_fd < 0)
        return stop_fd;
    const char *disk = *job->kvstore->disk_path ? job->kvstore->disk_path : own_disk;
    return serve_with_memory(job, &(struct paths){socket, disk, arbiter}, stop_fd, err);
}

int main(int argc, char **argv)
{
    static const struct argp argp = {
        .parser = parse_option,
        .args_doc = "JOBDIR",
        .doc = "The external KV store of a job's node, served on JOBDIR/run/kv.sock."};
    const char *dir = NULL;
    struct lh_error err = {0};

    signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes is a full disk, not an end */
    signal(SIGPIPE, SIG_IGN); /* nor is a peer that hangs up on curl */
    argp_err_exit_status = LH_EXIT_USAGE;
    argp_parse(&argp, argc, argv, 0, NULL, &dir);
    if (!lh_follow_supervisor(SIGTERM))
        return LH_EXIT_TRY_AGAIN;
    int r = run(dir, &err);
    if (r == 0)
        return EXIT_SUCCESS;
    lh_err("failed", "%s", err.message);
    /* Whoever has the socket may be ending; an arbiterd that is gone is started again. */
    return r == LH_ALREADY_EXISTS || r == LH_UNAVAILABLE ? LH_EXIT_TRY_AGAIN : EXIT_FAILURE;
}

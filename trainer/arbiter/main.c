/* arbiterd JOBDIR: lends the memory of the node to the processes of a job. */
#include <argp.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/file.h"
#include "proto/ipc.h"
#include "proto/log.h"
#include "proto/process.h"
#include "trainer/arbiter/node.h"

LH_LOG_COMPONENT("arbiterd");

enum { CHUNK_BYTES = 4 << 20, DEVICE_CHUNK_BYTES = 256 << 20 };

static struct node node; /* too large for a stack */

static const char *job_dir;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    if (key == ARGP_KEY_ARG && !job_dir)
        job_dir = arg;
    else if (key == ARGP_KEY_ARG || key == ARGP_KEY_NO_ARGS)
        argp_usage(state);
    else
        return ARGP_ERR_UNKNOWN;
    return 0;
}

static const struct argp argp = {
    .parser = parse,
    .args_doc = "JOBDIR",
    .doc = "Lends the node's memory to the processes of a job, by phase.",
};

static void serve_client(struct client *c)
{
    struct lh_error err = {0};

    if (node_receive(&node, c, &err) < 0)
        node_drop_client(&node, c, err.message);
}

static void accept_client(struct ipc_listener *listener)
{
    struct lh_error err = {0};
    pid_t pid;
    int fd = ipc_listener_accept(listener, &pid, &err);

    if (fd < 0 || node_add_client(&node, fd, pid, &err) < 0)
        lh_warn("accept", "%s", err.message);
}

/* The connected ones only: poll refuses a longer list than descriptors may be open. */
static nfds_t poll_clients(struct pollfd p[NODE_CLIENTS], struct client *polled[NODE_CLIENTS])
{
    nfds_t n = 0;

    for (size_t i = 0; i < NODE_CLIENTS; i++) {
        if (node.clients[i].fd < 0)
            continue;
        p[n] = (struct pollfd){node.clients[i].fd, POLLIN, 0};
        polled[n++] = &node.clients[i];
    }
    return n;
}

static int serve(int listen_fd, int signals, struct lh_error *err)
{
    struct ipc_listener listener = {.fd = listen_fd};
    struct pollfd p[NODE_CLIENTS + 2] = {[1] = {signals, POLLIN, 0}};

    for (;;) {
        int timeout = ipc_listener_timeout(&listener, node_switch_timeout(&node));
        struct client *polled[NODE_CLIENTS];
        p[0] = ipc_listener_poll(&listener);
        nfds_t n = 2 + poll_clients(p + 2, polled);
        if (poll(p, n, timeout) < 0 && errno != EINTR)
            return lh_fail_errno(err, errno, "poll");
        if (p[1].revents)
            return 0;
        for (nfds_t i = 2; i < n; i++)
            if (p[i].revents && polled[i - 2]->fd == p[i].fd)
                serve_client(polled[i - 2]);
        if (p[0].revents)
            accept_client(&listener);
        node_switch_step(&node);
    }
}

static int run(struct lh_error *err)
{
    struct rlimit files;
    sigset_t set;

    lh_autofree char *socket = lh_format("%s/run/arbiter.sock", job_dir);
    lh_autofree char *state = lh_format("%s/run/arbiter.state", job_dir);
    if (!socket || !state)
        return lh_fail_errno(err, ENOMEM, "starting");
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) { /* one fd a chunk */
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_BLOCK, &set, NULL);
    lh_autoclose int signals = signalfd(-1, &set, SFD_CLOEXEC);
    lh_autoclose int listener = ipc_listen(socket, err);
    if (listener < 0)
        return listener;
    int r = node_init(&node, state, CHUNK_BYTES, DEVICE_CHUNK_BYTES, err);
    if (r == 0)
        lh_info("ready", "socket=%s epoch=%llu", socket, (unsigned long long)node.epoch);
    if (r == 0)
        r = serve(listener, signals, err);
    node_finish(&node);
    unlink(socket);
    return r;
}

int main(int argc, char **argv)
{
    struct lh_error err = {0};

    argp_err_exit_status = LH_EXIT_USAGE;
    argp_parse(&argp, argc, argv, 0, NULL, NULL);
    if (!lh_follow_supervisor(SIGKILL))
        return LH_EXIT_TRY_AGAIN;
    signal(SIGPIPE, SIG_IGN);
    int r = run(&err);
    if (r == 0)
        return 0;
    lh_err("failed", "%s", err.message);
    return r == LH_ALREADY_EXISTS ? LH_EXIT_TRY_AGAIN : 1; /* it may be ending */
}

/* agentenvd: the node's sandboxes behind one unix socket. */
#include <argp.h>
#include <errno.h>
#include <locale.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <xxhash.h>

#include "agentenv/cli/cli.h"
#include "agentenv/daemon/access.h"
#include "agentenv/daemon/core.h"
#include "agentenv/daemon/metrics.h"
#include "agentenv/daemon/service.h"
#include "agentenv/sandbox/facts.h"
#include "agentenv/sandbox/places.h"
#include "agentenv/sandbox/rootless.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/process.h"

LH_LOG_COMPONENT("agentenvd");

enum {
    GRACE_MS = 3000,
    OPT_REMOVE = 256,
    OPT_CERT,
    OPT_KEY,
    OPT_METRICS,
    OPT_STORE,
    PEM_MAX = 1 << 20
};

const char *argp_program_version = "agentenvd " LONGHAUL_VERSION;

struct options {
    const char *own_state, *own_socket; /* defaults of an ordinary user */
    const char *state, *socket, *cgroup, *listen, *tls_cert, *tls_key, *metrics;
    uint64_t store_limit;
    bool remove_on_exit;
};

static const struct argp_option option_table[] = {
    {"state", 's', "DIR", 0,
     "Registry, images, layers and sandboxes; created if absent.  Default of an ordinary user: "
     "$XDG_DATA_HOME/agentenv or ~/.local/share/agentenv",
     0},
    {"socket", 'S', "PATH", 0,
     "Unix socket to serve on (mode 0600).  Default of an ordinary user: "
     "$XDG_RUNTIME_DIR/agentenv.sock, or socket in the state directory",
     0},
    {"cgroup", 'c', "NAME", 0, "Parent of the sandboxes' cgroups; default: made from DIR", 0},
    {"listen", 'l', "HOST:PORT", 0, "Serve there too, by TLS, holders of tokens", 0},
    {"tls-cert", OPT_CERT, "FILE", 0, "PEM: certificate chain, for --listen", 0},
    {"tls-key", OPT_KEY, "FILE", 0, "PEM: its private key", 0},
    {"metrics", OPT_METRICS, "IPV4:PORT", 0, "Serve Prometheus' metrics there by HTTP, to anybody",
     0},
    {"store-limit", OPT_STORE, "SIZE", 0,
     "Refuse snapshots when those there are hold so much on disk; default: no limit", 0},
    {"remove-on-exit", OPT_REMOVE, 0, 0, "Remove every sandbox on SIGTERM; default: they run on",
     0},
    {0},
};

static error_t parse_option(int key, char *arg, struct argp_state *state)
{
    struct options *o = state->input;

    switch (key) {
    case 's':
        o->state = arg;
        return 0;
    case 'S':
        o->socket = arg;
        return 0;
    case 'c':
        o->cgroup = arg;
        return 0;
    case 'l':
        o->listen = arg;
        return 0;
    case OPT_CERT:
        o->tls_cert = arg;
        return 0;
    case OPT_KEY:
        o->tls_key = arg;
        return 0;
    case OPT_METRICS:
        o->metrics = arg;
        return 0;
    case OPT_STORE:
        o->store_limit = cli_size(state, "--store-limit", arg);
        return 0;
    case OPT_REMOVE:
        o->remove_on_exit = true;
        return 0;
    case ARGP_KEY_END:
        o->state = o->state ? o->state : o->own_state;
        o->socket = o->socket ? o->socket : o->own_socket;
        if (!o->state || !o->socket)
            argp_error(state, "--state and --socket are needed");
        if (!o->listen != !o->tls_cert || !o->listen != !o->tls_key)
            argp_error(state, "--listen, --tls-cert and --tls-key go together");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* Two daemons must not sweep each other's cgroups, and a restarted one must find its own. */
static char *default_cgroup(const char *state_dir, struct lh_error *err)
{
    lh_autofree char *real = realpath(state_dir, NULL);
    if (!real)
        return lh_fail_errno(err, errno, "state directory %s", state_dir), NULL;
    return lh_format("agentenv-%016llx", (unsigned long long)XXH3_64bits(real, strlen(real)));
}

/* Every sandbox costs descriptors: init's socket, a pidfd, cgroup files. */
static void raise_descriptor_limit(void)
{
    struct rlimit r;

    if (getrlimit(RLIMIT_NOFILE, &r) < 0)
        return;
    r.rlim_cur = r.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &r) < 0)
        lh_warn("descriptor limit stays", "errno=%d", errno);
}

static struct rpc_server *start_server(struct daemon *d, const struct options *o,
                                       struct access *access, struct lh_error *err)
{
    size_t len;
    lh_autofree char *cert = o->listen ? lh_read_file(o->tls_cert, PEM_MAX, &len, err) : NULL;
    lh_autofree char *key = cert ? lh_read_file(o->tls_key, PEM_MAX, &len, err) : NULL;

    if (o->listen && !key)
        return NULL;
    const struct service_options options = {.socket = o->socket,
                                            .access = access,
                                            .tls_address = o->listen,
                                            .tls_cert = cert,
                                            .tls_key = key};
    struct rpc_server *s = service_start(d, &options, err);
    if (s && o->listen)
        lh_info("serving by TLS", "address=%s port=%d", o->listen, rpc_server_port(s));
    return s;
}

static int serve(const struct options *o, const char *cgroup, struct box_host *host,
                 const sigset_t *stop, struct lh_error *err)
{
    int sig, r = 0;

    lh_auto(daemon) d = daemon_open(o->state, &task_hooks, host, err);
    if (!d)
        return lh_wrap(err, "starting");
    daemon_limit_store(d, o->store_limit);
    lh_auto(metrics) metrics = metrics_create(d, o->metrics, err);
    lh_auto(access) access = metrics ? access_create(d, err) : NULL;
    if (!access)
        return lh_wrap(err, "starting");
    struct rpc_server *server = start_server(d, o, access, err);
    if (!server)
        return lh_wrap(err, "serving on %s", o->socket);
    lh_info("ready", "state=%s socket=%s cgroup=%s", o->state, o->socket, cgroup);
    do
        sigwait(stop, &sig);
    while (sig == SIGCHLD && box_host_alive(host));
    if (sig == SIGCHLD) {
        lh_err("the spawner is dead", "this daemon ends, the next one adopts the sandboxes");
        _exit(LH_EXIT_TRY_AGAIN); /* at once: a call that fails for want of it would blame its
                                     sandbox */
    }
    lh_info("stopping", "signal=%d", sig);
    rpc_server_destroy(server, GRACE_MS);
    if (o->remove_on_exit)
        r = daemon_remove_all(d, err);
    return r;
}

static void say_what_is_missing(void)
{
    struct box_offer offer;

    for (size_t i = 0; box_offer(i, &offer); i++)
        if (!offer.there)
            lh_warn("not offered", "what=%s cost=%s", offer.what, offer.cost);
}

static int run(const struct options *o, struct lh_error *err)
{
    sigset_t stop;
    int r = lh_make_dirs(o->state, 0700, err);

    if (r < 0)
        return lh_wrap(err, "--state");
    lh_autofree char *cgroup = o->cgroup ? strdup(o->cgroup) : default_cgroup(o->state, err);
    if (!cgroup)
        return lh_wrap(err, "cgroup name");
    lh_autoclose int lock = daemon_lock(o->state, err); /* covers the cgroup, too */
    if (lock < 0)
        return lh_wrap(err, "starting");
    if (geteuid() != 0 && box_rootless_enter(o->state, cgroup, err) < 0)
        return lh_wrap(err, "preparing for sandboxes (agentenv doctor says more)");
    lh_auto(box_host) host =
        box_host_create(&(struct box_host_options){.cgroup_parent = cgroup}, err);
    if (!host)
        return lh_wrap(err, "preparing for sandboxes (agentenv doctor says more)");
    say_what_is_missing();
    sigemptyset(&stop);
    sigaddset(&stop, SIGTERM);
    sigaddset(&stop, SIGINT);
    sigaddset(&stop, SIGCHLD);
    pthread_sigmask(SIG_BLOCK, &stop, NULL); /* inherited by every thread made from here on */
    signal(SIGPIPE, SIG_IGN);
    return serve(o, cgroup, host, &stop, err);
}

int main(int argc, char **argv)
{
    const struct argp argp = {
        option_table, parse_option, NULL, "Keeps the sandboxes of this machine.", NULL, NULL, NULL};
    lh_autofree char *state = box_default_state(), *socket = box_default_socket();
    struct options o = {.own_state = state, .own_socket = socket};
    struct lh_error err = {0};

    argp_err_exit_status = LH_EXIT_USAGE;
    argp_parse(&argp, argc, argv, 0, NULL, &o);
    setlocale(LC_CTYPE, "C.UTF-8"); /* file names in archives */
    if (!lh_follow_supervisor(SIGTERM))
        return LH_EXIT_TRY_AGAIN;
    raise_descriptor_limit();
    int r = run(&o, &err);
    if (r == 0)
        return 0;
    lh_err("failed", "%s", err.message);
    return r == LH_UNAVAILABLE || r == LH_ALREADY_EXISTS ? LH_EXIT_TRY_AGAIN
                                                         : 1; /* it may be ending */
}

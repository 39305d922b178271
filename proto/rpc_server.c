/* The server: threads, connections, arrival of calls, shutdown.
 *
 * Three kinds of threads.  The acceptor takes connections from the unix socket, because gRPC would
 * not look at the peer's credentials, and hands their fds to gRPC.  The event thread reads the one
 * completion queue and never blocks in anything else.  Pool threads run handlers (rpc_call.c).
 *
 * Methods are not registered with gRPC: every call arrives by the catch-all, is looked up here, and
 * its request is read when a thread is free for it. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "proto/rpc_core.h"
#include "proto/unix_socket.h"
#include "proto/wait.h"

LH_LOG_COMPONENT("rpc");

enum { DEFAULT_THREADS = 16, OUT_OF_FDS_MS = 100 };

/* ---- arrival of calls ------------------------------------------------------------------------ */

static const struct rpc_method *method_named(const struct rpc_service *s, const char *name)
{
    for (const struct rpc_method *m = s->methods; m->name; m++)
        if (!strcmp(m->name, name))
            return m;
    return NULL;
}

/* "/package.Service/Method" */
static bool find_method(struct rpc_call *c, const char *path)
{
    const char *slash = *path == '/' ? strchr(path + 1, '/') : NULL;

    for (size_t i = 0; slash && i < c->server->n_services; i++) {
        const struct rpc_service *s = &c->server->services[i];
        size_t len = strlen(s->descriptor->name);
        if ((size_t)(slash - path - 1) != len || strncmp(path + 1, s->descriptor->name, len) != 0)
            continue;
        c->service = s;
        c->method = method_named(s, slash + 1);
        c->descriptor = protobuf_c_service_descriptor_get_method_by_name(s->descriptor, slash + 1);
        return c->method && c->descriptor;
    }
    return false;
}

static void dispatch(struct rpc_call *c)
{
    char *path = grpc_slice_to_c_string(c->details.method);

    if (find_method(c, path)) {
        atomic_fetch_add(&c->refs, 1);
        rpc_pool_add(c->server->pool, c);
    } else if (!rpc_health_serve(c, path)) {
        char why[256];
        snprintf(why, sizeof why, "no method %.200s here", path);
        rpc_call_finish(c, NULL, LH_UNIMPLEMENTED, why);
    }
    gpr_free(path);
}

/* gRPC names a connection that it was handed "fd:N".  Should the client have gone and another one
 * have got the number, the answer is that one's uid: both passed the acceptor's check. */
static void identify(struct rpc_call *c)
{
    char *peer = grpc_call_get_peer(c->call);
    struct ucred cred = {.uid = (uid_t)-1};
    socklen_t len = sizeof cred;
    int fd;

    c->local = peer && sscanf(peer, "fd:%d", &fd) == 1;
    if (c->local && getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) == 0)
        c->peer_uid = cred.uid;
    gpr_free(peer);
}

/* The end of the call, and the only notice of a cancellation. */
static void on_close(struct rpc_call *c, bool ok)
{
    if (c->close_cancelled || !ok) {
        c->cancelled = true;
        rpc_health_forget(c);
    }
}

static void on_new(struct rpc_call *c, bool ok);

static void await_call(struct rpc_server *s)
{
    struct rpc_call *c = rpc_call_create(s);

    if (!c) {
        lh_err("deaf", "no memory to receive another call; restart this server");
        return;
    }
    c->on_new = (struct rpc_tag){on_new, c};
    grpc_call_error e = grpc_server_request_call(s->server, &c->call, &c->details, &c->metadata,
                                                 s->cq, s->cq, &c->on_new);
    if (e == GRPC_CALL_OK)
        return;
    lh_debug("no more calls", "%s", grpc_call_error_to_string(e));
    rpc_call_unref(c);
}

static void on_new(struct rpc_call *c, bool ok)
{
    grpc_op op = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER};

    if (!ok) /* the server is shutting down */
        return;
    await_call(c->server);
    c->deadline_ms = rpc_ms_from_deadline(c->details.deadline);
    identify(c);
    rpc_call_read_metadata(c);
    op.data.recv_close_on_server.cancelled = &c->close_cancelled;
    if (rpc_call_start(c, &op, 1, &c->on_close, on_close))
        dispatch(c);
}

static void on_down(struct rpc_server *s)
{
    LH_LOCKED(&s->mutex);
    s->down = true;
    pthread_cond_signal(&s->is_down);
}

static void *read_events(void *arg)
{
    struct rpc_server *s = arg;

    for (;;) {
        grpc_event e = grpc_completion_queue_next(s->cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        if (e.type == GRPC_QUEUE_SHUTDOWN)
            return NULL;
        struct rpc_tag *t = e.tag;
        if (t == &s->on_down) {
            on_down(s);
            continue;
        }
        struct rpc_call *c = t->call;
        t->done(c, e.success);
        rpc_call_unref(c);
    }
}

/* ---- connections ----------------------------------------------------------------------------- */

static void accept_one(struct rpc_server *s)
{
    struct pollfd stop = {s->stop_fd, POLLIN, 0};
    struct lh_error e = {0};
    struct ucred peer;
    int fd = lh_unix_accept(s->listen_fd, &peer, &e);

    if (fd >= 0) {
        grpc_server_add_channel_from_fd(s->server, fd, s->credentials);
    } else if (e.code != LH_UNAVAILABLE) {
        lh_warn("connection refused", "%s: %s", s->path, e.message);
        if (e.code == LH_RESOURCE_EXHAUSTED)
            poll(&stop, 1, OUT_OF_FDS_MS);
    }
}

static void *accept_connections(void *arg)
{
    struct rpc_server *s = arg;
    struct pollfd fds[] = {{s->listen_fd, POLLIN, 0}, {s->stop_fd, POLLIN, 0}};

    while (!fds[1].revents) {
        int n = poll(fds, LH_ARRAY_SIZE(fds), -1);
        if (n > 0 && fds[0].revents)
            accept_one(s);
        else if (n < 0 && errno != EINTR) /* no memory: not worse for being tried less often */
            poll(NULL, 0, OUT_OF_FDS_MS);
    }
    return NULL;
}

static void stop_accepting(struct rpc_server *s)
{
    if (s->acceptor_running) {
        eventfd_write(s->stop_fd, 1);
        pthread_join(s->acceptor, NULL);
    }
    if (s->listen_fd >= 0) {
        close(s->listen_fd);
        lh_unix_unlink(s->path, s->socket_inode);
    }
    if (s->stop_fd >= 0)
        close(s->stop_fd);
}

/* ---- life time ------------------------------------------------------------------------------- */

static int check_service(const struct rpc_service *s, struct lh_error *err)
{
    for (unsigned i = 0; i < s->descriptor->n_methods; i++) {
        const char *name = s->descriptor->methods[i].name;
        const struct rpc_method *m = method_named(s, name);
        if (!m || !m->unary == !m->stream)
            return lh_fail(err, LH_INVALID_ARGUMENT, "%s.%s needs one handler, unary or stream",
                           s->descriptor->name, name);
    }
    return 0;
}

static int copy_options(struct rpc_server *s, const struct rpc_server_options *o,
                        struct lh_error *err)
{
    for (size_t i = 0; i < o->n_services; i++) {
        int r = check_service(&o->services[i], err);
        if (r)
            return r;
    }
    s->max_message = o->max_message ? o->max_message : RPC_MAX_MESSAGE;
    s->n_services = o->n_services + 1;
    s->path = strdup(o->path);
    s->services = calloc(o->n_services + 1, sizeof *s->services);
    if (!s->path || !s->services)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a server");
    memcpy(s->services, o->services, o->n_services * sizeof *s->services);
    s->services[o->n_services] = rpc_reflection;
    return 0;
}

static void create_grpc(struct rpc_server *s)
{
    grpc_arg args[] = {
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH,
         .value.integer = (int)s->max_message},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_MAX_CONCURRENT_STREAMS,
         .value.integer = RPC_MAX_STREAMS},
        {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_ALLOW_REUSEPORT, .value.integer = 0},
    };
    grpc_channel_args list = {LH_ARRAY_SIZE(args), args};

    s->credentials = grpc_insecure_server_credentials_create();
    s->server = grpc_server_create(&list, NULL);
    s->cq = grpc_completion_queue_create_for_next(NULL);
    grpc_server_register_completion_queue(s->server, s->cq, NULL);
}

/* gRPC itself accepts there, so nobody is local; only the guard decides. */
static int listen_tls(struct rpc_server *s, const struct rpc_server_options *o,
                      struct lh_error *err)
{
    grpc_ssl_pem_key_cert_pair pair = {.private_key = o->tls_key, .cert_chain = o->tls_cert};

    if (!o->guard || !o->tls_key || !o->tls_cert)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "serving at %s needs a certificate, its key, and a guard", o->tls_address);
    s->tls = grpc_ssl_server_credentials_create_ex(NULL, &pair, 1,
                                                   GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE, NULL);
    s->tls_port = s->tls ? grpc_server_add_http2_port(s->server, o->tls_address, s->tls) : 0;
    return s->tls_port > 0 ? 0
                           : lh_fail(err, LH_UNAVAILABLE,
                                     "cannot serve at %s: the address is taken or the certificate "
                                     "and key do not fit",
                                     o->tls_address);
}

int rpc_server_port(const struct rpc_server *s)
{
    return s->tls_port;
}

static int start_threads(struct rpc_server *s, unsigned threads, struct lh_error *err)
{
    s->pool = rpc_pool_create(threads ? threads : DEFAULT_THREADS, err);
    if (!s->pool)
        return LH_RESOURCE_EXHAUSTED;
    grpc_server_start(s->server);
    s->started = true;
    await_call(s);
    int r = pthread_create(&s->events, NULL, read_events, s);
    s->events_running = !r;
    if (!r) {
        r = pthread_create(&s->acceptor, NULL, accept_connections, s);
        s->acceptor_running = !r;
    }
    return r ? lh_fail_errno(err, r, "threads of the server at %s", s->path) : 0;
}

static int start(struct rpc_server *s, const struct rpc_server_options *o, struct lh_error *err)
{
    int r = copy_options(s, o, err);

    if (r)
        return r;
    s->listen_fd = lh_unix_listen(s->path, SOCK_STREAM, &s->socket_inode, err);
    if (s->listen_fd < 0)
        return s->listen_fd;
    s->stop_fd = eventfd(0, EFD_CLOEXEC);
    if (s->stop_fd < 0)
        return lh_fail_errno(err, errno, "serving at %s", s->path);
    create_grpc(s);
    if (o->guard)
        s->guard = *o->guard;
    if (o->tls_address && (r = listen_tls(s, o, err)) < 0)
        return r;
    return start_threads(s, o->threads, err);
}

struct rpc_server *rpc_server_create(const struct rpc_server_options *o, struct lh_error *err)
{
    struct rpc_server *s = calloc(1, sizeof *s);

    if (!s) {
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a server");
        return NULL;
    }
    rpc_core_open();
    s->listen_fd = s->stop_fd = -1;
    pthread_mutex_init(&s->mutex, NULL);
    pthread_mutex_init(&s->health.mutex, NULL);
    pthread_cond_init(&s->is_down, NULL);
    if (start(s, o, err)) {
        rpc_server_destroy(s, 0);
        return NULL;
    }
    return s;
}

static bool wait_down(struct rpc_server *s, int64_t deadline_ms)
{
    bool in_time = true;

    LH_LOCKED(&s->mutex);
    while (!s->down && in_time)
        in_time = lh_wait_until(&s->is_down, &s->mutex, deadline_ms);
    return s->down;
}

static void shut_down(struct rpc_server *s, int grace_ms)
{
    rpc_health_stop(&s->health);
    grpc_server_shutdown_and_notify(s->server, s->cq, &s->on_down);
    if (s->events_running && !wait_down(s, lh_now_ms() + grace_ms)) {
        grpc_server_cancel_all_calls(s->server);
        wait_down(s, INT64_MAX); /* for handlers that do not ask rpc_cancelled() */
    }
}

static void destroy_grpc(struct rpc_server *s)
{
    grpc_completion_queue_shutdown(s->cq);
    if (s->events_running)
        pthread_join(s->events, NULL);
    else
        read_events(s);
    grpc_server_destroy(s->server);
    grpc_completion_queue_destroy(s->cq);
    grpc_server_credentials_release(s->credentials);
    if (s->tls)
        grpc_server_credentials_release(s->tls);
}

void rpc_server_destroy(struct rpc_server *s, int grace_ms)
{
    if (!s)
        return;
    stop_accepting(s);
    if (s->started)
        shut_down(s, grace_ms);
    rpc_pool_destroy(s->pool);
    if (s->server)
        destroy_grpc(s);
    rpc_core_close();
    pthread_cond_destroy(&s->is_down);
    pthread_mutex_destroy(&s->health.mutex);
    pthread_mutex_destroy(&s->mutex);
    free(s->services);
    free(s->path);
    free(s);
}

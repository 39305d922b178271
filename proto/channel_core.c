#include "proto/channel_core.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/unix_socket.h"
#include "proto/wait.h"

static bool valid_word(const char *s, const char *alphabet)
{
    size_t len = strspn(s, alphabet);

    return len && !s[len] && len < CHANNEL_PEER;
}

bool channel_name_valid(const char *name)
{
    return valid_word(name, "abcdefghijklmnopqrstuvwxyz0123456789-");
}

bool channel_instance_valid(const char *name)
{
    return valid_word(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-");
}

/* ---- socket ---------------------------------------------------------------------------------- */

static int zmq_fail(struct lh_error *err, const char *doing, const char *what)
{
    int e = zmq_errno();

    return lh_fail(err, lh_status_from_errno(e), "%s %s: %s", doing, what, zmq_strerror(e));
}

int channel_end_set(struct channel_end *e, int option, int value, struct lh_error *err)
{
    return zmq_setsockopt(e->socket, option, &value, sizeof value) < 0
               ? zmq_fail(err, "setting", "a socket option")
               : 0;
}

/* Heartbeats find dead peers; lingering is useless, as it loses messages over ipc anyway. */
static int set_common(struct channel_end *e, struct lh_error *err)
{
    static const struct {
        int option, value;
    } options[] = {{ZMQ_LINGER, 0},
                   {ZMQ_HEARTBEAT_IVL, 1000},
                   {ZMQ_HEARTBEAT_TIMEOUT, 3000},
                   {ZMQ_HANDSHAKE_IVL, 5000}};

    for (size_t i = 0; i < LH_ARRAY_SIZE(options); i++) {
        int r = channel_end_set(e, options[i].option, options[i].value, err);
        if (r)
            return r;
    }
    return 0;
}

int channel_end_init(struct channel_end *e, int socket_type, struct lh_error *err)
{
    pthread_mutex_init(&e->mutex, NULL);
    pthread_cond_init(&e->changed, NULL);
    e->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    e->queue = calloc(CHANNEL_QUEUE, sizeof(struct channel_message *));
    e->context = zmq_ctx_new();
    if (e->wake_fd < 0 || !e->queue || !e->context)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory or fds for a channel");
    e->socket = zmq_socket(e->context, socket_type);
    if (!e->socket)
        return zmq_fail(err, "opening", "a ZeroMQ socket");
    return set_common(e, err);
}

/* ipc:///absolute/path, or tcp:// on the loopback: between nodes it would need CURVE keys. */
static const char *ipc_path(const char *endpoint)
{
    return strncmp(endpoint, "ipc:///", 7) ? NULL : endpoint + 6;
}

static int check_endpoint(const char *endpoint, struct lh_error *err)
{
    if (ipc_path(endpoint) || !strncmp(endpoint, "tcp://127.0.0.1:", 16))
        return 0;
    return lh_fail(err, LH_INVALID_ARGUMENT,
                   "channel endpoint \"%s\": use ipc:///PATH or tcp://127.0.0.1:PORT", endpoint);
}

/* ZeroMQ's own bind would take the path of a live server away and leave the mode to the umask. */
static int bind_ipc(struct channel_end *e, const char *endpoint, struct lh_error *err)
{
    e->endpoint = strdup(endpoint);
    if (!e->endpoint)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a channel");
    lh_autoclose int fd = lh_unix_listen(ipc_path(endpoint), SOCK_STREAM, &e->inode, err);
    if (fd < 0)
        return fd;
    e->path = ipc_path(e->endpoint);
    int r = channel_end_set(e, ZMQ_USE_FD, fd, err);
    if (r)
        return r;
    if (zmq_bind(e->socket, endpoint) < 0)
        return zmq_fail(err, "binding", endpoint);
    lh_steal_fd(&fd); /* ZeroMQ's now */
    return 0;
}

int channel_end_bind(struct channel_end *e, const char *endpoint, struct lh_error *err)
{
    int r = check_endpoint(endpoint, err);

    if (r)
        return r;
    if (ipc_path(endpoint))
        return bind_ipc(e, endpoint, err);
    return zmq_bind(e->socket, endpoint) < 0 ? zmq_fail(err, "binding", endpoint) : 0;
}

int channel_end_connect(struct channel_end *e, const char *endpoint, struct lh_error *err)
{
    int r = check_endpoint(endpoint, err);

    if (r)
        return r;
    return zmq_connect(e->socket, endpoint) < 0 ? zmq_fail(err, "connecting to", endpoint) : 0;
}

/* ---- thread ---------------------------------------------------------------------------------- */

int channel_end_start(struct channel_end *e, void *(*run)(void *), void *arg, struct lh_error *err)
{
    int r = pthread_create(&e->thread, NULL, run, arg);

    e->running = !r;
    return r ? lh_fail_errno(err, r, "thread of a channel") : 0;
}

void channel_end_finish(struct channel_end *e)
{
    pthread_mutex_lock(&e->mutex);
    e->stopping = true;
    pthread_mutex_unlock(&e->mutex);
    if (e->running) {
        channel_end_wake(e);
        pthread_join(e->thread, NULL);
    }
    while (e->n--)
        channel_message_free(e->queue[e->first++ % CHANNEL_QUEUE]);
    if (e->socket)
        zmq_close(e->socket);
    if (e->context)
        zmq_ctx_term(e->context);
    if (e->wake_fd >= 0)
        close(e->wake_fd);
    if (e->path) /* ZeroMQ does not, as it did not bind */
        lh_unix_unlink(e->path, e->inode);
    free(e->endpoint);
    free(e->queue);
    pthread_cond_destroy(&e->changed);
    pthread_mutex_destroy(&e->mutex);
}

void channel_end_wake(struct channel_end *e)
{
    eventfd_write(e->wake_fd, 1);
}

bool channel_end_has_room(struct channel_end *e)
{
    LH_LOCKED(&e->mutex);
    return e->n < CHANNEL_QUEUE;
}

bool channel_end_poll(struct channel_end *e, bool want_in, bool want_out, int timeout_ms)
{
    short events = (short)((want_in ? ZMQ_POLLIN : 0) | (want_out ? ZMQ_POLLOUT : 0));
    zmq_pollitem_t items[] = {{NULL, e->wake_fd, ZMQ_POLLIN, 0}, {e->socket, 0, events, 0}};
    eventfd_t ignored;

    zmq_poll(items, events ? 2 : 1, timeout_ms);
    eventfd_read(e->wake_fd, &ignored);
    LH_LOCKED(&e->mutex);
    return !e->stopping;
}

bool channel_end_push(struct channel_end *e, struct channel_message *m)
{
    LH_LOCKED(&e->mutex);
    if (e->n == CHANNEL_QUEUE)
        return false;
    e->queue[(e->first + e->n++) % CHANNEL_QUEUE] = m;
    pthread_cond_broadcast(&e->changed);
    return true;
}

bool channel_end_wait(struct channel_end *e, int64_t deadline_ms)
{
    return lh_wait_until(&e->changed, &e->mutex, deadline_ms);
}

struct channel_message *channel_end_pop(struct channel_end *e, int timeout_ms, struct lh_error *err)
{
    int64_t deadline = lh_now_ms() + timeout_ms;

    LH_LOCKED(&e->mutex);
    while (!e->n) {
        if (!channel_end_wait(e, deadline) && !e->n) {
            lh_fail(err, LH_DEADLINE_EXCEEDED, "no message for %d ms", timeout_ms);
            return NULL;
        }
    }
    struct channel_message *m = e->queue[e->first % CHANNEL_QUEUE];
    if (e->n-- == CHANNEL_QUEUE) /* the thread had stopped reading */
        channel_end_wake(e);
    e->first++;
    return m;
}

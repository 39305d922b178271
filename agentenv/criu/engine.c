/* The options of every call, each for a reason that was met.
 *
 *   manage_cgroups = ignore  The cgroups are ours, with limits that a snapshot does not decide.
 *                            Restored tasks are where CRIU is; who belongs into a cgroup of its own
 *                            is put there while all stand still (sandbox/placement.c).
 *   empty_ns = network, network_lock = skip
 *                            The interfaces of a sandbox are made by us.  Without these CRIU saves
 *                            and restores them and a packet filter by ip(8) and iptables, 30 to
 *                            100 ms; nothing outside holds a connection that could see a packet of
 *                            a stopped sandbox.  The loopback interface must be up before sockets
 *                            come back, hence the station "setup-namespaces".
 *   tcp_established, file_locks
 *                            Connections within the sandbox, and flock(2), are kept.
 *   ghost_limit              Deleted files that are still open are in the images, up to this size.
 *   external                 Device nodes are bind mounts of the host's (sandbox/enter.c).
 *   rst_sibling              The restored PID 1 is the spawner's child, which reaps it.
 *
 * Not used: ext_unix_sk and tcp_skip_in_flight, with which a connection is lost in silence instead
 * of failing the dump; link_remap, which leaves files in the sandbox; track_mem, which needs
 * soft-dirty bits that many kernels lack, and with which CRIU 4.2 then runs into a BUG.
 *
 * PID 1 must lead a session, have no descriptor from outside (init/quiesce.c), and be an ancestor
 * of all: a process that entered by setns() is silently not dumped. */
#include "agentenv/criu/engine.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "criu/criu.pb-c.h"
#include "proto/clock.h"
#include "proto/parse.h"

enum { GHOST_MAX = 64 << 20, LOG_WARNINGS = 2, ANSWER_MAX = 64 << 10 };

static const char dump_log[] = "dump.log", restore_log[] = "restore.log";

/* ---- the conversation ---------------------------------------------------------------------- */

static int send_request(const struct criu_call *c, const Criu__Request *req, struct lh_error *err)
{
    size_t len;
    lh_autofree uint8_t *bytes = lh_pack(&req->base, &len, err);

    if (!bytes)
        return LH_RESOURCE_EXHAUSTED;
    if (send(c->socket, bytes, len, MSG_NOSIGNAL) != (ssize_t)len)
        return lh_fail(err, LH_UNAVAILABLE, "criu has ended");
    return 0;
}

static Criu__Response *receive(const struct criu_call *c, struct lh_error *err)
{
    struct pollfd p[] = {{c->socket, POLLIN, 0}, {c->pidfd, POLLIN, 0}};
    lh_autofree uint8_t *bytes = malloc(ANSWER_MAX);

    if (!bytes)
        return lh_fail_errno(err, ENOMEM, "an answer of criu"), NULL;
    int n = poll(p, 2, lh_ms_left(c->deadline_ms));
    if (n <= 0)
        return lh_fail(err, LH_DEADLINE_EXCEEDED, "criu did not finish in time"), NULL;
    ssize_t len =
        recv(c->socket, bytes, ANSWER_MAX, MSG_DONTWAIT); /* message boundaries are kept */
    if (len <= 0)
        return lh_fail(err, LH_UNAVAILABLE, "criu has died"), NULL;
    return (Criu__Response *)lh_parse(&criu__response__descriptor, bytes, (size_t)len,
                                      (struct lh_parse_limits){0}, err);
}

/* A station that failed says so to CRIU, whose own end of the call then follows. */
static int answer_station(const struct criu_call *c, const Criu__Notification *n, int *status,
                          struct lh_error *err)
{
    Criu__Request ack = CRIU__REQUEST__INIT;

    if (*status == 0 && c->station && n && n->script)
        *status = c->station(c->ctx, n->script, n->has_pid ? n->pid : 0, err);
    ack.type = CRIU__REQUEST_TYPE__NOTIFY;
    ack.has_notify_success = 1;
    ack.notify_success = *status == 0;
    return send_request(c, &ack, *status < 0 ? NULL : err);
}

/* Sends, serves the stations, returns the last answer. */
static Criu__Response *converse(const struct criu_call *c, const Criu__Request *req,
                                struct lh_error *err)
{
    int status = 0, r = send_request(c, req, err);

    while (r == 0) {
        lh_automsg(Criu__Response) resp = receive(c, status < 0 ? NULL : err);
        if (!resp)
            return NULL;
        if (resp->type == CRIU__REQUEST_TYPE__NOTIFY)
            r = answer_station(c, resp->notify, &status, err);
        else
            return status < 0 ? NULL : lh_steal(&resp);
    }
    return NULL;
}

/* ---- requests ------------------------------------------------------------------------------ */

struct request {
    Criu__Request req;
    Criu__Options opts;
    char *names; /* of the external mounts */
    char **external;
};

static void request_finish(struct request *r)
{
    free(r->names);
    free(r->external);
}

/* At a dump "mnt[/dev/null]:/dev/null" says that this mount is the host's and what to call it; at
 * a restore "mnt[/dev/null]:/dev/null" says what is bound there.  The name is the mount point. */
static int add_binds(struct request *r, const struct criu_call *c, bool restore,
                     struct lh_error *err)
{
    enum { SIZE = 160 };

    r->names = calloc(c->n_binds + 1, SIZE);
    r->external = calloc(c->n_binds + 1, sizeof *r->external);
    if (!r->names || !r->external)
        return lh_fail_errno(err, ENOMEM, "a request to criu");
    for (size_t i = 0; i < c->n_binds; i++) {
        const struct criu_bind *b = &c->binds[i];
        r->external[i] = r->names + i * SIZE;
        snprintf(r->external[i], SIZE, "mnt[%s]:%s", b->inside, restore ? b->outside : b->inside);
    }
    r->opts.external = r->external;
    r->opts.n_external = c->n_binds;
    return 0;
}

static int request_init(struct request *r, const struct criu_call *c, Criu__RequestType type,
                        int images, struct lh_error *err)
{
    *r = (struct request){0};
    criu__request__init(&r->req);
    criu__options__init(&r->opts);
    r->req.type = type;
    r->req.opts = &r->opts;
    r->opts.images_dir_fd = images;
    r->opts.has_log_level = 1;
    r->opts.log_level = LOG_WARNINGS;
    r->opts.has_manage_cgroups_mode = 1;
    r->opts.manage_cgroups_mode = CRIU__CGROUP_MODE__CGROUPS_IGNORE;
    r->opts.has_empty_ns = 1;
    r->opts.empty_ns = CLONE_NEWNET;
    r->opts.has_network_lock = 1;
    r->opts.network_lock = CRIU__NETWORK_LOCK__LOCK_SKIP;
    r->opts.has_tcp_established = r->opts.tcp_established = 1;
    r->opts.has_file_locks = r->opts.file_locks = 1;
    r->opts.has_ghost_limit = 1;
    r->opts.ghost_limit = GHOST_MAX;
    r->opts.has_notify_scripts = r->opts.notify_scripts = 1;
    return add_binds(r, c, type == CRIU__REQUEST_TYPE__RESTORE, err);
}

/* CRIU's own words, where it has left any. */
static int fail_as_criu(const Criu__Response *resp, int dir, const char *log, struct lh_error *err)
{
    char reason[600];

    criu_reason(dir, log, reason, sizeof reason);
    if (!resp) /* err says what; the log may say why */
        return reason[0] ? lh_wrap(err, "%s", reason) : err ? err->code : LH_INTERNAL;
    if (!reason[0] && resp->cr_errmsg)
        snprintf(reason, sizeof reason, "%s", resp->cr_errmsg);
    if (!reason[0] && resp->has_cr_errno && resp->cr_errno > 0)
        return lh_fail_errno(err, resp->cr_errno, "criu failed");
    return lh_fail(err, LH_FAILED_PRECONDITION, "%s", reason[0] ? reason : "criu gives no reason");
}

int criu_dump(const struct criu_call *c, pid_t pid, int images, struct lh_error *err)
{
    __attribute__((cleanup(request_finish))) struct request r;
    struct lh_error local = {0};

    err = err ? err : &local;
    if (request_init(&r, c, CRIU__REQUEST_TYPE__DUMP, images, err) < 0)
        return err->code;
    r.opts.log_file = (char *)dump_log;
    r.opts.has_pid = 1;
    r.opts.pid = pid;
    r.opts.has_leave_running = r.opts.leave_running = 1;
    lh_automsg(Criu__Response) resp = converse(c, &r.req, err);
    if (!resp || !resp->success)
        return fail_as_criu(resp, images, dump_log, err);
    return 0;
}

int criu_restore(const struct criu_call *c, int images, int work, const char *root,
                 struct lh_error *err)
{
    __attribute__((cleanup(request_finish))) struct request r;
    struct lh_error local = {0};

    err = err ? err : &local;
    if (request_init(&r, c, CRIU__REQUEST_TYPE__RESTORE, images, err) < 0)
        return err->code;
    r.opts.log_file = (char *)restore_log;
    r.opts.has_work_dir_fd = 1;
    r.opts.work_dir_fd = work;
    r.opts.root = (char *)root;
    r.opts.has_rst_sibling = r.opts.rst_sibling = 1;
    lh_automsg(Criu__Response) resp = converse(c, &r.req, err);
    if (!resp || !resp->success)
        return fail_as_criu(resp, work, restore_log, err);
    return 0;
}

int criu_version(const struct criu_call *c, int *version, struct lh_error *err)
{
    Criu__Request req = CRIU__REQUEST__INIT;

    req.type = CRIU__REQUEST_TYPE__VERSION;
    lh_automsg(Criu__Response) resp = converse(c, &req, err);
    if (!resp || !resp->success || !resp->version)
        return resp ? lh_fail(err, LH_FAILED_PRECONDITION, "criu does not tell its version")
                    : LH_UNAVAILABLE;
    *version = resp->version->major_number * 10000 + resp->version->minor_number * 100 +
               (resp->version->has_sublevel ? resp->version->sublevel : 0);
    return 0;
}

/* Commands in a box.  The calling thread waits on the exec's own channel; see init/wire.h. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "agentenv/sandbox/box_private.h"
#include "agentenv/sandbox/facts.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/wait.h"

enum { TICK_MS = 100, KILL_GRACE_MS = 5000, DISK_CHECK_MS = 500, DISK_CHECK_SHARE = 20 };

/* ---- one exec in progress ------------------------------------------------------------------ */

struct running {
    struct attached attached;
    struct box *box;
    const struct box_exec_spec *spec;
    struct box_exec_result *result;
    int kill; /* cgroup.kill of the exec, -1 when attached without one */
    int64_t
        hard_deadline_ms; /* init enforces the timeout; this is when the host stops trusting it */
    int64_t next_disk_ms;
    bool killed, told; /* told: init has said its last word */
    bool known;        /* init has an exec of this id */
    bool again;        /* attached once more, after a checkpoint */
    uint64_t next;     /* offset of the output that comes next */
    uint64_t oom_kills;
    char data[sizeof(struct wire_event) + WIRE_CHUNK + 1]; /* a NUL behind it */
};

/* By its cgroup; without one init does it. */
static bool killed_tree(struct running *x)
{
    struct wire_request req = {.op = WIRE_SIGNAL, .signal = SIGKILL};

    if (box_facts()->cgroups)
        return x->kill >= 0 && write(x->kill, "1", 1) == 1;
    memcpy(req.exec_id, x->spec->exec_id, strlen(x->spec->exec_id));
    return box_send_request(x->box, &req, NULL, 0, NULL) == 0;
}

static void kill_tree(struct running *x)
{
    if (!x->killed && killed_tree(x)) {
        x->killed = true;
        x->hard_deadline_ms = lh_now_ms() + KILL_GRACE_MS;
    }
}

static bool disk_exceeded(struct running *x)
{
    int64_t start = lh_now_ms();

    if (start < x->next_disk_ms)
        return false;
    lh_autoclose int upper = box_upper_fd(x->box, NULL);
    bool over = upper >= 0 && box_tree_bytes(upper) > x->box->limits.disk_bytes;
    int64_t took = lh_now_ms() - start; /* a large tree is walked less often */
    x->next_disk_ms = lh_now_ms() + DISK_CHECK_MS + took * DISK_CHECK_SHARE;
    return over;
}

/* 1 = nothing to wait for. */
static int cancel(struct running *x)
{
    x->result->cancelled = true;
    if (!x->spec->outlives)
        kill_tree(x);
    return x->spec->outlives;
}

/* What may end an exec besides itself.  Negative = give up waiting; 1 = leave it. */
static int check(struct running *x, struct lh_error *err)
{
    if (box_is_dead(x->box))
        return lh_fail(err, LH_UNAVAILABLE, "sandbox %s has died", x->box->id);
    if (!x->killed && x->spec->cancelled && x->spec->cancelled(x->spec->ctx))
        return cancel(x);
    if (!x->killed && disk_exceeded(x)) {
        x->result->disk_exceeded = true;
        kill_tree(x);
    }
    if (lh_now_ms() < x->hard_deadline_ms)
        return 0;
    if (!x->killed && cgroup_is_frozen(x->box->cgroup)) /* init will see to it when it thaws */
        return 0;
    if (x->killed)
        return lh_fail(err, LH_DEADLINE_EXCEEDED, "sandbox %s does not report the end of exec %s",
                       x->box->id, x->spec->exec_id);
    x->result->timed_out = true;
    kill_tree(x);
    return 0;
}

static void finish(struct running *x, const struct wire_event *ev)
{
    struct box_exec_result *r = x->result;

    r->signal = WIFSIGNALED(ev->value) ? WTERMSIG(ev->value) : 0;
    r->status = r->signal ? 128 + r->signal : WEXITSTATUS(ev->value);
    r->timed_out |= ev->timed_out;
    r->wall_ms = ev->wall_ms;
    r->oom_killed = r->status != 0 && !x->killed && !r->timed_out &&
                    cgroup_oom_kills(&x->box->host->cgroups, x->box->id) > x->oom_kills;
}

static int fail_start(const struct wire_event *ev, const char *step, struct lh_error *err)
{
    switch (ev->value) {
    case ENOENT:
        return lh_fail(err, LH_NOT_FOUND, "%s: not found in the sandbox", step);
    case EACCES:
    case EPERM:
        return lh_fail(err, LH_PERMISSION_DENIED, "%s: permission denied", step);
    default:
        return lh_fail_errno(err, ev->value, "%s", step);
    }
}

static int take_output(struct running *x, const struct wire_event *ev, const char *data, size_t len)
{
    enum box_stream stream = ev->kind == WIRE_OUT ? BOX_OUT : BOX_ERR;

    if (!x->spec->output || x->result->cancelled ||
        x->spec->output(x->spec->ctx, stream, ev->offset, data, len) == 0)
        return 0;
    return cancel(x);
}

enum { LAST = 1, CLOSED };

/* One event.  LAST; CLOSED: init has closed the channel. */
static int take_event(struct running *x, struct lh_error *err)
{
    ssize_t n = recv(x->attached.channel, x->data, sizeof x->data - 1, MSG_DONTWAIT);
    struct wire_event ev;

    if (n < 0 && errno == EAGAIN)
        return 0;
    if (n < (ssize_t)sizeof ev)
        return CLOSED;
    memcpy(&ev, x->data, sizeof ev);
    char *data = x->data + sizeof ev;
    size_t len = (size_t)n - sizeof ev;
    if (ev.kind == WIRE_MOVED)
        return lh_fail(err, LH_ABORTED, "somebody else attached to exec %s", x->spec->exec_id);
    if (ev.kind == WIRE_ATTACHED) {
        if (x->spec->attached && !x->again)
            x->spec->attached(x->spec->ctx, ev.stdin_bytes);
        return 0;
    }
    x->result->output_bytes = ev.output_bytes;
    x->result->truncated = ev.truncated;
    x->told = ev.kind == WIRE_EXIT || ev.kind == WIRE_NO_START;
    if (ev.kind == WIRE_NO_START) {
        data[len] = 0;
        return fail_start(&ev, data, err);
    }
    if (ev.kind == WIRE_EXIT) {
        finish(x, &ev);
        return LAST;
    }
    x->next = ev.offset + len;
    return take_output(x, &ev, data, len);
}

static void replace_channel(struct running *x, int channel)
{
    LH_LOCKED(&x->box->execs_lock);
    close(x->attached.channel);
    x->attached.channel = channel;
    if (x->kill >= 0)
        close(x->kill);
    x->kill = cgroup_exec_kill_fd(x->box->cgroup, x->spec->exec_id);
}

/* Init has closed the channel: for a checkpoint, or because it is dead.  What was delivered is not
 * sent again; the time asleep is nobody's. */
static int attach_again(struct running *x, struct lh_error *err)
{
    struct wire_request req = {.op = WIRE_ATTACH, .offset = x->next};
    int64_t slept_ms = 0;
    int p[2], r;

    while ((r = box_wait_awake(x->box, lh_now_ms() + TICK_MS, &slept_ms, err)) == 0)
        if (x->spec->cancelled && x->spec->cancelled(x->spec->ctx)) {
            x->result->cancelled = true;
            return LAST; /* init ends the command at its timeout */
        }
    if (r < 0)
        return r;
    if (x->hard_deadline_ms != INT64_MAX)
        x->hard_deadline_ms += slept_ms;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, p) < 0)
        return lh_fail_errno(err, errno, "attaching again");
    replace_channel(x, p[0]);
    x->again = true;
    memcpy(req.exec_id, x->spec->exec_id, strlen(x->spec->exec_id));
    r = box_send_request(x->box, &req, &p[1], 1, err);
    close(p[1]);
    return r;
}

static int follow(struct running *x, struct lh_error *err)
{
    struct wire_input taken = {.kind = WIRE_TAKEN};
    int64_t next_check = lh_now_ms() + TICK_MS;
    int r = 0;

    while (r == 0) {
        struct pollfd p = {x->attached.channel, POLLIN, 0};
        if (poll(&p, 1, lh_ms_left(next_check)) > 0)
            r = take_event(x, err);
        if (r == CLOSED)
            r = attach_again(x, err);
        if (r == 0 && lh_now_ms() >= next_check) {
            r = check(x, err);
            next_check = lh_now_ms() + TICK_MS;
        }
    }
    if (x->told && !x->spec->outlives) /* init may forget */
        send(x->attached.channel, &taken, sizeof taken, MSG_NOSIGNAL | MSG_DONTWAIT);
    return r < 0 ? r : 0;
}

/* ---- the calls ----------------------------------------------------------------------------- */

/* The cgroup of an ended exec lives as long as what it left in the background. Each end of an exec
 * is an occasion to look again; the rest goes with the box. */
static void tidy(struct box *b, const char *exec_id)
{
    LH_LOCKED(&b->execs_lock);
    size_t kept = 0;

    for (size_t i = 0; i < b->n_leftover; i++)
        if (!cgroup_exec_remove(b->cgroup, b->leftover[i]))
            memmove(b->leftover[kept++], b->leftover[i], WIRE_ID_SIZE);
    b->n_leftover = kept;
    if (!cgroup_exec_remove(b->cgroup, exec_id) && kept < BOX_MAX_LEFTOVER)
        snprintf(b->leftover[b->n_leftover++], WIRE_ID_SIZE, "%s", exec_id);
}

static int begin(struct running *x, int channel, struct lh_error *err)
{
    lh_autoclose int dir = -1;

    if (cgroup_exec_create(x->box->cgroup, x->spec->exec_id, &dir, &x->kill, err) < 0)
        return err ? err->code : LH_INTERNAL;
    x->known = true;
    return box_send_exec(x->box, x->spec, channel, dir, x->kill, err);
}

static int attach(struct running *x, int channel, struct lh_error *err)
{
    struct wire_request req = {.op = WIRE_ATTACH, .offset = x->spec->offset};

    memcpy(req.exec_id, x->spec->exec_id, strlen(x->spec->exec_id));
    x->kill = cgroup_exec_kill_fd(x->box->cgroup, x->spec->exec_id);
    x->known = true;
    return box_send_request(x->box, &req, &channel, 1, err);
}

static void enlist(struct running *x)
{
    LH_LOCKED(&x->box->execs_lock);
    x->attached.next = x->box->attached;
    x->box->attached = &x->attached;
}

static void delist(struct running *x)
{
    LH_LOCKED(&x->box->execs_lock);
    struct attached **at = &x->box->attached;

    while (*at != &x->attached)
        at = &(*at)->next;
    *at = x->attached.next;
}

typedef int first_fn(struct running *x, int channel, struct lh_error *err);

static int follow_from(struct running *x, first_fn *first, int channel, struct lh_error *err)
{
    int r = first(x, channel, err);

    close(channel);
    if (r < 0)
        return r;
    enlist(x);
    r = follow(x, err);
    delist(x);
    return r;
}

static int run(struct box *b, const struct box_exec_spec *spec, struct box_exec_result *result,
               first_fn *first, int64_t hard_deadline_ms, struct lh_error *err)
{
    lh_autofree struct running *x = calloc(1, sizeof *x);
    int p[2];

    *result = (struct box_exec_result){0};
    if (!box_name_valid(spec->exec_id))
        return lh_fail(err, LH_INVALID_ARGUMENT, "exec id \"%s\"", spec->exec_id);
    if (!x || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, p) < 0)
        return lh_fail_errno(err, x ? errno : ENOMEM, "exec in sandbox %s", b->id);
    x->attached = (struct attached){.exec_id = spec->exec_id, .channel = p[0]};
    x->box = b;
    x->spec = spec;
    x->result = result;
    x->kill = -1;
    x->next = spec->offset;
    x->hard_deadline_ms = hard_deadline_ms;
    x->next_disk_ms = lh_now_ms() + DISK_CHECK_MS;
    x->oom_kills = cgroup_oom_kills(&b->host->cgroups, b->id);
    int r = follow_from(x, first, p[1], err);
    close(x->attached.channel);
    if (x->kill >= 0)
        close(x->kill);
    if (x->known)
        tidy(b, spec->exec_id);
    return r;
}

int box_exec(struct box *b, const struct box_exec_spec *spec, struct box_exec_result *result,
             struct lh_error *err)
{
    struct lh_error local = {0};

    err = err ? err : &local;
    if (!spec->argv || !spec->argv[0] || spec->timeout_ms == 0)
        return lh_fail(err, LH_INVALID_ARGUMENT, "exec: a command and a timeout are needed");
    int r = run(b, spec, result, begin, lh_now_ms() + spec->timeout_ms + KILL_GRACE_MS, err);
    return r < 0 ? lh_wrap(err, "exec %s", spec->argv[0]) : 0;
}

int box_exec_attach(struct box *b, const struct box_exec_spec *spec, struct box_exec_result *result,
                    struct lh_error *err)
{
    struct lh_error local = {0};

    err = err ? err : &local;
    int r = run(b, spec, result, attach, INT64_MAX, err);
    return r < 0 ? lh_wrap(err, "exec %s", spec->exec_id) : 0;
}

/* What init is asked for: the request, and the descriptors that go with it. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "agentenv/sandbox/box_private.h"
#include "agentenv/sandbox/facts.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/wait.h"

enum { SEND_MS = 5000 }; /* for init to take a request */

static int sealed_memfd(const char *name, struct lh_error *err)
{
    lh_autoclose int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);

    /* Of an owner who exists inside, or it could not be restored there. */
    if (fd < 0 || fchown(fd, box_facts()->uid_base, box_facts()->uid_base) < 0)
        return lh_fail_errno(err, errno, "memfd for %s", name);
    return lh_steal_fd(&fd);
}

static int seal_memfd(int fd, struct lh_error *err)
{
    if (lseek(fd, 0, SEEK_SET) < 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) < 0)
        return lh_fail_errno(err, errno, "sealing a request");
    return 0;
}

static size_t count(const char *const *list)
{
    size_t n = 0;

    while (list && list[n])
        n++;
    return n;
}

static void put_strings(FILE *to, const char *const *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        fwrite(list[i], strlen(list[i]) + 1, 1, to);
}

static int strings_fd(const struct box_exec_spec *s, struct lh_error *err)
{
    const char *where[] = {s->cwd ? s->cwd : "", s->user ? s->user : ""};
    struct wire_strings h = {.argc = (uint32_t)count(s->argv), .envc = (uint32_t)count(s->env)};
    lh_autofree char *text = NULL;
    size_t len;
    FILE *to = open_memstream(&text, &len);

    if (!to)
        return lh_fail_errno(err, errno, "a request");
    fwrite(&h, sizeof h, 1, to);
    put_strings(to, where, 2);
    put_strings(to, s->argv, h.argc);
    put_strings(to, s->env, h.envc);
    if (fclose(to) != 0)
        return lh_fail_errno(err, errno, "a request");
    lh_autoclose int fd = sealed_memfd("exec", err);
    int r = fd < 0 ? fd : lh_write_all(fd, text, len, err);
    if (r < 0 || (r = seal_memfd(fd, err)) < 0)
        return r;
    return lh_steal_fd(&fd);
}

static int stdin_fd(const struct box_exec_spec *s, struct lh_error *err)
{
    lh_autoclose int fd =
        s->stdin_len ? sealed_memfd("stdin", err) : open("/dev/null", O_RDONLY | O_CLOEXEC);
    int r;

    if (fd < 0)
        return s->stdin_len ? fd : lh_fail_errno(err, errno, "/dev/null");
    if (s->stdin_len && ((r = lh_write_all(fd, s->stdin_data, s->stdin_len, err)) < 0 ||
                         (r = seal_memfd(fd, err)) < 0))
        return r;
    return lh_steal_fd(&fd);
}

int box_send_request(struct box *b, const struct wire_request *req, const int *fds, size_t n_fds,
                     struct lh_error *err)
{
    char space[CMSG_SPACE(sizeof(int) * WIRE_EXEC_FDS)] __attribute__((aligned(8))) = {0};
    struct iovec v = {(void *)req, sizeof *req};
    struct msghdr m = {.msg_iov = &v,
                       .msg_iovlen = 1,
                       .msg_control = n_fds ? space : NULL,
                       .msg_controllen = n_fds ? CMSG_SPACE(n_fds * sizeof(int)) : 0};
    int64_t deadline_ms = lh_now_ms() + SEND_MS;
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);

    if (c) {
        *c = (struct cmsghdr){CMSG_LEN(n_fds * sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(c), fds, n_fds * sizeof(int));
    }
    LH_LOCKED(&b->life_lock);
    while (b->life == BOX_ASLEEP) /* admitted just before a checkpoint began */
        if (!lh_wait_until(&b->life_changed, &b->life_lock, deadline_ms))
            return lh_fail(err, LH_UNAVAILABLE, "sandbox %s is being checkpointed", b->id);
    struct pollfd p = {b->control, POLLOUT, 0};
    while (sendmsg(b->control, &m, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
        if (errno != EAGAIN)
            return lh_fail(err, LH_UNAVAILABLE, "sandbox %s has died", b->id);
        if (poll(&p, 1, lh_ms_left(deadline_ms)) <= 0)
            return lh_fail(err, LH_DEADLINE_EXCEEDED, "init of sandbox %s does not answer", b->id);
    }
    return 0;
}

static uint32_t flags_of(const struct box_exec_spec *s)
{
    return (box_facts()->cgroups ? 0 : WIRE_LED) | (s->terminal ? WIRE_PTY : 0) |
           (s->stdin_open ? WIRE_STDIN : 0) | (s->keep_tail ? WIRE_TAIL : 0) |
           (s->outlives ? WIRE_KEPT : 0);
}

static uint32_t open_files_of(const struct box *b, const struct box_exec_spec *s)
{
    uint32_t asked = s->limits.open_files, most = b->limits.open_files;

    return asked && asked < most ? asked : most;
}

int box_send_exec(struct box *b, const struct box_exec_spec *s, int channel, int cgroup, int kill,
                  struct lh_error *err)
{
    lh_autoclose int strings = strings_fd(s, err);
    lh_autoclose int input = strings < 0 ? -1 : stdin_fd(s, err);
    struct wire_request req = {.op = WIRE_EXEC,
                               .flags = flags_of(s),
                               .timeout_ms = s->timeout_ms,
                               .rows = s->rows,
                               .cols = s->cols,
                               .output_bytes =
                                   s->output_bytes ? s->output_bytes : b->limits.output_bytes,
                               .limits = {.open_files = open_files_of(b, s),
                                          .cpu_seconds = s->limits.cpu_seconds,
                                          .memory_bytes = s->limits.memory_bytes,
                                          .file_bytes = s->limits.file_bytes}};

    if (strings < 0 || input < 0)
        return err ? err->code : LH_INTERNAL;
    memcpy(req.exec_id, s->exec_id, strlen(s->exec_id));
    const int fds[WIRE_EXEC_FDS] = {channel, strings, input, cgroup, kill};
    return box_send_request(b, &req, fds, WIRE_EXEC_FDS, err);
}

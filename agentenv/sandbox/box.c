/* The life of a box: start, adopt, kill, destroy. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include "agentenv/sandbox/box_private.h"
#include "agentenv/sandbox/facts.h"
#include "agentenv/sandbox/overlay.h"
#include "agentenv/sandbox/spawner.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"

LH_LOG_COMPONENT("sandbox");

/* ---- the object ---------------------------------------------------------------------------- */

static void free_layers(struct box_layer *layers, size_t n)
{
    for (size_t i = 0; layers && i < n; i++)
        free((char *)layers[i].path);
    free(layers);
}

static struct box_layer *copy_layers(const struct box_layer *from, size_t n)
{
    struct box_layer *layers = calloc(n, sizeof *layers);

    for (size_t i = 0; layers && i < n; i++) {
        layers[i].host_owned = from[i].host_owned;
        layers[i].path = strdup(from[i].path);
        if (!layers[i].path) {
            free_layers(layers, n);
            return NULL;
        }
    }
    return layers;
}

static void free_box(struct box *b)
{
    if (!b)
        return;
    free_layers(b->layers, b->n_layers);
    free(b->dir);
    const int fds[] = {b->pidfd, b->cgroup, b->control, b->files, b->memory};
    for (size_t i = 0; i < LH_ARRAY_SIZE(fds); i++)
        if (fds[i] >= 0)
            close(fds[i]);
    pthread_mutex_destroy(&b->state);
    pthread_mutex_destroy(&b->execs_lock);
    pthread_mutex_destroy(&b->life_lock);
    pthread_cond_destroy(&b->life_changed);
    free(b);
}

void box_close(struct box *b)
{
    free_box(b);
}

enum { MAX_LAYERS = 400, MIN_MEMORY = 4 << 20 };

static int check_spec(const struct box_spec *s, struct lh_error *err)
{
    const struct box_limits *l = &s->limits;

    if (!box_name_valid(s->id))
        return lh_fail(err, LH_INVALID_ARGUMENT, "sandbox id \"%s\": 1 to 64 of A-Za-z0-9._-",
                       s->id);
    if (s->n_layers < 1 || s->n_layers > MAX_LAYERS)
        return lh_fail(err, LH_INVALID_ARGUMENT, "%zu layers: 1 to %d are possible", s->n_layers,
                       MAX_LAYERS);
    if (l->memory_bytes < MIN_MEMORY || !l->cpu_millis || !l->pids || !l->open_files ||
        !l->disk_bytes || !l->output_bytes)
        return lh_fail(err, LH_INVALID_ARGUMENT, "limits: all must be set, memory at least 4 MiB");
    if (s->hostname && strlen(s->hostname) > 64)
        return lh_fail(err, LH_INVALID_ARGUMENT, "host name of more than 64 characters");
    return 0;
}

struct box *box_new(struct box_host *h, const struct box_spec *spec, struct lh_error *err)
{
    if (check_spec(spec, err) < 0)
        return NULL;
    struct box *b = calloc(1, sizeof *b);
    if (!b)
        return lh_fail_errno(err, ENOMEM, "sandbox %s", spec->id), NULL;
    b->host = h;
    b->pidfd = b->cgroup = b->control = b->files = b->memory = -1;
    b->limits = spec->limits;
    b->network = spec->network;
    if (spec->in_memory)
        b->limits.memory_bytes += spec->limits.disk_bytes;
    pthread_mutex_init(&b->state, NULL);
    pthread_mutex_init(&b->execs_lock, NULL);
    pthread_mutex_init(&b->life_lock, NULL);
    pthread_cond_init(&b->life_changed, NULL);
    memcpy(b->id, spec->id, strlen(spec->id));
    snprintf(b->hostname, sizeof b->hostname, "%s",
             spec->hostname && *spec->hostname ? spec->hostname : "sandbox");
    b->dir = strdup(spec->dir);
    b->layers = copy_layers(spec->layers, spec->n_layers);
    b->n_layers = b->layers ? spec->n_layers : 0;
    if (!b->dir || !b->layers) {
        free_box(b);
        return lh_fail_errno(err, ENOMEM, "sandbox %s", spec->id), NULL;
    }
    return b;
}

/* ---- start --------------------------------------------------------------------------------- */

void box_upper_names(unsigned n, char upper[32], char work[32])
{
    snprintf(upper, 32, "upper.%u", n);
    snprintf(work, 32, "work.%u", n);
}

int box_make_dirs(int dir_fd, const char *const names[2], struct lh_error *err)
{
    uid_t uid = box_facts()->uid_base;

    for (int i = 0; i < 2; i++)
        if ((mkdirat(dir_fd, names[i], 0755) < 0 && errno != EEXIST) ||
            fchownat(dir_fd, names[i], uid, uid, 0) < 0)
            return lh_fail_errno(err, errno, "directory %s", names[i]);
    return 0;
}

int box_make_upper(int dir_fd, unsigned n, struct lh_error *err)
{
    char names[2][32];

    box_upper_names(n, names[0], names[1]);
    return box_make_dirs(dir_fd, (const char *const[]){names[0], names[1]}, err);
}

int box_receive_report(int fd, int64_t deadline_ms, struct wire_report *r, int *pass_fd,
                       struct lh_error *err)
{
    char space[CMSG_SPACE(sizeof(int))] __attribute__((aligned(8)));
    struct iovec v = {r, sizeof *r};
    struct msghdr m = {
        .msg_iov = &v, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    struct pollfd p = {fd, POLLIN, 0};

    *pass_fd = -1;
    if (poll(&p, 1, lh_ms_left(deadline_ms)) <= 0)
        return lh_fail(err, LH_DEADLINE_EXCEEDED, "no report in time");
    if (recvmsg(fd, &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT) != sizeof *r)
        return lh_fail(err, LH_UNAVAILABLE, "it ended without a report");
    const struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    if (c && c->cmsg_len == CMSG_LEN(sizeof(int)))
        memcpy(pass_fd, CMSG_DATA(c), sizeof(int));
    r->step[sizeof r->step - 1] = 0;
    if (r->kind == WIRE_FAILED)
        return lh_fail_errno(err, r->value, "%s", r->step);
    return 0;
}

int box_identify(struct box *b, pid_t pid, struct lh_error *err)
{
    b->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    b->identity.init_pid = pid;
    if (b->pidfd < 0 || cgroup_start_ticks(pid, &b->identity.start_ticks) < 0)
        return lh_fail(err, LH_UNAVAILABLE, "init %d ended at once", pid);
    return 0;
}

/* First the spawner's report with the pidfd, then init's. */
static int await_ready(struct box *b, struct lh_error *err)
{
    int64_t deadline = lh_now_ms() + BOX_START_MS;
    struct wire_report r;
    int none;

    if (box_receive_report(b->control, deadline, &r, &b->pidfd, err) < 0)
        return err->code;
    b->identity.init_pid = r.value;
    if (cgroup_start_ticks(r.value, &b->identity.start_ticks) < 0)
        return lh_fail(err, LH_UNAVAILABLE, "init %d ended at once", r.value);
    return box_receive_report(b->control, deadline, &r, &none, err);
}

static struct confine_limits rlimits_of(const struct box_limits *l)
{
    bool instead = !box_facts()->limits;

    return (struct confine_limits){.file_bytes = l->disk_bytes,
                                   .data_bytes = instead ? l->memory_bytes : 0,
                                   .processes = instead ? l->pids : 0};
}

static int spawn(struct box *b, const struct box_spec *spec, int root, struct lh_error *err)
{
    struct spawner_request req = {
        .op = SPAWNER_START, .network = spec->network, .limits = rlimits_of(&spec->limits)};
    int p[2];

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, p) < 0)
        return lh_fail_errno(err, errno, "control socket");
    b->control = p[0];
    memcpy(req.id, b->id, sizeof req.id);
    memcpy(req.hostname, b->hostname, sizeof req.hostname);
    int r = spawner_send(b->host->spawner, &req, (int[]){p[1], root}, 2, err);
    close(p[1]);
    return r < 0 ? r : await_ready(b, err);
}

int box_mount(struct box *b, const struct box *below, int dir_fd, struct lh_error *err)
{
    char upper[32], work[32];

    if (below && below->files < 0)
        return lh_fail(err, LH_FAILED_PRECONDITION, "sandbox %s was started by another process",
                       below->id);
    box_upper_names(b->upper, upper, work);
    const struct overlay o = {.layers = b->layers,
                              .n_layers = b->n_layers,
                              .below = below ? below->files : -1,
                              .userns = b->host->userns,
                              .dir_fd = dir_fd,
                              .upper = upper,
                              .work = work};
    int files = overlay_create(&o, err);
    if (files < 0)
        return files;
    if (b->files >= 0)
        close(b->files);
    b->files = files;
    return overlay_clone(files, err);
}

static int open_dir(struct box *b, const struct box_spec *spec, struct lh_error *err)
{
    char size[32];
    const char *options[] = {"size", size, "mode", "0700", NULL};

    if (!spec->in_memory) {
        int fd = open(b->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        return fd < 0 ? lh_fail_errno(err, errno, "directory %s", b->dir) : fd;
    }
    snprintf(size, sizeof size, "%llu", (unsigned long long)spec->limits.disk_bytes);
    b->memory = overlay_new_fs("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    int fd = b->memory < 0 ? -1 : fcntl(b->memory, F_DUPFD_CLOEXEC, 0);
    return fd < 0 ? lh_fail_errno(err, errno, "memory for the files") : fd;
}

static int start(struct box *b, const struct box_spec *spec, struct lh_error *err)
{
    lh_autoclose int dir = open_dir(b, spec, err);
    int r = dir < 0 ? dir : box_make_upper(dir, 0, err);

    if (r < 0)
        return r;
    lh_autoclose int root = box_mount(b, spec->below, dir, err);
    return root < 0 ? root : spawn(b, spec, root, err);
}

/* Leaves the directory itself to the caller, who made it. */
static void undo_start(struct box *b)
{
    struct lh_error err = {0};

    if (box_destroy_named(b->host, b->id, b->dir, &err) < 0 ||
        (b->memory < 0 && mkdir(b->dir, 0755) < 0))
        lh_warn("a failed start left something", "sandbox=%s error=%s", b->id, err.message);
}

/* The cgroup comes first: while another box has the id it fails, and nothing must be undone. */
struct box *box_start(struct box_host *h, const struct box_spec *spec, struct lh_error *err)
{
    struct lh_error local = {0};
    struct lh_error *e = err ? err : &local;
    struct box *b = box_new(h, spec, e);

    if (!b)
        return NULL;
    b->cgroup = cgroup_create(&h->cgroups, b->id, &b->limits, e);
    if (b->cgroup >= 0 && start(b, spec, e) == 0)
        return b;
    lh_wrap(e, "starting sandbox %s", spec->id);
    if (b->cgroup >= 0)
        undo_start(b);
    free_box(b);
    return NULL;
}

struct box_identity box_identity(const struct box *b)
{
    return b->identity;
}

bool box_stands_still(const struct box *b)
{
    struct cgroup_counts c;

    return b->files >= 0 && cgroup_count(&b->host->cgroups, b->id, &c, NULL) == 0 &&
           c.processes <= 1;
}

int box_pidfd(const struct box *b)
{
    return b->pidfd;
}

/* ---- adopt --------------------------------------------------------------------------------- */

static bool status_has(pid_t pid, const char *key, const char *last_word)
{
    char path[64], line[256];

    snprintf(path, sizeof path, "/proc/%d/status", pid);
    lh_autofclose FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0) {
            line[strcspn(line, "\n")] = 0;
            const char *w = strrchr(line, '\t');
            return w && strcmp(w + 1, last_word) == 0;
        }
    return false;
}

/* In the cgroup of that name, wherever an ordinary user's daemon may have its own; without cgroups
 * by what was written down. */
static bool in_cgroup(const struct cgroup_root *root, pid_t pid, const char *id)
{
    char path[64], line[1024], want[160];

    if (!box_facts()->cgroups)
        return cgroup_init(root, id) == pid;
    snprintf(path, sizeof path, "/proc/%d/cgroup", pid);
    snprintf(want, sizeof want, "/%s/%s\n", root->parent, id);
    lh_autofclose FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, "0::", 3) == 0 && strlen(line) > strlen(want) &&
            strcmp(line + strlen(line) - strlen(want), want) == 0)
            return true;
    return false;
}

/* The pidfd is opened first: what is checked after it is checked of that process, unless it has
 * died, which the last check excludes. */
static int verify_init(struct box *b, const struct box_identity *who, struct lh_error *err)
{
    uint64_t ticks;

    b->identity = *who;
    b->pidfd = (int)syscall(SYS_pidfd_open, who->init_pid, 0);
    if (b->pidfd < 0 || cgroup_start_ticks(who->init_pid, &ticks) < 0 ||
        ticks != who->start_ticks || !status_has(who->init_pid, "NSpid:", "1") ||
        !in_cgroup(&b->host->cgroups, who->init_pid, b->id) ||
        syscall(SYS_pidfd_send_signal, b->pidfd, 0, NULL, 0) < 0)
        return lh_fail(err, LH_NOT_FOUND, "no init of sandbox %s with pid %d runs", b->id,
                       who->init_pid);
    return 0;
}

static int in_a_seal(const struct box *b, struct lh_error *err)
{
    return lh_fail(err, LH_FAILED_PRECONDITION, "sandbox %s was left in the middle of a seal",
                   b->id);
}

int box_find_upper(struct box *b, struct lh_error *err)
{
    lh_autoclosedir DIR *d = opendir(b->dir);
    int found = 0;

    for (const struct dirent *e; d && (e = readdir(d));)
        found += sscanf(e->d_name, "upper.%u", &b->upper) == 1;
    return found == 1 ? 0 : in_a_seal(b, err);
}

/* A read-only root is the other trace of an unfinished seal. */
static int find_upper(struct box *b, struct lh_error *err)
{
    lh_autoclose int root = box_root_fd(b, err);
    struct statvfs fs;

    if (root < 0)
        return root;
    if (fstatvfs(root, &fs) < 0 || (fs.f_flag & ST_RDONLY))
        return in_a_seal(b, err);
    return box_find_upper(b, err);
}

struct box *box_adopt(struct box_host *h, const struct box_spec *spec,
                      const struct box_identity *identity, struct lh_error *err)
{
    struct box *b = box_new(h, spec, err);

    if (!b)
        return NULL;
    b->cgroup = cgroup_open(&h->cgroups, b->id);
    int r = b->cgroup < 0 ? lh_fail(err, LH_NOT_FOUND, "sandbox %s has no cgroup", b->id)
                          : verify_init(b, identity, err);
    if (r < 0 || find_upper(b, err) < 0 || box_connect(b, err) < 0) {
        free_box(b);
        return NULL;
    }
    return b;
}

/* ---- end ----------------------------------------------------------------------------------- */

int box_kill(struct box *b, struct lh_error *err)
{
    LH_LOCKED(&b->state);
    int r = b->cgroup < 0 ? 0 : cgroup_kill(b->cgroup, b->pidfd, lh_now_ms() + BOX_KILL_MS, err);

    box_give_up(b);
    return r < 0 ? lh_wrap(err, "killing sandbox %s", b->id) : 0;
}

/* The overlay's last mount goes with the last process, while its directories are still there. */
int box_destroy(struct box *b, struct lh_error *err)
{
    if (b->files >= 0)
        close(b->files);
    b->files = -1;
    int r = box_destroy_named(b->host, b->id, b->dir, err);
    free_box(b);
    return r;
}

int box_set_layers(struct box *b, const struct box_layer *layers, size_t n, struct lh_error *err)
{
    struct box_layer *copy = n >= 1 && n <= MAX_LAYERS ? copy_layers(layers, n) : NULL;

    if (!copy)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%zu layers for sandbox %s", n, b->id);
    pthread_mutex_lock(&b->state);
    free_layers(b->layers, b->n_layers);
    b->layers = copy;
    b->n_layers = n;
    pthread_mutex_unlock(&b->state);
    return 0;
}

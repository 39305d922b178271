#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "agentenv/sandbox/box_private.h"
#include "agentenv/sandbox/confine.h"
#include "agentenv/sandbox/facts.h"
#include "agentenv/sandbox/overlay.h"
#include "agentenv/sandbox/spawner.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/process.h"

LH_LOG_COMPONENT("sandbox");

#ifndef MFD_EXEC
#define MFD_EXEC 0x10U
#endif

bool box_name_valid(const char *name)
{
    static const char ok[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    size_t n = strspn(name, ok);

    return n > 0 && n <= 64 && name[n] == 0 && name[0] != '.';
}

/* Where a program of ours is: beside us, installed, or in the build tree, whose layout puts every
 * executable that uses it at most three directories from its root. */
char *box_find_program(const char *name, struct lh_error *err)
{
    static const char *const places[] = {"",
                                         "../libexec/longhaul/",
                                         "../%s/",
                                         "../agentenv/%s/",
                                         "../../agentenv/%s/",
                                         "../../../agentenv/%s/"};
    const char *where = strcmp(name, "agentenv-init") ? "criu" : "init";
    lh_autofree char *self = lh_program_dir();
    char place[64];

    for (size_t i = 0; i < LH_ARRAY_SIZE(places); i++) {
        const char *gap = strstr(places[i], "%s");
        snprintf(place, sizeof place, "%.*s%s%s", gap ? (int)(gap - places[i]) : 64, places[i],
                 gap ? where : "", gap ? gap + 2 : "");
        lh_autofree char *path = lh_format("%s/%s%s", self ? self : "", place, name);
        if (path && access(path, R_OK) == 0)
            return lh_steal(&path);
    }
    return lh_fail(err, LH_FAILED_PRECONDITION,
                   "%s is neither beside %s nor in ../libexec/longhaul: install it", name,
                   self ? self : "the program"),
           NULL;
}

static int open_init(const char *path, struct lh_error *err)
{
    lh_autofree char *found = path ? NULL : box_find_program("agentenv-init", err);

    if (!path && !found)
        return LH_FAILED_PRECONDITION;
    path = path ? path : found;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    return fd < 0 ? lh_fail_errno(err, errno, "agentenv-init at %s", path) : fd;
}

static void print_file(int fd, char text[80])
{
    struct stat st;

    text[0] = 0;
    if (fd >= 0 && fstat(fd, &st) == 0)
        snprintf(text, 80, "%llu.%lld.%lld", (unsigned long long)st.st_ino, (long long)st.st_size,
                 (long long)st.st_mtime);
}

char *box_host_fingerprint(const struct box_host *h)
{
    char criu[80], init[80];
    lh_autoclose int fd = open_init(NULL, NULL);

    print_file(h->criu, criu);
    print_file(fd, init);
    return lh_format("%s %s", criu, init);
}

/* A copy that nothing can change: what every sandbox executes as its PID 1. */
static int seal_init(const char *path, struct lh_error *err)
{
    lh_autoclose int file = open_init(path, err);
    struct stat st;

    if (file < 0)
        return file;
    lh_autoclose int fd = memfd_create("agentenv-init", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_EXEC);
    if (fd < 0 && errno == EINVAL) /* before 6.3 */
        fd = memfd_create("agentenv-init", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || fstat(file, &st) < 0)
        return lh_fail_errno(err, errno, "a memfd for agentenv-init");
    /* Of an owner who exists inside, or a checkpoint could not be restored there. */
    uid_t uid = box_facts()->uid_base + box_facts()->init_uid;
    if (fchown(fd, uid, uid) < 0)
        return lh_fail_errno(err, errno, "the owner of agentenv-init");
    for (off_t left = st.st_size; left > 0;) {
        ssize_t n = sendfile(fd, file, NULL, (size_t)left);
        if (n <= 0)
            return lh_fail_errno(err, n < 0 ? errno : EIO, "copying agentenv-init");
        left -= n;
    }
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) < 0)
        return lh_fail_errno(err, errno, "sealing agentenv-init");
    return lh_steal_fd(&fd);
}

/* O_CLOEXEC, and still executable by its descriptor: it is no script. */
static int open_criu(const char *path)
{
    static const char *const places[] = {"/usr/local/libexec/longhaul/criu", "/usr/local/sbin/criu",
                                         "/usr/sbin/criu"};
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;

    for (size_t i = 0; !path && fd < 0 && i < LH_ARRAY_SIZE(places); i++)
        fd = open(places[i], O_RDONLY | O_CLOEXEC);
    return fd;
}

static int start_spawner(struct box_host *h, const char *init_path, struct lh_error *err)
{
    lh_autoclose int init = seal_init(init_path, err);
    lh_autoclose int filters = init < 0 ? -1 : confine_compile(err);

    if (init < 0 || filters < 0)
        return err ? err->code : LH_INTERNAL;
    h->spawner = spawner_start(&h->cgroups, init, filters, &h->spawner_pid, err);
    return h->spawner < 0 ? h->spawner : 0;
}

struct box_host *box_host_create(const struct box_host_options *o, struct lh_error *err)
{
    const char *bad = enter_bad_device(box_facts()->host_root);

    if (!box_name_valid(o->cgroup_parent))
        return lh_fail(err, LH_INVALID_ARGUMENT, "cgroup parent \"%s\": 1 to 64 of A-Za-z0-9._-",
                       o->cgroup_parent),
               NULL;
    if (bad)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "/dev/%s is not root's character device: some program has changed it, and "
                       "sandboxes would share it; chown root it, or make it again",
                       bad),
               NULL;
    struct box_host *h = calloc(1, sizeof *h);
    if (!h)
        return lh_fail_errno(err, ENOMEM, "sandboxes"), NULL;
    h->spawner = h->userns = -1;
    h->criu = open_criu(o->criu_path);
    if (cgroup_root_open(&h->cgroups, o->cgroup_parent, err) < 0)
        goto fail_cgroups;
    h->userns = box_facts()->idmap ? overlay_userns(err) : -1;
    if ((h->userns < 0 && box_facts()->idmap) || start_spawner(h, o->init_path, err) < 0)
        goto fail_spawner;
    return h;

fail_spawner:
    if (h->userns >= 0)
        close(h->userns);
    cgroup_root_close(&h->cgroups);
fail_cgroups:
    if (h->criu >= 0)
        close(h->criu);
    free(h);
    lh_wrap(err, "preparing sandboxes");
    return NULL;
}

bool box_host_alive(const struct box_host *h)
{
    siginfo_t info = {0};

    return waitid(P_PID, (id_t)h->spawner_pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == 0;
}

void box_host_destroy(struct box_host *h)
{
    if (!h)
        return;
    shutdown(h->spawner, SHUT_RDWR); /* it ends by that, even if a fork holds a copy */
    close(h->spawner);
    waitpid(h->spawner_pid, NULL, 0);
    if (h->userns >= 0)
        close(h->userns);
    if (h->criu >= 0)
        close(h->criu);
    cgroup_root_close(&h->cgroups);
    free(h);
}

int box_destroy_named(struct box_host *h, const char *id, const char *dir, struct lh_error *err)
{
    int64_t deadline = lh_now_ms() + BOX_KILL_MS;
    int r = 0;

    if (!box_name_valid(id))
        return lh_fail(err, LH_INVALID_ARGUMENT, "sandbox id \"%s\"", id);
    lh_autoclose int fd = cgroup_open(&h->cgroups, id);
    if (fd >= 0)
        r = cgroup_kill(fd, -1, deadline, err);
    if (r == 0)
        r = cgroup_remove(&h->cgroups, id, deadline, err);
    if (r == 0 && dir)
        r = box_remove_tree(dir, err);
    return r < 0 ? lh_wrap(err, "removing sandbox %s", id) : 0;
}

struct sweep {
    struct box_host *host;
    const char *const *keep;
    size_t n_keep;
    int removed;
    struct lh_error *err;
};

static int sweep_one(void *ctx, const char *id)
{
    struct sweep *s = ctx;

    for (size_t i = 0; i < s->n_keep; i++)
        if (strcmp(s->keep[i], id) == 0)
            return 0;
    int r = box_destroy_named(s->host, id, NULL, s->err);
    if (r < 0)
        return r;
    lh_info("orphan removed", "sandbox=%s", id);
    s->removed++;
    return 0;
}

int box_host_sweep(struct box_host *h, const char *const keep[], size_t n, struct lh_error *err)
{
    struct sweep s = {h, keep, n, 0, err};
    int r = cgroup_each(&h->cgroups, sweep_one, &s);

    return r < 0 ? lh_wrap(err, "looking for orphans") : s.removed;
}

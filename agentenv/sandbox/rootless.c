/* An ordinary user's daemon is root of a user namespace of its own, and the rest of agentenvd need
 * not know: there it owns its mounts, may write the id maps of the sandboxes' namespaces below, own
 * and remove the files of all their users, and join and trace what runs in them.
 *
 * Ids.  In the daemon's namespace the user is 0, and with a range in /etc/subuid (newuidmap(1) maps
 * it) the sandboxes' ids begin at BOX_UID_BASE as they do for root.  A usual range has 65536 ids,
 * of which init takes the last, so that id 65535 is missing inside.  Without a range one id is all
 * there is: a sandbox's root, its init and the daemon are the user.  Init is then guarded by what
 * guards it anyway besides its id: it is PID 1, not dumpable, and seccomp lets nobody signal or
 * trace it.  What a state directory began with it keeps (the file `ids`): the owners of its files
 * depend on it.
 *
 * A daemon after this one must be in the *same* namespace, not in one like it: rights over the
 * sandboxes' namespaces come from being in the parent.  The namespace lives as long as a sandbox
 * does, each leads to it (NS_GET_PARENT), and its owner may join it from outside.  Rejected: a
 * process that holds the namespace, which would have to be watched and ended; and to stay outside
 * and enter for each operation, which would be a second way of doing everything. */
#include "agentenv/sandbox/rootless.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/nsfs.h>
#include <pwd.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agentenv/sandbox/box.h"
#include "agentenv/sandbox/cgroup.h"
#include "agentenv/sandbox/facts.h"
#include "proto/file.h"
#include "proto/log.h"

LH_LOG_COMPONENT("sandbox");

enum { MIN_RANGE = 1024, OVERFLOW_ID = 65534, IDS_MAX = 200 };

/* What the host grants the user: from start, n ids.  n = 0: none. */
struct range {
    unsigned start, n;
};

struct ids {
    struct range uids, gids;
};

/* ---- which ids ----------------------------------------------------------------------------- */

/* The largest line of /etc/subuid that names the user. */
static struct range find_range(const char *path, const char *name, uid_t uid)
{
    lh_autofclose FILE *f = fopen(path, "re");
    struct range best = {0}, r;
    char line[512], number[16];

    snprintf(number, sizeof number, "%u", uid);
    while (f && fgets(line, sizeof line, f)) {
        char *rest = line, *who = strsep(&rest, ":");
        if ((strcmp(who, number) == 0 || (name && strcmp(who, name) == 0)) && rest &&
            sscanf(rest, "%u:%u", &r.start, &r.n) == 2 && r.n > best.n)
            best = r;
    }
    if (best.n > BOX_INIT_UID + 1)
        best.n = BOX_INIT_UID + 1;
    return best;
}

static bool has_program(const char *name)
{
    lh_autofree char *path = lh_format("/usr/bin/%s", name);

    return path && access(path, X_OK) == 0;
}

static struct ids granted_ids(void)
{
    const struct passwd *pw = getpwuid(getuid());
    const char *name = pw ? pw->pw_name : NULL;
    struct ids ids = {find_range("/etc/subuid", name, getuid()),
                      find_range("/etc/subgid", name, getuid())};

    if (ids.uids.n < MIN_RANGE || ids.gids.n < MIN_RANGE || !has_program("newuidmap") ||
        !has_program("newgidmap"))
        return (struct ids){0};
    ids.uids.n = ids.gids.n = ids.uids.n < ids.gids.n ? ids.uids.n : ids.gids.n;
    return ids;
}

/* The first daemon of a state directory decides, the others find it written. */
static int choose_ids(const char *state_dir, struct ids *ids, struct lh_error *err)
{
    lh_autofree char *path = state_dir ? lh_format("%s/ids", state_dir) : NULL;
    lh_autofree char *known = NULL;
    char text[IDS_MAX];
    size_t len;

    *ids = granted_ids();
    if (!state_dir)
        return 0;
    if (!path)
        return lh_fail_errno(err, ENOMEM, "%s", state_dir);
    if (access(path, F_OK) == 0) {
        known = lh_read_file(path, IDS_MAX, &len, err);
        if (!known || sscanf(known, "uids %u %u gids %u %u", &ids->uids.start, &ids->uids.n,
                             &ids->gids.start, &ids->gids.n) != 4)
            return lh_fail(err, LH_DATA_LOSS, "%s is not readable", path);
        return 0;
    }
    snprintf(text, sizeof text, "uids %u %u gids %u %u\n", ids->uids.start, ids->uids.n,
             ids->gids.start, ids->gids.n);
    return lh_write_file(path, text, strlen(text), 0600, err);
}

/* ---- a new namespace ----------------------------------------------------------------------- */

/* Replaces the process, a child that stayed outside. */
_Noreturn static void map_range(const char *program, pid_t pid, unsigned own, const struct range *r)
{
    const unsigned numbers[] = {0,
                                own,
                                1,
                                BOX_UID_BASE,
                                r->start,
                                r->n - 1,
                                BOX_UID_BASE + BOX_INIT_UID,
                                r->start + r->n - 1,
                                1};
    enum { N = LH_ARRAY_SIZE(numbers) };
    char text[N + 1][16], *argv[N + 3] = {(char *)program, text[N]};

    snprintf(text[N], sizeof text[N], "%d", pid);
    for (size_t i = 0; i < N; i++) {
        snprintf(text[i], sizeof text[i], "%u", numbers[i]);
        argv[2 + i] = text[i];
    }
    execvp(program, argv);
    _exit(127);
}

static int run_map(const char *program, pid_t target, unsigned own, const struct range *r)
{
    pid_t pid = fork();
    int status = -1;

    if (pid == 0)
        map_range(program, target, own, r);
    while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    return pid > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* Waits outside until its parent is in the new namespace. */
_Noreturn static void helper(int go, const struct ids *ids, uid_t uid, gid_t gid)
{
    pid_t parent = getppid();
    char c;

    if (read(go, &c, 1) != 1)
        _exit(1);
    int r = run_map("newuidmap", parent, uid, &ids->uids);
    _exit(r ? r : run_map("newgidmap", parent, gid, &ids->gids));
}

static int fail_unshare(struct lh_error *err)
{
    return lh_fail(err, LH_FAILED_PRECONDITION,
                   "this host gives ordinary users no user namespaces (%s): sysctl "
                   "user.max_user_namespaces=10000, kernel.unprivileged_userns_clone=1 or "
                   "kernel.apparmor_restrict_unprivileged_userns=0, where there is such a setting; "
                   "or run agentenvd as root",
                   strerror(errno));
}

static int make_many(const struct ids *ids, struct lh_error *err)
{
    uid_t uid = getuid();
    gid_t gid = getgid();
    int go[2], status = -1, r = 0;

    if (pipe2(go, O_CLOEXEC) < 0)
        return lh_fail_errno(err, errno, "a pipe");
    pid_t pid = fork();
    if (pid == 0) {
        close(go[1]);
        helper(go[0], ids, uid, gid);
    }
    close(go[0]);
    if (pid < 0)
        r = lh_fail_errno(err, errno, "fork");
    else if (unshare(CLONE_NEWUSER) < 0)
        r = fail_unshare(err);
    else if (write(go[1], "g", 1) != 1)
        r = lh_fail_errno(err, errno, "a pipe");
    close(go[1]);
    while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    if (r == 0 && status != 0)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "newuidmap or newgidmap refuses the range of /etc/subuid (status %d): they "
                       "must be set-uid root, as Debian's package uidmap has them, and the range "
                       "the one that the state directory began with",
                       status >> 8);
    return r;
}

static int write_own(const char *file, const char *text, struct lh_error *err)
{
    lh_autofree char *path = lh_format("/proc/self/%s", file);
    lh_autoclose int fd = path ? open(path, O_WRONLY | O_CLOEXEC) : -1;

    return fd < 0 || write(fd, text, strlen(text)) < 0
               ? lh_fail_errno(err, errno, "/proc/self/%s", file)
               : 0;
}

static int make_one(struct lh_error *err)
{
    char uids[40], gids[40];
    int r;

    snprintf(uids, sizeof uids, "0 %u 1\n", getuid());
    snprintf(gids, sizeof gids, "0 %u 1\n", getgid());
    if (unshare(CLONE_NEWUSER) < 0)
        return fail_unshare(err);
    if ((r = write_own("setgroups", "deny", err)) < 0 || (r = write_own("uid_map", uids, err)) < 0)
        return r;
    return write_own("gid_map", gids, err);
}

/* ---- the namespace of an earlier daemon ----------------------------------------------------- */

/* -1 = it cannot be told, or has gone. */
static int parent_namespace(pid_t pid)
{
    char path[64];

    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    lh_autoclose int ns = open(path, O_RDONLY | O_CLOEXEC);
    return ns < 0 ? -1 : ioctl(ns, NS_GET_PARENT);
}

struct search {
    const struct cgroup_root *root;
    int ns;
};

static int search_one(void *ctx, const char *id)
{
    struct search *s = ctx;
    pid_t pid = cgroup_init(s->root, id);

    s->ns = pid > 0 ? parent_namespace(pid) : -1;
    return s->ns >= 0; /* ends the walk */
}

/* -1 = no sandbox of ours runs. */
static int find_namespace(const char *cgroup_parent)
{
    struct cgroup_root root;
    struct search s = {&root, -1};

    if (cgroup_root_open(&root, cgroup_parent, NULL) < 0) /* which will be said when it is needed */
        return -1;
    cgroup_each(&root, search_one, &s);
    cgroup_root_close(&root);
    return s.ns;
}

static int join(int ns, struct lh_error *err)
{
    if (setns(ns, CLONE_NEWUSER) < 0)
        return lh_fail_errno(err, errno, "joining the user namespace of the sandboxes that run");
    lh_info("joined the user namespace of running sandboxes", "uid=%u", getuid());
    return 0;
}

/* ---- all of it ------------------------------------------------------------------------------ */

static int set_facts(const char *state_dir, struct lh_error *err)
{
    struct box_facts *f = box_facts_set();

    f->rootless = true;
    f->idmap = false;
    f->host_root = OVERFLOW_ID;
    f->overlay_xattr = "user.overlay.";
    f->processes = state_dir ? lh_format("%s/processes", state_dir) : strdup("");
    return f->processes ? 0 : lh_fail_errno(err, ENOMEM, "sandboxes");
}

static void set_ids(const struct ids *ids)
{
    struct box_facts *f = box_facts_set();

    f->uid_base = ids->uids.n ? BOX_UID_BASE : 0;
    f->uid_count = ids->uids.n ? ids->uids.n - 1 : 1;
    f->init_uid = ids->uids.n ? BOX_INIT_UID : 0;
}

int box_rootless_enter(const char *state_dir, const char *cgroup_parent, struct lh_error *err)
{
    struct ids ids;
    int r = set_facts(state_dir, err);

    if (r == 0)
        r = choose_ids(state_dir, &ids, err);
    if (r < 0)
        return r;
    lh_autoclose int ns = cgroup_parent ? find_namespace(cgroup_parent) : -1;
    r = ns >= 0 ? join(ns, err) : ids.uids.n ? make_many(&ids, err) : make_one(err);
    if (r < 0)
        return lh_wrap(err, "as an ordinary user");
    set_ids(&ids);
    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        return lh_fail_errno(err, errno, "a mount namespace of an ordinary user");
    return 0;
}

/* From a fork of init to the agent's command: everything that init may and the command may not is
 * given up here, in an order that matters.
 *
 * Init runs as an id of its own with the few capabilities that the sandbox's root is to have.  They
 * survive setresuid() to 0 and the exec (the bounding set is the same few), and vanish by
 * themselves for any other user.  no_new_privs is set already; the seccomp programs come last,
 * since they forbid some of what is done before. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "agentenv/init/init.h"

enum { MAX_FILTERS = 4 };

static struct sock_fprog filters[MAX_FILTERS];
static size_t n_filters;

/* The file holds, for each program, its length in instructions and the instructions. */
void launch_prepare(int fd)
{
    uint32_t len;
    off_t at = 0;

    while (n_filters < MAX_FILTERS && pread(fd, &len, sizeof len, at) == sizeof len) {
        size_t bytes = len * sizeof(struct sock_filter);
        struct sock_filter *code = malloc(bytes);
        at += sizeof len;
        if (!code || pread(fd, code, bytes, at) != (ssize_t)bytes)
            _exit(1);
        at += (off_t)bytes;
        filters[n_filters++] = (struct sock_fprog){(unsigned short)len, code};
    }
    close(fd);
    if (n_filters == 0)
        _exit(1);
}

static int report_fd;

_Noreturn static void give_up(const char *step, int errnum)
{
    struct wire_report r = {.kind = WIRE_FAILED, .value = errnum};

    snprintf(r.step, sizeof r.step, "%.100s", step);
    if (write(report_fd, &r, sizeof r) < 0)
        _exit(126);
    _exit(127);
}

struct command {
    char *cwd, *user;
    char **argv, **env;
};

static char *next_string(char **at, const char *end)
{
    char *s = *at, *nul = memchr(s, 0, (size_t)(end - s));

    if (!nul)
        give_up("reading the request", EPROTO);
    *at = nul + 1;
    return s;
}

static char **next_list(char **at, const char *end, uint32_t n, uint32_t spare)
{
    char **list = calloc((size_t)n + spare + 1, sizeof *list);

    if (!list)
        give_up("reading the request", ENOMEM);
    for (uint32_t i = 0; i < n; i++)
        list[i] = next_string(at, end);
    return list;
}

enum { ADDED_ENV = 3 };

static struct command read_command(int fd)
{
    struct stat st;
    struct command c;

    if (fstat(fd, &st) < 0 || st.st_size < (off_t)sizeof(struct wire_strings))
        give_up("reading the request", EPROTO);
    char *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0), *end = p + st.st_size;
    if (p == MAP_FAILED)
        give_up("reading the request", errno);
    const struct wire_strings *h = (void *)p;
    p += sizeof *h;
    c.cwd = next_string(&p, end);
    c.user = next_string(&p, end);
    c.argv = next_list(&p, end, h->argc, 0);
    c.env = next_list(&p, end, h->envc, ADDED_ENV);
    return c;
}

static void add_env(char **env, const char *name, const char *value)
{
    size_t n = strlen(name);

    for (; *env; env++)
        if (strncmp(*env, name, n) == 0 && (*env)[n] == '=')
            return;
    if (asprintf(env, "%s=%s", name, value) < 0)
        give_up("environment", ENOMEM);
}

/* Raised so that the memory limit ends a command and never init.  Once the id has changed the file
 * would belong to nobody; and it belongs to init only while init's fork is dumpable. */
static void prefer_for_oom_kill(bool one_uid)
{
    if (one_uid) /* dumpable, it would be open to processes of the agent, who have the same id */
        return;
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, "500", 3) != 3)
        give_up("oom_score_adj", errno);
    close(fd);
}

/* The terminal becomes the new session's, and its user's. */
static void take_stdio(const struct launch *l, const struct user *u)
{
    if (l->terminal && (ioctl(l->in, TIOCSCTTY, 0) < 0 || fchown(l->in, u->uid, u->gid) < 0))
        give_up("terminal", errno);
    if (dup2(l->in, 0) < 0 || dup2(l->out, 1) < 0 || dup2(l->err, 2) < 0)
        give_up("stdio", errno);
    if (syscall(SYS_close_range, 3, ~0U, 4 /* CLOSE_RANGE_CLOEXEC */) < 0)
        give_up("close_range", errno);
}

static void become(const struct user *u, bool one_uid)
{
    if (one_uid) {
        if (u->uid != 0 || u->gid != 0)
            give_up("another user than root, in a sandbox with one user id (agentenv doctor)",
                    EPERM);
        return;
    }
    if (setgroups(u->n_groups, u->groups) < 0 || setresgid(u->gid, u->gid, u->gid) < 0 ||
        setresuid(u->uid, u->uid, u->uid) < 0)
        give_up("changing the user", errno);
}

/* Lower than the sandbox's own, or as these are: what is inherited cannot be raised. */
static void limit(int what, uint64_t value)
{
    struct rlimit l;

    if (value == 0)
        return;
    if (getrlimit(what, &l) < 0)
        give_up("limits", errno);
    if (value < l.rlim_max)
        l.rlim_max = value;
    l.rlim_cur = l.rlim_max;
    if (setrlimit(what, &l) < 0)
        give_up("limits", errno);
}

static void confine(const struct wire_limits *l)
{
    limit(RLIMIT_NOFILE, l->open_files);
    limit(RLIMIT_CPU, l->cpu_seconds);
    limit(RLIMIT_AS, l->memory_bytes);
    limit(RLIMIT_FSIZE, l->file_bytes);
    for (size_t i = 0; i < n_filters; i++)
        if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filters[i]) < 0)
            give_up("seccomp", errno);
}

void launch_command(const struct launch *l)
{
    sigset_t none;
    struct user u;

    bool one_uid = getuid() == 0; /* init would have an id of its own */

    report_fd = l->report;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setsid();
    prefer_for_oom_kill(one_uid);
    struct command c = read_command(l->strings);
    if (user_find(c.user, &u) != 0)
        give_up("no such user", EINVAL);
    take_stdio(l, &u);
    add_env(c.env, "PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    add_env(c.env, "HOME", u.home);
    add_env(c.env, "USER", u.name[0] ? u.name : "user");
    become(&u, one_uid);
    umask(022);
    if (chdir(c.cwd[0] ? c.cwd : "/") < 0)
        give_up("changing to the working directory", errno);
    confine(&l->limits);
    environ = c.env;
    execvp(c.argv[0], c.argv);
    give_up(c.argv[0], errno);
}

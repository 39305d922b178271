/* doctor: what this machine offers, and what each missing thing costs.
 *
 * What sandboxes cannot do without is tried by box_selftest(); without it the exit status is 1. The
 * rest is this table: nothing of it is needed, each line says what one goes without.  Which engines
 * are offered is the daemon's to say, after its own trial, and is asked when it is there. */
#include <errno.h>
#include <linux/capability.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "agentenv/cli/verbs.h"
#include "agentenv/sandbox/box.h"
#include "agentenv/sandbox/facts.h"
#include "agentenv/sandbox/rootless.h"
#include "proto/cleanup.h"
#include "proto/parse.h"

static const char *const columns[] = {"what", "state", "text", NULL};

static void add(json_t *rows, const char *what, const char *state, const char *text)
{
    json_array_append_new(rows,
                          json_pack("{s:s, s:s, s:s}", "what", what, "state", state, "text", text));
}

static void add_problem(void *ctx, const char *text)
{
    add(ctx, "sandboxes", "missing", text);
}

static bool has_line(const char *path, const char *text)
{
    lh_autofclose FILE *f = fopen(path, "re");
    char line[1024];

    while (f && fgets(line, sizeof line, f))
        if (strstr(line, text))
            return true;
    return false;
}

static long number_in(const char *path)
{
    lh_autofclose FILE *f = fopen(path, "re");
    long n = 0;

    return f && fscanf(f, "%ld", &n) == 1 ? n : 0;
}

static bool has_swap(void)
{
    return has_line("/proc/swaps", "/");
}

/* The v2 hierarchy has the memory controller, be it mounted as the only one or beside v1. */
static bool has_v2_limits(void)
{
    return has_line("/sys/fs/cgroup/cgroup.controllers", "memory");
}

static bool has_inotify(void)
{
    return number_in("/proc/sys/fs/inotify/max_user_watches") >= 65536;
}

static bool has_descriptors(void)
{
    struct rlimit r;

    return getrlimit(RLIMIT_NOFILE, &r) == 0 && r.rlim_max >= 65536;
}

static bool has_sys_resource(void)
{
    return prctl(PR_CAPBSET_READ, CAP_SYS_RESOURCE, 0, 0, 0) == 1;
}

static bool has_namespaces(void)
{
    return number_in("/proc/sys/user/max_net_namespaces") >= 4096 &&
           number_in("/proc/sys/user/max_user_namespaces") >= 4096;
}

/* Root's sandboxes have these ids whoever else may have been given them. */
static bool has_own_ids(void)
{
    lh_autofclose FILE *f = geteuid() == 0 ? fopen("/etc/subuid", "re") : NULL;
    unsigned long start, n;
    char line[512];

    while (f && fgets(line, sizeof line, f)) {
        const char *rest = strchr(line, ':');
        if (rest && sscanf(rest, ":%lu:%lu", &start, &n) == 2 &&
            start <= BOX_UID_BASE + BOX_INIT_UID && start + n > BOX_UID_BASE)
            return false;
    }
    return true;
}

static bool has_soft_dirty(void)
{
    return has_line("/proc/self/smaps", "VmFlags:") && has_line("/proc/self/smaps", " sd");
}

static const struct {
    const char *what;
    bool (*there)(void);
    const char *cost; /* of its absence */
} offers[] = {
    {"swap", has_swap, "frozen sandboxes keep all their memory; hibernate them instead"},
    {"cgroup v2 limits", has_v2_limits,
     "limits are those of the v1 controllers: three more directories for each sandbox"},
    {"descriptors", has_descriptors,
     "few sandboxes at a time: each takes about five (ulimit -Hn 65536 or more)"},
    {"namespaces", has_namespaces,
     "fewer sandboxes at a time (sysctl user.max_net_namespaces, user.max_user_namespaces)"},
    {"inotify", has_inotify, "few directories can be watched (sysctl fs.inotify.max_user_watches)"},
    {"CAP_SYS_RESOURCE", has_sys_resource, "no limit can be raised above what agentenvd inherits"},
    {"ids of root's sandboxes", has_own_ids,
     "/etc/subuid gives 100000 to 165536 to a user, who may signal what runs under them, and read "
     "its files: where sandboxes of root run too, give that user another range"},
    {"soft-dirty", has_soft_dirty,
     "the second image of a process costs reading all of its memory (CONFIG_MEM_SOFT_DIRTY)"},
};

/* Nothing when no daemon is there: the table above needs none. */
static void add_engines(struct cli *cli, json_t *rows)
{
    V1(Empty) req = LONGHAUL__SANDBOX__V1__EMPTY__INIT;
    lh_automsg(V1(EnginesReply)) reply = NULL;

    if (!cli->socket ||
        cli_call(cli, "Engines", &req.base, &longhaul__sandbox__v1__engines_reply__descriptor,
                 CALL_MS, (ProtobufCMessage **)&reply, NULL) < 0)
        return;
    for (size_t i = 0; i < reply->n_engines; i++)
        add(rows, reply->engines[i], "offered", "an engine of the daemon's");
    for (size_t i = 0; i < reply->n_problems; i++)
        add(rows, "engine", "missing", reply->problems[i]);
}

/* As the daemon of this user would find the machine.  Forks: before any call. */
static int add_sandboxes(json_t *rows)
{
    struct lh_error err = {0};
    struct box_offer o;

    if (geteuid() != 0 && box_rootless_enter(NULL, NULL, &err) < 0) {
        add_problem(rows, err.message);
        return 1;
    }
    int problems = box_selftest(add_problem, rows);
    if (problems == 0)
        add(rows, "sandboxes", "offered", "this machine has what they need");
    for (size_t i = 0; box_offer(i, &o); i++)
        add(rows, o.what, o.there ? "offered" : "missing", o.there ? "" : o.cost);
    return problems;
}

int doctor_verb(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    const struct argp argp = {NULL,
                              cli_parse_words,
                              "",
                              "Says what this machine offers to sandboxes, and what each missing "
                              "thing costs.  Exit status 1: it cannot run them.",
                              NULL,
                              NULL,
                              NULL};
    struct cli_words w = {0};
    json_t *rows = json_array();

    cli_parse(&argp, argc, argv, &w);
    if (!rows)
        return lh_fail_errno(err, ENOMEM, "doctor");
    int problems = add_sandboxes(rows);
    for (size_t i = 0; i < LH_ARRAY_SIZE(offers); i++) {
        bool there = offers[i].there();
        add(rows, offers[i].what, there ? "offered" : "missing", there ? "" : offers[i].cost);
    }
    add_engines(cli, rows);
    int r = cli_print(cli, rows, columns, err);
    return r < 0 ? r : problems ? CLI_FAILED : 0;
}

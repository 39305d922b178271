/* Which process runs in which exec's cgroup.
 *
 * An exec is killed by its cgroup, descendants that hide in sessions of their own included, so a
 * restored sandbox needs the same placement.  CRIU could keep cgroups itself, but would then decide
 * about limits and names as well, and moves each task in any case.  So the pids, as the sandbox
 * counts them, are written beside the images, a line for each exec:
 *     EXEC_ID PID PID ...
 *
 * What an exec that has ended left in the background is not written down and wakes in the sandbox's
 * own cgroup: nobody will kill that exec, and to move the first process into a cgroup costs a
 * restore 8 ms (an RCU grace period), a third of a small one.                                  */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/sandbox/box_private.h"
#include "proto/file.h"

static const char file_name[] = "placement";

/* The pid inside, from the host's: the last field of NSpid. */
static int inner_pid(pid_t pid)
{
    char path[64], line[256];
    int inner = -1;

    snprintf(path, sizeof path, "/proc/%d/status", pid);
    lh_autofclose FILE *f = fopen(path, "re");
    while (f && inner < 0 && fgets(line, sizeof line, f)) {
        const char *last = strncmp(line, "NSpid:", 6) ? NULL : strrchr(line, '\t');
        inner = last ? atoi(last) : -1;
    }
    return inner;
}

struct saving {
    struct box *box;
    FILE *out;
};

static bool has_ended(struct box *b, const char *exec_id)
{
    LH_LOCKED(&b->execs_lock);
    bool found = false;

    for (size_t i = 0; i < b->n_leftover; i++)
        found |= !strcmp(b->leftover[i], exec_id);
    return found;
}

static int save_pid(void *ctx, pid_t pid)
{
    int inner = inner_pid(pid);

    if (inner > 0)
        fprintf(ctx, " %d", inner);
    return 0;
}

static int save_exec(void *ctx, const char *exec_id)
{
    const struct saving *s = ctx;

    if (has_ended(s->box, exec_id))
        return 0;
    lh_autoclose int dir = cgroup_exec_open(s->box->cgroup, exec_id);
    fprintf(s->out, "%s", exec_id);
    int r = dir < 0 ? 0 : cgroup_each_pid(dir, save_pid, s->out);
    fprintf(s->out, "\n");
    return r;
}

int placement_save(struct box *b, int images, struct lh_error *err)
{
    int fd = openat(images, file_name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    lh_autofclose FILE *f = fd < 0 ? NULL : fdopen(fd, "w");
    struct saving s = {b, f};

    if (!f || cgroup_each_exec(b->cgroup, save_exec, &s) < 0 || fflush(f) != 0)
        return lh_fail_errno(err, errno, "writing down the execs of sandbox %s", b->id);
    return 0;
}

/* ---- restoring ---- */

struct process {
    int inner;
    pid_t pid;
};

struct processes {
    struct process *items;
    size_t n;
};

static int add_process(void *ctx, pid_t pid)
{
    struct processes *p = ctx;
    struct process *more = realloc(p->items, (p->n + 1) * sizeof *more);

    if (!more)
        return -ENOMEM;
    p->items = more;
    p->items[p->n++] = (struct process){inner_pid(pid), pid};
    return 0;
}

static pid_t find_process(const struct processes *p, int inner)
{
    for (size_t i = 0; i < p->n; i++)
        if (p->items[i].inner == inner)
            return p->items[i].pid;
    return -1;
}

/* One line, which it takes apart. */
static int place_exec(const struct box *b, const struct processes *p, char *line,
                      struct lh_error *err)
{
    char *rest = line, *exec_id = strsep(&rest, " \n"), *word;
    lh_autoclose int dir = -1, kill = -1;

    if (!box_name_valid(exec_id))
        return lh_fail(err, LH_DATA_LOSS, "file %s names exec \"%.80s\"", file_name, exec_id);
    int r = cgroup_exec_create(b->cgroup, exec_id, &dir, &kill, err);
    while (r == 0 && (word = strsep(&rest, " \n"))) {
        pid_t pid = *word ? find_process(p, atoi(word)) : -1;
        int e = pid > 0 ? cgroup_move(dir, pid) : 0;
        if (e < 0)
            r = lh_fail_errno(err, -e, "process %s of exec %s into its cgroup", word, exec_id);
    }
    return r;
}

int placement_restore(const struct box *b, int images, struct lh_error *err)
{
    int fd = openat(images, file_name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    lh_autofclose FILE *f = fd < 0 ? NULL : fdopen(fd, "r");
    lh_autofree char *line = NULL;
    struct processes p = {0};
    size_t room = 0;
    int r = 0;

    if (!f)
        return lh_fail_errno(err, errno, "the execs of a checkpoint");
    while (r == 0 && getline(&line, &room, f) > 0) {
        if (p.n == 0 && cgroup_each_pid(b->cgroup, add_process, &p) < 0)
            r = lh_fail_errno(err, errno, "the processes of sandbox %s", b->id);
        if (r == 0)
            r = place_exec(b, &p, line, err);
    }
    free(p.items);
    return r;
}

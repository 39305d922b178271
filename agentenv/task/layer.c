/* STATE/verifier holds `.verifier/bin`: busybox and a link for each of its commands.
 *
 * `.verifier` is marked opaque for overlayfs: were it merged with a directory of that name that the
 * agent made, a command missing in busybox would be taken from there.  One layer serves all tasks;
 * a task's own verifier files are written into the fork, where no process of the agent is left. */
#include "agentenv/task/layer.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include "agentenv/sandbox/box.h"
#include "agentenv/sandbox/facts.h"
#include "agentenv/task/task.h"
#include "proto/file.h"
#include "proto/process.h"

enum { PROGRAM_MAX = 64 << 20 };

char *verifier_layer_path(struct daemon *d, struct lh_error *err)
{
    char *path = lh_format("%s/verifier", daemon_state_dir(d));

    if (!path)
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for a path");
    return path;
}

/* A bundle brings its own, for machines that have none. */
static char *find_busybox(struct lh_error *err)
{
    static const char *const places[] = {"/bin/busybox", "/usr/bin/busybox"};
    const char *given = getenv("LONGHAUL_BUSYBOX");
    lh_autofree char *dir = lh_program_dir();
    lh_autofree char *bundled = lh_format("%s/../libexec/longhaul/busybox", dir ? dir : "");

    if (given)
        return strdup(given);
    if (bundled && access(bundled, X_OK) == 0)
        return lh_steal(&bundled);
    for (size_t i = 0; i < LH_ARRAY_SIZE(places); i++)
        if (access(places[i], X_OK) == 0)
            return strdup(places[i]);
    lh_fail(err, LH_FAILED_PRECONDITION,
            "verifiers need busybox, which is missing; apt-get install busybox-static");
    return NULL;
}

/* A program with an interpreter needs libraries, and would take the agent's. */
static bool is_static(const char *data, size_t len)
{
    const Elf64_Ehdr *e = (const void *)data;

    if (len < sizeof *e || memcmp(data, ELFMAG, SELFMAG) || e->e_phentsize != sizeof(Elf64_Phdr) ||
        e->e_phoff % 8 || e->e_phoff > len || (len - e->e_phoff) / sizeof(Elf64_Phdr) < e->e_phnum)
        return false;
    const Elf64_Phdr *p = (const void *)(data + e->e_phoff);
    for (int i = 0; i < e->e_phnum; i++)
        if (p[i].p_type == PT_INTERP)
            return false;
    return true;
}

static int copy_busybox(const char *from, const char *to, struct lh_error *err)
{
    size_t len, have;
    lh_autofree char *program = lh_read_file(from, PROGRAM_MAX, &len, err);
    lh_autofree char *there = lh_read_file(to, PROGRAM_MAX, &have, NULL);

    if (!program)
        return err ? err->code : LH_UNKNOWN;
    if (!is_static(program, len))
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "%s is not statically linked; apt-get install busybox-static", from);
    if (there && have == len && !memcmp(there, program, len))
        return 0;
    return lh_write_file(to, program, len, 0755, err);
}

/* `busybox --list` names its commands, one a line. */
static int link_commands(const char *busybox, const char *bin, struct lh_error *err)
{
    lh_autofree char *list = lh_format("'%s' --list", busybox);
    lh_autoclose int dir = open(bin, O_DIRECTORY | O_PATH | O_CLOEXEC);
    FILE *f = list ? popen(list, "re") : NULL;
    char name[64];
    int r = 0;

    if (dir < 0 || !f)
        return lh_fail_errno(err, errno, "listing the commands of %s", busybox);
    while (r == 0 && fscanf(f, "%63s", name) == 1)
        if (strcmp(name, "busybox") && symlinkat("busybox", dir, name) < 0 && errno != EEXIST)
            r = lh_fail_errno(err, errno, "linking %s/%s", bin, name);
    if (pclose(f) && r == 0)
        r = lh_fail(err, LH_FAILED_PRECONDITION, "%s --list failed", busybox);
    return r;
}

int verifier_layer_make(struct daemon *d, struct lh_error *err)
{
    lh_autofree char *layer = verifier_layer_path(d, err);
    lh_autofree char *top = lh_format("%s" TASK_VERIFIER_DIR, layer ? layer : "");
    lh_autofree char *bin = lh_format("%s/bin", top ? top : "");
    lh_autofree char *program = lh_format("%s/busybox", bin ? bin : "");
    lh_autofree char *busybox = find_busybox(err);
    char opaque[64];

    if (!busybox)
        return err ? err->code : LH_FAILED_PRECONDITION;
    if (!layer || !top || !bin || !program)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for the verifier's layer");
    int r = lh_make_dirs(bin, 0755, err);
    snprintf(opaque, sizeof opaque, "%sopaque", box_facts()->overlay_xattr);
    if (r == 0 && setxattr(top, opaque, "y", 1, 0) < 0)
        r = lh_fail_errno(err, errno, "marking %s opaque", top);
    if (r == 0)
        r = copy_busybox(busybox, program, err);
    if (r == 0)
        r = link_commands(busybox, bin, err);
    if (r == 0)
        r = box_own_tree(layer, err);
    return r < 0 ? lh_wrap(err, "verifier's layer") : 0;
}

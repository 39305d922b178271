/* A child of the spawner becomes CRIU.
 *
 * CRIU keeps what it has learned about the kernel in /run, if that is a tmpfs; without, every call
 * costs 30 ms more.  So all calls share one that only they see: in a mount namespace of the
 * spawner's own, made before the first of them.  Mounts of the host still arrive there.
 *
 * A restore has a mount namespace for itself, in which the sandbox's root is attached: that mount
 * cannot be left behind, whoever is killed.  Its cgroup namespace begins at the sandbox's cgroup,
 * and the restored tasks inherit it. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "agentenv/sandbox/box_private.h"
#include "agentenv/sandbox/spawner.h"

enum { CRIU_SOCKET = 3 };

int spawner_criu_prepare(void)
{
    static bool done;

    if (done)
        return 0;
    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0 ||
        mount("criu", "/run", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=0700,size=1m") < 0 ||
        mkdir(BOX_CRIU_ROOT, 0755) < 0)
        return -errno;
    /* The sandbox walks through it, as nobody, to its root. */
    if (chmod("/run", 0711) < 0)
        return -errno;
    done = true;
    return 0;
}

static int attach_root(int root)
{
    if (unshare(CLONE_NEWNS | CLONE_NEWCGROUP) < 0 ||
        mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0)
        return -1;
    return move_mount(root, "", AT_FDCWD, BOX_CRIU_ROOT, MOVE_MOUNT_F_EMPTY_PATH);
}

static void reset_signals(void)
{
    sigset_t none;

    for (int i = 1; i < NSIG; i++)
        signal(i, SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

void spawner_criu_run(int program, int socket, int root)
{
    static char name[] = "criu", verb[] = "swrk", fd[] = "3",
                path[] = "PATH=/usr/sbin:/usr/bin:/sbin:/bin";
    char *const argv[] = {name, verb, fd, NULL}, *const env[] = {path, NULL};
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);

    reset_signals();
    setsid();
    umask(022);
    if (root >= 0 && attach_root(root) < 0)
        _exit(1);
    program = fcntl(program, F_DUPFD_CLOEXEC, 16);
    if (null < 0 || program < 0 || dup2(socket, CRIU_SOCKET) < 0)
        _exit(1);
    for (int i = 0; i < CRIU_SOCKET; i++)
        dup2(null, i);
    syscall(SYS_close_range, CRIU_SOCKET + 1, ~0U, 4 /* CLOSE_RANGE_CLOEXEC */);
    syscall(SYS_execveat, program, "", argv, env, AT_EMPTY_PATH);
    _exit(127);
}

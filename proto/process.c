#include "proto/process.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

/* The kernel signals deaths that come after prctl(); one that came before shows in getppid(). */
bool lh_follow_supervisor(int signal)
{
    const char *pid = getenv(LH_SUPERVISED);

    if (!pid || !*pid)
        return true;
    prctl(PR_SET_PDEATHSIG, signal);
    return getppid() == (pid_t)strtol(pid, NULL, 10);
}

char *lh_program_dir(void)
{
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);

    if (n <= 0)
        return NULL;
    self[n] = 0;
    char *slash = strrchr(self, '/');
    if (slash)
        *slash = 0;
    return strdup(self);
}

#include "proto/process.h"

#include <stdlib.h>
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

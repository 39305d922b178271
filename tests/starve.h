/* A process without descriptors to spare, and what it makes of that. */
#ifndef TESTS_STARVE_H
#define TESTS_STARVE_H

#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

/* Lowers the limit of `pid` (0 = this process) to what it has open; returns the limit of before. */
static inline struct rlimit starve(pid_t pid)
{
    struct rlimit before, tight;
    char path[64];

    snprintf(path, sizeof path, "/proc/%d/fd", (int)(pid ? pid : getpid()));
    cr_assert(eq(int, prlimit(pid, RLIMIT_NOFILE, NULL, &before), 0));
    tight = before;
    for (tight.rlim_cur = 0;; tight.rlim_cur++) { /* up to the lowest free one */
        char fd[80];
        snprintf(fd, sizeof fd, "%s/%d", path, (int)tight.rlim_cur);
        if (faccessat(AT_FDCWD, fd, F_OK, AT_SYMLINK_NOFOLLOW) < 0)
            break;
    }
    cr_assert(eq(int, prlimit(pid, RLIMIT_NOFILE, &tight, NULL), 0));
    return before;
}

static inline void feed(pid_t pid, struct rlimit limit)
{
    cr_assert(eq(int, prlimit(pid, RLIMIT_NOFILE, &limit, NULL), 0));
}

/* Clock ticks of processor time so far. */
static inline long cpu_ticks(pid_t pid)
{
    unsigned long user = 0, kernel = 0;
    char path[64];

    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "re");
    cr_assert(f != NULL);
    int n = fscanf(f, "%*d (%*[^)]) %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user,
                   &kernel);
    fclose(f);
    cr_assert(eq(int, n, 2));
    return (long)(user + kernel);
}

/* Half a second of `pid`; a process that spins uses up to all of it, one that does not a few ticks.
 */
static inline void must_not_spin(pid_t pid)
{
    long before = cpu_ticks(pid);

    usleep(500000);
    cr_assert(lt(int, (int)(cpu_ticks(pid) - before), (int)sysconf(_SC_CLK_TCK) / 8), "it spins");
}

#endif

/* probe --inside-sandbox: tries what a sandbox must refuse, names the holes and counts them.
 *
 * Static, so that it runs in any image.  Refuses to run elsewhere: some attempts would do harm on a
 * host.  An attempt counts as refused only with an error that says so; a bad argument proves
 * nothing and is reported as unclear, which is a failure too. */
#include "probe.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

static int probes, holes, unclear;

static bool is_refusal(int e)
{
    static const int refusals[] = {
        EPERM, EACCES,        ENOSYS,       ENOENT,  EROFS,   EAFNOSUPPORT, EPROTONOSUPPORT,
        ENXIO, ECONNREFUSED,  ENETUNREACH,  ETXTBSY, ENODEV,  ENOMEM,       ENOTSUP,
        ESRCH, EADDRNOTAVAIL, EHOSTUNREACH, EMFILE,  ENOTDIR, EBUSY,
    };

    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++)
        if (refusals[i] == e)
            return true;
    return false;
}

void must_fail(const char *what, long result)
{
    int e = errno;

    probes++;
    if (result >= 0) {
        holes++;
        printf("HOLE    %s\n", what);
    } else if (!is_refusal(e)) {
        unclear++;
        printf("UNCLEAR %s: %s\n", what, strerror(e));
    }
}

void must_hold(const char *what, bool holds)
{
    errno = EPERM;
    must_fail(what, holds ? -1 : 0);
}

void must_fail_apart(const char *what, long (*try)(void))
{
    int status = 0;
    pid_t pid = fork();

    if (pid == 0) {
        errno = 0;
        _exit(try() < 0 ? errno & 0xff : 200);
    }
    if (pid > 0)
        waitpid(pid, &status, 0);
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 200;
    errno = code;
    must_fail(what, code == 200 ? 0 : -1);
}

static int inherited_descriptors(void)
{
    int n = 0;

    for (int fd = 3; fd < 1024; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--effective-uid") == 0)
        return geteuid() == 65536;
    if (argc < 4 || strcmp(argv[1], "--inside-sandbox") != 0 || getpid() > 1000) {
        fprintf(stderr, "usage: probe --inside-sandbox SOCKET PORT   (never on a host)\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    must_hold("no inherited descriptors", inherited_descriptors() == 0);
    probe_init();
    probe_secrets();
    probe_controls();
    probe_devices();
    probe_sockets(argv[2], atoi(argv[3]));
    probe_interfaces();
    probe_namespaces();
    probe_mounts();
    probe_resources();
    printf("probes %d, holes %d, unclear %d\n", probes, holes, unclear);
    return holes + unclear ? 1 : 0;
}

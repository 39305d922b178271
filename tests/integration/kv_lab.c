#include "kv_lab.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/clock.h"

static void wait_for_writing(const struct daemon *d)
{
    int64_t deadline = lh_now_ms() + LAB_WAIT_MS;

    for (Longhaul__Kv__V1__StatReply s = stat_of(d);
         (s.used_bytes > MEMORY / 2 && s.remote_waiting) || s.remote_in_flight; s = stat_of(d)) {
        cr_assert(gt(int, lh_ms_left(deadline), 0), "it does not write");
        usleep(1000);
    }
}

void lab_store(const struct daemon *d, bool slowly)
{
    struct kv_key root = root_of(1), chain[LAB_UNITS];
    lh_auto(kv_client) c = client_of(d, "stores");
    struct lh_error e = {0};

    use_version(c, 1, false);
    for (unsigned seed = 0; seed < LAB_SEQUENCES; seed++) {
        chain_of(&root, seed, LAB_UNITS, chain);
        cr_assert(ge(i64, put_units(c, chain, 0, LAB_UNITS, &e), 0), "%s", e.message);
        if (slowly)
            wait_for_writing(d);
    }
}

unsigned lab_read(const struct daemon *d)
{
    struct kv_key root = root_of(1), chain[LAB_UNITS];
    lh_auto(kv_client) c = client_of(d, "reads");
    unsigned whole = 0;

    use_version(c, 1, false);
    for (unsigned seed = 0; seed < LAB_SEQUENCES; seed++) {
        chain_of(&root, seed, LAB_UNITS, chain);
        whole += get_units(c, chain, LAB_UNITS, 0) == LAB_UNITS;
    }
    return whole;
}

unsigned lab_read_anew(struct daemon *d)
{
    daemon_kill(d);
    daemon_restart(d);
    return lab_read(d);
}

void lab_wait(struct daemon *d, unsigned whole)
{
    int64_t deadline = lh_now_ms() + LAB_WAIT_MS;
    unsigned got = lab_read_anew(d);

    while (got < whole && lh_ms_left(deadline)) {
        usleep(100000);
        got = lab_read_anew(d);
    }
    cr_assert(ge(uint, got, whole), "not all come back");
}

int lab_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    cr_assert(eq(int, bind(fd, (struct sockaddr *)&at, sizeof at), 0));
    cr_assert(eq(int, getsockname(fd, (struct sockaddr *)&at, &len), 0));
    close(fd);
    return ntohs(at.sin_port);
}

pid_t lab_spawn(const char *const argv[], const char *log)
{
    pid_t pid = fork();

    cr_assert(ge(int, pid, 0));
    if (pid)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int fd = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    dup2(fd, STDOUT_FILENO);
    dup2(fd, STDERR_FILENO);
    execvp(argv[0], (char *const *)argv);
    _exit(127);
}

void lab_end(pid_t pid, int signal)
{
    int status;

    kill(pid, signal);
    cr_assert(eq(int, waitpid(pid, &status, 0), pid));
}

bool lab_listens(int port, int ms)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                             .sin_port = htons((uint16_t)port)};
    int64_t deadline = lh_now_ms() + ms;
    bool listens = false;

    while (!listens && lh_ms_left(deadline)) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        listens = connect(fd, (struct sockaddr *)&at, sizeof at) == 0;
        close(fd);
        if (!listens)
            usleep(20000);
    }
    return listens;
}

/* echo-server PATH: serves until SIGTERM, then ends within a second. */
#include <signal.h>
#include <stdio.h>

#include "echo.h"

int main(int argc, char **argv)
{
    struct lh_error e = {0};
    sigset_t stop;
    int sig;

    if (argc != 2)
        return 2;
    sigemptyset(&stop);
    sigaddset(&stop, SIGTERM);
    sigprocmask(SIG_BLOCK, &stop, NULL);
    struct rpc_server *s = echo_server_create(argv[1], 8, &e);
    if (!s) {
        fprintf(stderr, "echo-server: %s\n", e.message);
        return 1;
    }
    sigwait(&stop, &sig);
    rpc_server_destroy(s, 500);
    return 0;
}

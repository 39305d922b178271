#include <errno.h>
#include <poll.h>
#include <unistd.h>

#include "agentenv/init/init.h"

enum { DRAINS = 128 };

static int drains[DRAINS];
static size_t n_drains;

/* Beyond the bound the oldest is closed: its writers get SIGPIPE, as under any other parent. */
void drain_add(int fd)
{
    if (n_drains == DRAINS) {
        close(drains[0]);
        n_drains--;
        for (size_t i = 0; i < n_drains; i++)
            drains[i] = drains[i + 1];
    }
    drains[n_drains++] = fd;
}

size_t drain_poll(struct pollfd *p, size_t max)
{
    size_t n = n_drains < max ? n_drains : max;

    for (size_t i = 0; i < n; i++)
        p[i] = (struct pollfd){drains[i], POLLIN, 0};
    return n;
}

void drain_step(void)
{
    static char trash[WIRE_CHUNK];
    size_t kept = 0;

    for (size_t i = 0; i < n_drains; i++) {
        ssize_t n = read(drains[i], trash, sizeof trash);
        if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR)))
            drains[kept++] = drains[i];
        else
            close(drains[i]);
    }
    n_drains = kept;
}

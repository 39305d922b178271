/* Standard input that comes while the command runs.
 *
 * Messages arrive on the exec's channel with their position in the input.  Init holds one of them
 * at a time and reads no further before the command has taken it: the channel fills, the daemon's
 * sender waits, and that is the back-pressure.  Positions make the input exactly-once: after a
 * daemon was lost nobody knows which of its messages arrived, so the next one is told how much did,
 * and what comes twice is skipped. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "agentenv/init/init.h"

static const char END_OF_TRANSMISSION = 4; /* what ends the input of a terminal */

int input_open(struct input *in, int fd, bool terminal)
{
    *in = (struct input){.fd = fd, .terminal = terminal, .data = malloc(WIRE_INPUT_MAX)};
    return in->data ? 0 : -ENOMEM;
}

void input_finish(struct input *in)
{
    if (in->fd >= 0)
        close(in->fd);
    free(in->data);
    *in = (struct input){.fd = -1};
}

bool input_pending(const struct input *in)
{
    return in->fd >= 0 && (in->at < in->len || in->end);
}

void input_accept(struct input *in, uint64_t offset, size_t len)
{
    uint64_t seen = in->taken - offset;

    if (in->fd < 0 || offset > in->taken || seen >= len)
        return;
    in->at = (size_t)seen;
    in->len = len;
    in->taken += len - seen;
}

void input_end(struct input *in)
{
    in->end = in->fd >= 0;
}

static void close_input(struct input *in)
{
    close(in->fd);
    in->fd = -1;
}

void input_flush(struct input *in)
{
    while (in->fd >= 0 && in->at < in->len) {
        ssize_t n = write(in->fd, in->data + in->at, in->len - in->at);
        if (n < 0 && errno == EAGAIN)
            return;
        if (n < 0 && errno != EINTR) /* nobody reads any more */
            close_input(in);
        in->at += n > 0 ? (size_t)n : 0;
    }
    if (in->fd < 0 || !in->end)
        return;
    if (!in->terminal)
        close_input(in);
    else if (write(in->fd, &END_OF_TRANSMISSION, 1) < 0 && errno == EAGAIN)
        return;
    in->end = false;
}

/* The ends of a command: three pipes or a terminal, and the pipe that reports a failed start.
 *
 * Init owns all of them, not the daemon: a checkpoint finds no end outside of the sandbox, and a
 * daemon that dies breaks no pipe.  The terminal is of the sandbox's own /dev/pts.  Its path lies
 * in reach of the agent, who may have put anything there: what was opened is believed only when it
 * is that device, and the other end is taken from the descriptor, not from a name. */
#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <termios.h>
#include <unistd.h>

#include "agentenv/init/init.h"

static int open_multiplexer(void)
{
    int fd = open("/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    struct stat st;

    if (fd >= 0 && (fstat(fd, &st) < 0 || !S_ISCHR(st.st_mode) || st.st_rdev != makedev(5, 2))) {
        close(fd);
        errno = ENODEV;
        return -1;
    }
    return fd;
}

int streams_resize(int terminal, unsigned rows, unsigned cols)
{
    struct winsize w = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)cols};

    return ioctl(terminal, TIOCSWINSZ, &w) < 0 ? -errno : 0;
}

static int open_terminal(const struct wire_request *req, struct streams *s)
{
    int unlocked = 0, ours = open_multiplexer(), theirs = -1;

    if (ours >= 0 && ioctl(ours, TIOCSPTLCK, &unlocked) == 0)
        theirs = ioctl(ours, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    s->ours[STREAM_OUT] = ours;
    s->theirs[STREAM_IN] = theirs;
    s->theirs[STREAM_OUT] = theirs < 0 ? -1 : fcntl(theirs, F_DUPFD_CLOEXEC, 0);
    s->theirs[STREAM_ERR] = theirs < 0 ? -1 : fcntl(theirs, F_DUPFD_CLOEXEC, 0);
    s->ours[STREAM_IN] = theirs < 0 ? -1 : fcntl(ours, F_DUPFD_CLOEXEC, 0);
    if (s->ours[STREAM_IN] < 0 || s->theirs[STREAM_ERR] < 0)
        return -errno;
    return streams_resize(ours, req->rows, req->cols);
}

/* The reading end is ours but for the input. */
static int open_pipe(struct streams *s, enum stream which)
{
    int p[2], mine = which == STREAM_IN;

    if (pipe2(p, O_CLOEXEC) < 0)
        return -errno;
    fcntl(p[mine], F_SETFL, O_NONBLOCK);
    s->ours[which] = p[mine];
    s->theirs[which] = p[!mine];
    return 0;
}

static int open_all(const struct wire_request *req, struct streams *s)
{
    int r = open_pipe(s, STREAM_REPORT);

    if (req->flags & WIRE_PTY)
        return r < 0 ? r : open_terminal(req, s);
    if (r == 0)
        r = open_pipe(s, STREAM_OUT);
    if (r == 0)
        r = open_pipe(s, STREAM_ERR);
    return r == 0 && (req->flags & WIRE_STDIN) ? open_pipe(s, STREAM_IN) : r;
}

static void close_all(int fds[STREAMS])
{
    for (int i = 0; i < STREAMS; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

int streams_open(const struct wire_request *req, struct streams *s)
{
    *s = (struct streams){{-1, -1, -1, -1}, {-1, -1, -1, -1}};
    int r = open_all(req, s);

    if (r < 0) {
        close_all(s->ours);
        close_all(s->theirs);
    }
    return r;
}

void streams_close_theirs(struct streams *s)
{
    close_all(s->theirs);
}

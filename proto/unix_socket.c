#include "proto/unix_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/clock.h"

enum { BACKLOG = 128, LOCK_MS = 2000, RETRY_MS = 10 };

int lh_unix_address(const char *path, struct sockaddr_un *a, struct lh_error *err)
{
    *a = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (!*path || strlen(path) >= sizeof a->sun_path)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "socket path \"%s\" must have 1 to %zu bytes; choose a shorter directory",
                       path, sizeof a->sun_path - 1);
    strcpy(a->sun_path, path);
    return 0;
}

static int open_socket(int type, struct lh_error *err)
{
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    return fd < 0 ? lh_fail_errno(err, errno, "unix socket") : fd;
}

/* Of two servers that start at once only one may find the file stale: who looks and binds holds a
 * lock on the directory, which leaves nothing behind. */
static int lock_directory(const char *path, struct lh_error *err)
{
    lh_autofree char *copy = strdup(path);
    int64_t deadline = lh_now_ms() + LOCK_MS;

    if (!copy)
        return lh_fail_errno(err, ENOMEM, "listening on %s", path);
    const char *dir = dirname(copy);
    lh_autoclose int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return lh_fail_errno(err, errno, "directory of socket %s", path);
    while (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        if (errno != EWOULDBLOCK && errno != EINTR)
            return lh_fail_errno(err, errno, "locking %s", dir);
        if (!lh_ms_left(deadline))
            return lh_fail(err, LH_UNAVAILABLE, "%s stays locked by another starting server", dir);
        poll(NULL, 0, RETRY_MS);
    }
    return lh_steal_fd(&fd);
}

static int remove_stale(const struct sockaddr_un *a, int type, struct lh_error *err)
{
    const char *path = a->sun_path;
    lh_autoclose int fd = open_socket(type, err);
    struct stat st;

    if (fd < 0)
        return fd;
    if (lstat(path, &st) < 0)
        return errno == ENOENT ? 0 : lh_fail_errno(err, errno, "socket %s", path);
    if (!S_ISSOCK(st.st_mode))
        return lh_fail(err, LH_ALREADY_EXISTS, "%s is a file, not a socket; choose another path",
                       path);
    if (connect(fd, (const struct sockaddr *)a, sizeof *a) == 0 || errno != ECONNREFUSED)
        return lh_fail(err, LH_ALREADY_EXISTS,
                       "socket in use: a running server has %s; stop it first", path);
    if (unlink(path) < 0)
        return lh_fail_errno(err, errno, "removing the stale socket %s", path);
    return 0;
}

int lh_unix_listen(const char *path, int type, ino_t *inode, struct lh_error *err)
{
    struct sockaddr_un a;
    struct stat st;
    int r = lh_unix_address(path, &a, err);

    if (r)
        return r;
    lh_autoclose int lock = lock_directory(path, err);
    if (lock < 0)
        return lock;
    r = remove_stale(&a, type, err);
    if (r)
        return r;
    lh_autoclose int fd = open_socket(type, err);
    if (fd < 0)
        return fd;
    /* The unbound socket's mode becomes the file's: no window, and no umask that threads share. */
    if (fchmod(fd, 0600) < 0 || bind(fd, (struct sockaddr *)&a, sizeof a) < 0)
        return lh_fail_errno(err, errno, "binding socket %s", path);
    if (listen(fd, BACKLOG) < 0 || stat(path, &st) < 0) {
        r = lh_fail_errno(err, errno, "listening on %s", path);
        unlink(path);
        return r;
    }
    if (inode)
        *inode = st.st_ino;
    return lh_steal_fd(&fd);
}

void lh_unix_unlink(const char *path, ino_t inode)
{
    struct stat st;

    if (stat(path, &st) == 0 && st.st_ino == inode)
        unlink(path);
}

int lh_unix_accept(int listen_fd, struct ucred *peer, struct lh_error *err)
{
    socklen_t len = sizeof *peer;
    lh_autoclose int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd < 0 && (errno == EAGAIN || errno == ECONNABORTED || errno == EINTR))
        return lh_fail(err, LH_UNAVAILABLE, "no client is waiting");
    if (fd < 0)
        return lh_fail_errno(err, errno, "accepting a connection");
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, peer, &len) < 0)
        return lh_fail_errno(err, errno, "credentials of a peer");
    if (peer->uid != 0 && peer->uid != geteuid())
        return lh_fail(err, LH_PERMISSION_DENIED, "process %d of uid %u may not connect",
                       (int)peer->pid, peer->uid);
    return lh_steal_fd(&fd);
}

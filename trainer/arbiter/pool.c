#include "trainer/arbiter/pool.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "proto/cleanup.h"

void pool_init(struct pool *p, size_t chunk_bytes, bool on_device)
{
    *p = (struct pool){.chunk_bytes = chunk_bytes, .on_device = on_device};
}

void pool_finish(struct pool *p)
{
    for (size_t i = 0; i < p->n; i++)
        close(p->chunks[i].fd);
    free(p->chunks);
    *p = (struct pool){0};
}

int pool_shared_segment(const char *name, size_t bytes, ino_t *inode, struct lh_error *err)
{
    lh_autoclose int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    struct stat st;

    if (fd < 0)
        return lh_fail_errno(err, errno, "memfd for %s", name);
    int r = posix_fallocate(fd, 0, (off_t)bytes);
    if (r)
        return lh_fail_errno(err, r, "%zu bytes of memory for %s", bytes, name);
    /* A client that shrank it would give the others SIGBUS. */
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0 || fstat(fd, &st) < 0)
        return lh_fail_errno(err, errno, "memfd for %s", name);
    *inode = st.st_ino;
    return lh_steal_fd(&fd);
}

static int add_chunk(struct pool *p, struct lh_error *err)
{
    if (p->n == p->room) {
        size_t room = p->room ? 2 * p->room : 64;
        struct chunk *grown = realloc(p->chunks, room * sizeof *grown);
        if (!grown)
            return lh_fail_errno(err, ENOMEM, "table of %zu chunks", room);
        p->chunks = grown;
        p->room = room;
    }
    struct chunk *c = &p->chunks[p->n];
    c->inode = 0;
    c->fd = p->on_device ? device_segment(&p->chunk_bytes, err)
                         : pool_shared_segment("longhaul-chunk", p->chunk_bytes, &c->inode, err);
    if (c->fd < 0)
        return c->fd;
    c->lent = false;
    p->n++;
    return 0;
}

int pool_lend(struct pool *p, size_t count, size_t *out, struct lh_error *err)
{
    size_t got = 0;

    while (p->n - p->lent < count) {
        int r = add_chunk(p, err);
        if (r < 0)
            return r;
    }
    for (size_t i = 0; got < count; i++) {
        if (p->chunks[i].lent)
            continue;
        p->chunks[i].lent = true;
        out[got++] = i;
    }
    p->lent += count;
    return 0;
}

void pool_take_back(struct pool *p, const size_t *chunks, size_t count)
{
    for (size_t i = 0; i < count; i++)
        p->chunks[chunks[i]].lent = false;
    p->lent -= count;
}

#include "kvstore/client/link.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvstore/protocol.h"
#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/ipc.h"
#include "proto/parse.h"

enum { OWED_MAX = 16 }; /* small replies, which the socket's buffer surely holds */

struct kv_map *kv_map_ref(struct kv_map *m)
{
    atomic_fetch_add(&m->refs, 1);
    return m;
}

void kv_map_unref(struct kv_map *m)
{
    if (!m || atomic_fetch_sub(&m->refs, 1) != 1)
        return;
    munmap(m->base, m->bytes);
    free(m);
}

uint8_t *kv_map_at(const struct kv_map *m, uint64_t offset, uint64_t bytes)
{
    return offset <= m->bytes && bytes <= m->bytes - offset ? m->base + offset : NULL;
}

/* The size announced must be there, or the first touch beyond it would be SIGBUS. */
static struct kv_map *map_segment(int fd, uint64_t bytes, struct lh_error *err)
{
    struct stat st;

    if (fstat(fd, &st) < 0 || bytes == 0 || (uint64_t)st.st_size < bytes)
        return lh_fail(err, LH_DATA_LOSS, "kvstored's segment is shorter than it says"), NULL;
    lh_autofree struct kv_map *m = malloc(sizeof *m);
    if (!m)
        return lh_fail_errno(err, ENOMEM, "mapping the segment"), NULL;
    m->base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (m->base == MAP_FAILED)
        return lh_fail_errno(err, errno, "mapping %llu bytes", (unsigned long long)bytes), NULL;
    madvise(m->base, bytes, MADV_HUGEPAGE); /* helps where the kernel allows it for shared memory */
    atomic_init(&m->refs, 1);
    m->bytes = bytes;
    return lh_steal(&m);
}

static int refusal(const Longhaul__Kv__V1__Reply *r, struct lh_error *err)
{
    if (r->body_case != LONGHAUL__KV__V1__REPLY__BODY_FAILURE)
        return 0;
    int code = r->failure->code < 0 ? r->failure->code : LH_UNKNOWN;
    return lh_fail(err, code, "kvstored: %s", r->failure->message);
}

static Longhaul__Kv__V1__Reply *receive(int fd, int *got_fd, int64_t deadline_ms,
                                        struct lh_error *err)
{
    size_t n = 1;
    Longhaul__Kv__V1__Reply *r = (void *)ipc_recv(fd, &longhaul__kv__v1__reply__descriptor, got_fd,
                                                  got_fd ? &n : NULL, lh_ms_left(deadline_ms), err);

    if (got_fd && (!r || n == 0))
        *got_fd = -1;
    return r;
}

static Longhaul__Kv__V1__Reply *exchange(int fd, const Longhaul__Kv__V1__Request *q, int *got_fd,
                                         int64_t deadline_ms, struct lh_error *err)
{
    if (ipc_send(fd, &q->base, NULL, 0, lh_ms_left(deadline_ms), err) < 0)
        return NULL;
    return receive(fd, got_fd, deadline_ms, err);
}

/* What a kvstored of another version answers: its protocol must be one of ours. */
static int agree(struct kv_link *l, const Longhaul__Kv__V1__HelloReply *hello, struct lh_error *err)
{
    const char *peer = *hello->version ? hello->version : "unknown";

    if (!kv_protocol_shared(hello->protocol, hello->protocol))
        return lh_fail(
            err, LH_FAILED_PRECONDITION,
            "kvstored of version %.63s speaks protocol %u, this client of version " LONGHAUL_VERSION
            " %d to %d: run both from one build",
            peer, hello->protocol, KV_PROTOCOL_OLDEST, KV_PROTOCOL);
    l->features = hello->features;
    strncpy(l->peer, peer, sizeof l->peer - 1);
    return 0;
}

int kv_link_needs(const struct kv_link *l, enum kv_feature feature, const char *what,
                  struct lh_error *err)
{
    if (l->features & feature)
        return 0;
    return lh_fail(err, LH_UNIMPLEMENTED,
                   "kvstored of version %s knows no %s, this client of version " LONGHAUL_VERSION
                   " does: restart it from this build",
                   l->peer, what);
}

static int say_hello(struct kv_link *l, int fd, const char *name, int64_t deadline_ms,
                     struct lh_error *err)
{
    Longhaul__Kv__V1__HelloRequest hello = LONGHAUL__KV__V1__HELLO_REQUEST__INIT;
    Longhaul__Kv__V1__Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    lh_autoclose int segment = -1;

    hello.protocol = KV_PROTOCOL;
    hello.oldest = KV_PROTOCOL_OLDEST;
    hello.features = KV_FEATURES;
    hello.version = (char *)LONGHAUL_VERSION;
    hello.client = (char *)name;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_HELLO;
    q.hello = &hello;
    lh_automsg(Longhaul__Kv__V1__Reply) r = exchange(fd, &q, &segment, deadline_ms, err);
    if (!r || refusal(r, err) < 0)
        return err->code;
    if (r->body_case != LONGHAUL__KV__V1__REPLY__BODY_HELLO)
        return lh_fail(err, LH_INTERNAL, "kvstored did not say hello");
    if (agree(l, r->hello, err) < 0)
        return err->code;
    if (segment < 0)
        return lh_fail(err, LH_INTERNAL, "kvstored gave no segment");
    l->map = map_segment(segment, r->hello->segment_bytes, err);
    return l->map ? 0 : err->code;
}

int kv_link_open(struct kv_link *l, const char *path, const char *name, int64_t deadline_ms,
                 struct lh_error *err)
{
    struct lh_error local;

    err = err ? err : &local;
    *l = (struct kv_link){.fd = -1};
    lh_autoclose int fd = ipc_connect(path, 0, err);
    if (fd < 0)
        return fd;
    if (say_hello(l, fd, name, deadline_ms, err) < 0)
        return lh_wrap(err, "%s", path);
    l->fd = lh_steal_fd(&fd);
    return 0;
}

void kv_link_close(struct kv_link *l)
{
    if (l->fd >= 0)
        close(l->fd);
    kv_map_unref(l->map);
    *l = (struct kv_link){.fd = -1};
}

/* kvstored answers in order, so what is owed comes first. */
static int settle(struct kv_link *l, int64_t deadline_ms, struct lh_error *err)
{
    for (; l->owed; l->owed--) {
        lh_automsg(Longhaul__Kv__V1__Reply) r = receive(l->fd, NULL, deadline_ms, err);
        if (!r)
            return err->code;
    }
    return 0;
}

static Longhaul__Kv__V1__Reply *call(struct kv_link *l, const Longhaul__Kv__V1__Request *q,
                                     int64_t deadline_ms, struct lh_error *err)
{
    if (ipc_send(l->fd, &q->base, NULL, 0, lh_ms_left(deadline_ms), err) < 0 ||
        settle(l, deadline_ms, err) < 0)
        return NULL;
    return receive(l->fd, NULL, deadline_ms, err);
}

Longhaul__Kv__V1__Reply *kv_link_call(struct kv_link *l, const Longhaul__Kv__V1__Request *q,
                                      int64_t deadline_ms, struct lh_error *err)
{
    lh_automsg(Longhaul__Kv__V1__Reply) r = call(l, q, deadline_ms, err);

    if (!r)
        kv_link_close(l);
    if (!r || refusal(r, err) < 0)
        return NULL;
    return lh_steal(&r);
}

int kv_link_post(struct kv_link *l, const Longhaul__Kv__V1__Request *q, int64_t deadline_ms,
                 struct lh_error *err)
{
    int r = l->owed < OWED_MAX ? 0 : settle(l, deadline_ms, err);

    if (r == 0)
        r = ipc_send(l->fd, &q->base, NULL, 0, lh_ms_left(deadline_ms), err);
    if (r < 0)
        kv_link_close(l);
    else
        l->owed++;
    return r;
}

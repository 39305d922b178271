#include "kvstore/tier/remote.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "kvstore/tier/remote_peer.h"
#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/crc.h"
#include "proto/log.h"

LH_LOG_COMPONENT("kvstored");

struct list {
    struct kv_remote_op *first, **end;
};

struct gate {
    unsigned fails; /* since the last success */
    int64_t closed_until_us;
};

struct worker {
    struct kv_remote_pool *pool;
    void *peer;
    pthread_t thread;
};

struct kv_remote_pool {
    const struct kv_peer_kind *kind;
    struct kv_secrets secrets;
    char *location;
    const char *place; /* in it, behind the scheme */
    int stop_fd, event_fd;
    struct worker workers[KV_REMOTE_THREADS];
    unsigned running;

    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t work;
    bool stopping;
    struct kv_remote_op ops[KV_REMOTE_OPS];
    struct list waiting[KV_GATES], ended;
    struct gate gates[KV_GATES];
    char trouble[sizeof((struct kv_remote *)0)->trouble];
};

static enum kv_remote_gate gate_of(const struct kv_remote_op *op)
{
    return op->kind == KV_REMOTE_STORE ? KV_GATE_OUT : KV_GATE_IN;
}

static void append(struct list *l, struct kv_remote_op *op)
{
    op->next = NULL;
    *(l->first ? l->end : &l->first) = op;
    l->end = &op->next;
}

static struct kv_remote_op *take(struct list *l)
{
    struct kv_remote_op *op = l->first;

    if (op)
        l->first = op->next;
    return op;
}

/* ---- the threads ---- */

static int peer_has(const struct worker *w, const struct kv_remote_op *op, uint32_t i,
                    enum kv_part part, bool *has, struct lh_error *err)
{
    struct kv_remote_object o = op->object;
    char name[KV_REMOTE_NAME];

    o.hash = op->search.chain[i];
    o.part = part;
    kv_remote_name(&o, name);
    return w->pool->kind->has(w->peer, name, op->deadline_ms, has, err);
}

/* How many blocks of the chain are there.  The next one alone decides most searches.  Peers forget
 * what they like, so a block before one that is there may be gone; loading it finds that out. */
static int count_blocks(const struct worker *w, const struct kv_remote_op *op, uint32_t *n,
                        struct lh_error *err)
{
    uint32_t lo = 0, hi = op->search.n, mid = 0;

    while (lo < hi) {
        bool has;
        int r = peer_has(w, op, mid, KV_BLOCK, &has, err);
        if (r < 0)
            return r;
        lo = has ? mid + 1 : lo;
        hi = has ? hi : mid;
        mid = lo + (hi - lo) / 2;
    }
    *n = lo;
    return 0;
}

static int find(const struct worker *w, struct kv_remote_op *op, struct lh_error *err)
{
    uint32_t n = 0;
    int r = count_blocks(w, op, &n, err);

    for (uint32_t looked = 0; r == 0 && n && looked < KV_REMOTE_SCAN; n--, looked++) {
        bool has = !op->search.stateful;
        if (!has)
            r = peer_has(w, op, n - 1, KV_STATE, &has, err);
        if (r < 0 || !has)
            continue;
        op->search.found = n;
        return 0;
    }
    return r == LH_DEADLINE_EXCEEDED && n ? 0 : r; /* it answers, only not often enough */
}

static int load(const struct worker *w, struct kv_remote_op *op, struct lh_error *err)
{
    uint8_t header[KV_REMOTE_HEADER];
    struct iovec parts[] = {{header, sizeof header}, {op->bytes, op->object.bytes}};
    char name[KV_REMOTE_NAME];

    kv_remote_name(&op->object, name);
    int r = w->pool->kind->get(w->peer, name, parts, op->deadline_ms, err);
    if (r < 0)
        return r;
    if (!kv_remote_header_is(header, &op->object) ||
        lh_crc32c(0, op->bytes, op->object.bytes) != op->object.crc32c)
        return lh_fail(err, LH_DATA_LOSS, "%s is something else", name);
    return 0;
}

static int store(const struct worker *w, struct kv_remote_op *op, struct lh_error *err)
{
    uint8_t header[KV_REMOTE_HEADER];
    struct iovec parts[] = {{header, sizeof header}, {op->bytes, op->object.bytes}};
    char name[KV_REMOTE_NAME];

    kv_remote_name(&op->object, name);
    kv_remote_header(&op->object, header);
    int r = w->pool->kind->put(w->peer, name, parts, op->deadline_ms, err);
    /* The memory may have been given away meanwhile; what has arrived then is refused when read. */
    if (r == 0 && lh_crc32c(0, op->bytes, op->object.bytes) != op->object.crc32c)
        return lh_fail(err, LH_DATA_LOSS, "%s changed while it was sent", name);
    return r;
}

/* True: the gate is open, or this one may try it. */
static bool pass(struct kv_remote_pool *p, struct kv_remote_op *op)
{
    LH_LOCKED(&p->lock);
    return lh_now_us() >= p->gates[gate_of(op)].closed_until_us;
}

/* NOT_FOUND is an answer, unless something was to be put there (no such bucket). */
static bool is_failure(const struct kv_remote_op *op)
{
    return op->status < 0 && !(op->status == LH_NOT_FOUND && op->kind != KV_REMOTE_STORE) &&
           op->status != LH_DATA_LOSS && op->status != LH_CANCELLED;
}

static void move_gate(struct kv_remote_pool *p, const struct kv_remote_op *op,
                      const struct lh_error *why)
{
    struct gate *g = &p->gates[gate_of(op)];
    static const char *const names[KV_GATES] = {"loads", "stores"};

    if (!is_failure(op)) {
        if (g->fails && op->status != LH_CANCELLED)
            lh_info("remote-answers", "%s after %u failures", names[gate_of(op)], g->fails);
        g->fails = op->status == LH_CANCELLED ? g->fails : 0;
        return;
    }
    int64_t pause = KV_REMOTE_PAUSE_US;
    for (unsigned i = 0; i < g->fails && pause < KV_REMOTE_PAUSE_MAX_US; i++)
        pause *= 2;
    pause = pause < KV_REMOTE_PAUSE_MAX_US ? pause : KV_REMOTE_PAUSE_MAX_US;
    g->closed_until_us = op->ended_us + pause;
    snprintf(p->trouble, sizeof p->trouble, "%.*s", (int)sizeof p->trouble - 1, why->message);
    if (g->fails++ == 0)
        lh_warn("remote-fails", "no %s for %lld ms: %s", names[gate_of(op)],
                (long long)pause / 1000, p->trouble);
}

static void wake(int event_fd)
{
    uint64_t one = 1;

    if (write(event_fd, &one, sizeof one) < 0 && errno != EAGAIN)
        lh_warn("remote-event", "errno=%d", errno);
}

static void perform(const struct worker *w, struct kv_remote_op *op)
{
    static int (*const kinds[])(const struct worker *, struct kv_remote_op *, struct lh_error *) = {
        [KV_REMOTE_FIND] = find, [KV_REMOTE_LOAD] = load, [KV_REMOTE_STORE] = store};
    struct kv_remote_pool *p = w->pool;
    struct lh_error err = {0};
    bool passes = pass(p, op);

    op->began_us = lh_now_us();
    op->deadline_ms =
        op->began_us / 1000 + KV_REMOTE_OP_MS + op->object.bytes / KV_REMOTE_BYTES_A_MS;
    op->status = passes ? kinds[op->kind](w, op, &err) : LH_UNAVAILABLE;
    op->ended_us = lh_now_us();
    LH_LOCKED(&p->lock);
    if (passes)
        move_gate(p, op, &err);
    append(&p->ended, op);
    wake(p->event_fd);
}

static struct kv_remote_op *wait_for_work(struct kv_remote_pool *p)
{
    struct kv_remote_op *op = NULL;

    LH_LOCKED(&p->lock);
    while (!p->stopping && !(op = take(&p->waiting[KV_GATE_IN])) &&
           !(op = take(&p->waiting[KV_GATE_OUT])))
        pthread_cond_wait(&p->work, &p->lock);
    return op;
}

static void *serve(void *arg)
{
    const struct worker *w = arg;

    for (struct kv_remote_op *op; (op = wait_for_work(w->pool));)
        perform(w, op);
    return NULL;
}

/* ---- beginning and end ---- */

static int choose_kind(struct kv_remote_pool *p, const char *location, struct lh_error *err)
{
    static const struct kv_peer_kind *const kinds[] = {&kv_peer_redis, &kv_peer_s3};

    for (size_t i = 0; i < LH_ARRAY_SIZE(kinds); i++) {
        size_t n = strlen(kinds[i]->scheme);
        if (strncmp(location, kinds[i]->scheme, n) != 0)
            continue;
        p->kind = kinds[i];
        p->location = strdup(location);
        p->place = p->location ? p->location + n : NULL;
        return p->place ? 0 : lh_fail_errno(err, ENOMEM, "kvstore.remote");
    }
    return lh_fail(err, LH_INVALID_ARGUMENT,
                   "kvstore.remote %.200s: redis://HOST:PORT[,HOST:PORT...] or "
                   "s3://BUCKET[/PREFIX]",
                   location);
}

static int open_peers(struct kv_remote_pool *p, uint32_t ttl_s, struct lh_error *err)
{
    struct kv_peer_options o = {
        .place = p->place, .secrets = &p->secrets, .ttl_s = ttl_s, .stop_fd = p->stop_fd};

    for (int i = 0; i < KV_REMOTE_THREADS; i++) {
        p->workers[i] = (struct worker){.pool = p, .peer = p->kind->open(&o, err)};
        if (!p->workers[i].peer)
            return err->code;
    }
    return 0;
}

static int start_threads(struct kv_remote_pool *p, struct lh_error *err)
{
    for (; p->running < KV_REMOTE_THREADS; p->running++) {
        struct worker *w = &p->workers[p->running];
        int e = pthread_create(&w->thread, NULL, serve, w);
        if (e)
            return lh_fail_errno(err, e, "a thread of the remote tier");
    }
    return 0;
}

int kv_remote_open(struct kv_remote *r, const struct kv_remote_options *o, struct lh_error *err)
{
    struct kv_remote_pool *p = calloc(1, sizeof *p);

    *r = (struct kv_remote){.pool = p, .event_fd = -1};
    if (!p)
        return lh_fail_errno(err, ENOMEM, "the remote tier");
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    p->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    r->event_fd = p->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int e = p->stop_fd < 0 || p->event_fd < 0 ? lh_fail_errno(err, errno, "eventfd") : 0;
    if (e == 0)
        e = choose_kind(p, o->location, err);
    if (e == 0)
        e = kv_secrets_read(&p->secrets, o->credentials, err);
    if (e == 0)
        e = open_peers(p, o->ttl_s, err);
    if (e == 0)
        e = start_threads(p, err);
    if (e < 0) {
        kv_remote_close(r);
        return e;
    }
    r->location = p->location;
    r->object_max = p->kind->object_max - KV_REMOTE_HEADER;
    return 0;
}

static void stop_threads(struct kv_remote_pool *p)
{
    pthread_mutex_lock(&p->lock);
    p->stopping = true;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    wake(p->stop_fd);
    while (p->running)
        pthread_join(p->workers[--p->running].thread, NULL);
}

void kv_remote_close(struct kv_remote *r)
{
    struct kv_remote_pool *p = r->pool;

    if (!p)
        return;
    stop_threads(p);
    for (int i = 0; i < KV_REMOTE_THREADS; i++)
        if (p->workers[i].peer)
            p->kind->close(p->workers[i].peer);
    int fds[] = {p->stop_fd, p->event_fd};
    for (size_t i = 0; i < LH_ARRAY_SIZE(fds); i++)
        if (fds[i] >= 0)
            close(fds[i]);
    kv_secrets_wipe(&p->secrets);
    pthread_cond_destroy(&p->work);
    pthread_mutex_destroy(&p->lock);
    free(p->location);
    free(p);
    *r = (struct kv_remote){.event_fd = -1};
}

/* ---- for the one thread that asks ---- */

bool kv_remote_is_paused(const struct kv_remote *r, enum kv_remote_gate gate)
{
    LH_LOCKED(&r->pool->lock);
    return r->pool->gates[gate].fails;
}

bool kv_remote_ready(const struct kv_remote *r, enum kv_remote_gate gate, int64_t now_us)
{
    unsigned most = gate == KV_GATE_OUT ? KV_REMOTE_STORES : KV_REMOTE_OPS - KV_REMOTE_STORES;
    struct kv_remote_pool *p = r->pool;

    LH_LOCKED(&p->lock);
    const struct gate *g = &p->gates[gate];
    return now_us >= g->closed_until_us && r->in_flight[gate] < (g->fails ? 1 : most);
}

void kv_remote_begin(struct kv_remote *r, const struct kv_remote_op *op)
{
    struct kv_remote_pool *p = r->pool;
    struct kv_remote_op *own = p->ops;

    LH_LOCKED(&p->lock);
    while (own->busy)
        own++;
    *own = *op;
    own->busy = true;
    r->in_flight[gate_of(op)]++;
    r->bytes_in_flight[gate_of(op)] += op->object.bytes;
    append(&p->waiting[gate_of(op)], own);
    pthread_cond_signal(&p->work);
}

static void measure(struct kv_remote *r, const struct kv_remote_op *op)
{
    enum kv_remote_gate gate = gate_of(op);
    int64_t from = op->began_us > r->measured_us[gate] ? op->began_us : r->measured_us[gate];

    kv_rate_add(&r->rate[gate], op->object.bytes, (double)(op->ended_us - from) / 1e6);
    if (op->ended_us > r->measured_us[gate])
        r->measured_us[gate] = op->ended_us;
}

static void count(struct kv_remote *r, const struct kv_remote_op *op)
{
    struct kv_remote_counters *c = &r->count;

    c->finds += op->kind == KV_REMOTE_FIND;
    c->missing += op->kind == KV_REMOTE_LOAD && op->status == LH_NOT_FOUND;
    c->corrupt += op->status == LH_DATA_LOSS;
    c->errors += is_failure(op);
    if (op->status < 0 || op->kind == KV_REMOTE_FIND)
        return;
    measure(r, op);
    *(op->kind == KV_REMOTE_LOAD ? &c->loaded : &c->stored) += 1;
    *(op->kind == KV_REMOTE_LOAD ? &c->loaded_bytes : &c->stored_bytes) += op->object.bytes;
}

bool kv_remote_ended(struct kv_remote *r, struct kv_remote_op *out)
{
    struct kv_remote_pool *p = r->pool;

    pthread_mutex_lock(&p->lock);
    struct kv_remote_op *op = take(&p->ended);
    if (op) {
        *out = *op;
        op->busy = false;
        memcpy(r->trouble, p->trouble, sizeof r->trouble);
    }
    pthread_mutex_unlock(&p->lock);
    if (!op)
        return false;
    r->in_flight[gate_of(out)]--;
    r->bytes_in_flight[gate_of(out)] -= out->object.bytes;
    count(r, out);
    return true;
}

double kv_remote_load_s(const struct kv_remote *r, uint64_t bytes, int64_t now_us)
{
    double rate = r->rate[KV_GATE_IN].per_s;

    if (rate <= 0 || now_us - r->measured_us[KV_GATE_IN] > KV_REMOTE_TRIAL_US)
        return 0;
    return (double)(bytes + r->bytes_in_flight[KV_GATE_IN]) / rate;
}

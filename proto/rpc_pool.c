#include <stdlib.h>

#include "proto/rpc_core.h"

struct rpc_pool {
    pthread_mutex_t mutex;
    pthread_cond_t work;
    struct rpc_call *first, **last; /* calls without a thread */
    bool stopping;
    unsigned running;
    pthread_t threads[];
};

static struct rpc_call *take(struct rpc_pool *p)
{
    LH_LOCKED(&p->mutex);
    while (!p->first && !p->stopping)
        pthread_cond_wait(&p->work, &p->mutex);
    struct rpc_call *c = p->first;
    if (!c)
        return NULL;
    p->first = c->next;
    if (!p->first)
        p->last = &p->first;
    return c;
}

static void *serve_calls(void *arg)
{
    struct rpc_call *c;

    while ((c = take(arg))) {
        rpc_call_serve(c);
        rpc_call_unref(c);
    }
    return NULL;
}

void rpc_pool_add(struct rpc_pool *p, struct rpc_call *c)
{
    LH_LOCKED(&p->mutex);
    c->next = NULL;
    *p->last = c;
    p->last = &c->next;
    pthread_cond_signal(&p->work);
}

struct rpc_pool *rpc_pool_create(unsigned threads, struct lh_error *err)
{
    struct rpc_pool *p = calloc(1, sizeof *p + threads * sizeof *p->threads);

    if (!p) {
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for %u handler threads", threads);
        return NULL;
    }
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->work, NULL);
    p->last = &p->first;
    for (; p->running < threads; p->running++) {
        int r = pthread_create(&p->threads[p->running], NULL, serve_calls, p);
        if (r) {
            lh_fail_errno(err, r, "handler thread %u of %u", p->running + 1, threads);
            rpc_pool_destroy(p);
            return NULL;
        }
    }
    return p;
}

void rpc_pool_destroy(struct rpc_pool *p)
{
    if (!p)
        return;
    pthread_mutex_lock(&p->mutex);
    p->stopping = true;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->mutex);
    for (unsigned i = 0; i < p->running; i++)
        pthread_join(p->threads[i], NULL);
    pthread_cond_destroy(&p->work);
    pthread_mutex_destroy(&p->mutex);
    free(p);
}

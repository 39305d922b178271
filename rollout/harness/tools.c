#include "rollout/harness/tools.h"

#include <errno.h>
#include <stdlib.h>

#include "proto/clock.h"
#include "proto/wait.h"

struct job_list {
    struct tool_job *head, **tail;
};

struct tools {
    pthread_t *threads;
    unsigned n_threads;
    void (*wake)(void *ctx);
    void *ctx;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* under lock */
    bool stop;
    unsigned alive;
    struct job_list todo, finished;
};

static void push(struct job_list *l, struct tool_job *j)
{
    j->next = NULL;
    *l->tail = j;
    l->tail = &j->next;
}

static struct tool_job *pop(struct job_list *l)
{
    struct tool_job *j = l->head;

    if (j && !(l->head = j->next))
        l->tail = &l->head;
    return j;
}

static void *tool_thread(void *arg)
{
    struct tools *t = arg;

    pthread_mutex_lock(&t->lock);
    while (!t->stop) {
        struct tool_job *j = pop(&t->todo);
        if (!j) {
            pthread_cond_wait(&t->changed, &t->lock);
            continue;
        }
        pthread_mutex_unlock(&t->lock);
        j->run(j);
        pthread_mutex_lock(&t->lock);
        push(&t->finished, j);
        t->wake(t->ctx);
    }
    t->alive--;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

struct tools *tools_create(unsigned threads, void (*wake)(void *ctx), void *ctx,
                           struct lh_error *err)
{
    struct tools *t = calloc(1, sizeof *t);

    if (!t || !(t->threads = calloc(threads, sizeof *t->threads))) {
        free(t);
        return lh_fail_errno(err, ENOMEM, "tool threads"), NULL;
    }
    t->wake = wake;
    t->ctx = ctx;
    t->todo.tail = &t->todo.head;
    t->finished.tail = &t->finished.head;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->changed, NULL);
    for (; t->n_threads < threads; t->n_threads++) {
        int r = pthread_create(&t->threads[t->n_threads], NULL, tool_thread, t);
        if (r) {
            lh_fail_errno(err, r, "tool thread %u", t->n_threads);
            tools_destroy(t);
            return NULL;
        }
        LH_LOCKED(&t->lock);
        t->alive++;
    }
    return t;
}

bool tools_stop(struct tools *t, int64_t deadline_ms)
{
    LH_LOCKED(&t->lock);

    t->stop = true;
    for (struct tool_job *j; (j = pop(&t->todo));)
        push(&t->finished, j);
    pthread_cond_broadcast(&t->changed);
    while (t->alive)
        if (!lh_wait_until(&t->changed, &t->lock, deadline_ms))
            return t->alive == 0;
    return true;
}

void tools_destroy(struct tools *t)
{
    if (!t)
        return;
    pthread_mutex_lock(&t->lock);
    t->stop = true;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
    for (unsigned i = 0; i < t->n_threads; i++)
        pthread_join(t->threads[i], NULL);
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->lock);
    free(t->threads);
    free(t);
}

void tools_submit(struct tools *t, struct tool_job *job)
{
    LH_LOCKED(&t->lock);
    push(&t->todo, job);
    pthread_cond_signal(&t->changed);
}

struct tool_job *tools_finished(struct tools *t)
{
    LH_LOCKED(&t->lock);
    return pop(&t->finished);
}

/* Waiting for a condition variable until a deadline on the clock of all deadlines.  The variable
 * itself needs no attributes: the clock is named by the wait. */
#ifndef PROTO_WAIT_H
#define PROTO_WAIT_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* False when deadline_ms (as of lh_now_ms()) has passed; look at the condition all the same. */
static inline bool lh_wait_until(pthread_cond_t *c, pthread_mutex_t *m, int64_t deadline_ms)
{
    struct timespec until = {.tv_sec = deadline_ms / 1000, .tv_nsec = deadline_ms % 1000 * 1000000};

    return pthread_cond_clockwait(c, m, CLOCK_MONOTONIC, &until) == 0;
}

#endif

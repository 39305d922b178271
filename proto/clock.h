/* Time.  Deadlines are absolute milliseconds on the monotonic clock. */
#ifndef PROTO_CLOCK_H
#define PROTO_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline int64_t lh_now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static inline int64_t lh_now_ms(void)
{
    return lh_now_us() / 1000;
}

/* Milliseconds since 1970, for records that outlive the process. */
static inline int64_t lh_unix_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* What is left until `deadline_ms`, never negative; fits poll(2). */
static inline int lh_ms_left(int64_t deadline_ms)
{
    int64_t left = deadline_ms - lh_now_ms();

    return left < 0 ? 0 : left > INT32_MAX ? INT32_MAX : (int)left;
}

#endif

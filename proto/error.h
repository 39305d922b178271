/* Errors of the whole project: a code and a message that grows context while unwinding.
 *
 * A fallible function returns int (0, or a negative lh_status) or a pointer, and takes
 * `struct lh_error *err` last.  On success it leaves *err alone.  On failure it fills *err once,
 * at the place that knows what went wrong; callers add where they were with lh_wrap().  A message
 * names the thing (path, field, id) and, where one exists, the next step.  `err` may be NULL when
 * the caller wants the code only.
 *
 * The object is a plain value on the caller's stack: it needs no allocation, so out of memory can
 * be reported too, and no clean-up.  Not shared between threads. */
#ifndef PROTO_ERROR_H
#define PROTO_ERROR_H

/* Negated gRPC status codes, one to one, so a handler's error is the status the client sees. */
enum lh_status {
    LH_OK = 0,
    LH_CANCELLED = -1,
    LH_UNKNOWN = -2,
    LH_INVALID_ARGUMENT = -3,
    LH_DEADLINE_EXCEEDED = -4,
    LH_NOT_FOUND = -5,
    LH_ALREADY_EXISTS = -6,
    LH_PERMISSION_DENIED = -7,
    LH_RESOURCE_EXHAUSTED = -8,
    LH_FAILED_PRECONDITION = -9,
    LH_ABORTED = -10, /* a lower attempt, a lost race: retry from the start */
    LH_OUT_OF_RANGE = -11,
    LH_UNIMPLEMENTED = -12,
    LH_INTERNAL = -13,
    LH_UNAVAILABLE = -14, /* the peer is not there: retry as it is */
    LH_DATA_LOSS = -15,
    LH_UNAUTHENTICATED = -16,
};

struct lh_error {
    int code; /* enum lh_status */
    char message[1024];
};

/* Fills *err and returns `code`, so that a failure is one statement: return lh_fail(err, ...). */
int lh_fail(struct lh_error *err, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* The same from an errno value; appends strerror(errnum) and picks the code that fits. */
int lh_fail_errno(struct lh_error *err, int errnum, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Puts "context: " before the message and returns the code it already had. */
int lh_wrap(struct lh_error *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

int lh_status_from_errno(int errnum);
const char *lh_status_name(int code); /* "NOT_FOUND"; never NULL */

#endif

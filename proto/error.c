#include "proto/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const struct {
    int errnum, status;
} errno_map[] = {
    {EINVAL, LH_INVALID_ARGUMENT},
    {ENAMETOOLONG, LH_INVALID_ARGUMENT},
    {ENOENT, LH_NOT_FOUND},
    {ENOTDIR, LH_NOT_FOUND},
    {ESRCH, LH_NOT_FOUND},
    {EEXIST, LH_ALREADY_EXISTS},
    {EADDRINUSE, LH_ALREADY_EXISTS},
    {EACCES, LH_PERMISSION_DENIED},
    {EPERM, LH_PERMISSION_DENIED},
    {ENOSPC, LH_RESOURCE_EXHAUSTED},
    {EDQUOT, LH_RESOURCE_EXHAUSTED},
    {ENOMEM, LH_RESOURCE_EXHAUSTED},
    {EMFILE, LH_RESOURCE_EXHAUSTED},
    {ENFILE, LH_RESOURCE_EXHAUSTED},
    {EBUSY, LH_FAILED_PRECONDITION},
    {ENOTEMPTY, LH_FAILED_PRECONDITION},
    {ETIMEDOUT, LH_DEADLINE_EXCEEDED},
    {ENOSYS, LH_UNIMPLEMENTED},
    {EOPNOTSUPP, LH_UNIMPLEMENTED},
    {ECONNREFUSED, LH_UNAVAILABLE},
    {ECONNRESET, LH_UNAVAILABLE},
    {EPIPE, LH_UNAVAILABLE},
    {EAGAIN, LH_UNAVAILABLE},
    {EIO, LH_DATA_LOSS},
};

static const char *const status_names[] = {
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
};

int lh_status_from_errno(int errnum)
{
    for (size_t i = 0; i < sizeof errno_map / sizeof *errno_map; i++)
        if (errno_map[i].errnum == errnum)
            return errno_map[i].status;
    return LH_UNKNOWN;
}

const char *lh_status_name(int code)
{
    size_t i = (size_t)(code < 0 ? -code : code);

    return i < sizeof status_names / sizeof *status_names ? status_names[i] : "UNKNOWN";
}

int lh_fail(struct lh_error *err, int code, const char *fmt, ...)
{
    va_list ap;

    if (!err)
        return code;
    err->code = code;
    va_start(ap, fmt);
    vsnprintf(err->message, sizeof err->message, fmt, ap);
    va_end(ap);
    return code;
}

int lh_fail_errno(struct lh_error *err, int errnum, const char *fmt, ...)
{
    int code = lh_status_from_errno(errnum);
    va_list ap;

    if (!err)
        return code;
    err->code = code;
    va_start(ap, fmt);
    int n = vsnprintf(err->message, sizeof err->message, fmt, ap);
    va_end(ap);
    if (n >= 0 && (size_t)n < sizeof err->message)
        snprintf(err->message + n, sizeof err->message - (size_t)n, ": %s", strerror(errnum));
    return code;
}

int lh_wrap(struct lh_error *err, const char *fmt, ...)
{
    char inner[sizeof err->message];
    va_list ap;

    if (!err)
        return LH_UNKNOWN;
    memcpy(inner, err->message, sizeof inner);
    va_start(ap, fmt);
    int n = vsnprintf(err->message, sizeof err->message, fmt, ap);
    va_end(ap);
    if (n >= 0 && (size_t)n < sizeof err->message)
        snprintf(err->message + n, sizeof err->message - (size_t)n, ": %s", inner);
    return err->code;
}

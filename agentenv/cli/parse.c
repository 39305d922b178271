#include <errno.h>
#include <math.h>
#include <string.h>

#include "agentenv/cli/verbs.h"
#include "proto/cleanup.h"

struct unit {
    const char *suffix;
    double factor;
};

/* "1.5" + suffix of the table. */
static int parse_with_unit(const char *text, const struct unit *units, const char *what, double max,
                           double *out, struct lh_error *err)
{
    char *end;

    errno = 0;
    double v = strtod(text, &end);
    for (const struct unit *u = units; end != text && errno == 0 && u->suffix; u++) {
        if (strcmp(end, u->suffix))
            continue;
        *out = v * u->factor;
        if (isfinite(*out) && *out >= 0 && *out <= max)
            return 0;
        break;
    }
    return lh_fail(err, LH_INVALID_ARGUMENT, "\"%s\" is not a %s", text, what);
}

int cli_size(const char *text, uint64_t *bytes, struct lh_error *err)
{
    static const struct unit units[] = {{"", 1},
                                        {"k", 1024},
                                        {"K", 1024},
                                        {"M", 1024 * 1024},
                                        {"m", 1024 * 1024},
                                        {"G", 1073741824.0},
                                        {"g", 1073741824.0},
                                        {NULL, 0}};
    double v = 0;
    int r = parse_with_unit(text, units, "size (examples: 512M, 2G, 100k)", 1e15, &v, err);

    if (r == 0)
        *bytes = (uint64_t)v;
    return r;
}

int cli_duration(const char *text, uint32_t *ms, struct lh_error *err)
{
    static const struct unit units[] = {{"", 1000},   {"ms", 1},      {"s", 1000},
                                        {"m", 60000}, {"h", 3600000}, {NULL, 0}};
    double v = 0;
    int r = parse_with_unit(text, units, "duration (examples: 90, 1.5s, 200ms, 5m)", UINT32_MAX, &v,
                            err);

    if (r == 0)
        *ms = (uint32_t)v;
    return r;
}

int cli_number(const char *text, double max, double *out, const char *what, struct lh_error *err)
{
    char *end;

    *out = strtod(text, &end);
    if (end == text || *end || !(*out > 0 && *out <= max))
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s \"%s\": a number above 0, at most %g", what,
                       text, max);
    return 0;
}

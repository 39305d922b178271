/* Values of options.  What is wrong with one is wrong usage: argp says so and ends the program. */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "agentenv/cli/verbs.h"
#include "proto/cleanup.h"

struct unit {
    const char *suffix;
    double factor;
};

/* "1.5" + suffix of the table; negative = none. */
static double parse_with_unit(const char *text, const struct unit *units, double max)
{
    char *end;

    errno = 0;
    double v = strtod(text, &end);
    for (const struct unit *u = units; end != text && errno == 0 && u->suffix; u++)
        if (!strcmp(end, u->suffix)) {
            double whole = v * u->factor;
            return isfinite(whole) && whole >= 0 && whole <= max ? whole : -1;
        }
    return -1;
}

uint64_t cli_size(struct argp_state *state, const char *option, const char *text)
{
    static const struct unit units[] = {{"", 1},
                                        {"k", 1024},
                                        {"K", 1024},
                                        {"M", 1024 * 1024},
                                        {"m", 1024 * 1024},
                                        {"G", 1073741824.0},
                                        {"g", 1073741824.0},
                                        {NULL, 0}};
    double v = parse_with_unit(text, units, 1e15);

    if (v < 0)
        argp_error(state, "%s \"%s\": a size (examples: 512M, 2G, 100k)", option, text);
    return v < 0 ? 0 : (uint64_t)v;
}

uint32_t cli_duration(struct argp_state *state, const char *option, const char *text)
{
    static const struct unit units[] = {{"", 1000},   {"ms", 1},      {"s", 1000},
                                        {"m", 60000}, {"h", 3600000}, {NULL, 0}};
    double v = parse_with_unit(text, units, UINT32_MAX);

    if (v < 0)
        argp_error(state, "%s \"%s\": a duration (examples: 90, 1.5s, 200ms, 5m)", option, text);
    return v < 0 ? 0 : (uint32_t)v;
}

double cli_number(struct argp_state *state, const char *option, const char *text, double max)
{
    char *end;
    double v = strtod(text, &end);
    bool good = end != text && !*end && v > 0 && v <= max;

    if (!good)
        argp_error(state, "%s \"%s\": a number above 0, at most %.0f", option, text, max);
    return good ? v : 0;
}

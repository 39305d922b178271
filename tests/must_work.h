/* What a test does when the machine lacks what it needs: it says so and is skipped, unless the
 * facility is named in LONGHAUL_MUST_WORK (a comma list, or 1 for all): then it fails.  CI sets it.
 */
#ifndef TESTS_MUST_WORK_H
#define TESTS_MUST_WORK_H

#include <criterion/criterion.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static inline bool must_work(const char *facility)
{
    const char *list = getenv("LONGHAUL_MUST_WORK");
    size_t n = strlen(facility);

    for (const char *w = list ? list : ""; *w; w += strcspn(w, ",") + (w[strcspn(w, ",")] == ',')) {
        size_t len = strcspn(w, ",");
        if ((len == 1 && *w == '1') || (len == n && !strncmp(w, facility, n)))
            return true;
    }
    return false;
}

#define NEEDS(facility, available, why)                                                            \
    do {                                                                                           \
        if (available)                                                                             \
            break;                                                                                 \
        if (must_work(facility))                                                                   \
            cr_fatal("%s is missing and must work here: %s", facility, why);                       \
        cr_skip_test("SKIPPED, %s is missing: %s", facility, why);                                 \
    } while (0)

#endif

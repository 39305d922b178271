/* What this machine lacks for sandboxes, in words. */
#ifndef TESTS_UNIT_AGENTENV_MISSING_H
#define TESTS_UNIT_AGENTENV_MISSING_H

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "agentenv/sandbox/box.h"

static inline void missing_note(void *ctx, const char *text)
{
    char *problems = ctx;
    size_t n = strlen(problems);

    snprintf(problems + n, 2048 - n, "%s%s", n ? "; " : "", text);
}

/* NULL = nothing. */
static inline const char *missing_for_sandboxes(void)
{
    static char problems[2048];

    problems[0] = 0;
    if (access("/bin/busybox", X_OK) < 0)
        missing_note(problems, "/bin/busybox: apt-get install busybox-static");
    box_selftest(missing_note, problems);
    return *problems ? problems : NULL;
}

#endif

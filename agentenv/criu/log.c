/* What CRIU says of a failure.  Its log has lines like
 *     (00.021756)      1: Error (criu/sk-inet.c:188): inet: Connected TCP socket, consider …
 * of which the first errors are causes and the last ones that it gives up. */
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "agentenv/criu/engine.h"
#include "proto/cleanup.h"
#include "proto/parse.h"

enum { REASONS = 2 };

/* Met on success too: CRIU wants to raise a limit that it does not need. */
static bool harmless(const char *text)
{
    return strstr(text, "Can't setup RLIMIT_NOFILE") != NULL;
}

void criu_reason(int dir, const char *log, char *out, size_t size)
{
    int fd = openat(dir, log, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    lh_autofclose FILE *f = fd < 0 ? NULL : fdopen(fd, "r");
    char line[400];
    int found = 0;

    out[0] = 0;
    while (f && found < REASONS && fgets(line, sizeof line, f)) {
        char *text = strstr(line, "Error (");
        char *end = text ? strstr(text, "): ") : NULL;
        if (!end || harmless(end))
            continue;
        end += strlen("): ");
        end[strcspn(end, "\n")] = 0;
        lh_text_clean(end); /* it quotes names from inside */
        size_t n = strlen(out);
        snprintf(out + n, size - n, "%s%s", n ? "; " : "criu: ", end);
        found++;
    }
}

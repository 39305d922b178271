/* Any bytes as a Dockerfile: refused with a line, or steps that say something. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agentenv/task/dockerfile.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct lh_error err = {0};
    struct dockerfile f;
    unsigned line;

    if (dockerfile_parse("D", (const char *)data, size, &f, &err) < 0) {
        if (err.code != LH_RESOURCE_EXHAUSTED && sscanf(err.message, "D:%u: ", &line) != 1)
            abort();
        return 0;
    }
    for (size_t i = 0; i < f.n; i++)
        if (f.steps[i].n_words < (f.steps[i].kind == DOCKER_COPY ? 2u : 1u) || !f.steps[i].line)
            abort();
    dockerfile_finish(&f);
    return 0;
}

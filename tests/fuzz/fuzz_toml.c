/* Any bytes as a task.toml: refused with a line, or values whose every key has a line. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "agentenv/task/toml.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct lh_error err = {0};
    struct toml t;
    const char *name;
    json_t *v;
    int line;

    if (toml_parse("T", (const char *)data, size, &t, &err) < 0) {
        if (sscanf(err.message, "T:%d: ", &line) != 1 || line < 1)
            abort();
        return 0;
    }
    json_object_foreach(t.root, name, v) if (toml_line(&t, name) < 1) abort();
    toml_finish(&t);
    return 0;
}

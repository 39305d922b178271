/* Any bytes: open or a message, and every tensor of what opens can be read.  The bytes are tried as
 * a file, and as header and data of a file whose length field is right (a fuzzer seldom guesses
 * it). */
#include <string.h>

#include "trainer/policy/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void try(const void *bytes, size_t size)
{
    struct lh_error err = {0};
    lh_auto(safetensors) s = safetensors_parse(bytes, size, "fuzz", &err);

    for (size_t i = 0; s && i < safetensors_count(s); i++) {
        const struct safetensor *t = safetensors_at(s, i);
        float *to = malloc(t->count * sizeof *to + 1);

        if (to)
            safetensor_floats(t, to, &err);
        free(to);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t header = strnlen((const char *)data, size);
    char *file = malloc(sizeof header + size);

    try(data, size);
    if (!file)
        return 0;
    memcpy(file, &header, sizeof header);
    memcpy(file + sizeof header, data, size);
    try(file, sizeof header + size);
    free(file);
    return 0;
}

/* Any bytes: open or a message, and every tensor of what opens can be read. */
#include "trainer/policy/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct lh_error err = {0};
    lh_auto(safetensors) s = safetensors_parse(data, size, "fuzz", &err);

    for (size_t i = 0; s && i < safetensors_count(s); i++) {
        const struct safetensor *t = safetensors_at(s, i);
        float *to = malloc(t->count * sizeof *to + 1);

        if (to)
            safetensor_floats(t, to, &err);
        free(to);
    }
    return 0;
}

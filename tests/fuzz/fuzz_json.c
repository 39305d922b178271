/* Any bytes as JSON of a task: refused, or read, printed and read again as the same message. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "longhaul/task/v1/task.pb-c.h"
#include "proto/cleanup.h"
#include "proto/json.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const ProtobufCMessageDescriptor *type = &longhaul__task__v1__task_set__descriptor;
    const struct lh_parse_limits limits = {.heap = 16 << 20};
    struct lh_error err = {0};
    size_t len, again_len;
    lh_automsg(ProtobufCMessage) m = lh_json_parse(type, (const char *)data, size, limits, &err);

    if (!m)
        return 0;
    lh_autofree char *text = lh_json_print(m, &err);
    if (!text)
        return 0; /* memory */
    lh_automsg(ProtobufCMessage) again = lh_json_parse(type, text, strlen(text), limits, &err);
    if (!again)
        return 0; /* the memory bound is an estimate from the form it came in */
    lh_autofree uint8_t *a = lh_pack(m, &len, &err), *b = lh_pack(again, &again_len, &err);
    if (len != again_len || memcmp(a, b, len) != 0)
        abort();
    return 0;
}

/* Any bytes as a set of tasks: parsed or refused, and what is parsed is validated, digested and
 * printed without a slip. */
#include <stdint.h>
#include <stdio.h>

#include "agentenv/task/task.h"
#include "proto/parse.h"
#include "proto/text.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static FILE *nowhere;
    struct lh_parse_limits limits = {.heap = 16 << 20};
    struct lh_error err;
    uint8_t digest[TASK_DIGEST];

    if (!nowhere)
        nowhere = fopen("/dev/null", "w");
    TaskSet *set = (TaskSet *)lh_parse(TASK_SET_DESCRIPTOR, data, size, limits, &err);
    for (size_t i = 0; set && i < set->n_tasks; i++)
        if (task_validate(set->tasks[i], &err) == 0 && task_digest(set->tasks[i], digest, &err) < 0)
            __builtin_trap(); /* what is valid has a digest */
    if (set)
        lh_text_print(nowhere, &set->base);
    lh_message_free((ProtobufCMessage *)set);
    return 0;
}

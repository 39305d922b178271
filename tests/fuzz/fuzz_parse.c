/* What the guard of proto/parse.c lets pass never makes protobuf-c allocate more than the limit,
 * and what was parsed can be packed and parsed again.  The first byte picks the type and the limit.
 *
 * Includes the source: the guard alone, without the allocator behind it, is what must hold. */
#include "proto/parse.c"

#include "longhaul/experience/v1/experience.pb-c.h"
#include "longhaul/job/v1/job.pb-c.h"
#include "longhaul/kv/v1/kv.pb-c.h"
#include "longhaul/sandbox/v1/sandbox.pb-c.h"
#include "longhaul/task/v1/task.pb-c.h"
#include "proto/cleanup.h"
#include "test.pb-c.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static const ProtobufCMessageDescriptor *const types[] = {
    &longhaul__test__v1__everything__descriptor,
    &longhaul__test__v1__node__descriptor,
    &longhaul__experience__v1__envelope__descriptor,
    &longhaul__sandbox__v1__create_request__descriptor,
    &longhaul__sandbox__v1__list_snapshots_reply__descriptor,
    &longhaul__task__v1__task__descriptor,
    &longhaul__job__v1__job__descriptor,
    &longhaul__kv__v1__request__descriptor,
};

struct meter {
    size_t used, limit;
};

static void *meter_alloc(void *data, size_t n)
{
    struct meter *m = data;

    m->used += n + COST_MALLOC;
    if (m->used > m->limit)
        abort(); /* the guard should have refused this input */
    return malloc(n);
}

static void check_again(const ProtobufCMessageDescriptor *type, const ProtobufCMessage *m)
{
    size_t len;
    lh_autofree uint8_t *p = lh_pack(m, &len, NULL);
    lh_automsg(ProtobufCMessage) again =
        lh_parse(type, p, len, (struct lh_parse_limits){.depth = 33, .heap = 1 << 30}, NULL);

    if (!again)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    if (!n)
        return 0;
    const ProtobufCMessageDescriptor *type = types[p[0] & 7];
    struct lh_parse_limits limits = {.depth = 32, .heap = (size_t)1024 << (p[0] >> 3 & 7)};
    struct guard g = {.top = type, .start = p + 1, .left = limits};
    struct meter m = {0, limits.heap};

    if (walk(&g, type, p + 1, n - 1))
        return 0;
    ProtobufCAllocator a = {meter_alloc, budget_free, &m};
    ProtobufCMessage *raw = protobuf_c_message_unpack(type, &a, n - 1, p + 1);
    if (raw)
        protobuf_c_message_free_unpacked(raw, &a);
    lh_automsg(ProtobufCMessage) parsed = lh_parse(type, p + 1, n - 1, limits, NULL);
    if (!raw != !parsed)
        abort();
    if (parsed)
        check_again(type, parsed);
    return 0;
}

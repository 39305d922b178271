#include "proto/rpc_core.h"

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/support/log.h>
#include <stdlib.h>

#include "proto/clock.h"
#include "proto/log.h"

LH_LOG_COMPONENT("grpc");

static pthread_once_t once = PTHREAD_ONCE_INIT;

/* gRPC's own complaints go where ours go. */
static void log_line(gpr_log_func_args *a)
{
    enum lh_level level = a->severity == GPR_LOG_SEVERITY_ERROR ? LH_WARN : LH_DEBUG;

    if (lh_log_enabled(lh_log_component_, level))
        lh_log(lh_log_component_, level, "core", "%s", a->message);
}

/* Its fork handlers would touch locks in children that only exec; we never fork and go on. */
static void set_up(void)
{
    setenv("GRPC_ENABLE_FORK_SUPPORT", "0", 0);
    gpr_set_log_function(log_line);
}

void rpc_core_open(void)
{
    pthread_once(&once, set_up);
    grpc_init();
}

void rpc_core_close(void)
{
    grpc_shutdown();
}

grpc_byte_buffer *rpc_buffer_from_message(const ProtobufCMessage *m)
{
    grpc_slice slice = grpc_slice_malloc(protobuf_c_message_get_packed_size(m));

    protobuf_c_message_pack(m, GRPC_SLICE_START_PTR(slice));
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return buffer;
}

/* The heap a message may take: its own bytes, and as much again as small fields may add. */
ProtobufCMessage *rpc_message_from_buffer(const ProtobufCMessageDescriptor *type,
                                          grpc_byte_buffer *buffer, size_t max_message,
                                          struct lh_error *err)
{
    struct lh_parse_limits limits = {.heap = max_message + RPC_MAX_MESSAGE};
    grpc_byte_buffer_reader reader;

    if (!grpc_byte_buffer_reader_init(&reader, buffer)) {
        lh_fail(err, LH_INVALID_ARGUMENT, "%s: cannot be decompressed", type->name);
        return NULL;
    }
    grpc_slice slice = grpc_byte_buffer_reader_readall(&reader);
    ProtobufCMessage *m =
        lh_parse(type, GRPC_SLICE_START_PTR(slice), GRPC_SLICE_LENGTH(slice), limits, err);
    grpc_slice_unref(slice);
    grpc_byte_buffer_reader_destroy(&reader);
    return m;
}

int64_t rpc_ms_from_deadline(gpr_timespec deadline)
{
    if (gpr_time_cmp(deadline, gpr_inf_future(deadline.clock_type)) == 0)
        return INT64_MAX;
    gpr_timespec left = gpr_time_sub(gpr_convert_clock_type(deadline, GPR_CLOCK_MONOTONIC),
                                     gpr_now(GPR_CLOCK_MONOTONIC));
    return lh_now_ms() + gpr_time_to_millis(left);
}

/* One table for both directions: how each type of protobuf goes on the wire, which of them are
 * whole numbers and how wide.  Reading and printing ask it instead of having a case for each of ten
 * integer types, so that they cannot come to differ. */
#include "proto/json_fields.h"

#include <ctype.h>
#include <protobuf-c/protobuf-c.h>

void json_camel_case(const char *name, char out[JSON_NAME_SIZE])
{
    size_t n = 0;

    for (bool up = false; *name && n < JSON_NAME_SIZE - 1; name++) {
        if (*name == '_') {
            up = true;
            continue;
        }
        out[n++] = up ? (char)toupper((unsigned char)*name) : *name;
        up = false;
    }
    out[n] = 0;
}

const struct json_coding json_codings[] = {
    [PROTOBUF_C_TYPE_INT32] = {JSON_VARINT, true, false, 32},
    [PROTOBUF_C_TYPE_SINT32] = {JSON_VARINT, true, true, 32},
    [PROTOBUF_C_TYPE_SFIXED32] = {JSON_FIXED32, true, false, 32},
    [PROTOBUF_C_TYPE_INT64] = {JSON_VARINT, true, false, 64},
    [PROTOBUF_C_TYPE_SINT64] = {JSON_VARINT, true, true, 64},
    [PROTOBUF_C_TYPE_SFIXED64] = {JSON_FIXED64, true, false, 64},
    [PROTOBUF_C_TYPE_UINT32] = {JSON_VARINT, false, false, 32},
    [PROTOBUF_C_TYPE_FIXED32] = {JSON_FIXED32, false, false, 32},
    [PROTOBUF_C_TYPE_UINT64] = {JSON_VARINT, false, false, 64},
    [PROTOBUF_C_TYPE_FIXED64] = {JSON_FIXED64, false, false, 64},
    [PROTOBUF_C_TYPE_FLOAT] = {JSON_FIXED32, false, false, 0},
    [PROTOBUF_C_TYPE_DOUBLE] = {JSON_FIXED64, false, false, 0},
    [PROTOBUF_C_TYPE_BOOL] = {JSON_VARINT, false, false, 0},
    [PROTOBUF_C_TYPE_ENUM] = {JSON_VARINT, false, false, 0},
    [PROTOBUF_C_TYPE_STRING] = {JSON_BLOCK, false, false, 0},
    [PROTOBUF_C_TYPE_BYTES] = {JSON_BLOCK, false, false, 0},
    [PROTOBUF_C_TYPE_MESSAGE] = {JSON_BLOCK, false, false, 0},
};

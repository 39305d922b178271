/* proto3 JSON, the mapping of protobuf.dev/programming-guides/json, for messages of any type: names
 * in lowerCamelCase (read in the schema's form too), 64-bit numbers as text, bytes in base64,
 * enumerations by name, defaults left out, null as not given.
 *
 * What is read is strict beyond the specification: an unknown or repeated name and a number with a
 * fraction where none belongs are refused, since a mistyped field would otherwise pass as its
 * default.  No Any, Timestamp, wrappers or maps: our schemas have none.  Fuzzed:
 * tests/fuzz/fuzz_json.c. */
#ifndef PROTO_JSON_H
#define PROTO_JSON_H

#include <protobuf-c/protobuf-c.h>
#include <stddef.h>

#include "proto/error.h"
#include "proto/parse.h"

/* NULL and *err (INVALID_ARGUMENT) naming line and column of what is not JSON, or the path of what
 * is not of this type ("tasks[2].environment.limits.memoryBytes: ...").  Free with
 * lh_message_free(). */
ProtobufCMessage *lh_json_parse(const ProtobufCMessageDescriptor *type, const char *text,
                                size_t len, struct lh_parse_limits limits, struct lh_error *err);

/* Indented text with a newline at its end; the caller frees.  NULL: no memory. */
char *lh_json_print(const ProtobufCMessage *m, struct lh_error *err);

#endif

/* The only way bytes from outside become a protobuf message.
 *
 * protobuf-c has no recursion limit, lets small messages grow 24-fold on the heap, merges repeated
 * occurrences of a singular sub-message in quadratic time, and checks neither UTF-8 nor NUL bytes.
 * So a guard walks the wire form along the descriptor first and refuses all of these, then the
 * message is unpacked by an allocator with the same budget.  Enum membership and ranges stay with
 * the receiver.  Fuzzed: tests/fuzz/fuzz_parse.c. */
#ifndef PROTO_PARSE_H
#define PROTO_PARSE_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/cleanup.h"
#include "proto/error.h"

struct lh_parse_limits {
    unsigned depth; /* nesting levels, the top message included; 0 = 16 */
    size_t heap;    /* bytes that unpacking may allocate, an upper estimate; 0 = 64 MiB */
};

/* NULL and *err (INVALID_ARGUMENT or RESOURCE_EXHAUSTED, naming the message type and the byte
 * offset) on anything unacceptable.  Free with lh_message_free(). */
ProtobufCMessage *lh_parse(const ProtobufCMessageDescriptor *type, const void *data, size_t len,
                           struct lh_parse_limits limits, struct lh_error *err);

/* UTF-8 without NUL, what every string field of a message must be. */
bool lh_text_valid(const void *text, size_t len);

/* Makes it valid: '?' for every byte that is no part of a UTF-8 sequence. */
void lh_text_clean(char *text);

/* Packs into a new buffer; NULL when memory is out. */
uint8_t *lh_pack(const ProtobufCMessage *m, size_t *len, struct lh_error *err);

void lh_message_free(ProtobufCMessage *m); /* NULL is fine */

/* lh_automsg(Longhaul__Sandbox__V1__Sandbox) s = NULL;  frees at scope end. */
static inline void lh_cleanup_message(void *p)
{
    lh_message_free(*(ProtobufCMessage **)p);
}
#define lh_automsg(type) __attribute__((cleanup(lh_cleanup_message), unused)) type *

#endif

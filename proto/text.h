/* Protobuf text format, the form people read: printed along the descriptor of any message, fields
 * in the order of the schema, defaults left out.  `protoc --encode` reads what this writes; reading
 * is protoc's work (agentenv/task/load.c), because its errors carry line and column. */
#ifndef PROTO_TEXT_H
#define PROTO_TEXT_H

#include <protobuf-c/protobuf-c.h>
#include <stddef.h>
#include <stdio.h>

/* The items of a field that are set: all of a repeated field, 0 or 1 of any other (one of a oneof
 * when it is the member chosen, a plain one when it is not zero).  *items points to the first, each
 * lh_field_size() bytes long; strings and messages are pointers. */
size_t lh_field_items(const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f,
                      const void **items);
size_t lh_field_size(const ProtobufCFieldDescriptor *f);

/* Write errors show in ferror(to). */
void lh_text_print(FILE *to, const ProtobufCMessage *m);

#endif

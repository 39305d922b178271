/* What reading and printing of JSON share: how a field is called and what form its value has.
 * Private to json.c, json_print.c and json_fields.c. */
#ifndef PROTO_JSON_FIELDS_H
#define PROTO_JSON_FIELDS_H

#include <jansson.h>
#include <stdbool.h>

enum { JSON_NAME_SIZE = 128 };

static inline void json_cleanup(json_t **j)
{
    json_decref(*j);
}
#define json_auto __attribute__((cleanup(json_cleanup))) json_t *

/* "memory_bytes" → "memoryBytes". */
void json_camel_case(const char *name, char out[JSON_NAME_SIZE]);

enum json_wire { JSON_VARINT, JSON_FIXED64, JSON_BLOCK, JSON_FIXED32 = 5 };

struct json_coding {
    enum json_wire wire;
    bool is_signed, zigzag; /* zigzag: the sint types */
    unsigned bits;          /* 0 = not a whole number */
};

/* By ProtobufCType. */
extern const struct json_coding json_codings[];

#endif

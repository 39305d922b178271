/* Messages become JSON along their descriptor: a tree of jansson's first, then written out whole.
 * Rejected: printing text directly; quoting, UTF-8 and numbers are the library's to get right. */
#include "proto/json.h"

#include <inttypes.h>
#include <math.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/cleanup.h"
#include "proto/json_fields.h"
#include "proto/text.h"

static json_t *print_message(const ProtobufCMessage *m);

static json_t *print_double(double d)
{
    if (isfinite(d))
        return json_real(d);
    return json_string(isnan(d) ? "NaN" : d > 0 ? "Infinity" : "-Infinity");
}

static json_t *print_bytes(const ProtobufCBinaryData *b)
{
    size_t size = sodium_base64_encoded_len(b->len, sodium_base64_VARIANT_ORIGINAL);
    lh_autofree char *text = malloc(size);

    return text ? json_string(sodium_bin2base64(text, size, b->data, b->len,
                                                sodium_base64_VARIANT_ORIGINAL))
                : NULL;
}

static json_t *print_enum(const ProtobufCEnumDescriptor *e, int number)
{
    const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(e, number);

    return v ? json_string(v->name) : json_integer(number);
}

static json_t *print_integer(const struct json_coding *c, const void *at)
{
    char text[24];

    if (c->bits == 32)
        return json_integer(c->is_signed ? *(const int32_t *)at
                                         : (json_int_t) * (const uint32_t *)at);
    if (c->is_signed)
        snprintf(text, sizeof text, "%" PRId64, *(const int64_t *)at);
    else
        snprintf(text, sizeof text, "%" PRIu64, *(const uint64_t *)at);
    return json_string(text);
}

static json_t *print_value(const ProtobufCFieldDescriptor *f, const void *at)
{
    if (json_codings[f->type].bits)
        return print_integer(&json_codings[f->type], at);
    switch (f->type) {
    case PROTOBUF_C_TYPE_BOOL:
        return json_boolean(*(const protobuf_c_boolean *)at);
    case PROTOBUF_C_TYPE_ENUM:
        return print_enum(f->descriptor, *(const int *)at);
    case PROTOBUF_C_TYPE_STRING:
        return json_string(*(char *const *)at);
    case PROTOBUF_C_TYPE_BYTES:
        return print_bytes(at);
    case PROTOBUF_C_TYPE_MESSAGE:
        return print_message(*(ProtobufCMessage *const *)at);
    case PROTOBUF_C_TYPE_FLOAT:
        return print_double((double)*(const float *)at);
    default:
        return print_double(*(const double *)at);
    }
}

static json_t *print_field(const ProtobufCFieldDescriptor *f, const void *items, size_t n)
{
    if (f->label != PROTOBUF_C_LABEL_REPEATED)
        return print_value(f, items);
    json_auto list = json_array();
    for (size_t i = 0; i < n; i++)
        if (json_array_append_new(list,
                                  print_value(f, (const char *)items + i * lh_field_size(f))) < 0)
            return NULL;
    return lh_steal(&list);
}

static json_t *print_message(const ProtobufCMessage *m)
{
    const ProtobufCMessageDescriptor *d = m->descriptor;
    json_auto object = json_object();
    char name[JSON_NAME_SIZE];

    for (unsigned i = 0; i < d->n_fields; i++) {
        const void *items;
        size_t n = lh_field_items(m, &d->fields[i], &items);
        json_camel_case(d->fields[i].name, name);
        if (n && json_object_set_new(object, name, print_field(&d->fields[i], items, n)) < 0)
            return NULL;
    }
    return lh_steal(&object);
}

char *lh_json_print(const ProtobufCMessage *m, struct lh_error *err)
{
    json_auto object = print_message(m);
    lh_autofree char *text =
        object ? json_dumps(object, JSON_INDENT(2) | JSON_REAL_PRECISION(17)) : NULL;
    size_t len = text ? strlen(text) : 0;
    char *line = text ? realloc(text, len + 2) : NULL;

    if (!line)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for JSON"), NULL;
    text = NULL;
    memcpy(line + len, "\n", 2);
    return line;
}

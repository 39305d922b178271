#include "proto/text.h"

#include <ctype.h>
#include <inttypes.h>
#include <string.h>

static void print_message(FILE *to, const ProtobufCMessage *m, int indent);

static void print_quoted(FILE *to, const uint8_t *text, size_t len)
{
    static const char plain[] = "\n\t\"\\", escape[] = "nt\"\\";

    putc('"', to);
    for (size_t i = 0; i < len; i++) {
        const char *known = text[i] ? strchr(plain, text[i]) : NULL;

        if (known)
            fprintf(to, "\\%c", escape[known - plain]);
        else if (isprint(text[i]))
            putc(text[i], to);
        else
            fprintf(to, "\\%03o", text[i]);
    }
    putc('"', to);
}

static void print_enum(FILE *to, const ProtobufCFieldDescriptor *f, int number)
{
    const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(f->descriptor, number);

    if (v)
        fputs(v->name, to);
    else
        fprintf(to, "%d", number);
}

static void print_scalar(FILE *to, const ProtobufCFieldDescriptor *f, const void *at)
{
    switch (f->type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
        fprintf(to, "%" PRId32, *(const int32_t *)at);
        break;
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
        fprintf(to, "%" PRIu32, *(const uint32_t *)at);
        break;
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
        fprintf(to, "%" PRId64, *(const int64_t *)at);
        break;
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
        fprintf(to, "%" PRIu64, *(const uint64_t *)at);
        break;
    case PROTOBUF_C_TYPE_FLOAT:
        fprintf(to, "%.9g", (double)*(const float *)at);
        break;
    case PROTOBUF_C_TYPE_DOUBLE:
        fprintf(to, "%.17g", *(const double *)at);
        break;
    case PROTOBUF_C_TYPE_BOOL:
        fputs(*(const protobuf_c_boolean *)at ? "true" : "false", to);
        break;
    case PROTOBUF_C_TYPE_ENUM:
        print_enum(to, f, *(const int *)at);
        break;
    case PROTOBUF_C_TYPE_STRING: {
        const char *s = *(char *const *)at;
        print_quoted(to, (const uint8_t *)s, s ? strlen(s) : 0);
        break;
    }
    case PROTOBUF_C_TYPE_BYTES: {
        const ProtobufCBinaryData *b = at;
        print_quoted(to, b->data, b->len);
        break;
    }
    case PROTOBUF_C_TYPE_MESSAGE:
        break;
    }
}

static void print_field(FILE *to, const ProtobufCFieldDescriptor *f, const void *at, int indent)
{
    fprintf(to, "%*s%s", indent, "", f->name);
    if (f->type == PROTOBUF_C_TYPE_MESSAGE) {
        fputs(" {\n", to);
        print_message(to, *(ProtobufCMessage *const *)at, indent + 2);
        fprintf(to, "%*s}\n", indent, "");
        return;
    }
    fputs(": ", to);
    print_scalar(to, f, at);
    putc('\n', to);
}

size_t lh_field_size(const ProtobufCFieldDescriptor *f)
{
    switch (f->type) {
    case PROTOBUF_C_TYPE_BYTES:
        return sizeof(ProtobufCBinaryData);
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        return sizeof(void *);
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return 8;
    case PROTOBUF_C_TYPE_BOOL:
        return sizeof(protobuf_c_boolean);
    default:
        return 4;
    }
}

/* A proto3 field without presence is set when it is not zero. */
static int is_nonzero(const ProtobufCFieldDescriptor *f, const void *at)
{
    static const char zero[sizeof(ProtobufCBinaryData)];

    if (f->type == PROTOBUF_C_TYPE_STRING)
        return *(char *const *)at && **(char *const *)at;
    if (f->type == PROTOBUF_C_TYPE_BYTES)
        return ((const ProtobufCBinaryData *)at)->len > 0;
    return memcmp(at, zero, lh_field_size(f)) != 0;
}

size_t lh_field_items(const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f,
                      const void **items)
{
    const char *base = (const char *)m, *at = base + f->offset;
    const void *quantity = base + f->quantifier_offset;

    *items = at;
    if (f->label == PROTOBUF_C_LABEL_REPEATED) {
        *items = *(void *const *)at;
        return *(const size_t *)quantity;
    }
    if (f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF)
        return *(const uint32_t *)quantity == f->id;
    return is_nonzero(f, at) ? 1 : 0;
}

static void print_message(FILE *to, const ProtobufCMessage *m, int indent)
{
    const ProtobufCMessageDescriptor *d = m->descriptor;

    for (unsigned i = 0; i < d->n_fields; i++) {
        const void *items;
        size_t n = lh_field_items(m, &d->fields[i], &items);

        for (size_t k = 0; k < n; k++)
            print_field(to, &d->fields[i], (const char *)items + k * lh_field_size(&d->fields[i]),
                        indent);
    }
}

void lh_text_print(FILE *to, const ProtobufCMessage *m)
{
    print_message(to, m, 0);
}

/* JSON is read by jansson and re-coded along the descriptor into protobuf's wire form, which then
 * goes through lh_parse() like any other bytes from outside.  So there is one place that allocates
 * messages, with its bounds on depth and memory, and this file never touches one.  Rejected:
 * filling protobuf-c's structures here, with ownership of every string and array to get right. */
#include "proto/json.h"

#include <ctype.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/cleanup.h"
#include "proto/json_fields.h"

enum { DEPTH_MAX = 32 };

struct buffer {
    uint8_t *data;
    size_t len, room;
};

struct reading {
    char path[512]; /* of the value looked at */
    unsigned depth;
    struct lh_error *err;
};

static int refuse(struct reading *r, const char *what)
{
    return lh_fail(r->err, LH_INVALID_ARGUMENT, "%s: %s", *r->path ? r->path : "the top level",
                   what);
}

static int put(struct reading *r, struct buffer *b, const void *data, size_t len)
{
    if (b->room - b->len < len) {
        size_t room = 2 * b->room + len + 64;
        uint8_t *more = realloc(b->data, room);
        if (!more)
            return lh_fail(r->err, LH_RESOURCE_EXHAUSTED, "no memory for JSON");
        b->data = more;
        b->room = room;
    }
    if (len) /* an empty message has no bytes to point to */
        memcpy(b->data + b->len, data, len);
    b->len += len;
    return 0;
}

static int put_varint(struct reading *r, struct buffer *b, uint64_t v)
{
    uint8_t bytes[10];
    size_t n = 0;

    do
        bytes[n++] = (uint8_t)((v & 0x7f) | (v > 0x7f ? 0x80 : 0));
    while (v >>= 7);
    return put(r, b, bytes, n);
}

static int put_block(struct reading *r, struct buffer *b, const void *data, size_t len)
{
    int rc = put_varint(r, b, len);

    return rc < 0 ? rc : put(r, b, data, len);
}

/* A whole number, as such or as text; 64 bits do not fit a JSON number everywhere. */
static int read_integer(struct reading *r, const json_t *v, bool is_signed, unsigned bits,
                        uint64_t *out)
{
    const char *text = json_string_value(v);
    char *end = NULL;
    double d = json_real_value(v);

    errno = 0;
    if (json_is_integer(v))
        *out = (uint64_t)json_integer_value(v);
    else if (json_is_real(v) && d == floor(d) && fabs(d) <= 9007199254740992.0)
        *out = (uint64_t)(int64_t)d;
    else if (text && *text && !isspace((unsigned char)*text))
        *out = *text == '-' ? (uint64_t)strtoll(text, &end, 10) : strtoull(text, &end, 10);
    else
        return refuse(r, "a whole number is needed");
    if (errno || (end && *end))
        return refuse(r, "a whole number is needed");
    bool negative = text ? *text == '-' : json_number_value(v) < 0;
    uint64_t max = bits == 64 ? UINT64_MAX : (UINT64_C(1) << bits) - 1;
    bool fits = is_signed ? negative ? (int64_t)*out >= -(int64_t)(max >> 1) - 1 : *out <= max >> 1
                          : !negative && *out <= max;
    return fits ? 0 : refuse(r, "the number is out of range");
}

static int read_double(struct reading *r, const json_t *v, double *out)
{
    static const struct {
        const char *name;
        double value;
    } names[] = {{"NaN", NAN}, {"Infinity", INFINITY}, {"-Infinity", -INFINITY}};
    const char *text = json_string_value(v);
    char *end;

    if (json_is_number(v)) {
        *out = json_number_value(v);
        return 0;
    }
    for (size_t i = 0; text && i < LH_ARRAY_SIZE(names); i++)
        if (!strcmp(text, names[i].name)) {
            *out = names[i].value;
            return 0;
        }
    if (!text || !*text || isspace((unsigned char)*text))
        return refuse(r, "a number is needed");
    *out = strtod(text, &end);
    return *end ? refuse(r, "a number is needed") : 0;
}

static int read_enum(struct reading *r, const ProtobufCEnumDescriptor *e, const json_t *v,
                     uint64_t *out)
{
    const ProtobufCEnumValue *named =
        json_is_string(v) ? protobuf_c_enum_descriptor_get_value_by_name(e, json_string_value(v))
                          : NULL;

    if (named)
        *out = (uint64_t)(int64_t)named->value;
    else if (json_is_integer(v))
        *out = (uint64_t)json_integer_value(v); /* membership is the receiver's business */
    else
        return lh_fail(r->err, LH_INVALID_ARGUMENT, "%s: not a member of %s", r->path,
                       e->short_name);
    return 0;
}

/* Either alphabet, padded or not. */
static int put_base64(struct reading *r, struct buffer *b, const json_t *v)
{
    const char *text = json_string_value(v);
    size_t len = text ? json_string_length(v) : 0, size = len / 4 * 3 + 3, n;
    lh_autofree uint8_t *bytes = malloc(size);

    if (!text)
        return refuse(r, "base64 text is needed");
    if (!bytes)
        return lh_fail(r->err, LH_RESOURCE_EXHAUSTED, "no memory for JSON");
    bool url = strpbrk(text, "-_");
    while (len && text[len - 1] == '=')
        len--;
    if (sodium_base642bin(bytes, size, text, len, NULL, &n, NULL,
                          url ? sodium_base64_VARIANT_URLSAFE_NO_PADDING
                              : sodium_base64_VARIANT_ORIGINAL_NO_PADDING) != 0)
        return refuse(r, "base64 text is needed");
    return put_block(r, b, bytes, n);
}

static int put_message(struct reading *r, struct buffer *b, const ProtobufCMessageDescriptor *d,
                       const json_t *object);

static int put_nested(struct reading *r, struct buffer *b, const ProtobufCFieldDescriptor *f,
                      const json_t *v)
{
    struct buffer inner = {0};
    int rc = put_message(r, &inner, f->descriptor, v);

    if (rc == 0)
        rc = put_block(r, b, inner.data, inner.len);
    free(inner.data);
    return rc;
}

static int put_integer(struct reading *r, struct buffer *b, const struct json_coding *c,
                       const json_t *v)
{
    uint64_t n;
    int rc = read_integer(r, v, c->is_signed, c->bits, &n);

    if (rc < 0)
        return rc;
    if (c->zigzag)
        n = n << 1 ^ (uint64_t)((int64_t)n >> 63);
    if (c->wire == JSON_VARINT)
        return put_varint(r, b, n);
    return put(r, b, &n, c->wire == JSON_FIXED64 ? 8 : 4); /* little-endian, as the wire */
}

static int put_real(struct reading *r, struct buffer *b, const ProtobufCFieldDescriptor *f,
                    const json_t *v)
{
    double d = 0;
    int rc = read_double(r, v, &d);

    if (rc < 0)
        return rc;
    if (f->type != PROTOBUF_C_TYPE_FLOAT)
        return put(r, b, &d, 8);
    float single = (float)d;
    return put(r, b, &single, 4);
}

static int put_value(struct reading *r, struct buffer *b, const ProtobufCFieldDescriptor *f,
                     const json_t *v)
{
    const struct json_coding *c = &json_codings[f->type];
    uint64_t n = 0;
    int rc = put_varint(r, b, (uint64_t)f->id << 3 | c->wire);

    if (rc < 0)
        return rc;
    if (c->bits)
        return put_integer(r, b, c, v);
    switch (f->type) {
    case PROTOBUF_C_TYPE_BOOL:
        return json_is_boolean(v) ? put_varint(r, b, json_is_true(v))
                                  : refuse(r, "true or false is needed");
    case PROTOBUF_C_TYPE_ENUM:
        rc = read_enum(r, f->descriptor, v, &n);
        return rc < 0 ? rc : put_varint(r, b, n);
    case PROTOBUF_C_TYPE_STRING:
        return json_is_string(v) ? put_block(r, b, json_string_value(v), json_string_length(v))
                                 : refuse(r, "text is needed");
    case PROTOBUF_C_TYPE_BYTES:
        return put_base64(r, b, v);
    case PROTOBUF_C_TYPE_MESSAGE:
        return put_nested(r, b, f, v);
    default:
        return put_real(r, b, f, v);
    }
}

static int put_field(struct reading *r, struct buffer *b, const ProtobufCFieldDescriptor *f,
                     const json_t *v)
{
    size_t end = strlen(r->path), n = json_array_size(v);
    int rc = 0;

    if (json_is_null(v))
        return 0;
    if (f->label != PROTOBUF_C_LABEL_REPEATED)
        return put_value(r, b, f, v);
    if (!json_is_array(v))
        return refuse(r, "an array is needed");
    for (size_t i = 0; rc == 0 && i < n; i++) {
        snprintf(r->path + end, sizeof r->path - end, "[%zu]", i);
        rc = put_value(r, b, f, json_array_get(v, i));
    }
    if (rc == 0)
        r->path[end] = 0;
    return rc;
}

static const ProtobufCFieldDescriptor *find_field(const ProtobufCMessageDescriptor *d,
                                                  const char *name)
{
    char camel[JSON_NAME_SIZE];

    for (unsigned i = 0; i < d->n_fields; i++) {
        json_camel_case(d->fields[i].name, camel);
        if (!strcmp(name, camel) || !strcmp(name, d->fields[i].name))
            return &d->fields[i];
    }
    return NULL;
}

/* Two names of one field, or two members of one oneof. */
static int refuse_doubles(struct reading *r, const ProtobufCFieldDescriptor *f,
                          const ProtobufCFieldDescriptor *const *seen, size_t n)
{
    bool oneof = f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF;

    for (size_t i = 0; i < n; i++)
        if (seen[i] == f || (oneof && seen[i]->flags & PROTOBUF_C_FIELD_FLAG_ONEOF &&
                             seen[i]->quantifier_offset == f->quantifier_offset))
            return lh_fail(r->err, LH_INVALID_ARGUMENT, "%s: given together with %s", r->path,
                           seen[i]->name);
    return 0;
}

static int put_message(struct reading *r, struct buffer *b, const ProtobufCMessageDescriptor *d,
                       const json_t *object)
{
    const ProtobufCFieldDescriptor *seen[256];
    size_t end = strlen(r->path), n = 0;
    const char *name;
    json_t *v;
    int rc = 0;

    if (!json_is_object(object))
        return refuse(r, "an object is needed");
    if (r->depth == DEPTH_MAX)
        return refuse(r, "nested too deep");
    r->depth++;
    json_object_foreach((json_t *)object, name, v)
    {
        const ProtobufCFieldDescriptor *f = find_field(d, name);
        snprintf(r->path + end, sizeof r->path - end, "%s%.100s", end ? "." : "", name);
        if (!f || n == LH_ARRAY_SIZE(seen))
            return lh_fail(r->err, LH_INVALID_ARGUMENT, "%s: %s has no such field", r->path,
                           d->short_name);
        if ((rc = refuse_doubles(r, f, seen, n)) < 0 || (rc = put_field(r, b, f, v)) < 0)
            return rc;
        if (!json_is_null(v))
            seen[n++] = f;
        r->path[end] = 0;
    }
    r->depth--;
    return 0;
}

ProtobufCMessage *lh_json_parse(const ProtobufCMessageDescriptor *type, const char *text,
                                size_t len, struct lh_parse_limits limits, struct lh_error *err)
{
    struct reading r = {.err = err};
    struct buffer b = {0};
    json_error_t why;
    json_auto top = json_loadb(text, len, JSON_REJECT_DUPLICATES, &why);
    ProtobufCMessage *m = NULL;

    if (!top)
        return lh_fail(err, LH_INVALID_ARGUMENT, "line %d, column %d: %s", why.line, why.column,
                       why.text),
               NULL;
    if (put_message(&r, &b, type, top) == 0)
        m = lh_parse(type, b.data ? b.data : (const uint8_t *)"", b.len, limits, err);
    free(b.data);
    return m;
}

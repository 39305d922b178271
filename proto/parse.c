/* Bytes from outside, checked before protobuf-c sees them.
 *
 * The guard walks the wire form along the descriptor, allocates nothing, and charges every field
 * with what protobuf-c 1.4.1 would allocate for it at most.  What it refuses and why is said in
 * the header.  The unpacker then runs on an allocator with the same budget: should an estimate
 * here ever be too low, the message is refused all the same.
 *
 * Rejected: unpacking first and checking the result (the damage is done by then), and a limit on
 * the length alone (1 MiB of empty sub-messages is 25 MiB of heap). */
#include "proto/parse.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum {
    DEFAULT_DEPTH = 16,
    DEFAULT_HEAP = 64 << 20,
    COST_MALLOC = 16,  /* malloc's own, per block */
    COST_FIELD = 64,   /* a scan slot of 32 bytes; its slabs double, so it counts twice */
    COST_ELEMENT = 16, /* array slot of a repeated field, at most a ProtobufCBinaryData */
    COST_UNKNOWN = 48, /* record of an unknown field, without its data */
    MAX_FIELDS = 256,  /* of one message type, for the duplicate check */
};

struct guard {
    const ProtobufCMessageDescriptor *top;
    const uint8_t *start;
    struct lh_parse_limits left;
    struct lh_error *err;
};

/* One message being walked. */
struct level {
    const ProtobufCMessageDescriptor *type;
    const uint8_t *at, *end;
    uint8_t seen[MAX_FIELDS / 8]; /* singular sub-messages that have occurred */
};

static int refuse(struct guard *g, int code, const uint8_t *at, const char *why)
{
    return lh_fail(g->err, code, "%s, byte %zu: %s", g->top->name, (size_t)(at - g->start), why);
}

static int charge(struct guard *g, const uint8_t *at, uint64_t bytes)
{
    if (bytes > g->left.heap)
        return refuse(g, LH_RESOURCE_EXHAUSTED, at, "would need too much memory when unpacked");
    g->left.heap -= (size_t)bytes;
    return 0;
}

static bool read_varint(struct level *l, uint64_t *out)
{
    uint64_t v = 0;

    for (unsigned shift = 0; shift < 70 && l->at < l->end; shift += 7) {
        uint8_t b = *l->at++;
        if (shift < 64)
            v |= (uint64_t)(b & 0x7f) << shift;
        if (!(b & 0x80)) {
            *out = v;
            return true;
        }
    }
    return false;
}

/* Length of the UTF-8 sequence at p; 0 for NUL, overlong forms, surrogates and what is cut off. */
static size_t utf8_length(const uint8_t *p, const uint8_t *end)
{
    static const struct {
        uint8_t mask, lead;
        uint32_t first; /* smallest code point that needs this length */
    } form[] = {{0x80, 0x00, 1}, {0xe0, 0xc0, 0x80}, {0xf0, 0xe0, 0x800}, {0xf8, 0xf0, 0x10000}};
    size_t n = 0;

    while (n < 4 && (*p & form[n].mask) != form[n].lead)
        n++;
    if (n == 4 || (size_t)(end - p) <= n)
        return 0;
    uint32_t c = *p & (uint8_t)~form[n].mask;
    for (size_t i = 1; i <= n; i++) {
        if ((p[i] & 0xc0) != 0x80)
            return 0;
        c = c << 6 | (p[i] & 0x3f);
    }
    bool surrogate = c >= 0xd800 && c <= 0xdfff;
    return c < form[n].first || c > 0x10ffff || surrogate ? 0 : n + 1;
}

bool lh_text_valid(const void *text, size_t len)
{
    const uint8_t *p = text, *end = p + len;

    for (size_t n; p < end; p += n) {
        n = utf8_length(p, end);
        if (!n)
            return false;
    }
    return true;
}

void lh_text_clean(char *text)
{
    const uint8_t *end = (uint8_t *)text + strlen(text);

    for (uint8_t *p = (uint8_t *)text; p < end;) {
        size_t n = utf8_length(p, end);
        if (!n)
            *p = '?';
        p += n ? n : 1;
    }
}

static int check_text(struct guard *g, const uint8_t *p, const uint8_t *end)
{
    for (size_t n; p < end; p += n) {
        n = utf8_length(p, end);
        if (!n)
            return refuse(g, LH_INVALID_ARGUMENT, p, "text holds a NUL or is not UTF-8");
    }
    return 0;
}

static int walk(struct guard *g, const ProtobufCMessageDescriptor *type, const uint8_t *p,
                size_t len);

static int walk_submessage(struct guard *g, struct level *l, const ProtobufCFieldDescriptor *f,
                           size_t len)
{
    size_t i = (size_t)(f - l->type->fields);

    if (f->label != PROTOBUF_C_LABEL_REPEATED) {
        if (i >= MAX_FIELDS || l->seen[i / 8] & (1u << i % 8))
            return refuse(g, LH_INVALID_ARGUMENT, l->at, "a singular sub-message occurs twice");
        l->seen[i / 8] |= (uint8_t)(1u << i % 8);
    }
    return walk(g, f->descriptor, l->at, len);
}

/* Sub-message, text, bytes, packed numbers (8 bytes for each byte at most) or something unknown. */
static int walk_delimited(struct guard *g, struct level *l, const ProtobufCFieldDescriptor *f)
{
    const uint8_t *at = l->at;
    uint64_t len;

    if (!read_varint(l, &len) || len > (uint64_t)(l->end - l->at))
        return refuse(g, LH_INVALID_ARGUMENT, at, "cut off");
    int r = 0;
    if (f && f->type == PROTOBUF_C_TYPE_MESSAGE) {
        r = walk_submessage(g, l, f, (size_t)len);
    } else {
        bool text = f && f->type == PROTOBUF_C_TYPE_STRING;
        bool plain = !f || text || f->type == PROTOBUF_C_TYPE_BYTES;
        r = charge(g, at, COST_MALLOC + 1 + len * (plain ? 1 : 8));
        if (!r && text)
            r = check_text(g, l->at, l->at + len);
    }
    l->at += len;
    return r;
}

static int walk_fixed(struct guard *g, struct level *l, size_t len)
{
    if ((size_t)(l->end - l->at) < len)
        return refuse(g, LH_INVALID_ARGUMENT, l->at, "cut off");
    l->at += len;
    return 0;
}

static int walk_value(struct guard *g, struct level *l, const ProtobufCFieldDescriptor *f,
                      unsigned wire)
{
    uint64_t ignored;

    switch (wire) {
    case PROTOBUF_C_WIRE_TYPE_VARINT:
        return read_varint(l, &ignored) ? 0 : refuse(g, LH_INVALID_ARGUMENT, l->at, "bad varint");
    case PROTOBUF_C_WIRE_TYPE_64BIT:
        return walk_fixed(g, l, 8);
    case PROTOBUF_C_WIRE_TYPE_32BIT:
        return walk_fixed(g, l, 4);
    case PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED:
        return walk_delimited(g, l, f);
    default:
        return refuse(g, LH_INVALID_ARGUMENT, l->at, "a group or an unknown wire type");
    }
}

static int walk_field(struct guard *g, struct level *l)
{
    const uint8_t *at = l->at;
    uint64_t key;

    if (!read_varint(l, &key) || key > UINT32_MAX || key >> 3 == 0)
        return refuse(g, LH_INVALID_ARGUMENT, at, "bad field number");
    const ProtobufCFieldDescriptor *f =
        protobuf_c_message_descriptor_get_field(l->type, (unsigned)(key >> 3));
    unsigned cost = COST_FIELD;
    if (!f)
        cost += COST_UNKNOWN + COST_MALLOC + 10; /* the longest varint */
    else if (f->label == PROTOBUF_C_LABEL_REPEATED)
        cost += COST_ELEMENT;
    int r = charge(g, at, cost);
    return r ? r : walk_value(g, l, f, (unsigned)(key & 7));
}

static int walk(struct guard *g, const ProtobufCMessageDescriptor *type, const uint8_t *p,
                size_t len)
{
    struct level l = {.type = type, .at = p, .end = p + len};

    if (!g->left.depth)
        return refuse(g, LH_INVALID_ARGUMENT, p, "nested too deeply");
    g->left.depth--;
    int r = charge(g, p, type->sizeof_message + COST_MALLOC);
    while (!r && l.at < l.end)
        r = walk_field(g, &l);
    g->left.depth++;
    return r;
}

/* Gives no credit for what is freed: the total stays within the budget, not only the peak. */
static void *budget_alloc(void *data, size_t n)
{
    size_t *left = data;

    if (n > *left)
        return NULL;
    *left -= n;
    return malloc(n);
}

static void budget_free(void *data, void *p)
{
    free(p);
}

ProtobufCMessage *lh_parse(const ProtobufCMessageDescriptor *type, const void *data, size_t len,
                           struct lh_parse_limits limits, struct lh_error *err)
{
    if (!data)
        data = "";
    struct guard g = {.top = type, .start = data, .left = limits, .err = err};
    if (!limits.depth)
        g.left.depth = DEFAULT_DEPTH;
    if (!limits.heap)
        g.left.heap = DEFAULT_HEAP;
    size_t budget = g.left.heap;
    if (walk(&g, type, g.start, len))
        return NULL;
    ProtobufCAllocator a = {budget_alloc, budget_free, &budget};
    ProtobufCMessage *m = protobuf_c_message_unpack(type, &a, len, data);
    if (!m)
        lh_fail(err, LH_INVALID_ARGUMENT, "%s: a field has the wrong type, or memory is out",
                type->name);
    return m;
}

uint8_t *lh_pack(const ProtobufCMessage *m, size_t *len, struct lh_error *err)
{
    *len = protobuf_c_message_get_packed_size(m);
    uint8_t *p = malloc(*len + 1); /* an empty message is not a failed allocation */

    if (!p) {
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "packing %s: no memory for %zu bytes",
                m->descriptor->name, *len);
        return NULL;
    }
    protobuf_c_message_pack(m, p);
    return p;
}

void lh_message_free(ProtobufCMessage *m)
{
    if (m)
        protobuf_c_message_free_unpacked(m, NULL);
}

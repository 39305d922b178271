/* Hostile bytes are refused for the right reason, honest ones pass. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdlib.h>
#include <string.h>

#include "longhaul/experience/v1/experience.pb-c.h"
#include "proto/cleanup.h"
#include "proto/parse.h"
#include "test.pb-c.h"

#define EVERYTHING &longhaul__test__v1__everything__descriptor
#define NODE       &longhaul__test__v1__node__descriptor

static const struct lh_parse_limits tight = {.depth = 8, .heap = 4096};

/* LH_OK or the code of the refusal. */
static int parse(const ProtobufCMessageDescriptor *type, const void *p, size_t n,
                 struct lh_parse_limits limits, struct lh_error *e)
{
    lh_automsg(ProtobufCMessage) m = lh_parse(type, p, n, limits, e);

    return m ? LH_OK : e->code;
}

#define REFUSED(type, bytes, status, part)                                                         \
    do {                                                                                           \
        struct lh_error e_ = {0};                                                                  \
        cr_assert(eq(int, parse(type, bytes, sizeof(bytes) - 1, tight, &e_), status), "%s",        \
                  e_.message);                                                                     \
        cr_assert(strstr(e_.message, part) != NULL, "\"%s\" in \"%s\"", part, e_.message);         \
    } while (0)

static uint8_t *repeat(const char *unit, size_t unit_len, size_t times)
{
    uint8_t *p = malloc(unit_len * times);

    for (size_t i = 0; i < times; i++)
        memcpy(p + i * unit_len, unit, unit_len);
    return p;
}

/* Node{child: Node{child: ...}}, written from the inside out. */
static uint8_t *nested(size_t depth, size_t *len)
{
    size_t room = depth * 8, at = room;
    uint8_t *p = malloc(room + 1);

    for (size_t i = 1; i < depth; i++) {
        uint8_t head[8] = {0x0a};
        size_t k = 1, v = room - at;
        for (; v > 0x7f; v >>= 7)
            head[k++] = (uint8_t)(v | 0x80);
        head[k++] = (uint8_t)v;
        at -= k;
        memcpy(p + at, head, k);
    }
    *len = room - at;
    memmove(p, p + at, *len);
    return p;
}

Test(parse, text_is_cleaned_byte_by_byte)
{
    static const char *const pairs[][2] = {
        {"", ""},
        {"plain \xc3\xa4", "plain \xc3\xa4"},
        {"\xff|\xc3(|\xed\xa0\x80|\xe2\x82", "?|?(|\?\?\?|\?\?"}};

    for (size_t i = 0; i < LH_ARRAY_SIZE(pairs); i++) {
        char text[64];
        strcpy(text, pairs[i][0]);
        lh_text_clean(text);
        cr_assert(eq(str, text, (char *)pairs[i][1]));
        cr_assert(lh_text_valid(text, strlen(text)));
    }
}

Test(parse, text_must_be_utf8_without_nul)
{
    REFUSED(EVERYTHING,
            "\x0a\x03"
            "a\0b",
            LH_INVALID_ARGUMENT, "byte 3: text holds a NUL");
    REFUSED(EVERYTHING, "\x0a\x02\xc3\x28", LH_INVALID_ARGUMENT, "not UTF-8");
    REFUSED(EVERYTHING, "\x0a\x02\xc0\xaf", LH_INVALID_ARGUMENT, "not UTF-8");     /* overlong */
    REFUSED(EVERYTHING, "\x0a\x03\xed\xa0\x80", LH_INVALID_ARGUMENT, "not UTF-8"); /* surrogate */
    REFUSED(EVERYTHING, "\x0a\x04\xf4\x90\x80\x80", LH_INVALID_ARGUMENT, "not UTF-8");
    REFUSED(EVERYTHING, "\x0a\x01\xff", LH_INVALID_ARGUMENT, "not UTF-8");
    REFUSED(EVERYTHING, "\x0a\x01\x80", LH_INVALID_ARGUMENT, "not UTF-8");
    REFUSED(EVERYTHING, "\x0a\x02\xe2\x82", LH_INVALID_ARGUMENT, "not UTF-8"); /* cut sequence */
    REFUSED(EVERYTHING, "\x1a\x01\xfe", LH_INVALID_ARGUMENT, "not UTF-8");     /* repeated too */
}

Test(parse, broken_wire_forms)
{
    REFUSED(EVERYTHING,
            "\x0a\x05"
            "ab",
            LH_INVALID_ARGUMENT, "byte 1: cut off");
    REFUSED(EVERYTHING, "\x0a", LH_INVALID_ARGUMENT, "cut off");
    REFUSED(EVERYTHING, "\x45\x01\x02", LH_INVALID_ARGUMENT, "cut off");
    REFUSED(EVERYTHING, "\x49\x01\x02\x03\x04", LH_INVALID_ARGUMENT, "cut off");
    REFUSED(EVERYTHING, "\x0b\x0c", LH_INVALID_ARGUMENT, "group");
    REFUSED(EVERYTHING, "\x0e\x00", LH_INVALID_ARGUMENT, "unknown wire type");
    REFUSED(EVERYTHING, "\x00\x01", LH_INVALID_ARGUMENT, "byte 0: bad field number");
    REFUSED(EVERYTHING, "\x58\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", LH_INVALID_ARGUMENT,
            "bad varint");
    REFUSED(EVERYTHING, "\xff\xff\xff\xff\xff\xff\xff\x7f\x01", LH_INVALID_ARGUMENT,
            "bad field number");
    REFUSED(EVERYTHING, "\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", LH_INVALID_ARGUMENT,
            "cut off"); /* a length of 2^64 - 1 */
    REFUSED(EVERYTHING, "\x08\x01", LH_INVALID_ARGUMENT, "wrong type");
}

Test(parse, singular_submessages_occur_once)
{
    size_t len = 4 << 15;
    lh_autofree uint8_t *p = repeat("\x32\x02\x10\x01", 4, 1 << 15); /* merged in quadratic time */
    struct lh_error e = {0};

    cr_assert(
        eq(int, parse(EVERYTHING, p, len, (struct lh_parse_limits){0}, &e), LH_INVALID_ARGUMENT));
    cr_assert(strstr(e.message, "byte 6: a singular sub-message occurs twice") != NULL, "%s",
              e.message);
    REFUSED(EVERYTHING, "\x52\x00\x52\x00", LH_INVALID_ARGUMENT, "occurs twice"); /* in a oneof */
    cr_assert(eq(int, parse(EVERYTHING, "\x3a\x00\x3a\x00", 4, tight, &e), LH_OK), "repeated");
}

Test(parse, depth_is_bounded)
{
    struct lh_error e = {0};
    size_t len;

    lh_autofree uint8_t *bomb = nested(100000, &len);
    cr_assert(
        eq(int, parse(NODE, bomb, len, (struct lh_parse_limits){0}, &e), LH_INVALID_ARGUMENT));
    cr_assert(strstr(e.message, "longhaul.test.v1.Node, byte") != NULL, "%s", e.message);
    cr_assert(strstr(e.message, "nested too deeply") != NULL, "%s", e.message);
    for (size_t depth = 15; depth <= 17; depth++) {
        lh_autofree uint8_t *p = nested(depth, &len);
        int r = parse(NODE, p, len, (struct lh_parse_limits){0}, &e);
        cr_assert(eq(int, r, depth <= 16 ? LH_OK : LH_INVALID_ARGUMENT), "%zu levels", depth);
    }
}

Test(parse, heap_is_bounded)
{
    static const struct {
        const char *unit;
        size_t len;
    } bombs[] = {
        {"\x2a\x00", 2},         /* empty map entries */
        {"\x3a\x00", 2},         /* empty repeated messages */
        {"\x1a\x00", 2},         /* empty strings */
        {"\xa0\x06\x01", 3},     /* unknown fields are kept */
        {"\x0a\x01x", 3},        /* a singular string again and again */
        {"\x22\x02\x01\x01", 4}, /* packed numbers in many pieces */
    };

    for (size_t i = 0; i < LH_ARRAY_SIZE(bombs); i++) {
        lh_autofree uint8_t *p = repeat(bombs[i].unit, bombs[i].len, 1 << 16);
        struct lh_error e = {0};
        struct lh_parse_limits limits = {.heap = 1 << 20};
        int r = parse(EVERYTHING, p, bombs[i].len << 16, limits, &e);
        cr_assert(eq(int, r, LH_RESOURCE_EXHAUSTED), "bomb %zu: %s", i, e.message);
    }
}

Test(parse, large_honest_payloads_fit_the_default)
{
    size_t n = 60 << 20, len;
    lh_autofree uint8_t *raw = calloc(1, n);
    Longhaul__Test__V1__Everything x = LONGHAUL__TEST__V1__EVERYTHING__INIT;
    struct lh_error e = {0};

    x.raw = (ProtobufCBinaryData){n, raw};
    lh_autofree uint8_t *p = lh_pack(&x.base, &len, &e);
    cr_assert(eq(int, parse(EVERYTHING, p, len, (struct lh_parse_limits){0}, &e), LH_OK), "%s",
              e.message);
}

Test(parse, everything_survives_a_round_trip)
{
    Longhaul__Test__V1__Everything x = LONGHAUL__TEST__V1__EVERYTHING__INIT;
    Longhaul__Test__V1__Node child = LONGHAUL__TEST__V1__NODE__INIT;
    Longhaul__Test__V1__Node node = LONGHAUL__TEST__V1__NODE__INIT;
    char *tags[] = {(char *)"a", (char *)"", (char *)"\xe2\x82\xac\xf0\x9f\x98\x80\xc3\xa9"};
    int32_t numbers[] = {1, -2, 300};
    struct lh_error e = {0};
    size_t len;

    child.value = 9;
    node.child = &child;
    x.text = (char *)"run-1";
    x.raw = (ProtobufCBinaryData){4, (uint8_t *)"\0\xff\0\xfe"};
    x.tags = tags;
    x.n_tags = 3;
    x.numbers = numbers;
    x.n_numbers = 3;
    x.node = &node;
    x.eight = UINT64_MAX;
    x.choice_case = LONGHAUL__TEST__V1__EVERYTHING__CHOICE_RIGHT;
    x.right = 5;
    lh_autofree uint8_t *p = lh_pack(&x.base, &len, &e);
    lh_automsg(Longhaul__Test__V1__Everything) y = (void *)lh_parse(EVERYTHING, p, len, tight, &e);
    cr_assert(y != NULL, "%s", e.message);
    cr_assert(eq(str, y->tags[2], tags[2]));
    cr_assert(eq(int, y->numbers[1], -2));
    cr_assert(eq(u32, y->node->child->value, 9));
    cr_assert(eq(u64, y->eight, UINT64_MAX));
    cr_assert(eq(int, y->choice_case, LONGHAUL__TEST__V1__EVERYTHING__CHOICE_RIGHT));
    for (size_t cut = 0; cut < len; cut++) /* never more than a refusal */
        parse(EVERYTHING, p, cut, tight, &e);
}

Test(parse, empty_is_a_message)
{
    Longhaul__Experience__V1__Stop stop = LONGHAUL__EXPERIENCE__V1__STOP__INIT;
    struct lh_error e = {0};
    size_t len = 1;

    lh_autofree uint8_t *p = lh_pack(&stop.base, &len, &e);
    cr_assert(p != NULL);
    cr_assert(eq(sz, len, 0));
    cr_assert(eq(int, parse(EVERYTHING, NULL, 0, tight, &e), LH_OK));
    lh_message_free(NULL);
}

/* proto3 JSON: what is printed is read again, both forms of names and numbers are taken, and what
 * is wrong is refused by its place. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdlib.h>
#include <string.h>

#include "longhaul/task/v1/task.pb-c.h"
#include "proto/cleanup.h"
#include "proto/json.h"
#include "test.pb-c.h"

#define TASK (&longhaul__task__v1__task__descriptor)

typedef Longhaul__Task__V1__Task Task;

static Task *read_task(const char *text, struct lh_error *e)
{
    return (Task *)lh_json_parse(TASK, text, strlen(text), (struct lh_parse_limits){0}, e);
}

Test(json, takes_every_form_of_the_specification)
{
    struct lh_error e = {0};
    lh_automsg(Task) t = read_task(
        "{\"name\": \"a/b\", \"revision\": 3, \"split\": \"SPLIT_EVAL\", \"family\": null,"
        " \"seeds\": [\"18446744073709551615\", 7, 2.0],"
        " \"budgets\": {\"contextTokens\": \"100\", \"turn_tokens\": 5, \"allowCompaction\": true},"
        " \"verifier\": {\"rewardMax\": 1.5, \"passMark\": \"-Infinity\"},"
        " \"environment\": {\"files\": [{\"path\": \"/x\", \"content\": \"-_8\"}],"
        "   \"env\": [{\"name\": \"A\", \"value\": \"\"}]},"
        " \"unknown\": \"aGk=\"}",
        &e);

    cr_assert(t != NULL, "%s", e.message);
    cr_expect(eq(str, t->name, (char *)"a/b"));
    cr_expect(eq(u32, t->revision, 3));
    cr_expect(eq(int, (int)t->split, LONGHAUL__TASK__V1__SPLIT__SPLIT_EVAL));
    cr_expect(eq(sz, t->n_seeds, 3));
    cr_expect(eq(u64, t->seeds[0], UINT64_MAX));
    cr_expect(eq(u64, t->seeds[2], 2));
    cr_expect(eq(u32, t->budgets->context_tokens, 100));
    cr_expect(eq(u32, t->budgets->turn_tokens, 5));
    cr_expect(t->budgets->allow_compaction);
    cr_expect(eq(dbl, t->verifier->reward_max, 1.5));
    cr_expect(lt(dbl, t->verifier->pass_mark, -1e300));
    cr_expect(eq(sz, t->environment->files[0]->content.len, 2));
    cr_expect(eq(u8, t->environment->files[0]->content.data[0], 0xfb));
    cr_expect(eq(int, (int)t->environment->env[0]->source_case,
                 LONGHAUL__TASK__V1__ENV_VAR__SOURCE_VALUE));
    cr_expect(eq(sz, t->unknown.len, 2));
}

Test(json, is_read_as_it_was_printed)
{
    struct lh_error e = {0};
    lh_automsg(Task) t = read_task(
        "{\"name\": \"\\u00fc\\n\", \"seeds\": [\"9007199254740993\"],"
        " \"verifier\": {\"rewardMin\": 0.1, \"rewardMax\": \"NaN\", \"carry\": [\"/a\", \"\"]},"
        " \"unknown\": \"AP8=\", \"timeouts\": {\"boot\": {}}}",
        &e);
    size_t len, again_len;

    cr_assert(t != NULL, "%s", e.message);
    lh_autofree char *text = lh_json_print(&t->base, &e);
    cr_assert(text != NULL, "%s", e.message);
    lh_automsg(Task) again = read_task(text, &e);
    cr_assert(again != NULL, "%s", e.message);
    lh_autofree uint8_t *a = lh_pack(&t->base, &len, &e);
    lh_autofree uint8_t *b = lh_pack(&again->base, &again_len, &e);
    cr_assert(eq(sz, len, again_len));
    cr_expect(eq(int, memcmp(a, b, len), 0), "%s", text);
}

Test(json, names_the_place_of_what_is_wrong)
{
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"{\"name\": \"a\",\n \"revision\": }", "line 2, column 14: "},
        {"[]", "the top level: an object is needed"},
        {"{\"nmae\": \"a\"}", "nmae: Task has no such field"},
        {"{\"name\": 5}", "name: text is needed"},
        {"{\"revision\": -1}", "revision: the number is out of range"},
        {"{\"revision\": 4294967296}", "revision: the number is out of range"},
        {"{\"revision\": 1.5}", "revision: a whole number is needed"},
        {"{\"revision\": \"1x\"}", "revision: a whole number is needed"},
        {"{\"seeds\": 1}", "seeds: an array is needed"},
        {"{\"seeds\": [1, null]}", "seeds[1]: a whole number is needed"},
        {"{\"split\": \"TRAIN\"}", "split: not a member of Split"},
        {"{\"unknown\": \"a\"}", "unknown: base64 text is needed"},
        {"{\"budgets\": {\"allowCompaction\": 1}}", "budgets.allowCompaction: true or false"},
        {"{\"verifier\": {\"passMark\": \"1.5x\"}}", "verifier.passMark: a number is needed"},
        {"{\"name\": \"a\", \"name\": \"b\"}", "duplicate object key"},
        {"{\"passMark\": 1, \"name\": \"a\"}", "passMark: Task has no such field"},
        {"{\"budgets\": {\"turn_tokens\": 1, \"turnTokens\": 2}}", "given together with"},
        {"{\"environment\": {\"env\": [{\"name\": \"A\", \"value\": \"x\", \"secretRef\": "
         "\"y\"}]}}",
         "environment.env[0].secretRef: given together with value"},
    };

    for (size_t i = 0; i < LH_ARRAY_SIZE(cases); i++) {
        struct lh_error e = {0};
        lh_automsg(Task) t = read_task(cases[i].text, &e);
        cr_expect(t == NULL, "%s", cases[i].text);
        cr_expect(eq(int, e.code, LH_INVALID_ARGUMENT));
        cr_expect(strstr(e.message, cases[i].message) != NULL, "%s: %s", cases[i].text, e.message);
    }
}

Test(json, is_bounded_in_depth)
{
    char text[4096] = "";
    struct lh_error e = {0};

    for (int i = 0; i < 100; i++)
        strcat(text, "{\"child\": ");
    strcat(text, "{}");
    for (int i = 0; i < 100; i++)
        strcat(text, "}");
    lh_automsg(ProtobufCMessage) m = lh_json_parse(&longhaul__test__v1__node__descriptor, text,
                                                   strlen(text), (struct lh_parse_limits){0}, &e);
    cr_expect(m == NULL);
    cr_expect(strstr(e.message, "nested too deep") != NULL, "%s", e.message);
}

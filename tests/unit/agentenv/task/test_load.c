#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agentenv/task/task.h"
#include "proto/cleanup.h"
#include "proto/parse.h"
#include "proto/text.h"

static char path[64];

static void make_path(void)
{
    strcpy(path, "/tmp/longhaul-load-XXXXXX");
    close(mkstemp(path));
}

static void remove_path(void)
{
    unlink(path);
}

TestSuite(load, .init = make_path, .fini = remove_path);

static void put(const void *data, size_t len)
{
    lh_autofclose FILE *f = fopen(path, "w");

    cr_assert(f && fwrite(data, 1, len, f) == len);
}

static const char example[] =
    "tasks { name: \"acme/x\" revision: 1 split: SPLIT_EVAL\n"
    "  prompt { role: ROLE_USER text: \"tab\\t quote\\\" nul-free \\303\\266\" }\n"
    "  environment { image: \"i\" files { path: \"/a\" content: \"\\000\\377\" mode: 493 }\n"
    "    env { name: \"A\" value: \"\" } env { name: \"B\" secret_ref: \"S\" } }\n"
    "  verifier { command: \"true\" reward_min: -0.5 reward_max: 0.1 pass_mark: 0.1 }\n"
    "  seeds: [1, 18446744073709551615] }\n";

static uint8_t *packed(TaskSet *set, size_t *len)
{
    struct lh_error e = {0};

    return lh_pack(&set->base, len, &e);
}

Test(load, text_binary_and_printed_text_are_the_same_tasks)
{
    struct lh_error e = {0};
    size_t n[3];

    put(example, strlen(example));
    lh_automsg(TaskSet) text = task_load(path, &e);
    cr_assert(ne(ptr, text, NULL), "%s", e.message);
    cr_assert(eq(sz, text->n_tasks, 1));
    lh_autofree uint8_t *first = packed(text, &n[0]);

    put(first, n[0]);
    lh_automsg(TaskSet) binary = task_load(path, &e);
    cr_assert(ne(ptr, binary, NULL), "%s", e.message);
    lh_autofree uint8_t *second = packed(binary, &n[1]);

    FILE *f = fopen(path, "w");
    lh_text_print(f, &text->base);
    fclose(f);
    lh_automsg(TaskSet) printed = task_load(path, &e);
    cr_assert(ne(ptr, printed, NULL), "%s", e.message);
    lh_autofree uint8_t *third = packed(printed, &n[2]);

    cr_assert(eq(sz, n[0], n[1]));
    cr_assert(eq(sz, n[0], n[2]));
    cr_assert(eq(int, memcmp(first, second, n[0]), 0));
    cr_assert(eq(int, memcmp(first, third, n[0]), 0));
}

Test(load, an_error_in_text_names_file_line_and_column)
{
    static const char *const wrong[][2] = {
        {"tasks {\n  name: \"acme/x\"\n  colour: 7\n}\n", ":3:9: "},
        {"tasks {\n  name: \"acme/x\n}\n", ":2:"},
        {"tasks {\n  split: SPLIT_TEST\n}\n", ":3:1: "},
        {"tasks {\n  revision: -1\n}\n", ":2:13: "},
    };

    for (size_t i = 0; i < LH_ARRAY_SIZE(wrong); i++) {
        struct lh_error e = {0};

        put(wrong[i][0], strlen(wrong[i][0]));
        cr_expect(eq(ptr, task_load(path, &e), NULL));
        cr_expect(eq(int, e.code, LH_INVALID_ARGUMENT));
        cr_expect(strstr(e.message, path) == e.message && strstr(e.message, wrong[i][1]),
                  "'%s' lacks '%s'", e.message, wrong[i][1]);
    }
}

/* ---- hostile binary ---- */

static void refuse(const void *data, size_t len, int code, const char *what)
{
    struct lh_error e = {0};
    TaskSet *set;

    put(data, len);
    set = task_load(path, &e);
    cr_expect(eq(ptr, set, NULL), "%s was taken", what);
    cr_expect(eq(int, e.code, code), "%s: %s", what, e.message);
    lh_message_free((ProtobufCMessage *)set);
}

Test(load, every_truncation_is_refused)
{
    struct lh_error e = {0};
    size_t len;

    put(example, strlen(example));
    lh_automsg(TaskSet) set = task_load(path, &e);
    lh_autofree uint8_t *bytes = packed(set, &len);
    for (size_t n = 2; n < len; n++) /* a lone newline is a text without tasks */
        refuse(bytes, n, LH_INVALID_ARGUMENT, "a truncated set");
}

Test(load, hostile_bytes_are_refused)
{
    /* A task whose timeouts come again and again: protobuf-c merges them in quadratic time. */
    uint8_t repeated[4096] = {0x0a, 0xfc, 0x1f};
    uint8_t bad_text[] = {0x0a, 0x04, 0x0a, 0x02, 0xff, 0xfe};
    uint8_t nul_text[] = {0x0a, 0x04, 0x0a, 0x02, 'a', 0};
    uint8_t huge[] = {0x0a, 0xff, 0xff, 0xff, 0xff, 0x07, 1, 2};
    uint8_t group[] = {0x0b, 0x0c, 1};

    for (size_t i = 3; i + 2 <= sizeof repeated; i += 2)
        memcpy(repeated + i, "\x52\x00", 2);
    refuse(repeated, 3 + 0xffc, LH_INVALID_ARGUMENT, "a repeated singular message");
    refuse(bad_text, sizeof bad_text, LH_INVALID_ARGUMENT, "text that is not UTF-8");
    refuse(nul_text, sizeof nul_text, LH_INVALID_ARGUMENT, "text with a NUL");
    refuse(huge, sizeof huge, LH_INVALID_ARGUMENT, "a length beyond the end");
    refuse(group, sizeof group, LH_INVALID_ARGUMENT, "a group");
}

Test(load, what_cannot_be_read_is_named)
{
    struct lh_error e = {0};

    cr_assert(eq(ptr, task_load("/nonexistent/tasks", &e), NULL));
    cr_assert(eq(int, e.code, LH_NOT_FOUND));
    cr_assert(strstr(e.message, "/nonexistent/tasks") != NULL);
    cr_assert(eq(ptr, task_load("/tmp", &e), NULL));
    cr_assert(eq(int, e.code, LH_INVALID_ARGUMENT));
}

Test(load, a_wrong_schema_path_says_so)
{
    struct lh_error e = {0};

    put(example, strlen(example));
    setenv("LONGHAUL_PROTO_PATH", "/nonexistent", 1);
    cr_assert(eq(ptr, task_load(path, &e), NULL));
    cr_assert(strstr(e.message, "LONGHAUL_PROTO_PATH=/nonexistent") != NULL, "%s", e.message);
}

Test(load, the_worked_example_is_valid)
{
    struct lh_error e = {0};
    lh_automsg(TaskSet) set =
        task_load(SOURCE_ROOT "/deploy/jobs/examples/hello-task.textproto", &e);

    cr_assert(ne(ptr, set, NULL), "%s", e.message);
    cr_assert(eq(sz, set->n_tasks, 1));
    cr_assert(eq(int, task_validate(set->tasks[0], &e), 0), "%s", e.message);
}

Test(load, json_is_the_same_task)
{
    static const char json[] = " {\"tasks\": [{\"name\": \"acme/echo\", \"revision\": 1,"
                               " \"split\": \"SPLIT_TRAIN\"}]}";
    struct lh_error e = {0};

    put(json, strlen(json));
    lh_automsg(TaskSet) set = task_load(path, &e);
    cr_assert(ne(ptr, set, NULL), "%s", e.message);
    cr_expect(eq(str, set->tasks[0]->name, (char *)"acme/echo"));
    put("{\"tasks\": [\n{\"nme\": 1}]}", 24);
    cr_assert(eq(ptr, task_load(path, &e), NULL));
    cr_expect(strstr(e.message, "tasks[0].nme: Task has no such field") != NULL, "%s", e.message);
}

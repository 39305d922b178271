/* kvstore explain reads what a worker has left, without kvstored. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "kvstore/trace.h"
#include "proto/file.h"

/* Exit status; the output's beginning in text. */
static int explain(const char *dir, const char *arguments, char *text, size_t size)
{
    lh_autofree char *command = lh_format("%s %s explain %s 2>&1", KVSTORE, dir, arguments);
    FILE *f = popen(command, "r");

    cr_assert(f != NULL);
    text[fread(text, 1, size - 1, f)] = '\0';
    return WEXITSTATUS(pclose(f));
}

Test(explain, one_trajectory_or_all_reasons)
{
    char dir[] = "/tmp/longhaul-explain-XXXXXX", text[16384];
    struct lh_error err = {0};
    struct kv_record r = {.decision = KV_RESTORE_SPLIT, .tokens = 4711, .split_tokens = 1024};

    cr_assert(mkdtemp(dir) != NULL);
    cr_assert(ne(int, explain(dir, "", text, sizeof text), 0), "there is no trace");
    lh_autofree char *run = lh_format("%s/run", dir), *path = lh_format("%s/w.trace", run);
    cr_assert(eq(int, mkdir(run, 0700), 0));
    lh_auto(kv_trace) t = kv_trace_create(path, 16, &err);
    cr_assert(t != NULL, "%s", err.message);
    kv_trace_add(t, &r, "mine");
    kv_trace_add(t, &r, "other");
    cr_assert(eq(int, explain(dir, "mine -o json", text, sizeof text), 0), "%s", text);
    char *first = strstr(text, "4711");
    cr_assert(first != NULL, "%s", text);
    cr_assert(strstr(first + 1, "4711") == NULL, "of one trajectory only: %s", text);
    cr_assert(eq(int, explain(dir, "-o json", text, sizeof text), 0));
    cr_assert(strstr(text, "\"count\": 2") != NULL, "%s", text);
    cr_assert(eq(int, lh_remove_tree(dir, NULL), 0));
}

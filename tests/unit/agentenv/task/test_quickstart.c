/* The quickstart's tasks as data: deterministic, disjoint, half of them with a second turn, short
 * enough for the policy that learns them. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agentenv/task/task.h"
#include "proto/cleanup.h"
#include "proto/file.h"
#include "proto/parse.h"

static char *generate(const char *options, size_t *len)
{
    lh_autofree char *command = lh_format("'%s' %s", getenv("QUICKSTART_TASKS"), options);
    FILE *f = popen(command, "re");
    char *data = NULL;
    size_t room = 0;

    cr_assert(ne(ptr, f, NULL));
    *len = 0;
    do {
        room += 1 << 20;
        data = realloc(data, room);
        *len += fread(data + *len, 1, room - *len, f);
    } while (*len == room);
    cr_assert(eq(int, pclose(f), 0));
    return data;
}

static TaskSet *generate_set(const char *options)
{
    struct lh_parse_limits limits = {.heap = 256 << 20};
    struct lh_error e = {0};
    size_t len;
    lh_autofree char *data = generate(options, &len);
    TaskSet *set = (TaskSet *)lh_parse(TASK_SET_DESCRIPTOR, data, len, limits, &e);

    cr_assert(ne(ptr, set, NULL), "%s", e.message);
    return set;
}

Test(quickstart, the_seed_decides_everything)
{
    size_t a_len, b_len, c_len;
    lh_autofree char *a = generate("", &a_len), *b = generate("", &b_len);
    lh_autofree char *c = generate("--seed 2", &c_len);

    cr_assert(eq(sz, a_len, b_len));
    cr_assert(eq(int, memcmp(a, b, a_len), 0));
    cr_assert(a_len != c_len || memcmp(a, c, a_len));
}

Test(quickstart, more_training_tasks_leave_the_evaluation_alone)
{
    size_t a_len, b_len;
    lh_autofree char *a = generate("--train 0", &a_len), *b = generate("--train 600", &b_len);

    cr_assert(lt(sz, a_len, b_len));
    cr_assert(eq(int, memcmp(a, b + (b_len - a_len), a_len), 0));
}

Test(quickstart, all_are_valid_and_short)
{
    lh_automsg(TaskSet) set = generate_set("");

    cr_assert(eq(sz, set->n_tasks, 2250));
    for (size_t i = 0; i < set->n_tasks; i++) {
        const Task *t = set->tasks[i];
        struct lh_error e = {0};

        cr_assert(eq(int, task_validate(t, &e), 0), "%s", e.message);
        cr_assert(le(sz, strlen(t->prompt[0]->text), 30), "%s", t->prompt[0]->text);
        for (size_t k = 0; k < t->oracle->n_actions; k++)
            cr_assert(le(sz, strlen(t->oracle->actions[k]), 20), "%s", t->oracle->actions[k]);
        for (size_t k = 0; k < t->environment->n_files; k++)
            cr_assert(le(sz, t->environment->files[k]->content.len, 8));
    }
}

static bool is_eval(const Task *t)
{
    return t->split == LONGHAUL__TASK__V1__SPLIT__SPLIT_EVAL;
}

Test(quickstart, nearly_half_of_the_evaluation_needs_what_the_first_command_printed)
{
    lh_automsg(TaskSet) set = generate_set("");
    size_t eval = 0, two = 0;

    for (size_t i = 0; i < set->n_tasks; i++) {
        const Task *t = set->tasks[i];

        if (is_eval(t)) {
            eval++;
            two += t->oracle->n_actions == 2;
        }
        if (t->oracle->n_actions < 2)
            continue;
        /* Its last word is neither in the prompt nor in the first command. */
        const char *word = strrchr(t->oracle->actions[1], ' ') + 1;
        cr_assert(eq(ptr, strstr(t->prompt[0]->text, word), NULL), "%s", t->name);
        cr_assert(eq(ptr, strstr(t->oracle->actions[0], word), NULL), "%s", t->name);
    }
    cr_assert(eq(sz, eval, 250));
    cr_assert(ge(sz, 100 * two, 45 * eval), "%zu of %zu", two, eval);
}

/* ---- disjointness ---- */

struct words {
    char (*word)[16];
    size_t n;
};

static const char *const common[] = {
    "cat",  "cd",     "dir",  "echo",  "find", "grep", "in",  "it",  "l",
    "list", "ls",     "make", "mkdir", "move", "mv",   "old", "out", "put",
    "read", "remove", "rm",   "touch", "to",   "work", "and",
};

static bool is_common(const char *word)
{
    for (size_t i = 0; i < LH_ARRAY_SIZE(common); i++)
        if (!strcmp(common[i], word))
            return true;
    return false;
}

static void add_words(struct words *w, const char *text, size_t len)
{
    for (size_t i = 0, start; i < len;) {
        for (start = i; i < len && isalnum((unsigned char)text[i]);)
            i++;
        if (i > start && i - start < 16) {
            w->word = reallocarray(w->word, w->n + 1, 16);
            memcpy(w->word[w->n], text + start, i - start);
            w->word[w->n][i - start] = 0;
            w->n += !is_common(w->word[w->n]);
        }
        i += i == start;
    }
}

static void add_task(struct words *w, const Task *t)
{
    add_words(w, t->prompt[0]->text, strlen(t->prompt[0]->text));
    for (size_t i = 0; i < t->oracle->n_actions; i++)
        add_words(w, t->oracle->actions[i], strlen(t->oracle->actions[i]));
    for (size_t i = 0; i < t->environment->n_files; i++) {
        const Longhaul__Task__V1__File *f = t->environment->files[i];

        add_words(w, f->path, strlen(f->path));
        add_words(w, (const char *)f->content.data, f->content.len);
    }
}

static int compare(const void *a, const void *b)
{
    return strcmp(a, b);
}

Test(quickstart, no_word_of_the_evaluation_occurs_in_training)
{
    lh_automsg(TaskSet) set = generate_set("");
    struct words train = {0}, eval = {0};

    for (size_t i = 0; i < set->n_tasks; i++)
        add_task(is_eval(set->tasks[i]) ? &eval : &train, set->tasks[i]);
    cr_assert(gt(sz, train.n, 4000));
    cr_assert(gt(sz, eval.n, 500));
    qsort(train.word, train.n, 16, compare);
    for (size_t i = 0; i < eval.n; i++)
        cr_assert(eq(ptr, bsearch(eval.word[i], train.word, train.n, 16, compare), NULL),
                  "%s is in both", eval.word[i]);
    free(train.word);
    free(eval.word);
}

/* quickstart-tasks: writes the tasks that the quickstart job trains and is evaluated on.
 *
 * Six families of shell tasks, small enough for a byte-level policy of half a million parameters to
 * learn within minutes on two cores, and true to what agents do: read the request, act, look at
 * what came back, act on it.  The skill that is learnt is copying: the right word from the prompt
 * (put, make, move) or from the output of one's own first command (read, list, find) into the right
 * place. In the last three the answer is nowhere in the prompt, and no glob or redirection stands
 * in for looking: the second command has to type what the first one printed.
 *
 * Words belong to train or to eval by a hash of themselves, so no argument, file or directory name
 * of an evaluation task ever occurs in training.  Everything follows from the seed.
 *
 * Arguments are words only.  With numbers among them, or with two words to copy into one command, a
 * family was learnt long after all the others: there is less of each kind to learn copying from. */
#include <argp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "longhaul/task/v1/task.pb-c.h"
#include "proto/cleanup.h"
#include "proto/error.h"
#include "proto/text.h"

typedef Longhaul__Task__V1__Task Task;
typedef Longhaul__Task__V1__File File;

enum { WORD = 8, EVAL_ONE_IN = 4, MAX_FILES = 3, MAX_ACTIONS = 2 };

/* ---- words ---- */

struct source {
    uint64_t state;
    bool eval;
};

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static unsigned below(struct source *s, unsigned n)
{
    s->state += 0x9e3779b97f4a7c15u;
    return (unsigned)(mix(s->state) % n);
}

/* Which split an argument belongs to; nothing but the argument itself decides. */
static bool is_eval(const char *text)
{
    uint64_t h = 0;

    for (; *text; text++)
        h = mix(h * 257 + (unsigned char)*text);
    return h % EVAL_ONE_IN == 0;
}

/* Four or five letters: two syllables, or two and a closing consonant. */
static void draw_letters(struct source *s, char word[WORD])
{
    static const char consonants[] = "bdklmnrstv", vowels[] = "aiou";
    unsigned len = 4 + below(s, 2);

    for (unsigned i = 0; i < len; i++)
        word[i] = i % 2 ? vowels[below(s, sizeof vowels - 1)]
                        : consonants[below(s, sizeof consonants - 1)];
    word[len] = 0;
}

static void draw_word(struct source *s, char word[WORD])
{
    do
        draw_letters(s, word);
    while (is_eval(word) != s->eval);
}

/* n words of which none contains another, since grep would find both. */
static void draw_distinct(struct source *s, unsigned n, char (*out)[WORD])
{
    for (unsigned i = 0; i < n;) {
        bool again = false;

        draw_word(s, out[i]);
        for (unsigned k = 0; k < i; k++)
            again |= strstr(out[i], out[k]) || strstr(out[k], out[i]);
        i += !again;
    }
}

/* ---- families ---- */

struct draft {
    char prompt[96];
    char action[MAX_ACTIONS][96];
    struct {
        char path[96], content[48];
    } file[MAX_FILES];
    unsigned n_files;
    char check[512]; /* the verifier, run in the working directory */
};

#define SAY(field, ...) snprintf(field, sizeof(field), __VA_ARGS__)

static void add_file(struct draft *d, const char *directory, const char *name, const char *content)
{
    SAY(d->file[d->n_files].path, "/work/%s%s%s", directory, *directory ? "/" : "", name);
    SAY(d->file[d->n_files].content, "%s\n", content);
    d->n_files++;
}

/* Two names in the order of ls. */
static void sort_names(const char *a, const char *b, char both[2 * WORD])
{
    bool swap = strcmp(a, b) > 0;

    snprintf(both, 2 * WORD, "%s %s", swap ? b : a, swap ? a : b);
}

/* Nothing but these names is in the working directory. */
#define ONLY "[ \"$(echo $(ls -A))\" = \"%s\" ]"
/* The files' contents, in order, on one line. */
#define HOLDS "[ \"$(echo $(cat %s))\" = \"%s\" ]"

static void make_put(struct source *s, struct draft *d)
{
    char word[WORD];

    draw_word(s, word);
    SAY(d->prompt, "put %s in out", word);
    SAY(d->action[0], "echo %s >out", word);
    SAY(d->check, ONLY " && " HOLDS, "out", "out", word);
}

static void make_make(struct source *s, struct draft *d)
{
    char name[WORD];

    draw_word(s, name);
    SAY(d->prompt, "make dir %s", name);
    SAY(d->action[0], "mkdir %s", name);
    SAY(d->check, ONLY " && [ -d %s ]", name, name);
}

static void make_move(struct source *s, struct draft *d)
{
    char name[WORD], held[WORD];

    draw_word(s, name);
    draw_word(s, held);
    add_file(d, "", name, held);
    SAY(d->prompt, "move %s to old", name);
    SAY(d->action[0], "mv %s old", name);
    SAY(d->check, ONLY " && " HOLDS, "old", "old", held);
}

/* The word in a file becomes a directory. */
static void make_read(struct source *s, struct draft *d)
{
    char name[2][WORD], both[2 * WORD];

    draw_distinct(s, 2, name);
    sort_names(name[0], name[1], both);
    add_file(d, "", name[0], name[1]);
    SAY(d->prompt, "read %s, mkdir it", name[0]);
    SAY(d->action[0], "cat %s", name[0]);
    SAY(d->action[1], "mkdir %s", name[1]);
    SAY(d->check, ONLY " && [ -d %s ] && " HOLDS, both, name[1], name[0], name[1]);
}

/* The name of the file in a directory becomes an empty file outside.  Removing it instead would be
 * solved by a glob, without looking; copying it out by a glob fails here, as it is not empty. */
static void make_list(struct source *s, struct draft *d)
{
    char name[2][WORD], held[WORD], both[2 * WORD];

    draw_distinct(s, 2, name);
    draw_word(s, held);
    sort_names(name[0], name[1], both);
    add_file(d, name[0], name[1], held);
    SAY(d->prompt, "list %s, touch it", name[0]);
    SAY(d->action[0], "ls %s", name[0]);
    SAY(d->action[1], "touch %s", name[1]);
    SAY(d->check, ONLY " && [ -f %s ] && [ ! -s %s ] && " HOLDS, both, name[1], name[1],
        d->file[0].path, held);
}

/* Of three files the one that holds a word goes; the others stay. */
static void make_find(struct source *s, struct draft *d)
{
    char word[6][WORD], left[2 * WORD]; /* three names, then what the files hold */

    draw_distinct(s, 6, word);
    for (int i = 0; i < 3; i++)
        add_file(d, "", word[i], word[3 + i]);
    SAY(d->prompt, "find %s, remove it", word[3]);
    SAY(d->action[0], "grep -l %s *", word[3]);
    SAY(d->action[1], "rm %s", word[0]);
    sort_names(word[1], word[2], left);
    SAY(d->check, ONLY " && [ %s = \"$(cat %s)\" ] && [ %s = \"$(cat %s)\" ]", left, word[4],
        word[1], word[5], word[2]);
}

/* One-turn and two-turn families take turns, so any number of tasks is half and half. */
static const struct family {
    const char *name;
    void (*make)(struct source *s, struct draft *d);
} families[] = {
    {"read", make_read}, {"put", make_put},   {"list", make_list},
    {"make", make_make}, {"find", make_find}, {"move", make_move},
};

/* ---- from a draft to a task ---- */

struct options {
    uint64_t seed;
    unsigned train, eval;
    bool text;
    const char *image;
};

/* Sets packed one after the other are one set: that is how protobuf merges, text and binary. */
static int write_task(Task *task, bool text, struct lh_error *err)
{
    Longhaul__Task__V1__TaskSet set = LONGHAUL__TASK__V1__TASK_SET__INIT;

    set.n_tasks = 1;
    set.tasks = &task;
    if (text) {
        lh_text_print(stdout, &set.base);
        return 0;
    }
    size_t len = protobuf_c_message_get_packed_size(&set.base);
    lh_autofree uint8_t *bytes = malloc(len);
    if (!bytes)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory for task %s", task->name);
    protobuf_c_message_pack(&set.base, bytes);
    fwrite(bytes, 1, len, stdout);
    return 0;
}

static int write_draft(struct draft *d, Task *task, const struct options *o, struct lh_error *err)
{
    Longhaul__Task__V1__Message prompt = LONGHAUL__TASK__V1__MESSAGE__INIT, *prompts[] = {&prompt};
    Longhaul__Task__V1__Environment environment = LONGHAUL__TASK__V1__ENVIRONMENT__INIT;
    Longhaul__Task__V1__Verifier verifier = LONGHAUL__TASK__V1__VERIFIER__INIT;
    Longhaul__Task__V1__Oracle oracle = LONGHAUL__TASK__V1__ORACLE__INIT;
    File file[MAX_FILES], *files[MAX_FILES];
    char *actions[MAX_ACTIONS];

    prompt.role = LONGHAUL__TASK__V1__ROLE__ROLE_USER;
    prompt.text = d->prompt;
    for (unsigned i = 0; i < d->n_files; i++) {
        file[i] = (File)LONGHAUL__TASK__V1__FILE__INIT;
        file[i].path = d->file[i].path;
        file[i].content.data = (uint8_t *)d->file[i].content;
        file[i].content.len = strlen(d->file[i].content);
        files[i] = &file[i];
    }
    for (; oracle.n_actions < MAX_ACTIONS && *d->action[oracle.n_actions]; oracle.n_actions++)
        actions[oracle.n_actions] = d->action[oracle.n_actions];
    oracle.actions = actions;
    environment.image = (char *)o->image;
    environment.n_files = d->n_files;
    environment.files = files;
    verifier.command = d->check;
    task->revision = 1;
    task->licence = (char *)"Apache-2.0";
    task->n_prompt = 1;
    task->prompt = prompts;
    task->environment = &environment;
    task->verifier = &verifier;
    task->oracle = &oracle;
    return write_task(task, o->text, err);
}

/* Every split has its own stream: the number of training tasks does not change the evaluation. */
static int write_split(const struct options *o, bool eval, struct lh_error *err)
{
    struct source source = {.state = mix(o->seed + 1) + eval, .eval = eval};
    unsigned n = eval ? o->eval : o->train;

    for (unsigned i = 0; i < n; i++) {
        const struct family *family = &families[i % LH_ARRAY_SIZE(families)];
        Task task = LONGHAUL__TASK__V1__TASK__INIT;
        struct draft draft = {0};
        char name[64];

        family->make(&source, &draft);
        SAY(name, "quickstart%s/%s-%04u", eval ? "-eval" : "", family->name,
            i / (unsigned)LH_ARRAY_SIZE(families));
        task.name = name;
        task.split = LONGHAUL__TASK__V1__SPLIT__SPLIT_TRAIN + eval;
        task.family = (char *)family->name;
        int r = write_draft(&draft, &task, o, err);
        if (r < 0)
            return r;
    }
    return 0;
}

/* ---- command line ---- */

static const struct argp_option option_table[] = {
    {"seed", 's', "N", 0, "Everything follows from it (default 1)", 0},
    {"train", 't', "N", 0, "Training tasks (default 2000)", 0},
    {"eval", 'e', "N", 0, "Evaluation tasks (default 250)", 0},
    {"image", 'i', "NAME", 0, "Image they run in (default quickstart)", 0},
    {"text", 'x', NULL, 0, "Text format instead of binary", 0},
    {0},
};

static uint64_t number_of(const char *text, uint64_t max, struct argp_state *state)
{
    char *end;
    uint64_t n = strtoull(text, &end, 10);

    if (*text < '0' || *text > '9' || *end || n > max)
        argp_error(state, "'%s' is not a number from 0 to %llu", text, (unsigned long long)max);
    return n;
}

static error_t parse_option(int key, char *arg, struct argp_state *state)
{
    struct options *o = state->input;

    switch (key) {
    case 's':
        o->seed = number_of(arg, UINT32_MAX, state);
        return 0;
    case 't':
        o->train = (unsigned)number_of(arg, 50000, state);
        return 0;
    case 'e':
        o->eval = (unsigned)number_of(arg, 50000, state);
        return 0;
    case 'i':
        o->image = arg;
        return 0;
    case 'x':
        o->text = true;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int main(int argc, char **argv)
{
    static const struct argp argp = {
        .options = option_table,
        .parser = parse_option,
        .doc = "Writes the quickstart's tasks, a longhaul.task.v1.TaskSet, to standard output.",
    };
    struct options o = {.seed = 1, .train = 2000, .eval = 250, .image = "quickstart"};
    struct lh_error err = {0};

    argp_err_exit_status = 2;
    if (argp_parse(&argp, argc, argv, 0, NULL, &o))
        return 2;
    if (write_split(&o, false, &err) < 0 || write_split(&o, true, &err) < 0) {
        fprintf(stderr, "quickstart-tasks: %s\n", err.message);
        return 1;
    }
    if (fflush(stdout) || ferror(stdout)) {
        perror("quickstart-tasks: writing to standard output");
        return 1;
    }
    return 0;
}

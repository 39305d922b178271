#include "agentenv/task/dockerfile.h"

#include <ctype.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "proto/cleanup.h"
#include "proto/file.h"

enum { STEPS_MAX = 1000, WORDS_MAX = 256, TEXT_MAX = 1 << 20 };

struct parsing {
    const char *name;
    const char *at, *end;
    unsigned line; /* of the instruction */
    unsigned next; /* of what `at` points to */
    struct dockerfile *out;
    struct lh_error *err;
};

static int refuse(const struct parsing *p, int code, const char *what)
{
    return lh_fail(p->err, code, "%s:%u: %s", p->name, p->line, what);
}

static int out_of_memory(const struct parsing *p)
{
    return refuse(p, LH_RESOURCE_EXHAUSTED, "no memory");
}

/* ---- lines ---- */

static bool is_blank(const char *s, size_t n)
{
    while (n && isspace((unsigned char)*s))
        s++, n--;
    return n == 0 || *s == '#';
}

/* One instruction: lines that end in a backslash go on, comments and empty lines between are left
 * out.  NULL at the end, or without memory (*r). */
static char *next_instruction(struct parsing *p, int *r)
{
    lh_autofree char *text = malloc((size_t)(p->end - p->at) + 1);
    size_t len = 0;
    bool open = true;

    *r = text ? 0 : out_of_memory(p);
    while (text && open && p->at < p->end) {
        const char *stop = memchr(p->at, '\n', (size_t)(p->end - p->at));
        size_t n = (size_t)((stop ? stop : p->end) - p->at), keep = n;
        const char *line = p->at;
        p->at = stop ? stop + 1 : p->end;
        p->next++;
        if (is_blank(line, n))
            continue;
        if (len == 0)
            p->line = p->next - 1;
        while (keep && isspace((unsigned char)line[keep - 1]))
            keep--;
        open = keep && line[keep - 1] == '\\';
        memcpy(text + len, line, keep -= open);
        len += keep;
    }
    if (!text || len == 0)
        return NULL;
    text[len] = 0;
    return lh_steal(&text);
}

/* ---- words ---- */

static void free_words(char **words, size_t n)
{
    for (size_t i = 0; i < n; i++)
        free(words[i]);
    free(words);
}

static int add_word(struct parsing *p, struct docker_step *s, const char *text, size_t len)
{
    if (s->n_words == WORDS_MAX)
        return refuse(p, LH_INVALID_ARGUMENT, "more than 256 words");
    char **more = reallocarray(s->words, s->n_words + 1, sizeof *more);
    if (more)
        s->words = more;
    char *copy = more ? strndup(text, len) : NULL;
    if (!copy)
        return out_of_memory(p);
    s->words[s->n_words++] = copy;
    return 0;
}

/* The next word without its quotes and backslashes, in `out`; what follows it.  NULL: a quote is
 * open. */
static const char *read_word(const char *s, char *out)
{
    char quote = 0;

    for (; *s && (quote || !isspace((unsigned char)*s)); s++) {
        if (quote && *s == quote)
            quote = 0;
        else if (!quote && (*s == '"' || *s == '\''))
            quote = *s;
        else if (*s == '\\' && quote != '\'' && s[1])
            *out++ = *++s;
        else
            *out++ = *s;
    }
    *out = 0;
    return quote ? NULL : s;
}

static int split(struct parsing *p, struct docker_step *s, const char *text)
{
    lh_autofree char *word = malloc(strlen(text) + 1);
    int r = word ? 0 : out_of_memory(p);

    while (r == 0 && *(text += strspn(text, " \t\r\f\v"))) {
        text = read_word(text, word);
        r = text ? add_word(p, s, word, strlen(word))
                 : refuse(p, LH_INVALID_ARGUMENT, "a quote is not closed");
    }
    return r;
}

/* ["a", "b"] as words; 1 = it is not of that form. */
static int split_json(struct parsing *p, struct docker_step *s, const char *text)
{
    json_t *list = *text == '[' ? json_loads(text, 0, NULL) : NULL;
    int r = list && json_array_size(list) ? 0 : 1;

    for (size_t i = 0; r == 0 && i < json_array_size(list); i++) {
        const char *word = json_string_value(json_array_get(list, i));
        r = word ? add_word(p, s, word, strlen(word)) : 1;
    }
    json_decref(list);
    return r;
}

/* ---- instructions ---- */

typedef int instruction(struct parsing *p, struct docker_step *s, const char *rest);

static int no_flags(const struct parsing *p, const char *rest)
{
    return strncmp(rest, "--", 2) ? 0 : refuse(p, LH_UNIMPLEMENTED, "flags are not supported");
}

static int no_variables(const struct parsing *p, const char *rest)
{
    return strchr(rest, '$') ? refuse(p, LH_UNIMPLEMENTED, "variables are not replaced here") : 0;
}

/* A word as the shell takes it for itself. */
static char *quote(const char *word)
{
    char *out = malloc(4 * strlen(word) + 3), *to = out;

    if (!out)
        return NULL;
    *to++ = '\'';
    for (; *word; word++) {
        if (*word == '\'')
            to = stpcpy(to, "'\\'");
        *to++ = *word;
    }
    return memcpy(to, "'", 2), out;
}

/* The form of a list runs without a shell; quoted for one it means the same. */
static int join_quoted(struct parsing *p, struct docker_step *s)
{
    lh_autofree char *all = strdup("");

    for (size_t i = 0; all && i < s->n_words; i++) {
        lh_autofree char *word = quote(s->words[i]);
        char *more = word ? lh_format("%s%s%s", all, i ? " " : "", word) : NULL;
        free(all);
        all = more;
    }
    if (!all)
        return out_of_memory(p);
    free_words(s->words, s->n_words);
    s->words = NULL;
    s->n_words = 0;
    return add_word(p, s, all, strlen(all));
}

static int read_run(struct parsing *p, struct docker_step *s, const char *rest)
{
    int r = no_flags(p, rest);

    if (r < 0)
        return r;
    if (strstr(rest, "<<"))
        return refuse(p, LH_UNIMPLEMENTED, "here-documents are not supported");
    r = split_json(p, s, rest);
    if (r == 0)
        return join_quoted(p, s);
    free_words(s->words, s->n_words);
    s->words = NULL;
    s->n_words = 0;
    return r < 0 ? r : add_word(p, s, rest, strlen(rest));
}

static int check_source(const struct parsing *p, const char *source)
{
    if (strpbrk(source, "*?["))
        return refuse(p, LH_UNIMPLEMENTED, "patterns are not supported, name files or directories");
    if (strstr(source, "://"))
        return refuse(p, LH_UNIMPLEMENTED, "COPY from the network is not supported");
    for (const char *part = source; *part; part += strcspn(part, "/")) {
        part += strspn(part, "/");
        if (!strncmp(part, "..", 2) && (part[2] == '/' || !part[2]))
            return refuse(p, LH_INVALID_ARGUMENT, "a source outside the directory of the build");
    }
    return 0;
}

static int read_copy(struct parsing *p, struct docker_step *s, const char *rest)
{
    int r = no_flags(p, rest);

    if (r < 0 || (r = no_variables(p, rest)) < 0)
        return r;
    r = split_json(p, s, rest);
    if (r > 0)
        r = *rest == '[' ? refuse(p, LH_INVALID_ARGUMENT, "a list of texts is needed")
                         : split(p, s, rest);
    if (r == 0 && s->n_words < 2)
        r = refuse(p, LH_INVALID_ARGUMENT, "COPY needs sources and a destination");
    for (size_t i = 0; r == 0 && i + 1 < s->n_words; i++)
        r = check_source(p, s->words[i]);
    return r;
}

static int read_one(struct parsing *p, struct docker_step *s, const char *rest)
{
    int r = no_variables(p, rest);

    if (r == 0)
        r = split(p, s, rest);
    return r == 0 && s->n_words != 1 ? refuse(p, LH_INVALID_ARGUMENT, "one word is needed") : r;
}

static int read_workdir(struct parsing *p, struct docker_step *s, const char *rest)
{
    int r = read_one(p, s, rest);

    return r == 0 && *s->words[0] != '/'
               ? refuse(p, LH_UNIMPLEMENTED, "WORKDIR must be an absolute path")
               : r;
}

/* Each pair becomes a step of its own; the last one is left in `s`. */
static int read_env(struct parsing *p, struct docker_step *s, const char *rest);

/* "python:3.12" has a character that names of images have not. */
static int read_from(struct parsing *p, const char *rest)
{
    struct docker_step s = {0};
    int r = no_flags(p, rest);

    if (r == 0)
        r = no_variables(p, rest);
    if (r == 0)
        r = split(p, &s, rest);
    if (r == 0 && p->out->from)
        r = refuse(p, LH_UNIMPLEMENTED, "a second FROM: only one stage is supported");
    if (r == 0 && s.n_words == 3 && !strcasecmp(s.words[1], "AS"))
        s.n_words = 1, free(s.words[1]), free(s.words[2]);
    if (r == 0 && s.n_words != 1)
        r = refuse(p, LH_INVALID_ARGUMENT, "FROM needs the name of an image");
    if (r == 0 && strchr(s.words[0], '@'))
        r = refuse(p, LH_UNIMPLEMENTED, "FROM by digest is not supported");
    if (r == 0) {
        p->out->from = lh_steal(&s.words[0]);
        for (char *c = p->out->from; (c = strchr(c, ':'));)
            *c = '-';
    }
    free_words(s.words, s.n_words);
    return r;
}

static const struct {
    const char *name;
    enum docker_kind kind;
    instruction *read;
} instructions[] = {
    {"RUN", DOCKER_RUN, read_run},   {"COPY", DOCKER_COPY, read_copy},
    {"ENV", DOCKER_ENV, read_env},   {"WORKDIR", DOCKER_WORKDIR, read_workdir},
    {"USER", DOCKER_USER, read_one},
};

/* Takes what `s` owns, also after an error. */
static int add_step(struct parsing *p, struct docker_step *s)
{
    struct dockerfile *f = p->out;
    struct docker_step *more =
        f->n < STEPS_MAX ? reallocarray(f->steps, f->n + 1, sizeof *more) : NULL;

    if (!more) {
        free_words(s->words, s->n_words);
        return f->n < STEPS_MAX ? out_of_memory(p)
                                : refuse(p, LH_INVALID_ARGUMENT, "more than 1000 steps");
    }
    f->steps = more;
    f->steps[f->n++] = *s;
    return 0;
}

static int add_pair(struct parsing *p, const char *pair)
{
    struct docker_step s = {.kind = DOCKER_ENV, .line = p->line};
    size_t n = strcspn(pair, "=");

    if (n == 0 || !pair[n] ||
        strspn(pair, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                     "0123456789_") != n)
        return refuse(p, LH_INVALID_ARGUMENT, "ENV needs NAME=value");
    int r = add_word(p, &s, pair, strlen(pair));
    if (r < 0) {
        free_words(s.words, s.n_words);
        return r;
    }
    return add_step(p, &s);
}

static int read_env(struct parsing *p, struct docker_step *s, const char *rest)
{
    size_t first = strcspn(rest, "= \t");
    int r = no_variables(p, rest);

    if (r < 0)
        return r;
    if (rest[first] != '=') { /* the old form: all behind the name is the value */
        lh_autofree char *pair =
            lh_format("%.*s=%s", (int)first, rest, rest + first + strspn(rest + first, " \t"));
        return pair ? add_pair(p, pair) : out_of_memory(p);
    }
    r = split(p, s, rest);
    for (size_t i = 0; r == 0 && i < s->n_words; i++)
        r = add_pair(p, s->words[i]);
    return r;
}

static int read_instruction(struct parsing *p, const char *text)
{
    const char *start = text + strspn(text, " \t");
    size_t n = strcspn(start, " \t\r\f\v");
    const char *rest = start + n + strspn(start + n, " \t\r\f\v");

    if (n == 4 && !strncasecmp(start, "FROM", 4))
        return read_from(p, rest);
    if (!p->out->from)
        return refuse(p, LH_INVALID_ARGUMENT, "the first instruction must be FROM");
    for (size_t i = 0; i < LH_ARRAY_SIZE(instructions); i++) {
        struct docker_step s = {.kind = instructions[i].kind, .line = p->line};
        if (n != strlen(instructions[i].name) || strncasecmp(start, instructions[i].name, n) != 0)
            continue;
        if (!*rest)
            return refuse(p, LH_INVALID_ARGUMENT, "nothing follows the instruction");
        int r = instructions[i].read(p, &s, rest);
        if (r == 0 && s.kind != DOCKER_ENV)
            return add_step(p, &s);
        free_words(s.words, s.n_words);
        return r;
    }
    return lh_fail(p->err, LH_UNIMPLEMENTED,
                   "%s:%u: %.*s is not supported; FROM, COPY, RUN, ENV, WORKDIR and USER are",
                   p->name, p->line, (int)(n < 40 ? n : 40), start);
}

int dockerfile_parse(const char *name, const char *text, size_t len, struct dockerfile *out,
                     struct lh_error *err)
{
    struct parsing p = {
        .name = name, .at = text, .end = text + len, .line = 1, .next = 1, .out = out, .err = err};
    int r = 0;

    *out = (struct dockerfile){.what = "Dockerfile"};
    if (len > TEXT_MAX || memchr(text, 0, len))
        return refuse(&p, LH_INVALID_ARGUMENT, "more than 1 MiB, or a NUL byte");
    while (r == 0) {
        lh_autofree char *line = next_instruction(&p, &r);
        if (!line)
            break;
        r = read_instruction(&p, line);
    }
    if (r == 0 && !out->from)
        r = refuse(&p, LH_INVALID_ARGUMENT, "FROM is missing");
    if (r < 0)
        dockerfile_finish(out);
    return r;
}

void dockerfile_finish(struct dockerfile *f)
{
    for (size_t i = 0; i < f->n; i++)
        free_words(f->steps[i].words, f->steps[i].n_words);
    free(f->steps);
    free(f->from);
    *f = (struct dockerfile){0};
}

/* Tables, arrays and pairs of TOML as JSON values: recursive descent over the words of
 * toml_words.c, straight into jansson's objects.  A second tree notes the line of every key by its
 * path, so that whoever checks the values later can still say where.  Rejected: a tree of our own
 * with lines in its nodes; every reader would have needed a second set of accessors beside
 * jansson's. */
#include "agentenv/task/toml.h"

#include <stdio.h>
#include <string.h>

#include "agentenv/task/toml_words.h"
#include "proto/cleanup.h"

enum { TEXT_MAX = 1 << 20, DEPTH_MAX = 32 };

/* ---- keys ---- */

static void extend(char path[TOML_PATH_SIZE], const char *part)
{
    size_t n = strlen(path);

    snprintf(path + n, TOML_PATH_SIZE - n, "%s%s", n ? "." : "", part);
}

static int note_line(struct toml_parser *p, const char *path, int line)
{
    return json_object_set_new(p->out->lines, path, json_integer(line)) < 0
               ? toml_refuse(p, "no memory")
               : 0;
}

/* The table below `t` under one part of a key, made if absent; the last of an array of tables. */
static json_t *step_into(struct toml_parser *p, json_t *t, const char *part,
                         char path[TOML_PATH_SIZE])
{
    json_t *next = json_object_get(t, part);

    extend(path, part);
    if (!next) {
        next = json_object();
        if (json_object_set_new(t, part, next) < 0)
            return toml_refuse(p, "the key is not UTF-8"), NULL;
        return json_object_get(t, part);
    }
    if (json_is_array(next) && json_array_size(next)) {
        size_t last = json_array_size(next) - 1, n = strlen(path);
        snprintf(path + n, TOML_PATH_SIZE - n, "[%zu]", last);
        next = json_array_get(next, last);
    }
    if (!json_is_object(next))
        return toml_refuse(p, "the key is used for a value already"), NULL;
    return next;
}

/* ---- values ---- */

static json_t *read_value(struct toml_parser *p, const char *path);

static json_t *read_array(struct toml_parser *p, const char *path)
{
    json_t *list = json_array();
    char item[TOML_PATH_SIZE];

    p->at++;
    for (size_t i = 0; list; i++) {
        toml_skip_space(p);
        if (toml_peek(p) == ']')
            return p->at++, list;
        snprintf(item, sizeof item, "%.400s[%zu]", path, i);
        json_t *v = read_value(p, item);
        if (!v || json_array_append_new(list, v) < 0)
            break;
        toml_skip_space(p);
        if (toml_peek(p) == ',')
            p->at++;
        else if (toml_peek(p) != ']') {
            toml_refuse(p, "an array does not go on");
            break;
        }
    }
    json_decref(list);
    return NULL;
}

static int read_pair(struct toml_parser *p, json_t *table, const char *path);

static json_t *read_inline_table(struct toml_parser *p, const char *path)
{
    json_t *t = json_object();

    p->at++;
    toml_skip_blanks(p);
    if (toml_peek(p) == '}')
        return p->at++, t;
    while (t && read_pair(p, t, path) == 0) {
        toml_skip_blanks(p);
        int c = toml_peek(p);
        p->at += c == ',' || c == '}';
        if (c == '}')
            return t;
        if (c != ',') {
            toml_refuse(p, "a table does not go on");
            break;
        }
    }
    json_decref(t);
    return NULL;
}

static json_t *read_value(struct toml_parser *p, const char *path)
{
    json_t *v;

    if (p->depth == DEPTH_MAX)
        return toml_refuse(p, "nested too deep"), NULL;
    p->depth++;
    if (toml_peek(p) == '"' || toml_peek(p) == '\'') {
        lh_autofree char *text = toml_read_text(p);
        v = text ? json_string(text) : NULL;
        if (text && !v)
            toml_refuse(p, "a text is not UTF-8");
    } else if (toml_peek(p) == '[') {
        v = read_array(p, path);
    } else {
        v = toml_peek(p) == '{' ? read_inline_table(p, path) : toml_read_plain(p);
    }
    p->depth--;
    return v;
}

static int set_value(struct toml_parser *p, json_t *table, const struct toml_key *k,
                     const char *above)
{
    char path[TOML_PATH_SIZE];
    int line = p->line;

    snprintf(path, sizeof path, "%s", above);
    for (int i = 0; i + 1 < k->n; i++)
        if (!(table = step_into(p, table, k->parts[i], path)))
            return p->err->code;
    extend(path, k->parts[k->n - 1]);
    if (json_object_get(table, k->parts[k->n - 1]))
        return toml_refuse(p, "the key is given twice");
    json_t *v = read_value(p, path);
    if (!v)
        return p->err->code ? p->err->code : toml_refuse(p, "no memory");
    if (json_object_set_new(table, k->parts[k->n - 1], v) < 0)
        return toml_refuse(p, "the key is not UTF-8");
    return note_line(p, path, line);
}

static int read_pair(struct toml_parser *p, json_t *table, const char *path)
{
    struct toml_key k;
    int r = toml_read_key(p, &k);

    if (r == 0 && toml_peek(p) != '=')
        r = toml_refuse(p, "a key without a value");
    if (r == 0) {
        p->at++;
        toml_skip_blanks(p);
        r = set_value(p, table, &k, path);
    }
    toml_free_key(&k);
    return r;
}

/* ---- tables ---- */

/* [[a.b]]: one more of an array. */
static int add_table(struct toml_parser *p, json_t *t, const char *part)
{
    json_t *list = json_object_get(t, part);
    size_t n = strlen(p->path);

    if (!list && json_object_set_new(t, part, list = json_array()) < 0)
        return toml_refuse(p, "the key is not UTF-8");
    list = json_object_get(t, part);
    if (!json_is_array(list) || json_array_append_new(list, json_object()) < 0)
        return toml_refuse(p, "the key is used for a value already");
    p->table = json_array_get(list, json_array_size(list) - 1);
    snprintf(p->path + n, TOML_PATH_SIZE - n, "%s%s[%zu]", n ? "." : "", part,
             json_array_size(list) - 1);
    return 0;
}

static int open_table(struct toml_parser *p, const struct toml_key *k, bool array)
{
    json_t *t = p->out->root;

    p->path[0] = 0;
    for (int i = 0; i + array < k->n; i++)
        if (!(t = step_into(p, t, k->parts[i], p->path)))
            return p->err->code;
    p->table = t;
    if (array)
        return add_table(p, t, k->parts[k->n - 1]);
    if (json_object_get(p->out->lines, p->path))
        return toml_refuse(p, "the table is given twice");
    return note_line(p, p->path, p->line);
}

static int read_header(struct toml_parser *p)
{
    bool array = toml_starts(p, "[[");
    struct toml_key k;

    p->at += 1 + array;
    int r = toml_read_key(p, &k);
    if (r == 0 && !toml_starts(p, array ? "]]" : "]"))
        r = toml_refuse(p, "the name of a table does not end");
    if (r == 0) {
        p->at += 1 + array;
        r = open_table(p, &k, array);
    }
    toml_free_key(&k);
    return r == 0 ? toml_end_line(p) : r;
}

static int read_all(struct toml_parser *p)
{
    int r = 0;

    for (toml_skip_space(p); r == 0 && p->at < p->end; toml_skip_space(p)) {
        if (toml_peek(p) == '[')
            r = read_header(p);
        else if ((r = read_pair(p, p->table, p->path)) == 0)
            r = toml_end_line(p);
        if (r < 0)
            break;
    }
    return r;
}

int toml_parse(const char *name, const char *text, size_t len, struct toml *out,
               struct lh_error *err)
{
    struct lh_error local = {0};
    struct toml_parser p = {.name = name, .at = text, .end = text + len, .line = 1, .out = out};

    p.err = err ? err : &local;
    *out = (struct toml){json_object(), json_object()};
    p.table = out->root;
    int r = !out->root || !out->lines ? toml_refuse(&p, "no memory")
            : len > TEXT_MAX || memchr(text, 0, len)
                ? toml_refuse(&p, "more than 1 MiB, or a NUL byte")
                : read_all(&p);
    if (r < 0)
        toml_finish(out);
    return r;
}

void toml_finish(struct toml *t)
{
    json_decref(t->root);
    json_decref(t->lines);
    *t = (struct toml){0};
}

int toml_line(const struct toml *t, const char *path)
{
    char above[TOML_PATH_SIZE];

    snprintf(above, sizeof above, "%s", path);
    for (;;) {
        json_t *line = json_object_get(t->lines, above);
        char *cut = strrchr(above, '.'), *bracket = strrchr(above, '[');
        if (line)
            return (int)json_integer_value(line);
        if (!cut && !bracket)
            return 1;
        *(bracket > cut ? bracket : cut) = 0;
    }
}

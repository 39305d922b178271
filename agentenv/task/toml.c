#include "agentenv/task/toml.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/cleanup.h"

enum { TEXT_MAX = 1 << 20, DEPTH_MAX = 32, PATH_SIZE = 512, KEYS_MAX = 16 };

struct parser {
    const char *name;
    const char *at, *end;
    int line, depth;
    struct toml *out;
    json_t *table;        /* that keys go to */
    char path[PATH_SIZE]; /* of it */
    struct lh_error *err;
};

static int refuse(struct parser *p, const char *what)
{
    return lh_fail(p->err, LH_INVALID_ARGUMENT, "%s:%d: %s", p->name, p->line, what);
}

static int peek(const struct parser *p)
{
    return p->at < p->end ? (unsigned char)*p->at : -1;
}

static bool starts(const struct parser *p, const char *text)
{
    size_t n = strlen(text);

    return (size_t)(p->end - p->at) >= n && !memcmp(p->at, text, n);
}

static void skip_blanks(struct parser *p)
{
    while (peek(p) == ' ' || peek(p) == '\t')
        p->at++;
}

static void skip_comment(struct parser *p)
{
    if (peek(p) == '#')
        while (p->at < p->end && *p->at != '\n')
            p->at++;
}

/* Blanks, comments and line ends. */
static void skip_space(struct parser *p)
{
    for (;;) {
        skip_blanks(p);
        skip_comment(p);
        if (peek(p) == '\r')
            p->at++;
        else if (peek(p) == '\n')
            p->at++, p->line++;
        else
            return;
    }
}

static int end_line(struct parser *p)
{
    skip_blanks(p);
    skip_comment(p);
    if (peek(p) == '\r')
        p->at++;
    if (peek(p) != '\n' && peek(p) != -1)
        return refuse(p, "something follows where the line should end");
    p->line += peek(p) == '\n';
    p->at += peek(p) == '\n';
    return 0;
}

/* ---- texts ---- */

static int put_utf8(struct parser *p, char **to, unsigned long c)
{
    if (c == 0 || c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
        return refuse(p, "\\u names no character");
    if (c < 0x80) {
        *(*to)++ = (char)c;
        return 0;
    }
    int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    static const unsigned char first[] = {0, 0xc0, 0xe0, 0xf0};
    *(*to)++ = (char)(first[more] | c >> 6 * more);
    while (more--)
        *(*to)++ = (char)(0x80 | (c >> 6 * more & 0x3f));
    return 0;
}

static int read_hex(struct parser *p, int digits, char **to)
{
    char hex[9] = "", *end;

    if (p->end - p->at < digits)
        return refuse(p, "a text does not end");
    memcpy(hex, p->at, (size_t)digits);
    unsigned long c = strtoul(hex, &end, 16);
    if (*end || !isxdigit((unsigned char)*hex))
        return refuse(p, "\\u needs hexadecimal digits");
    p->at += digits;
    return put_utf8(p, to, c);
}

/* Behind a backslash. */
static int read_escape(struct parser *p, bool many, char **to)
{
    static const char plain[] = "btnfr\"\\", meant[] = "\b\t\n\f\r\"\\";
    int c = peek(p);
    const char *known = c > 0 ? strchr(plain, c) : NULL;

    if (many && (c == '\n' || c == '\r' || c == ' ' || c == '\t')) {
        while (peek(p) >= 0 && isspace(peek(p)))
            p->line += *p->at++ == '\n';
        return 0;
    }
    p->at += c >= 0;
    if (known)
        return *(*to)++ = meant[known - plain], 0;
    if (c == 'u' || c == 'U')
        return read_hex(p, c == 'u' ? 4 : 8, to);
    return refuse(p, "unknown escape in a text");
}

/* From behind the opening quotes to behind the closing ones. */
static int read_until(struct parser *p, const char *quotes, bool many, char **to)
{
    bool literal = *quotes == '\'';

    if (many && peek(p) == '\r')
        p->at++;
    if (many && peek(p) == '\n')
        p->at++, p->line++;
    while (!starts(p, quotes)) {
        int c = peek(p), r = 0;
        if (c < 0 || (c == '\n' && !many))
            return refuse(p, "a text does not end");
        p->at++;
        if (c == '\\' && !literal)
            r = read_escape(p, many, to);
        else
            *(*to)++ = (char)c;
        p->line += c == '\n';
        if (r < 0)
            return r;
    }
    p->at += strlen(quotes);
    for (int i = 0; many && i < 2 && peek(p) == *quotes; i++) /* """" ends with a quote in it */
        *(*to)++ = *p->at++;
    return 0;
}

static char *read_text(struct parser *p)
{
    const char *quotes = starts(p, "\"\"\"") ? "\"\"\""
                         : starts(p, "'''")  ? "'''"
                         : starts(p, "\"")   ? "\""
                                             : "'";
    lh_autofree char *text = malloc((size_t)(p->end - p->at) + 1);
    char *to = text;

    if (!text)
        return refuse(p, "no memory"), NULL;
    p->at += strlen(quotes);
    if (read_until(p, quotes, quotes[1], &to) < 0)
        return NULL;
    *to = 0;
    return lh_steal(&text);
}

/* ---- keys ---- */

static bool is_bare(int c)
{
    return c > 0 && (isalnum(c) || c == '_' || c == '-');
}

static char *read_key_part(struct parser *p)
{
    const char *start = p->at;

    if (peek(p) == '"' || peek(p) == '\'')
        return starts(p, "\"\"\"") || starts(p, "'''") ? (refuse(p, "a key on several lines"), NULL)
                                                       : read_text(p);
    while (is_bare(peek(p)))
        p->at++;
    if (p->at == start)
        return refuse(p, "a key is missing"), NULL;
    char *key = strndup(start, (size_t)(p->at - start));
    if (!key)
        refuse(p, "no memory");
    return key;
}

struct key {
    char *parts[KEYS_MAX];
    int n;
};

static void free_key(struct key *k)
{
    for (int i = 0; i < k->n; i++)
        free(k->parts[i]);
}

static int read_key(struct parser *p, struct key *k)
{
    k->n = 0;
    for (;;) {
        if (k->n == KEYS_MAX)
            return refuse(p, "a key of too many parts");
        skip_blanks(p);
        if (!(k->parts[k->n] = read_key_part(p)))
            return p->err->code;
        k->n++;
        skip_blanks(p);
        if (peek(p) != '.')
            return 0;
        p->at++;
    }
}

static void extend(char path[PATH_SIZE], const char *part)
{
    size_t n = strlen(path);

    snprintf(path + n, PATH_SIZE - n, "%s%s", n ? "." : "", part);
}

static int note_line(struct parser *p, const char *path, int line)
{
    return json_object_set_new(p->out->lines, path, json_integer(line)) < 0 ? refuse(p, "no memory")
                                                                            : 0;
}

/* The table below `t` under one part of a key, made if absent; the last of an array of tables. */
static json_t *step_into(struct parser *p, json_t *t, const char *part, char path[PATH_SIZE])
{
    json_t *next = json_object_get(t, part);

    extend(path, part);
    if (!next) {
        next = json_object();
        if (json_object_set_new(t, part, next) < 0)
            return refuse(p, "the key is not UTF-8"), NULL;
        return json_object_get(t, part);
    }
    if (json_is_array(next) && json_array_size(next)) {
        size_t last = json_array_size(next) - 1, n = strlen(path);
        snprintf(path + n, PATH_SIZE - n, "[%zu]", last);
        next = json_array_get(next, last);
    }
    if (!json_is_object(next))
        return refuse(p, "the key is used for a value already"), NULL;
    return next;
}

/* ---- values ---- */

static json_t *read_value(struct parser *p, const char *path);

static json_t *read_array(struct parser *p, const char *path)
{
    json_t *list = json_array();
    char item[PATH_SIZE];

    p->at++;
    for (size_t i = 0; list; i++) {
        skip_space(p);
        if (peek(p) == ']')
            return p->at++, list;
        snprintf(item, sizeof item, "%.400s[%zu]", path, i);
        json_t *v = read_value(p, item);
        if (!v || json_array_append_new(list, v) < 0)
            break;
        skip_space(p);
        if (peek(p) == ',')
            p->at++;
        else if (peek(p) != ']') {
            refuse(p, "an array does not go on");
            break;
        }
    }
    json_decref(list);
    return NULL;
}

static int read_pair(struct parser *p, json_t *table, const char *path);

static json_t *read_inline_table(struct parser *p, const char *path)
{
    json_t *t = json_object();

    p->at++;
    skip_blanks(p);
    if (peek(p) == '}')
        return p->at++, t;
    while (t && read_pair(p, t, path) == 0) {
        skip_blanks(p);
        int c = peek(p);
        p->at += c == ',' || c == '}';
        if (c == '}')
            return t;
        if (c != ',') {
            refuse(p, "a table does not go on");
            break;
        }
    }
    json_decref(t);
    return NULL;
}

/* Digits may have underscores between them. */
static bool strip_underscores(char *text)
{
    char *to = text;

    for (const char *s = text; *s; s++) {
        if (*s == '_' &&
            (s == text || !isxdigit((unsigned char)s[-1]) || !isxdigit((unsigned char)s[1])))
            return false;
        if (*s != '_')
            *to++ = *s;
    }
    *to = 0;
    return true;
}

static json_t *number(const char *text)
{
    static const struct {
        const char *prefix;
        int base;
    } bases[] = {{"0x", 16}, {"0o", 8}, {"0b", 2}};
    char *end;

    errno = 0;
    for (size_t i = 0; i < LH_ARRAY_SIZE(bases); i++)
        if (!strncmp(text, bases[i].prefix, 2)) {
            long long v = strtoll(text + 2, &end, bases[i].base);
            return *end || errno || !isxdigit((unsigned char)text[2]) ? NULL : json_integer(v);
        }
    const char *digits = text + strspn(text, "+-");
    if (!isdigit((unsigned char)*digits) || digits - text > 1 ||
        (*digits == '0' && isdigit((unsigned char)digits[1])) || strpbrk(text, "xX"))
        return NULL;
    long long v = strtoll(text, &end, 10);
    if (!*end && !errno)
        return json_integer(v);
    double d = strtod(text, &end);
    return *end || !isfinite(d) ? NULL : json_real(d);
}

/* "1979-05-27", "07:32:00": kept as it stands. */
static bool is_time(const char *text)
{
    return strlen(text) >= 8 && isdigit((unsigned char)*text) &&
           (text[4] == '-' || text[2] == ':') && !text[strspn(text, "0123456789-:.TtZz+ ")];
}

static json_t *read_plain(struct parser *p)
{
    char text[64];
    size_t n = 0;

    while (n < sizeof text - 1 && (is_bare(peek(p)) || strchr("+.:", peek(p) > 0 ? peek(p) : 'x')))
        text[n++] = *p->at++;
    text[n] = 0;
    if (!strcmp(text, "true") || !strcmp(text, "false"))
        return json_boolean(*text == 't');
    if (is_time(text))
        return json_string(text);
    json_t *v = strip_underscores(text) ? number(text) : NULL;
    if (!v)
        refuse(p, n ? "neither a number nor anything else that is a value" : "a value is missing");
    return v;
}

static json_t *read_value(struct parser *p, const char *path)
{
    json_t *v;

    if (p->depth == DEPTH_MAX)
        return refuse(p, "nested too deep"), NULL;
    p->depth++;
    if (peek(p) == '"' || peek(p) == '\'') {
        lh_autofree char *text = read_text(p);
        v = text ? json_string(text) : NULL;
        if (text && !v)
            refuse(p, "a text is not UTF-8");
    } else if (peek(p) == '[') {
        v = read_array(p, path);
    } else {
        v = peek(p) == '{' ? read_inline_table(p, path) : read_plain(p);
    }
    p->depth--;
    return v;
}

static int set_value(struct parser *p, json_t *table, const struct key *k, const char *above)
{
    char path[PATH_SIZE];
    int line = p->line;

    snprintf(path, sizeof path, "%s", above);
    for (int i = 0; i + 1 < k->n; i++)
        if (!(table = step_into(p, table, k->parts[i], path)))
            return p->err->code;
    extend(path, k->parts[k->n - 1]);
    if (json_object_get(table, k->parts[k->n - 1]))
        return refuse(p, "the key is given twice");
    json_t *v = read_value(p, path);
    if (!v)
        return p->err->code ? p->err->code : refuse(p, "no memory");
    if (json_object_set_new(table, k->parts[k->n - 1], v) < 0)
        return refuse(p, "the key is not UTF-8");
    return note_line(p, path, line);
}

static int read_pair(struct parser *p, json_t *table, const char *path)
{
    struct key k;
    int r = read_key(p, &k);

    if (r == 0 && peek(p) != '=')
        r = refuse(p, "a key without a value");
    if (r == 0) {
        p->at++;
        skip_blanks(p);
        r = set_value(p, table, &k, path);
    }
    free_key(&k);
    return r;
}

/* ---- tables ---- */

/* [[a.b]]: one more of an array. */
static int add_table(struct parser *p, json_t *t, const char *part)
{
    json_t *list = json_object_get(t, part);
    size_t n = strlen(p->path);

    if (!list && json_object_set_new(t, part, list = json_array()) < 0)
        return refuse(p, "the key is not UTF-8");
    list = json_object_get(t, part);
    if (!json_is_array(list) || json_array_append_new(list, json_object()) < 0)
        return refuse(p, "the key is used for a value already");
    p->table = json_array_get(list, json_array_size(list) - 1);
    snprintf(p->path + n, PATH_SIZE - n, "%s%s[%zu]", n ? "." : "", part,
             json_array_size(list) - 1);
    return 0;
}

static int open_table(struct parser *p, const struct key *k, bool array)
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
        return refuse(p, "the table is given twice");
    return note_line(p, p->path, p->line);
}

static int read_header(struct parser *p)
{
    bool array = starts(p, "[[");
    struct key k;

    p->at += 1 + array;
    int r = read_key(p, &k);
    if (r == 0 && !starts(p, array ? "]]" : "]"))
        r = refuse(p, "the name of a table does not end");
    if (r == 0) {
        p->at += 1 + array;
        r = open_table(p, &k, array);
    }
    free_key(&k);
    return r == 0 ? end_line(p) : r;
}

static int read_all(struct parser *p)
{
    int r = 0;

    for (skip_space(p); r == 0 && p->at < p->end; skip_space(p)) {
        if (peek(p) == '[')
            r = read_header(p);
        else if ((r = read_pair(p, p->table, p->path)) == 0)
            r = end_line(p);
        if (r < 0)
            break;
    }
    return r;
}

int toml_parse(const char *name, const char *text, size_t len, struct toml *out,
               struct lh_error *err)
{
    struct lh_error local = {0};
    struct parser p = {.name = name, .at = text, .end = text + len, .line = 1, .out = out};

    p.err = err ? err : &local;
    *out = (struct toml){json_object(), json_object()};
    p.table = out->root;
    int r = !out->root || !out->lines                ? refuse(&p, "no memory")
            : len > TEXT_MAX || memchr(text, 0, len) ? refuse(&p, "more than 1 MiB, or a NUL byte")
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
    char above[PATH_SIZE];

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

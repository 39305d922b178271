/* The words of TOML: where the parser stands, texts, keys, and what stands without quotes.  Nothing
 * here knows of tables; toml.c builds them of these words.
 *
 * A text is read into one piece of memory as large as what is left of the file, at most 1 MiB: no
 * escape gets longer by being read, so no write needs a check of its own. */
#include "agentenv/task/toml_words.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/cleanup.h"

int toml_refuse(struct toml_parser *p, const char *what)
{
    return lh_fail(p->err, LH_INVALID_ARGUMENT, "%s:%d: %s", p->name, p->line, what);
}

int toml_peek(const struct toml_parser *p)
{
    return p->at < p->end ? (unsigned char)*p->at : -1;
}

bool toml_starts(const struct toml_parser *p, const char *text)
{
    size_t n = strlen(text);

    return (size_t)(p->end - p->at) >= n && !memcmp(p->at, text, n);
}

void toml_skip_blanks(struct toml_parser *p)
{
    while (toml_peek(p) == ' ' || toml_peek(p) == '\t')
        p->at++;
}

static void skip_comment(struct toml_parser *p)
{
    if (toml_peek(p) == '#')
        while (p->at < p->end && *p->at != '\n')
            p->at++;
}

void toml_skip_space(struct toml_parser *p)
{
    for (;;) {
        toml_skip_blanks(p);
        skip_comment(p);
        if (toml_peek(p) == '\r')
            p->at++;
        else if (toml_peek(p) == '\n')
            p->at++, p->line++;
        else
            return;
    }
}

int toml_end_line(struct toml_parser *p)
{
    toml_skip_blanks(p);
    skip_comment(p);
    if (toml_peek(p) == '\r')
        p->at++;
    if (toml_peek(p) != '\n' && toml_peek(p) != -1)
        return toml_refuse(p, "something follows where the line should end");
    p->line += toml_peek(p) == '\n';
    p->at += toml_peek(p) == '\n';
    return 0;
}

/* ---- texts ---- */

static int put_utf8(struct toml_parser *p, char **to, unsigned long c)
{
    if (c == 0 || c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
        return toml_refuse(p, "\\u names no character");
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

static int read_hex(struct toml_parser *p, int digits, char **to)
{
    char hex[9] = "", *end;

    if (p->end - p->at < digits)
        return toml_refuse(p, "a text does not end");
    memcpy(hex, p->at, (size_t)digits);
    unsigned long c = strtoul(hex, &end, 16);
    if (*end || !isxdigit((unsigned char)*hex))
        return toml_refuse(p, "\\u needs hexadecimal digits");
    p->at += digits;
    return put_utf8(p, to, c);
}

/* Behind a backslash. */
static int read_escape(struct toml_parser *p, bool many, char **to)
{
    static const char plain[] = "btnfr\"\\", meant[] = "\b\t\n\f\r\"\\";
    int c = toml_peek(p);
    const char *known = c > 0 ? strchr(plain, c) : NULL;

    if (many && (c == '\n' || c == '\r' || c == ' ' || c == '\t')) {
        while (toml_peek(p) >= 0 && isspace(toml_peek(p)))
            p->line += *p->at++ == '\n';
        return 0;
    }
    p->at += c >= 0;
    if (known)
        return *(*to)++ = meant[known - plain], 0;
    if (c == 'u' || c == 'U')
        return read_hex(p, c == 'u' ? 4 : 8, to);
    return toml_refuse(p, "unknown escape in a text");
}

/* From behind the opening quotes to behind the closing ones. */
static int read_until(struct toml_parser *p, const char *quotes, bool many, char **to)
{
    bool literal = *quotes == '\'';

    if (many && toml_peek(p) == '\r')
        p->at++;
    if (many && toml_peek(p) == '\n')
        p->at++, p->line++;
    while (!toml_starts(p, quotes)) {
        int c = toml_peek(p), r = 0;
        if (c < 0 || (c == '\n' && !many))
            return toml_refuse(p, "a text does not end");
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
    for (int i = 0; many && i < 2 && toml_peek(p) == *quotes;
         i++) /* """" ends with a quote in it */
        *(*to)++ = *p->at++;
    return 0;
}

char *toml_read_text(struct toml_parser *p)
{
    const char *quotes = toml_starts(p, "\"\"\"") ? "\"\"\""
                         : toml_starts(p, "'''")  ? "'''"
                         : toml_starts(p, "\"")   ? "\""
                                                  : "'";
    lh_autofree char *text = malloc((size_t)(p->end - p->at) + 1);
    char *to = text;

    if (!text)
        return toml_refuse(p, "no memory"), NULL;
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

static char *read_key_part(struct toml_parser *p)
{
    const char *start = p->at;

    if (toml_peek(p) == '"' || toml_peek(p) == '\'')
        return toml_starts(p, "\"\"\"") || toml_starts(p, "'''")
                   ? (toml_refuse(p, "a key on several lines"), NULL)
                   : toml_read_text(p);
    while (is_bare(toml_peek(p)))
        p->at++;
    if (p->at == start)
        return toml_refuse(p, "a key is missing"), NULL;
    char *key = strndup(start, (size_t)(p->at - start));
    if (!key)
        toml_refuse(p, "no memory");
    return key;
}

void toml_free_key(struct toml_key *k)
{
    for (int i = 0; i < k->n; i++)
        free(k->parts[i]);
}

int toml_read_key(struct toml_parser *p, struct toml_key *k)
{
    k->n = 0;
    for (;;) {
        if (k->n == TOML_KEYS_MAX)
            return toml_refuse(p, "a key of too many parts");
        toml_skip_blanks(p);
        if (!(k->parts[k->n] = read_key_part(p)))
            return p->err->code;
        k->n++;
        toml_skip_blanks(p);
        if (toml_peek(p) != '.')
            return 0;
        p->at++;
    }
}

/* ---- numbers and the like ---- */

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

json_t *toml_read_plain(struct toml_parser *p)
{
    char text[64];
    size_t n = 0;

    while (n < sizeof text - 1 &&
           (is_bare(toml_peek(p)) || strchr("+.:", toml_peek(p) > 0 ? toml_peek(p) : 'x')))
        text[n++] = *p->at++;
    text[n] = 0;
    if (!strcmp(text, "true") || !strcmp(text, "false"))
        return json_boolean(*text == 't');
    if (is_time(text))
        return json_string(text);
    json_t *v = strip_underscores(text) ? number(text) : NULL;
    if (!v)
        toml_refuse(p, n ? "neither a number nor anything else that is a value"
                         : "a value is missing");
    return v;
}

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "kvstore/cli/cli.h"
#include "proto/cleanup.h"
#include "proto/file.h"
#include "proto/hex.h"

json_t *cli_hex(const ProtobufCBinaryData *bytes)
{
    char text[2 * 32 + 1];

    lh_hex_print(bytes->data, bytes->len < 32 ? bytes->len : 32, text);
    return json_string(text);
}

static char *text_of(const json_t *v)
{
    if (json_is_string(v))
        return strdup(json_string_value(v));
    if (json_is_real(v))
        return lh_format("%.1f", json_real_value(v));
    if (json_is_boolean(v))
        return strdup(json_is_true(v) ? "yes" : "no");
    return lh_format("%lld", (long long)json_integer_value(v));
}

static int width_of(const json_t *rows, const char *column)
{
    size_t width = strlen(column);
    json_t *row;
    size_t i;

    json_array_foreach(rows, i, row)
    {
        lh_autofree char *s = text_of(json_object_get(row, column));
        if (s && strlen(s) > width)
            width = strlen(s);
    }
    return (int)width;
}

static void print_row(const json_t *row, const char *const *columns, const int *widths)
{
    for (int c = 0; columns[c]; c++) {
        const json_t *v = json_object_get(row, columns[c]);
        lh_autofree char *s = text_of(v);
        printf(json_is_string(v) ? "%-*s%s" : "%*s%s", widths[c], s ? s : "",
               columns[c + 1] ? "  " : "\n");
    }
}

static void print_table(const json_t *rows, const char *const *columns)
{
    int widths[16];
    json_t *row;
    size_t i;

    for (int c = 0; columns[c]; c++) {
        widths[c] = width_of(rows, columns[c]);
        printf("%-*s%s", widths[c], columns[c], columns[c + 1] ? "  " : "\n");
    }
    json_array_foreach(rows, i, row)
    {
        print_row(row, columns, widths);
    }
}

static void print_fields(json_t *object)
{
    const char *key;
    json_t *v;

    json_object_foreach(object, key, v)
    {
        lh_autofree char *s = text_of(v);
        printf("%-24s %16s\n", key, s ? s : "");
    }
}

static int finish(struct lh_error *err)
{
    if (fflush(stdout) || ferror(stdout))
        return lh_fail_errno(err, errno, "writing the result");
    return 0;
}

static void dump(const json_t *v)
{
    json_dumpf(v, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
    putchar('\n');
}

int cli_print_rows(const struct cli *c, json_t *rows, const char *const *columns,
                   struct lh_error *err)
{
    if (!rows)
        return lh_fail_errno(err, ENOMEM, "printing");
    if (c->json)
        dump(rows);
    else
        print_table(rows, columns);
    json_decref(rows);
    return finish(err);
}

int cli_print_object(const struct cli *c, json_t *object, struct lh_error *err)
{
    if (!object)
        return lh_fail_errno(err, ENOMEM, "printing");
    if (c->json)
        dump(object);
    else
        print_fields(object);
    json_decref(object);
    return finish(err);
}

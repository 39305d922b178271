#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <wchar.h>

#include "agentenv/cli/cli.h"
#include "proto/cleanup.h"
#include "proto/file.h"

/* A cell as text; control characters, which would move the cursor, as '?'. */
static char *cell_text(json_t *v)
{
    char *s;

    if (json_is_string(v))
        s = strdup(json_string_value(v));
    else if (json_is_integer(v))
        s = lh_format("%lld", (long long)json_integer_value(v));
    else if (json_is_real(v))
        s = lh_format("%g", json_real_value(v));
    else if (json_is_boolean(v))
        s = strdup(json_is_true(v) ? "yes" : "no");
    else if (json_is_array(v))
        s = json_dumps(v, JSON_COMPACT);
    else
        s = strdup("");
    for (char *p = s; p && *p; p++)
        if ((unsigned char)*p < 32 || *p == 127)
            *p = '?';
    return s;
}

static int width_of(const char *s)
{
    wchar_t wide[256];
    size_t n = mbstowcs(wide, s, LH_ARRAY_SIZE(wide) - 1);

    if (n == (size_t)-1)
        return (int)strlen(s);
    int w = wcswidth(wide, n);
    return w < 0 ? (int)n : w;
}

static void print_cell(const char *text, int width, bool last)
{
    int pad = width - width_of(text);

    printf("%s%*s", text, last || pad < 0 ? 0 : pad, "");
    fputs(last ? "\n" : "  ", stdout);
}

static int column_width(json_t *rows, const char *key)
{
    int width = (int)strlen(key);
    json_t *row;
    size_t i;

    json_array_foreach(rows, i, row)
    {
        lh_autofree char *s = cell_text(json_object_get(row, key));
        int w = s ? width_of(s) : 0;
        width = w > width ? w : width;
    }
    return width;
}

static void print_heading(const char *key, int width, bool last)
{
    lh_autofree char *s = strdup(key);

    for (char *p = s; p && *p; p++)
        *p = (char)(*p >= 'a' && *p <= 'z' ? *p - 32 : *p == '_' ? ' ' : *p);
    if (s)
        print_cell(s, width, last);
}

static void print_table(json_t *rows, const char *const *columns)
{
    int widths[32];
    json_t *row;
    size_t i;

    for (int c = 0; columns[c] && c < (int)LH_ARRAY_SIZE(widths); c++)
        widths[c] = column_width(rows, columns[c]);
    for (int c = 0; columns[c]; c++)
        print_heading(columns[c], widths[c], !columns[c + 1]);
    json_array_foreach(rows, i, row)
    {
        for (int c = 0; columns[c]; c++) {
            lh_autofree char *s = cell_text(json_object_get(row, columns[c]));
            print_cell(s ? s : "", widths[c], !columns[c + 1]);
        }
    }
}

int cli_print(const struct cli *cli, json_t *rows, const char *const *columns, struct lh_error *err)
{
    if (!rows)
        return lh_fail_errno(err, ENOMEM, "printing");
    if (cli->json) {
        if (json_dumpf(rows, stdout, JSON_INDENT(2)) == 0)
            putchar('\n');
    } else {
        print_table(rows, columns);
    }
    json_decref(rows);
    if (fflush(stdout) || ferror(stdout))
        return lh_fail_errno(err, errno, "writing the result");
    return 0;
}

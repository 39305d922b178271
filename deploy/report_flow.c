#include "deploy/report_flow.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/metrics.h"
#include "deploy/plot.h"

enum { ROWS = 5, SAMPLES = 1 << 16 };

enum curve { WINDOW, KV_USE, WAIT, CURVES };

struct flow_sample {
    double at_ms, value[CURVES];
};

static const char *const titles[CURVES] = {
    "window: trajectories that the engines may work on at once",
    "KV memory in use, %",
    "wait for loads from the store, s",
};

/* NULL when memory is out.  When the table is full every second one goes. */
static struct flow_sample *add(struct report_flow *f)
{
    if (!f->samples)
        f->samples = calloc(SAMPLES, sizeof *f->samples);
    if (f->n == SAMPLES) {
        f->n /= 2;
        for (size_t i = 1; i < f->n; i++)
            f->samples[i] = f->samples[2 * i];
    }
    return f->samples ? &f->samples[f->n++] : NULL;
}

void report_flow_collect(struct report_flow *f, const json_t *line)
{
    double budget = metrics_number(line, "kv_budget_bytes", 0);

    if (strcmp(metrics_text(line, "kind", ""), "flow"))
        return;
    struct flow_sample *s = add(f);
    if (!s)
        return;
    s->at_ms = metrics_number(line, "at_ms", 0);
    s->value[WINDOW] = metrics_number(line, "window", 0);
    s->value[KV_USE] = budget > 0 ? 100 * metrics_number(line, "kv_used_bytes", 0) / budget : 0;
    s->value[WAIT] = metrics_number(line, "load_wait_ms", 0) / 1e3;
}

static size_t column_of(const struct report_flow *f, double at_ms, size_t columns)
{
    double began = f->samples[0].at_ms, length = f->samples[f->n - 1].at_ms - began;
    double c = length > 0 ? (at_ms - began) / length * (double)columns : 0;

    return c < 0 ? 0 : c >= (double)columns ? columns - 1 : (size_t)c;
}

/* The mean of what was seen in a span of time; a span without a line is as the one before it ended.
 * False when all is 0. */
static bool fill(const struct report_flow *f, enum curve k, double *column, size_t columns)
{
    bool any = false;
    size_t i = 0;

    for (size_t c = 0; c < columns; c++) {
        double sum = 0, n = 0;
        for (; i < f->n && column_of(f, f->samples[i].at_ms, columns) <= c; i++, n++)
            sum += f->samples[i].value[k];
        column[c] = n > 0 ? sum / n : f->samples[i - 1].value[k];
        any |= column[c] > 0;
    }
    return any;
}

void report_flow_print(const struct report_flow *f)
{
    double column[PLOT_WIDTH];
    char seconds[32];

    if (f->n < 2)
        return;
    snprintf(seconds, sizeof seconds, "%.0f s",
             (f->samples[f->n - 1].at_ms - f->samples[0].at_ms) / 1e3);
    for (int k = 0; k < CURVES; k++) {
        if (!fill(f, k, column, PLOT_WIDTH))
            continue;
        plot_print(titles[k], column, PLOT_WIDTH, ROWS, seconds);
    }
}

void report_flow_finish(struct report_flow *f)
{
    free(f->samples);
    *f = (struct report_flow){0};
}

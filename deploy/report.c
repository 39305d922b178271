/* The end of a job: how the reward grew, what the throttle did, what each evaluation found. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/metrics.h"
#include "deploy/plot.h"
#include "deploy/progress.h"
#include "deploy/report_flow.h"

enum { EVALS = 16, HEIGHT = 8, STEPS = 1 << 16 };

struct report {
    json_t *evals[EVALS]; /* last one of each name */
    size_t n_evals;
    double *rewards; /* [STEPS], by order of steps */
    size_t n_steps;
    double worst_gap;
    struct report_flow flow;
};

static void keep_eval(struct report *r, json_t *line)
{
    const char *name = metrics_text(line, "name", "");

    if (!strcmp(name, "step"))
        return;
    for (size_t i = 0; i < r->n_evals; i++)
        if (!strcmp(metrics_text(r->evals[i], "name", ""), name)) {
            json_decref(r->evals[i]);
            r->evals[i] = json_incref(line);
            return;
        }
    if (r->n_evals < EVALS)
        r->evals[r->n_evals++] = json_incref(line);
}

static void collect(void *ctx, json_t *line)
{
    struct report *r = ctx;
    const char *kind = metrics_text(line, "kind", "");

    if (!strcmp(kind, "eval"))
        keep_eval(r, line);
    report_flow_collect(&r->flow, line);
    if (strcmp(kind, "step") || r->n_steps == STEPS)
        return;
    r->rewards[r->n_steps++] = metrics_number(line, "reward_mean", 0);
    double gap = metrics_number(line, "logprob_gap_max", 0);
    if (gap > r->worst_gap)
        r->worst_gap = gap;
}

static double family_success(const json_t *eval, const char *family)
{
    const json_t *f = json_object_get(json_object_get(eval, "families"), family);

    return json_is_object(f) ? metrics_number(f, "success", -1) : json_number_value(f);
}

static void print_row(const struct report *r, const char *label, const char *family)
{
    printf("%-22s", label);
    for (size_t i = 0; i < r->n_evals; i++)
        printf("%12.3f", family ? family_success(r->evals[i], family)
                                : metrics_number(r->evals[i], "success", 0));
    putchar('\n');
}

static void print_evals(const struct report *r)
{
    const char *family;
    json_t *value;

    if (!r->n_evals)
        return;
    printf("\n%-22s", "held-out success");
    for (size_t i = 0; i < r->n_evals; i++)
        printf("%12s", metrics_text(r->evals[i], "name", "?"));
    putchar('\n');
    json_object_foreach(json_object_get(r->evals[0], "families"), family, value)
        print_row(r, family, family);
    print_row(r, "all", NULL);
    printf("%-22s", "episodes");
    for (size_t i = 0; i < r->n_evals; i++)
        printf("%12.0f", metrics_number(r->evals[i], "episodes", 0));
    putchar('\n');
}

/* Columns are means of equal spans of steps. */
static void print_curve(const struct report *r)
{
    size_t columns = r->n_steps < PLOT_WIDTH ? r->n_steps : PLOT_WIDTH;
    double mean[PLOT_WIDTH] = {0};
    char title[80], unit[32];

    for (size_t c = 0; c < columns; c++) {
        size_t from = c * r->n_steps / columns, to = (c + 1) * r->n_steps / columns;
        for (size_t i = from; i < to; i++)
            mean[c] += r->rewards[i] / (double)(to - from);
    }
    snprintf(title, sizeof title, "reward by step (largest log-probability gap %g)", r->worst_gap);
    snprintf(unit, sizeof unit, "%zu steps", r->n_steps);
    plot_print(title, mean, columns, HEIGHT, unit);
}

void report_print(const char *job_dir)
{
    struct report r = {.rewards = calloc(STEPS, sizeof *r.rewards)};
    long offset = 0;

    if (!r.rewards)
        return;
    metrics_read(job_dir, &offset, collect, &r);
    if (r.n_steps)
        print_curve(&r);
    report_flow_print(&r.flow);
    print_evals(&r);
    for (size_t i = 0; i < r.n_evals; i++)
        json_decref(r.evals[i]);
    report_flow_finish(&r.flow);
    free(r.rewards);
}

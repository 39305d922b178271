#include "deploy/progress.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "deploy/metrics.h"
#include "proto/clock.h"

enum { DRAW_MS = 500 };

void progress_init(struct progress *p, const char *job_dir)
{
    *p = (struct progress){.dir = job_dir, .terminal = isatty(STDOUT_FILENO)};
}

static void print_warm_start(const json_t *o)
{
    printf("warm start  step %4.0f  loss %.4f  %6.0f tokens/s\n", metrics_number(o, "step", 0),
           metrics_number(o, "loss", 0), metrics_number(o, "tokens_per_s", 0));
}

static void print_step(const json_t *o)
{
    printf(
        "step %4.0f  reward %.3f  success %.3f  loss %+.5f  gap %.1g  rollout %.1fs  train %.1fs  "
        "spilled %.0f KiB  store hits %.0f/%.0f\n",
        metrics_number(o, "step", 0), metrics_number(o, "reward_mean", 0),
        metrics_number(o, "success", 0), metrics_number(o, "loss", 0),
        metrics_number(o, "logprob_gap_max", 0), metrics_number(o, "rollout_s", 0),
        metrics_number(o, "train_s", 0), metrics_number(o, "spilled_bytes", 0) / 1024,
        metrics_number(o, "store_hits", 0), metrics_number(o, "store_lookups", 0));
}

static void print_eval(const json_t *o)
{
    printf("evaluation (%s)  %.0f episodes  success %.3f  second turn %.0f%%\n",
           metrics_text(o, "name", "?"), metrics_number(o, "episodes", 0),
           metrics_number(o, "success", 0), 100 * metrics_number(o, "second_turn_share", 0));
}

static void print_infra(const json_t *o)
{
    printf("retry  trajectory %s: %s: %s\n", metrics_text(o, "trajectory", "?"),
           metrics_text(o, "code", "?"), metrics_text(o, "message", ""));
}

static void print_checkpoint(const json_t *o)
{
    printf("checkpoint  step %.0f\n", metrics_number(o, "step", 0));
}

static const struct {
    const char *kind;
    void (*print)(const json_t *o);
} printers[] = {{"warm_start", print_warm_start},
                {"step", print_step},
                {"eval", print_eval},
                {"infra", print_infra},
                {"checkpoint", print_checkpoint}};

static void print_event(void *ctx, json_t *line)
{
    struct progress *p = ctx;

    if (p->terminal)
        printf("\r\033[K");
    for (size_t i = 0; i < sizeof printers / sizeof *printers; i++)
        if (!strcmp(printers[i].kind, metrics_text(line, "kind", "")))
            printers[i].print(line);
}

static void draw_live(const struct progress *p)
{
    json_t *s = metrics_status(p->dir);

    if (!s)
        return;
    printf(
        "\r\033[K%s %.0f/%.0f  reward %.3f  %.0f tokens/s  run %.0f  wait %.0f  tool %.0f  spilled "
        "%.0f  memory %s",
        metrics_text(s, "phase", "starting"), metrics_number(s, "step", 0),
        metrics_number(s, "steps", 0), metrics_number(s, "reward_mean", 0),
        metrics_number(s, "tokens_per_s", 0), metrics_number(s, "running", 0),
        metrics_number(s, "waiting", 0), metrics_number(s, "in_tool", 0),
        metrics_number(s, "spilled", 0), metrics_text(s, "memory", "-"));
    json_decref(s);
}

void progress_tick(void *progress)
{
    struct progress *p = progress;

    if (lh_now_ms() < p->next_ms)
        return;
    p->next_ms = lh_now_ms() + DRAW_MS;
    metrics_read(p->dir, &p->offset, print_event, p);
    if (p->terminal)
        draw_live(p);
    fflush(stdout);
}

void progress_finish(struct progress *p)
{
    metrics_read(p->dir, &p->offset, print_event, p);
    if (p->terminal)
        printf("\r\033[K");
    fflush(stdout);
}

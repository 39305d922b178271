#include "trainer/learn/metrics.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"

LH_LOG_COMPONENT("trainer");

enum { METRICS_MAX = 1 << 30 };

struct metrics {
    int fd;
    pthread_mutex_t lock; /* lines of two threads */
    json_t *evals;        /* array of the lines kept */
};

static uint64_t number(const json_t *line, const char *key)
{
    return (uint64_t)json_integer_value(json_object_get(line, key));
}

static bool is_kind(const json_t *line, const char *kind)
{
    const char *k = json_string_value(json_object_get(line, "kind"));

    return k && !strcmp(k, kind);
}

/* Lines without a step are of what happened, not of the lineage: they stay. */
static bool of_lineage(const json_t *line, uint64_t warm_steps, uint64_t steps)
{
    if (is_kind(line, "warm_start"))
        return number(line, "step") <= warm_steps;
    if (is_kind(line, "checkpoint"))
        return number(line, "step") <= warm_steps + steps;
    if (is_kind(line, "step") || is_kind(line, "eval"))
        return number(line, "step") <= steps;
    return !is_kind(line, "end");
}

/* Copies the lines worth keeping; a torn last line is none. */
static int filter(struct metrics *m, char *text, uint64_t warm_steps, uint64_t steps, FILE *to)
{
    for (char *save, *line = strtok_r(text, "\n", &save); line;
         line = strtok_r(NULL, "\n", &save)) {
        json_t *o = json_loads(line, 0, NULL);
        if (o && of_lineage(o, warm_steps, steps)) {
            fprintf(to, "%s\n", line);
            if (is_kind(o, "eval"))
                json_array_append(m->evals, o);
        }
        json_decref(o);
    }
    return ferror(to) ? -1 : 0;
}

static int truncate_lines(struct metrics *m, const char *path, uint64_t warm_steps, uint64_t steps,
                          struct lh_error *err)
{
    struct lh_error absent = {0};
    lh_autofree char *text = lh_read_file(path, METRICS_MAX, NULL, &absent);
    lh_autofree char *kept = NULL;
    size_t len = 0;

    if (!text)
        return absent.code == LH_NOT_FOUND ? 0 : lh_fail(err, absent.code, "%s", absent.message);
    FILE *to = open_memstream(&kept, &len);
    if (!to)
        return lh_fail_errno(err, errno, "reading %s", path);
    int r = filter(m, text, warm_steps, steps, to);
    if (fclose(to) != 0 || r < 0)
        return lh_fail_errno(err, ENOMEM, "reading %s", path);
    return lh_write_file(path, kept, len, 0644, err);
}

struct metrics *metrics_open(const char *job_dir, uint64_t warm_steps, uint64_t steps,
                             struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/metrics.jsonl", job_dir);
    lh_auto(metrics) m = calloc(1, sizeof *m);

    if (m)
        *m = (struct metrics){.fd = -1, .lock = PTHREAD_MUTEX_INITIALIZER, .evals = json_array()};
    if (!m || !path || !m->evals)
        return lh_fail_errno(err, ENOMEM, "opening the metrics"), NULL;
    if (truncate_lines(m, path, warm_steps, steps, err) < 0)
        return NULL;
    m->fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (m->fd < 0)
        return lh_fail_errno(err, errno, "cannot open %s", path), NULL;
    return lh_steal(&m);
}

void metrics_close(struct metrics *m)
{
    if (!m)
        return;
    if (m->fd >= 0)
        close(m->fd);
    json_decref(m->evals);
    free(m);
}

/* All of it or nothing: on a full disk, half a line would spoil the one after it, too. */
static int append_line(struct metrics *m, const char *text, struct lh_error *err)
{
    LH_LOCKED(&m->lock);
    off_t end = lseek(m->fd, 0, SEEK_END);
    int r = end < 0 ? lh_fail_errno(err, errno, "end of the metrics")
                    : lh_write_all(m->fd, text, strlen(text), err);

    if (r < 0 && end >= 0 && ftruncate(m->fd, end) < 0)
        lh_warn("metrics", "half a line stays: %s", strerror(errno));
    return r;
}

void metrics_write(struct metrics *m, json_t *line)
{
    struct lh_error err = {0};

    json_object_set_new(line, "at_ms", json_integer(lh_unix_ms()));
    lh_autofree char *text = json_dumps(line, JSON_COMPACT);
    lh_autofree char *with_end = text ? lh_format("%s\n", text) : NULL;
    json_decref(line);
    if (!with_end || append_line(m, with_end, &err) < 0)
        lh_warn("metrics", "a line was not written: %s", err.message);
}

bool metrics_has_eval(const struct metrics *m, const char *name, uint64_t step)
{
    size_t i;
    json_t *line;

    json_array_foreach(m->evals, i, line)
    {
        const char *n = json_string_value(json_object_get(line, "name"));
        if (n && !strcmp(n, name) && number(line, "step") == step)
            return true;
    }
    return false;
}

void metrics_status(const char *job_dir, json_t *status)
{
    lh_autofree char *path = lh_format("%s/status.json", job_dir);
    lh_autofree char *tmp = lh_format("%s/.status.json.tmp", job_dir);
    static bool warned;

    bool failed =
        path && tmp && (json_dump_file(status, tmp, JSON_COMPACT) < 0 || rename(tmp, path) < 0);
    if (failed && !warned) /* twice a second would not help a full disk */
        lh_warn("status", "cannot replace %s: %s", path, strerror(errno));
    warned = failed;
    json_decref(status);
}

#include "deploy/metrics.h"

#include <stdio.h>
#include <string.h>

#include "proto/cleanup.h"
#include "proto/file.h"

void metrics_read(const char *job_dir, long *offset, void (*each)(void *ctx, json_t *line),
                  void *ctx)
{
    lh_autofree char *path = lh_format("%s/metrics.jsonl", job_dir);
    lh_autofclose FILE *f = path ? fopen(path, "re") : NULL;
    lh_autofree char *line = NULL;
    size_t room = 0;
    ssize_t n;

    if (!f || fseek(f, 0, SEEK_END) < 0)
        return;
    if (ftell(f) < *offset)
        *offset = ftell(f);
    fseek(f, *offset, SEEK_SET);
    while ((n = getline(&line, &room, f)) > 0 && line[n - 1] == '\n') {
        json_t *o = json_loadb(line, (size_t)n, 0, NULL);
        if (json_is_object(o))
            each(ctx, o);
        json_decref(o);
        *offset += n;
    }
}

json_t *metrics_status(const char *job_dir)
{
    lh_autofree char *path = lh_format("%s/status.json", job_dir);

    return path ? json_load_file(path, 0, NULL) : NULL;
}

double metrics_number(const json_t *o, const char *key, double otherwise)
{
    const json_t *v = json_object_get(o, key);

    return json_is_number(v) ? json_number_value(v) : otherwise;
}

const char *metrics_text(const json_t *o, const char *key, const char *otherwise)
{
    const json_t *v = json_object_get(o, key);

    return json_is_string(v) ? json_string_value(v) : otherwise;
}

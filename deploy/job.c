#include "deploy/job.h"

#include <ctype.h>
#include <errno.h>
#include <libgen.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#include "proto/cleanup.h"
#include "proto/file.h"
#include "proto/parse.h"

enum { JOB_MAX = 1 << 20 };

struct loader {
    const char *path; /* of the file, for messages */
    char *dir;
    yaml_document_t doc;
    Longhaul__Job__V1__Job *job;
    bool *given; /* [job_n_fields] */
};

static const struct {
    const char *name;
    size_t offset;
    const ProtobufCMessageDescriptor *type;
} sections[] = {
    {"model", offsetof(Longhaul__Job__V1__Job, model), &longhaul__job__v1__model__descriptor},
    {"tasks", offsetof(Longhaul__Job__V1__Job, tasks), &longhaul__job__v1__tasks__descriptor},
    {"rollout", offsetof(Longhaul__Job__V1__Job, rollout), &longhaul__job__v1__rollout__descriptor},
    {"kvstore", offsetof(Longhaul__Job__V1__Job, kvstore),
     &longhaul__job__v1__kv_store__descriptor},
    {"warm_start", offsetof(Longhaul__Job__V1__Job, warm_start),
     &longhaul__job__v1__warm_start__descriptor},
    {"train", offsetof(Longhaul__Job__V1__Job, train), &longhaul__job__v1__train__descriptor},
    {"eval", offsetof(Longhaul__Job__V1__Job, eval), &longhaul__job__v1__eval__descriptor},
};

void *job_section(Longhaul__Job__V1__Job *job, const char *section)
{
    if (!*section)
        return job;
    for (size_t i = 0; i < LH_ARRAY_SIZE(sections); i++)
        if (!strcmp(sections[i].name, section))
            return *(void **)((char *)job + sections[i].offset);
    return NULL;
}

void job_destroy(Longhaul__Job__V1__Job *job)
{
    lh_message_free(job ? &job->base : NULL);
}

static Longhaul__Job__V1__Job *job_create(void)
{
    Longhaul__Job__V1__Job *job = malloc(sizeof *job);

    if (!job)
        return NULL;
    longhaul__job__v1__job__init(job);
    for (size_t i = 0; i < LH_ARRAY_SIZE(sections); i++) {
        ProtobufCMessage *m = malloc(sections[i].type->sizeof_message);
        if (!m) {
            job_destroy(job);
            return NULL;
        }
        sections[i].type->message_init(m);
        *(ProtobufCMessage **)((char *)job + sections[i].offset) = m;
    }
    return job;
}

/* ---- one value ---- */

static bool parse_number(const char *text, enum job_type type, double *out)
{
    static const struct {
        const char *suffix;
        double scale;
    } sizes[] = {
        {"", 1}, {"KiB", 1024}, {"MiB", 1048576}, {"GiB", 1073741824}, {"TiB", 1099511627776}};
    char *end;

    errno = 0;
    *out = strtod(text, &end);
    if (end == text || errno || !isfinite(*out))
        return false;
    while (type == JOB_BYTES && *end == ' ')
        end++;
    for (size_t i = 0; i < (type == JOB_BYTES ? LH_ARRAY_SIZE(sizes) : 1); i++)
        if (!strcmp(end, sizes[i].suffix)) {
            *out *= sizes[i].scale;
            return type == JOB_FLOAT || *out == floor(*out);
        }
    return false;
}

static int set_number(const struct job_field *f, void *at, const char *text, struct lh_error *err)
{
    double v;

    if (!parse_number(text, f->type, &v))
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s: '%s' is not a %s", f->name, text,
                       f->type == JOB_FLOAT   ? "number"
                       : f->type == JOB_BYTES ? "size such as 64MiB"
                                              : "whole number");
    if (v < f->min || v > f->max)
        return lh_fail(err, LH_OUT_OF_RANGE, "%s: %s is outside %.15g..%.15g", f->name, text,
                       f->min, f->max);
    if (f->type == JOB_FLOAT)
        *(float *)at = (float)v;
    else if (f->type == JOB_U32)
        *(uint32_t *)at = (uint32_t)v;
    else
        *(uint64_t *)at = (uint64_t)v;
    return 0;
}

static int set_choice(const struct job_field *f, void *at, const char *text, struct lh_error *err)
{
    int value = 0;

    for (const char *c = f->choices; *c; value++) {
        size_t n = strcspn(c, "|");
        if (strlen(text) == n && !strncmp(c, text, n)) {
            *(int *)at = value;
            return 0;
        }
        c += n + (c[n] == '|');
    }
    return lh_fail(err, LH_INVALID_ARGUMENT, "%s: '%s' is none of %s", f->name, text, f->choices);
}

static int set_text(const struct loader *l, const struct job_field *f, void *at, const char *text,
                    struct lh_error *err)
{
    size_t n = strlen(text);
    bool relative = f->type == JOB_PATH && n && *text != '/';

    if ((double)n < f->min || (double)n > f->max)
        return lh_fail(err, LH_OUT_OF_RANGE, "%s: has %zu bytes, allowed are %g..%g", f->name, n,
                       f->min, f->max);
    char *copy = relative ? lh_format("%s/%s", l->dir, text) : strdup(text);
    if (!copy)
        return lh_fail_errno(err, ENOMEM, "%s", f->name);
    char **slot = at;
    if (*slot != (const char *)protobuf_c_empty_string)
        free(*slot);
    *slot = copy;
    return 0;
}

static int set_value(const struct loader *l, const struct job_field *f, const char *text,
                     struct lh_error *err)
{
    void *at = (char *)job_section(l->job, f->section) + f->offset;

    switch (f->type) {
    case JOB_STRING:
    case JOB_PATH:
        return set_text(l, f, at, text, err);
    case JOB_CHOICE:
        return set_choice(f, at, text, err);
    case JOB_BOOL:
        if (strcmp(text, "true") && strcmp(text, "false"))
            return lh_fail(err, LH_INVALID_ARGUMENT, "%s: '%s' is neither true nor false", f->name,
                           text);
        *(protobuf_c_boolean *)at = !strcmp(text, "true");
        return 0;
    default:
        return set_number(f, at, text, err);
    }
}

/* ---- the document ---- */

static int at_line(const struct loader *l, const yaml_node_t *n, struct lh_error *err)
{
    return lh_wrap(err, "%s:%zu", l->path, n->start_mark.line + 1);
}

static const char *scalar(const yaml_node_t *n)
{
    return n && n->type == YAML_SCALAR_NODE ? (const char *)n->data.scalar.value : NULL;
}

static const struct job_field *find_field(const char *section, const char *name)
{
    for (size_t i = 0; i < job_n_fields; i++)
        if (!strcmp(job_fields[i].section, section) && !strcmp(job_fields[i].name, name))
            return &job_fields[i];
    return NULL;
}

static int load_field(struct loader *l, const char *section, const yaml_node_t *key,
                      const yaml_node_t *value, struct lh_error *err)
{
    const char *name = scalar(key), *text = scalar(value);
    const struct job_field *f = name ? find_field(section, name) : NULL;

    if (!f) {
        lh_fail(err, LH_INVALID_ARGUMENT,
                "unknown field '%s'%s%s; `longhaul run --fields` lists all", name ? name : "?",
                *section ? " in section " : "", section);
        return at_line(l, key, err);
    }
    if (!text) {
        lh_fail(err, LH_INVALID_ARGUMENT, "%s must be a single value", name);
        return at_line(l, value, err);
    }
    if (l->given[f - job_fields]) {
        lh_fail(err, LH_INVALID_ARGUMENT, "%s is given twice", name);
        return at_line(l, key, err);
    }
    l->given[f - job_fields] = true;
    return set_value(l, f, text, err) < 0 ? at_line(l, value, err) : 0;
}

static int load_mapping(struct loader *l, const char *section, yaml_node_t *map,
                        struct lh_error *err);

static int load_pair(struct loader *l, const char *section, const yaml_node_pair_t *p,
                     struct lh_error *err)
{
    yaml_node_t *key = yaml_document_get_node(&l->doc, p->key);
    yaml_node_t *value = yaml_document_get_node(&l->doc, p->value);
    const char *name = scalar(key);

    if (!*section && name && *name && job_section(l->job, name))
        return load_mapping(l, name, value, err);
    return load_field(l, section, key, value, err);
}

static int load_mapping(struct loader *l, const char *section, yaml_node_t *map,
                        struct lh_error *err)
{
    if (map->type != YAML_MAPPING_NODE) {
        lh_fail(err, LH_INVALID_ARGUMENT, "%s%smust be a list of `field: value`", section,
                *section ? " " : "the file ");
        return at_line(l, map, err);
    }
    for (yaml_node_pair_t *p = map->data.mapping.pairs.start; p < map->data.mapping.pairs.top;
         p++) {
        int r = load_pair(l, section, p, err);
        if (r < 0)
            return r;
    }
    return 0;
}

static int load_defaults(struct loader *l, struct lh_error *err)
{
    for (size_t i = 0; i < job_n_fields; i++) {
        const struct job_field *f = &job_fields[i];
        if (l->given[i])
            continue;
        if (!f->initial)
            return lh_fail(err, LH_INVALID_ARGUMENT, "%s: %s%s%s is missing: %s", l->path,
                           f->section, *f->section ? "." : "", f->name, f->doc);
        if (set_value(l, f, f->initial, err) < 0)
            return lh_wrap(err, "default");
    }
    return 0;
}

static int parse_yaml(struct loader *l, const char *text, size_t len, struct lh_error *err)
{
    yaml_parser_t parser;

    if (!yaml_parser_initialize(&parser))
        return lh_fail_errno(err, ENOMEM, "%s", l->path);
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, len);
    int r = 0;
    if (!yaml_parser_load(&parser, &l->doc))
        r = lh_fail(err, LH_INVALID_ARGUMENT, "%s:%zu: %s", l->path, parser.problem_mark.line + 1,
                    parser.problem ? parser.problem : "not YAML");
    yaml_parser_delete(&parser);
    return r;
}

static int load_document(struct loader *l, struct lh_error *err)
{
    yaml_node_t *root = yaml_document_get_root_node(&l->doc);

    if (!root)
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s is empty", l->path);
    int r = load_mapping(l, "", root, err);
    return r < 0 ? r : load_defaults(l, err);
}

Longhaul__Job__V1__Job *job_load(const char *path, struct lh_error *err)
{
    size_t len;
    lh_autofree char *text = lh_read_file(path, JOB_MAX, &len, err);
    lh_autofree char *real = text ? realpath(path, NULL) : NULL;
    lh_autofree bool *given = calloc(job_n_fields, sizeof *given);
    struct loader l = {.path = path, .given = given, .job = job_create()};

    if (!text || !real || !given || !l.job) {
        if (text)
            lh_fail_errno(err, ENOMEM, "reading %s", path);
        job_destroy(l.job);
        return NULL;
    }
    l.dir = dirname(real);
    int r = parse_yaml(&l, text, len, err);
    if (r == 0) {
        r = load_document(&l, err);
        yaml_document_delete(&l.doc);
    }
    if (r == 0)
        r = job_check(l.job, path, err);
    if (r == 0)
        return l.job;
    job_destroy(l.job);
    return NULL;
}

/* ---- job.pb ---- */

Longhaul__Job__V1__Job *job_read(const char *job_dir, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/job.pb", job_dir);
    size_t len;

    lh_autofree char *data = path ? lh_read_file(path, JOB_MAX, &len, err) : NULL;
    if (!data) {
        lh_wrap(err, "%s is not a job directory", job_dir);
        return NULL;
    }
    Longhaul__Job__V1__Job *job = (void *)lh_parse(&longhaul__job__v1__job__descriptor, data, len,
                                                   (struct lh_parse_limits){0}, err);
    if (!job)
        lh_wrap(err, "%s", path);
    if (job && (job->format != 1 || strcmp(job->version, LONGHAUL_VERSION))) {
        lh_fail(err, LH_FAILED_PRECONDITION,
                "%s was made by Longhaul %s, this is %s: use that version or start a new job", path,
                job->version, LONGHAUL_VERSION);
        job_destroy(job);
        return NULL;
    }
    return job;
}

int job_write(const Longhaul__Job__V1__Job *job, const char *job_dir, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/job.pb", job_dir);
    size_t len;
    lh_autofree uint8_t *data = lh_pack(&job->base, &len, err);

    if (!path || !data)
        return lh_fail_errno(err, ENOMEM, "writing the job to %s", job_dir);
    return lh_write_file(path, data, len, 0644, err);
}

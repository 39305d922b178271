#include <inttypes.h>
#include <string.h>

#include "deploy/job.h"

static void print_choice(const struct job_field *f, int value, FILE *to)
{
    const char *c = f->choices;

    while (value-- > 0 && strchr(c, '|'))
        c = strchr(c, '|') + 1;
    fprintf(to, "%.*s", (int)strcspn(c, "|"), c);
}

static void print_value(const struct job_field *f, const void *at, FILE *to)
{
    switch (f->type) {
    case JOB_U32:
        fprintf(to, "%" PRIu32, *(const uint32_t *)at);
        break;
    case JOB_U64:
    case JOB_BYTES:
        fprintf(to, "%" PRIu64, *(const uint64_t *)at);
        break;
    case JOB_FLOAT:
        fprintf(to, "%.9g", (double)*(const float *)at);
        break;
    case JOB_BOOL:
        fputs(*(const protobuf_c_boolean *)at ? "true" : "false", to);
        break;
    case JOB_CHOICE:
        print_choice(f, *(const int *)at, to);
        break;
    case JOB_STRING:
    case JOB_PATH:
        fprintf(to, "\"%s\"", *(char *const *)at);
        break;
    }
}

void job_print(Longhaul__Job__V1__Job *job, FILE *to)
{
    const char *section = "";

    for (size_t i = 0; i < job_n_fields; i++) {
        const struct job_field *f = &job_fields[i];
        if (strcmp(section, f->section))
            fprintf(to, "%s:\n", f->section);
        section = f->section;
        fprintf(to, "%s%s: ", *section ? "  " : "", f->name);
        print_value(f, (char *)job_section(job, section) + f->offset, to);
        fputc('\n', to);
    }
}

void job_print_fields(FILE *to)
{
    for (size_t i = 0; i < job_n_fields; i++) {
        const struct job_field *f = &job_fields[i];
        fprintf(to, "%s%s%-*s  %-12s  %s", f->section, *f->section ? "." : "",
                (int)(32 - strlen(f->section) - !!*f->section), f->name,
                f->initial ? (*f->initial ? f->initial : "\"\"") : "(required)", f->doc);
        if (f->type < JOB_BOOL)
            fprintf(to, " [%.10g..%.10g]", f->min, f->max);
        fputc('\n', to);
    }
}

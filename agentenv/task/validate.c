/* The bounds of every field of a task, as one table.
 *
 * A row names a field by message and field ("Limits.memory_bytes"), so that it holds wherever the
 * message occurs, and bounds its value: the number, the length of a text or of bytes, the count of
 * a repeated field; "X.y[]" bounds each item of one.  The walk goes along the descriptors, which
 * also give the members of every enumeration, and composes the path for the message.  A field
 * without a row is an error of the table, found by the first task that sets it and by a test that
 * looks at them all: a field added to the schema cannot be forgotten here.
 *
 * What concerns several fields at once is in relations.c. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "agentenv/task/task.h"
#include "agentenv/task/validate.h"
#include "proto/text.h"

#define DAY_MS   (24u * 60 * 60 * 1000)
#define KIB(n)   ((uint64_t)(n) << 10)
#define MIB(n)   ((uint64_t)(n) << 20)
#define TIB(n)   ((uint64_t)(n) << 40)
#define ANY      UINT64_MAX
#define REQUIRED true

static const char *check_name(const char *s)
{
    return task_name_valid(s) ? NULL : "is not of the form org/name, both of [a-z0-9._-]";
}

static const char *check_image(const char *s)
{
    return task_image_name_valid(s) ? NULL : "is not an image name, [a-z0-9._/-]";
}

static const char *check_path(const char *s)
{
    if (*s != '/')
        return "is not an absolute path";
    for (const char *part = s; *part; part += strcspn(part, "/")) {
        part += strspn(part, "/");
        size_t len = strcspn(part, "/");
        if ((len == 1 && *part == '.') || (len == 2 && !strncmp(part, "..", 2)))
            return "has a component . or ..";
        if (len > 255)
            return "has a component of more than 255 bytes";
    }
    return s[strlen(s) - 1] == '/' && s[1] ? "ends in a slash" : NULL;
}

#define LOWER  "abcdefghijklmnopqrstuvwxyz"
#define UPPER  "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
#define DIGITS "0123456789"

static const char *check_variable(const char *s)
{
    bool fine = !s[strspn(s, LOWER UPPER DIGITS "_")] && !strchr(DIGITS, *s);

    return fine ? NULL : "is not a variable name";
}

static const char *check_word(const char *s)
{
    return s[strspn(s, LOWER DIGITS "_")] ? "has characters other than a-z, 0-9, _" : NULL;
}

static const char *check_label(const char *s)
{
    return s[strspn(s, LOWER UPPER DIGITS "._+-")]
               ? "has characters other than letters, digits, . _ + -"
               : NULL;
}

static const char *check_user(const char *s)
{
    return s[strspn(s, LOWER DIGITS "_-:")] ? "is neither a name, a uid nor uid:gid" : NULL;
}

/* Sorted as in the schema. */
static const struct rule {
    const char *field;
    uint64_t min, max;
    bool required; /* zero and empty are refused; otherwise they mean the default */
    const char *(*check)(const char *text); /* NULL, or what is wrong with it */
} rules[] = {
    {"Message.role", 0, ANY, REQUIRED},
    {"Message.text", 1, MIB(1), REQUIRED},
    {"Tool.name", 1, 64, REQUIRED, check_word},
    {"Tool.description", 0, KIB(64)},
    {"Tool.json_schema", 0, KIB(256)},
    {"Budgets.context_tokens", 16, 16u << 20},
    {"Budgets.turn_tokens", 1, 1u << 20},
    {"Budgets.total_tokens", 1, 64u << 20},
    {"Budgets.turns", 1, 100000},
    {"Limits.cpu_millis", 10, 1024000},
    {"Limits.memory_bytes", MIB(4), TIB(16)},
    {"Limits.disk_bytes", KIB(64), TIB(16)},
    {"Limits.pids", 4, 1u << 22},
    {"Limits.open_files", 16, 1u << 20},
    {"Limits.output_bytes", 256, MIB(64)},
    {"EnvVar.name", 1, 128, REQUIRED, check_variable},
    {"EnvVar.value", 0, KIB(64)},
    {"EnvVar.secret_ref", 1, 128, REQUIRED, check_variable},
    {"File.path", 2, 4095, REQUIRED, check_path},
    {"File.content", 0, TASK_FILE_MAX},
    {"File.mode", 1, 07777},
    {"Environment.image", 1, 128, REQUIRED, check_image},
    {"Environment.files", 0, 10000},
    {"Environment.setup", 0, 1000},
    {"Environment.setup[]", 1, KIB(64), REQUIRED},
    {"Environment.env", 0, 1000},
    {"Environment.user", 1, 64, false, check_user},
    {"Environment.workdir", 1, 4095, false, check_path},
    {"Environment.healthcheck", 1, KIB(64)},
    {"Timeout.ms", 1, 7 * DAY_MS},
    {"CheckpointPolicy.every_turns", 1, 100000},
    {"CheckpointPolicy.every_ms", 100, DAY_MS},
    {"CheckpointPolicy.keep", 1, 1000},
    {"Verifier.command", 1, KIB(64), REQUIRED},
    {"Verifier.carry", 0, 100},
    {"Verifier.carry[]", 2, 4095, REQUIRED, check_path},
    {"Verifier.reward_min", 0, ANY},
    {"Verifier.reward_max", 0, ANY},
    {"Verifier.pass_mark", 0, ANY},
    {"Verifier.files", 0, 10000},
    {"Verifier.reward_files", 0, 8},
    {"Verifier.reward_files[]", 2, 4095, REQUIRED, check_path},
    {"Oracle.actions", 0, 100000},
    {"Oracle.actions[]", 1, MIB(1), REQUIRED},
    {"RetryPolicy.infra_retries", 1, 100},
    {"RetryPolicy.quarantine_after", 1, 10000},
    {"Task.name", 3, 128, REQUIRED, check_name},
    {"Task.revision", 1, UINT32_MAX, REQUIRED},
    {"Task.licence", 1, 128, false, check_label},
    {"Task.split", 0, ANY, REQUIRED},
    {"Task.family", 1, 64, false, check_label},
    {"Task.prompt", 1, 1000, REQUIRED},
    {"Task.tools", 0, 256},
    {"Task.seeds", 0, 100000},
    {"Task.seeds[]", 0, ANY},
    {"Task.unknown", 0, MIB(16)},
};

/* ---- names ---- */

bool task_name_valid(const char *name)
{
    static const char allowed[] = LOWER DIGITS "._-";
    size_t org = strspn(name, allowed);
    const char *rest = name + org + 1;

    return org && name[org] == '/' && *rest && !rest[strspn(rest, allowed)] &&
           strchr(LOWER DIGITS, *name) && strchr(LOWER DIGITS, *rest);
}

bool task_image_name_valid(const char *name)
{
    return strchr(LOWER DIGITS, *name) && *name && !name[strspn(name, LOWER DIGITS "._/-")] &&
           strlen(name) <= 128;
}

/* ---- the walk ---- */

struct walk {
    char path[512]; /* of the field looked at */
    struct lh_error *err;
};

static const struct rule *find_rule(const char *message, const char *field, const char *suffix)
{
    char name[128];

    snprintf(name, sizeof name, "%s.%s%s", message, field, suffix);
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (!strcmp(rules[i].field, name))
            return &rules[i];
    return NULL;
}

/* Types whose values the descriptor or relations.c judges. */
static bool needs_rule(const ProtobufCFieldDescriptor *f, bool item)
{
    if (f->type == PROTOBUF_C_TYPE_MESSAGE)
        return f->label == PROTOBUF_C_LABEL_REPEATED && !item;
    return f->type != PROTOBUF_C_TYPE_ENUM && f->type != PROTOBUF_C_TYPE_BOOL &&
           f->type != PROTOBUF_C_TYPE_DOUBLE;
}

bool task_bounds_cover(const ProtobufCMessageDescriptor *message, const ProtobufCFieldDescriptor *f)
{
    if (needs_rule(f, false) && !find_rule(message->short_name, f->name, ""))
        return false;
    return f->label != PROTOBUF_C_LABEL_REPEATED || !needs_rule(f, true) ||
           find_rule(message->short_name, f->name, "[]");
}

static int check_range(struct walk *w, const struct rule *rule, const char *what, uint64_t value,
                       const char *unit)
{
    if (value < rule->min)
        return lh_fail(w->err, LH_INVALID_ARGUMENT, "%s%s %" PRIu64 "%s is below %" PRIu64, w->path,
                       what, value, unit, rule->min);
    if (value > rule->max)
        return lh_fail(w->err, LH_INVALID_ARGUMENT, "%s%s %" PRIu64 "%s is above %" PRIu64, w->path,
                       what, value, unit, rule->max);
    return 0;
}

static int check_text(struct walk *w, const struct rule *rule, const char *text)
{
    const char *wrong = rule->check ? rule->check(text) : NULL;

    if (wrong)
        return lh_fail(w->err, LH_INVALID_ARGUMENT, "%s '%.200s' %s", w->path, text, wrong);
    return check_range(w, rule, " has", strlen(text), " bytes, which");
}

static int check_enum(struct walk *w, const ProtobufCEnumDescriptor *e, int value)
{
    if (protobuf_c_enum_descriptor_get_value(e, value))
        return 0;
    return lh_fail(w->err, LH_INVALID_ARGUMENT, "%s %d is not a %s", w->path, value, e->short_name);
}

static int check_message(struct walk *w, const ProtobufCMessage *m);

static int check_item(struct walk *w, const ProtobufCFieldDescriptor *f, const struct rule *rule,
                      const void *at)
{
    switch (f->type) {
    case PROTOBUF_C_TYPE_MESSAGE:
        return check_message(w, *(ProtobufCMessage *const *)at);
    case PROTOBUF_C_TYPE_ENUM:
        return check_enum(w, f->descriptor, *(const int *)at);
    case PROTOBUF_C_TYPE_STRING:
        return check_text(w, rule, *(char *const *)at);
    case PROTOBUF_C_TYPE_BYTES:
        return check_range(w, rule, " has", ((const ProtobufCBinaryData *)at)->len,
                           " bytes, which");
    case PROTOBUF_C_TYPE_UINT32:
        return check_range(w, rule, "", *(const uint32_t *)at, "");
    case PROTOBUF_C_TYPE_UINT64:
        return check_range(w, rule, "", *(const uint64_t *)at, "");
    default: /* booleans; doubles are for relations.c */
        return 0;
    }
}

static int check_items(struct walk *w, const char *message, const ProtobufCFieldDescriptor *f,
                       const void *items, size_t n)
{
    const struct rule *rule = find_rule(message, f->name, "[]");
    size_t end = strlen(w->path);

    for (size_t i = 0; i < n; i++) {
        snprintf(w->path + end, sizeof w->path - end, "[%zu]", i);
        int r = check_item(w, f, rule, (const char *)items + i * lh_field_size(f));
        w->path[end] = 0;
        if (r < 0)
            return r;
    }
    return 0;
}

static int check_field(struct walk *w, const char *message, const ProtobufCFieldDescriptor *f,
                       const void *items, size_t n)
{
    const struct rule *rule = find_rule(message, f->name, "");

    if (!rule && needs_rule(f, false))
        return lh_fail(w->err, LH_INTERNAL, "%s: validate.c has no row for %s.%s", w->path, message,
                       f->name);
    if (n == 0 && rule && rule->required && !(f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF))
        return lh_fail(w->err, LH_INVALID_ARGUMENT, "%s is missing", w->path);
    if (n == 0)
        return 0;
    if (f->label != PROTOBUF_C_LABEL_REPEATED)
        return check_item(w, f, rule, items);
    int r = check_range(w, rule, " has", n, " items, which");
    return r < 0 ? r : check_items(w, message, f, items, n);
}

static int check_message(struct walk *w, const ProtobufCMessage *m)
{
    const ProtobufCMessageDescriptor *d = m->descriptor;
    size_t end = strlen(w->path);

    for (unsigned i = 0; i < d->n_fields; i++) {
        const void *items;
        size_t n = lh_field_items(m, &d->fields[i], &items);

        snprintf(w->path + end, sizeof w->path - end, "%s%s", end ? "." : "", d->fields[i].name);
        int r = check_field(w, d->short_name, &d->fields[i], items, n);
        w->path[end] = 0;
        if (r < 0)
            return r;
    }
    return 0;
}

int task_bounds(const Task *task, struct lh_error *err)
{
    struct walk w = {.err = err};

    return check_message(&w, &task->base);
}

int task_validate(const Task *task, struct lh_error *err)
{
    if (task_bounds(task, err) == 0 && task_relations(task, err) == 0)
        return 0;
    return lh_wrap(err, "task %.128s", *task->name ? task->name : "without a name");
}

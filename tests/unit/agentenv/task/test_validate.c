#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <math.h>
#include <string.h>

#include "agentenv/task/task.h"
#include "agentenv/task/validate.h"
#include "tests/unit/agentenv/task/build.h"

Test(validate, the_small_task_is_valid)
{
    struct built b;
    struct lh_error e = {0};

    build(&b);
    cr_assert(eq(int, task_validate(&b.task, &e), 0), "%s", e.message);
}

/* ---- one change each, and what is said about it ---- */

static char long_text[(64 << 10) + 2];

#define BEND(name, ...)                                                                            \
    static void bend_##name(struct built *b)                                                       \
    {                                                                                              \
        __VA_ARGS__;                                                                               \
    }

BEND(no_name, b->task.name = (char *)"")
BEND(bad_name, b->task.name = (char *)"acme")
BEND(upper_name, b->task.name = (char *)"Acme/x")
BEND(dotted_name, b->task.name = (char *)"acme/../x")
BEND(plus_name, b->task.name = (char *)"acme/x+01")
BEND(no_revision, b->task.revision = 0)
BEND(no_split, b->task.split = 0)
BEND(bad_split, b->task.split = 7)
BEND(no_prompt, b->task.n_prompt = 0)
BEND(no_role, b->prompt.role = 0)
BEND(bad_licence, b->task.licence = (char *)"as you like it")
BEND(low_memory, b->limits.memory_bytes = 100)
BEND(high_pids, b->limits.pids = 1u << 30)
BEND(no_image, b->environment.image = (char *)"")
BEND(bad_image, b->environment.image = (char *)"/etc")
BEND(no_environment, b->task.environment = NULL)
BEND(no_verifier, b->task.verifier = NULL)
BEND(no_command, b->verifier.command = (char *)"")
BEND(long_command, memset(long_text, 'x', sizeof long_text - 1); b->verifier.command = long_text)
BEND(bad_isolation, b->verifier.isolation = 3)
BEND(bad_network, b->environment.agent_network = -1)
BEND(relative_file, b->environment.n_files = 1; b->file[0].path = (char *)"work/a")
BEND(dotted_file, b->environment.n_files = 1; b->file[0].path = (char *)"/work/../etc/a")
BEND(slash_file, b->environment.n_files = 1; b->file[0].path = (char *)"/work/")
BEND(file_mode, b->environment.n_files = 1; b->file[0].path = (char *)"/a";
     b->file[0].mode = 010000)
BEND(file_in_proc, b->environment.n_files = 1; b->file[0].path = (char *)"/proc/a")
BEND(file_for_verifier, b->environment.n_files = 1; b->file[0].path = (char *)"/.verifier/a")
BEND(file_of_verifier, b->verifier.n_files = 1; b->file[0].path = (char *)"/tests/a")
BEND(file_over_shell, b->verifier.n_files = 1; b->file[0].path = (char *)"/.verifier/bin/sh")
BEND(file_twice, b->environment.n_files = 2; b->file[0].path = b->file[1].path = (char *)"/a")
BEND(file_in_file, b->environment.n_files = 2; b->file[0].path = (char *)"/a/b";
     b->file[1].path = (char *)"/a")
BEND(workdir_in_dev, b->environment.workdir = (char *)"/dev/shm")
BEND(variable_name, b->environment.n_env = 1; b->variable[0].name = (char *)"1X";
     b->variable[0].source_case = LONGHAUL__TASK__V1__ENV_VAR__SOURCE_VALUE;
     b->variable[0].value = (char *)"")
BEND(variable_source, b->environment.n_env = 1; b->variable[0].name = (char *)"X")
BEND(timeout, b->timeouts.verify = &b->timeout; b->timeout.ms = UINT32_MAX)
BEND(on_timeout, b->timeouts.boot = &b->timeout;
     b->timeout.on_timeout = LONGHAUL__TASK__V1__ON_TIMEOUT__ON_TIMEOUT_TRUNCATE_AND_SCORE)
BEND(reward_nan, b->verifier.reward_max = NAN)
BEND(reward_range, b->verifier.reward_min = 1; b->verifier.reward_max = 2)
BEND(pass_mark, b->verifier.pass_mark = 2)
BEND(carry_of_fork, b->verifier.n_carry = 1; b->carry[0] = (char *)"/work")
BEND(fresh_without_carry, b->verifier.isolation = LONGHAUL__TASK__V1__ISOLATION__ISOLATION_FRESH)
BEND(tool_schema, b->task.n_tools = 1; b->tool.name = (char *)"t";
     b->tool.json_schema = (char *)"{\n\"a\": }")
BEND(tool_twice, b->task.n_tools = 2; b->tool.name = (char *)"t")
BEND(budgets, b->budgets.turn_tokens = 9; b->budgets.total_tokens = 8)
BEND(empty_action, b->actions[0] = (char *)"")

static const struct row {
    const char *name;
    void (*bend)(struct built *b);
    const char *says; /* part of the message */
} rows[] = {
    {"no name", bend_no_name, "task without a name: name is missing"},
    {"bad name", bend_bad_name, "task acme: name 'acme' is not of the form org/name"},
    {"upper case", bend_upper_name, "is not of the form org/name"},
    {"dots", bend_dotted_name, "is not of the form org/name"},
    {"a candidate's name", bend_plus_name, "is not of the form org/name"},
    {"revision", bend_no_revision, "task acme/x: revision is missing"},
    {"split", bend_no_split, "split is missing"},
    {"enum", bend_bad_split, "split 7 is not a Split"},
    {"prompt", bend_no_prompt, "prompt is missing"},
    {"role", bend_no_role, "prompt[0].role is missing"},
    {"licence", bend_bad_licence, "licence 'as you like it' has characters other"},
    {"below", bend_low_memory, "task acme/x: environment.limits.memory_bytes 100 is below 4194304"},
    {"above", bend_high_pids, "environment.limits.pids 1073741824 is above 4194304"},
    {"no image", bend_no_image, "environment.image is missing"},
    {"image", bend_bad_image, "environment.image '/etc' is not an image name"},
    {"no environment", bend_no_environment, "environment is missing"},
    {"no verifier", bend_no_verifier, "verifier is missing"},
    {"no command", bend_no_command, "verifier.command is missing"},
    {"long", bend_long_command, "verifier.command has 65537 bytes, which is above 65536"},
    {"isolation", bend_bad_isolation, "verifier.isolation 3 is not a Isolation"},
    {"network", bend_bad_network, "environment.agent_network -1 is not a Network"},
    {"relative", bend_relative_file, "environment.files[0].path 'work/a' is not an absolute path"},
    {"dots in path", bend_dotted_file,
     "environment.files[0].path '/work/../etc/a' has a component"},
    {"slash", bend_slash_file, "ends in a slash"},
    {"mode", bend_file_mode, "environment.files[0].mode 4096 is above 4095"},
    {"proc", bend_file_in_proc, "is in /proc, which is reserved"},
    {"verifier's place", bend_file_for_verifier, "is in /.verifier, which is reserved"},
    {"verifier's file", bend_file_of_verifier, "is not below /.verifier/"},
    {"verifier's shell", bend_file_over_shell, "or in its bin"},
    {"twice", bend_file_twice, "environment.files names '/a' and '/a'"},
    {"file in file", bend_file_in_file, "environment.files names '/a' and '/a/b'"},
    {"workdir", bend_workdir_in_dev, "environment.workdir is in /dev"},
    {"variable", bend_variable_name, "environment.env[0].name '1X' is not a variable name"},
    {"no source", bend_variable_source, "environment.env[0] X has neither value nor secret_ref"},
    {"timeout", bend_timeout, "timeouts.verify.ms 4294967295 is above 604800000"},
    {"on_timeout", bend_on_timeout, "timeouts.boot.on_timeout cannot be TRUNCATE_AND_SCORE"},
    {"nan", bend_reward_nan, "must be finite"},
    {"range", bend_reward_range, "0, the reward of doing nothing"},
    {"pass mark", bend_pass_mark, "verifier.pass_mark 2 is not above 0 and at most reward_max 1"},
    {"carry", bend_carry_of_fork, "verifier.carry is for isolation FRESH"},
    {"fresh", bend_fresh_without_carry, "verifier.carry is empty"},
    {"schema", bend_tool_schema, "tools[0].json_schema is not a JSON object: line 2"},
    {"tool twice", bend_tool_twice, "tools names t twice"},
    {"budgets", bend_budgets, "budgets.turn_tokens 9 is above total_tokens 8"},
    {"action", bend_empty_action, "oracle.actions[0] has 0 bytes, which is below 1"},
};

Test(validate, each_fault_is_named)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct built b;
        struct lh_error e = {0};

        build(&b);
        rows[i].bend(&b);
        cr_expect(eq(int, task_validate(&b.task, &e), LH_INVALID_ARGUMENT), "%s", rows[i].name);
        cr_expect(strstr(e.message, rows[i].says) != NULL, "%s: '%s' does not say '%s'",
                  rows[i].name, e.message, rows[i].says);
    }
}

static void each_field_has_bounds(const ProtobufCMessageDescriptor *d)
{
    for (unsigned i = 0; i < d->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &d->fields[i];

        cr_expect(task_bounds_cover(d, f), "validate.c has no row for %s.%s", d->short_name,
                  f->name);
        if (f->type == PROTOBUF_C_TYPE_MESSAGE)
            each_field_has_bounds(f->descriptor);
    }
}

Test(validate, no_field_of_the_schema_is_forgotten)
{
    each_field_has_bounds(&longhaul__task__v1__task__descriptor);
}

Test(task, zeros_stand_for_the_defaults_of_the_schema)
{
    struct built b;

    build(&b);
    cr_assert(eq(u32, task_timeout(&b.task, TASK_BOOT).ms, 10000));
    cr_assert(eq(u32, task_timeout(&b.task, TASK_VERIFY).ms, 60000));
    cr_assert(eq(int, task_timeout(&b.task, TASK_ACTION).on_timeout,
                 LONGHAUL__TASK__V1__ON_TIMEOUT__ON_TIMEOUT_FAIL));
    cr_assert(eq(int, task_timeout(&b.task, TASK_VERIFY).on_timeout,
                 LONGHAUL__TASK__V1__ON_TIMEOUT__ON_TIMEOUT_INFRA_INVALID));
    cr_assert(eq(str, (char *)task_workdir(&b.task), (char *)"/work"));
    cr_assert(eq(dbl, task_reward(&b.task).max, 1.0));
    cr_assert(eq(dbl, task_reward(&b.task).pass_mark, 1.0));
    b.timeout.ms = 5;
    b.timeouts.verify = &b.timeout;
    cr_assert(eq(u32, task_timeout(&b.task, TASK_VERIFY).ms, 5));
}

Test(task, the_digest_is_over_every_field)
{
    struct built b;
    uint8_t first[TASK_DIGEST], again[TASK_DIGEST], other[TASK_DIGEST];
    struct lh_error e = {0};

    build(&b);
    cr_assert(eq(int, task_digest(&b.task, first, &e), 0));
    cr_assert(eq(int, task_digest(&b.task, again, &e), 0));
    cr_assert(eq(int, memcmp(first, again, TASK_DIGEST), 0));
    b.actions[0] = (char *)"mkdir  a";
    cr_assert(eq(int, task_digest(&b.task, other, &e), 0));
    cr_assert(ne(int, memcmp(first, other, TASK_DIGEST), 0));
}

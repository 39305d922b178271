/* A small valid task for the tests to bend. */
#ifndef TESTS_UNIT_AGENTENV_TASK_BUILD_H
#define TESTS_UNIT_AGENTENV_TASK_BUILD_H

#include "agentenv/task/task.h"

struct built {
    Task task;
    Longhaul__Task__V1__Message prompt, *prompts[1];
    Longhaul__Task__V1__Environment environment;
    Longhaul__Task__V1__Limits limits;
    Longhaul__Task__V1__Verifier verifier;
    Longhaul__Task__V1__Oracle oracle;
    Longhaul__Task__V1__Timeouts timeouts;
    Longhaul__Task__V1__Timeout timeout;
    Longhaul__Task__V1__Budgets budgets;
    Longhaul__Task__V1__Tool tool, *tools[2];
    Longhaul__Task__V1__EnvVar variable[2], *variables[2];
    Longhaul__Task__V1__File file[2], *files[2];
    char *actions[4], *setup[2], *carry[2];
};

/* make dir a: `mkdir a`, verified by `[ -d a ]`.  Everything else is at hand but not attached. */
static inline void build(struct built *b)
{
    longhaul__task__v1__task__init(&b->task);
    longhaul__task__v1__message__init(&b->prompt);
    longhaul__task__v1__environment__init(&b->environment);
    longhaul__task__v1__limits__init(&b->limits);
    longhaul__task__v1__verifier__init(&b->verifier);
    longhaul__task__v1__oracle__init(&b->oracle);
    longhaul__task__v1__timeouts__init(&b->timeouts);
    longhaul__task__v1__timeout__init(&b->timeout);
    longhaul__task__v1__budgets__init(&b->budgets);
    longhaul__task__v1__tool__init(&b->tool);
    for (int i = 0; i < 2; i++) {
        longhaul__task__v1__env_var__init(&b->variable[i]);
        longhaul__task__v1__file__init(&b->file[i]);
        b->variables[i] = &b->variable[i];
        b->files[i] = &b->file[i];
        b->tools[i] = &b->tool;
    }
    b->prompts[0] = &b->prompt;
    b->prompt.role = LONGHAUL__TASK__V1__ROLE__ROLE_USER;
    b->prompt.text = (char *)"make dir a";
    b->environment.image = (char *)"quickstart";
    b->environment.limits = &b->limits;
    b->environment.files = b->files;
    b->environment.env = b->variables;
    b->environment.setup = b->setup;
    b->verifier.command = (char *)"[ -d a ]";
    b->verifier.files = b->files;
    b->verifier.carry = b->carry;
    b->actions[0] = (char *)"mkdir a";
    b->oracle.n_actions = 1;
    b->oracle.actions = b->actions;
    b->task.name = (char *)"acme/x";
    b->task.revision = 1;
    b->task.split = LONGHAUL__TASK__V1__SPLIT__SPLIT_TRAIN;
    b->task.n_prompt = 1;
    b->task.prompt = b->prompts;
    b->task.tools = b->tools;
    b->task.environment = &b->environment;
    b->task.verifier = &b->verifier;
    b->task.oracle = &b->oracle;
    b->task.timeouts = &b->timeouts;
    b->task.budgets = &b->budgets;
}

#endif

/* The tasks of the world.  All copy a word; each beside the first differs from it in one thing, so
 * that what a test sees of it has one cause: no oracle, a setup that fails, or an oracle and a
 * verifier that print what is no text. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>

#include "longhaul/task/v1/service.pb-c.h"
#include "world.h"

typedef Longhaul__Task__V1__Environment Environment;
typedef Longhaul__Task__V1__Message Message;
typedef Longhaul__Task__V1__Oracle Oracle;
typedef Longhaul__Task__V1__Task Task;
typedef Longhaul__Task__V1__Verifier Verifier;

static const char *setup[] = {"mkdir sub && echo secret >sub/word"};
static const char *bad_setup[] = {"echo no such thing; false"};
static const char *actions[] = {"cd sub; ls; export N=7; false", "echo $N >n; cat word >../out"};
static const char *noises[] = {"printf 'a\\377\\000\\303('", "touch sub/done",
                               "dd if=/dev/zero bs=1048576 count=100 2>/dev/null", "true"};

static Environment environment(const char **commands)
{
    Environment e = LONGHAUL__TASK__V1__ENVIRONMENT__INIT;

    e.image = (char *)"box";
    e.setup = (char **)commands;
    e.n_setup = 1;
    return e;
}

static Verifier verifier(const char *command)
{
    Verifier v = LONGHAUL__TASK__V1__VERIFIER__INIT;

    v.command = (char *)command;
    return v;
}

static Oracle oracle(const char **commands, size_t n)
{
    Oracle o = LONGHAUL__TASK__V1__ORACLE__INIT;

    o.actions = (char **)commands;
    o.n_actions = n;
    return o;
}

static Task train_task(const char *name, Message **prompt)
{
    Task t = LONGHAUL__TASK__V1__TASK__INIT;

    t.name = (char *)name;
    t.revision = 1;
    t.licence = (char *)"Apache-2.0";
    t.split = LONGHAUL__TASK__V1__SPLIT__SPLIT_TRAIN;
    t.prompt = prompt;
    t.n_prompt = 1;
    return t;
}

static int registered(void *ctx, const ProtobufCMessage *m, struct lh_error *err)
{
    const Longhaul__Task__V1__RegisterReply *r = (const void *)m;

    (void)err;
    cr_assert(r->accepted, "%s: %s", r->name, r->error);
    ++*(int *)ctx;
    return 0;
}

static void add(struct world *w, Task **tasks, size_t n)
{
    Longhaul__Task__V1__RegisterRequest req = LONGHAUL__TASK__V1__REGISTER_REQUEST__INIT;
    Longhaul__Task__V1__TaskSet set = LONGHAUL__TASK__V1__TASK_SET__INIT;
    struct lh_error err = {0};
    int accepted = 0;

    set.tasks = tasks;
    set.n_tasks = n;
    req.set = &set;
    req.no_verify = true; /* its oracle is not run by the harness there */
    int r = rpc_stream(w->agentenv, "/longhaul.task.v1.Tasks/Add", &req.base,
                       &longhaul__task__v1__register_reply__descriptor, 60000, registered,
                       &accepted, &err);
    cr_assert(eq(int, r, 0), "%s", err.message);
    cr_assert(eq(int, accepted, (int)n));
}

void world_register_tasks(struct world *w)
{
    Message prompt = LONGHAUL__TASK__V1__MESSAGE__INIT, *prompts[] = {&prompt};
    Environment sound = environment(setup), broken = environment(bad_setup);
    Verifier quiet = verifier("[ \"$(cat out)\" = secret ] && [ \"$(cat sub/n)\" = 7 ]"),
             loud = verifier("printf '\\377\\303'; [ -e sub/done ]; exit $?");
    Oracle copies = oracle(actions, LH_ARRAY_SIZE(actions)),
           noise = oracle(noises, LH_ARRAY_SIZE(noises));
    const struct {
        const char *name;
        Environment *environment;
        Verifier *verifier;
        Oracle *oracle;
    } kinds[] = {
        {TASK_TWO, &sound, &quiet, &copies},
        {TASK_AGENT, &sound, &quiet, NULL},
        {TASK_BROKEN, &broken, &quiet, &copies},
        {TASK_NOISY, &sound, &loud, &noise},
    };
    Task tasks[LH_ARRAY_SIZE(kinds)], *list[LH_ARRAY_SIZE(kinds)];

    prompt.role = LONGHAUL__TASK__V1__ROLE__ROLE_USER;
    prompt.text = (char *)"copy the word";
    for (size_t i = 0; i < LH_ARRAY_SIZE(kinds); i++) {
        tasks[i] = train_task(kinds[i].name, prompts);
        tasks[i].environment = kinds[i].environment;
        tasks[i].verifier = kinds[i].verifier;
        tasks[i].oracle = kinds[i].oracle;
        list[i] = &tasks[i];
    }
    add(w, list, LH_ARRAY_SIZE(kinds));
}

/* policy: what the daemon does with a sandbox by the clock, shown and changed. */
#include <errno.h>

#include "agentenv/cli/verbs.h"
#include "proto/parse.h"

enum { OPT_TTL = 768, OPT_AT_TTL, OPT_FREEZE, OPT_HIBERNATE, OPT_PIN, OPT_UNPIN };

static const struct argp_option options[] = {
    {"ttl", OPT_TTL, "TIME", 0, "Remove it after this long, from now", 0},
    {"ttl-hibernate", OPT_AT_TTL, 0, 0, "Hibernate it then instead", 0},
    {"idle-freeze", OPT_FREEZE, "TIME", 0, "Freeze it when nobody has used it this long; 0 = never",
     0},
    {"idle-hibernate", OPT_HIBERNATE, "TIME", 0,
     "Hibernate it then; the next command wakes it; 0 = never", 0},
    {"pin", OPT_PIN, 0, 0, "None of these happens before policy --unpin", 0},
    {"unpin", OPT_UNPIN, 0, 0, "They happen again", 0},
    {0},
};

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct cli_policy *p = state->input;

    switch (key) {
    case OPT_TTL:
        p->ttl_ms = cli_duration(state, "--ttl", arg);
        if (p->ttl_ms == 0)
            argp_error(state, "--ttl \"%s\": above 0", arg);
        return 0;
    case OPT_AT_TTL:
        p->said.hibernate_at_ttl = p->set_at_ttl = true;
        return 0;
    case OPT_FREEZE:
        p->said.freeze_after_ms = cli_duration(state, "--idle-freeze", arg);
        p->set_freeze = true;
        return 0;
    case OPT_HIBERNATE:
        p->said.hibernate_after_ms = cli_duration(state, "--idle-hibernate", arg);
        p->set_hibernate = true;
        return 0;
    case OPT_PIN:
    case OPT_UNPIN:
        p->said.pinned = key == OPT_PIN;
        p->set_pinned = true;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

const struct argp cli_policy_argp = {.options = options, .parser = parse};

bool cli_policy_fill(const struct cli_policy *p, V1(Policy) * to)
{
    if (p->set_at_ttl)
        to->hibernate_at_ttl = p->said.hibernate_at_ttl;
    if (p->set_freeze)
        to->freeze_after_ms = p->said.freeze_after_ms;
    if (p->set_hibernate)
        to->hibernate_after_ms = p->said.hibernate_after_ms;
    if (p->set_pinned)
        to->pinned = p->said.pinned;
    return p->set_at_ttl || p->set_freeze || p->set_hibernate || p->set_pinned;
}

/* ---- the verb ---- */

struct args {
    struct cli_words words; /* first: cli_parse_words() takes it for these */
    struct cli_policy policy;
};

static error_t parse_verb(int key, char *arg, struct argp_state *state)
{
    struct args *a = state->input;

    if (key != ARGP_KEY_INIT)
        return cli_parse_words(key, arg, state);
    state->child_inputs[0] = &a->policy;
    return 0;
}

static int show_sandbox(struct cli *cli, char *id, V1(Sandbox) * *out, struct lh_error *err)
{
    V1(SandboxId) req = LONGHAUL__SANDBOX__V1__SANDBOX_ID__INIT;

    req.id = id;
    return cli_call(cli, "Show", &req.base, &longhaul__sandbox__v1__sandbox__descriptor, CALL_MS,
                    (ProtobufCMessage **)out, err);
}

/* What was not said stays as it is: SetPolicy takes the whole of it. */
static int change(struct cli *cli, const V1(Sandbox) * now, const struct cli_policy *said,
                  struct lh_error *err)
{
    V1(SetPolicyRequest) req = LONGHAUL__SANDBOX__V1__SET_POLICY_REQUEST__INIT;
    lh_automsg(V1(Sandbox)) after = NULL;

    cli_policy_fill(said, now->policy);
    req.id = now->id;
    req.attempt = CURRENT_ATTEMPT;
    req.policy = now->policy;
    req.ttl_ms = said->ttl_ms;
    return cli_call(cli, "SetPolicy", &req.base, &longhaul__sandbox__v1__sandbox__descriptor,
                    CALL_MS, (ProtobufCMessage **)&after, err);
}

static int print_policy(struct cli *cli, const V1(Sandbox) * s, struct lh_error *err)
{
    static const char *const columns[] = {
        "id", "ttl_left_ms", "at_ttl", "idle_freeze_ms", "idle_hibernate_ms", "pinned", NULL};
    const V1(Policy) *p = s->policy;
    const char *at_ttl = !s->ttl_left_ms ? "" : p->hibernate_at_ttl ? "hibernate" : "remove";

    return cli_print(cli,
                     json_pack("[{s:s, s:I, s:s, s:I, s:I, s:b}]", "id", s->id, "ttl_left_ms",
                               (json_int_t)s->ttl_left_ms, "at_ttl", at_ttl, "idle_freeze_ms",
                               (json_int_t)p->freeze_after_ms, "idle_hibernate_ms",
                               (json_int_t)p->hibernate_after_ms, "pinned", (int)p->pinned),
                     columns, err);
}

int policy_verb(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_child children[] = {{&cli_policy_argp, 0, NULL, 0}, {0}};
    const struct argp argp = {.parser = parse_verb,
                              .args_doc = "ID",
                              .doc = "Changes what happens to a sandbox by the clock, or shows it; "
                                     "what is not named stays as it is.",
                              .children = children};
    lh_automsg(V1(Sandbox)) now = NULL;
    V1(Policy) none = LONGHAUL__SANDBOX__V1__POLICY__INIT;
    char *id[1];
    struct args a = {.words = {.min = 1, .max = 1, .argv = id}};

    cli_parse(&argp, argc, argv, &a);
    int r = show_sandbox(cli, id[0], &now, err);
    if (r < 0)
        return r;
    if (!now->policy)
        return lh_fail(err, LH_UNIMPLEMENTED, "this agentenvd does not say what a policy is");
    return a.policy.ttl_ms || cli_policy_fill(&a.policy, &none) ? change(cli, now, &a.policy, err)
                                                                : print_policy(cli, now, err);
}

#include "rig.h"

#include <criterion/new/assert.h>

void rig_init(struct rig *r, size_t kv_bytes, struct kv_client *store)
{
    struct lh_error err = {0};

    *r = (struct rig){.version = {.step = 1, .id = {1}}};
    r->model = util_open(TINY_MODEL);
    r->weights = util_weights(r->model, 1);
    r->o = (struct engine_options){
        .model = r->model,
        .weights = r->weights,
        .page_tokens = RIG_PAGE,
        .unit_tokens = RIG_UNIT,
        .step_tokens = 64,
        .max_running = RIG_RUNNING,
        .max_context_tokens = RIG_CONTEXT,
        .store = store,
        .max_inflight_bytes = 16 << 20,
    };
    r->o.kv_bytes = kv_bytes ? kv_bytes : 64 * rig_sequence_bytes(r, RIG_CONTEXT);
    r->o.scratch_bytes = engine_scratch_bytes(&r->o);
    r->kv = r->o.kv = util_alloc(r->o.kv_bytes);
    r->scratch = r->o.scratch = util_alloc(r->o.scratch_bytes);
    /* Nothing may depend on what a fresh page holds. */
    memset(r->kv, 0x7f, r->o.kv_bytes);
    r->engine = engine_create(&r->o, &err);
    cr_assert(r->engine != NULL, "%s", err.message);
    scheduler_init(&r->scheduler, r->engine, RIG_RUNNING);
    r->narrowest = RIG_RUNNING;
    cr_assert(eq(int, scheduler_resume(&r->scheduler, &r->version, &err), 0), "%s", err.message);
}

void rig_finish(struct rig *r)
{
    engine_destroy(r->engine);
    free(r->kv);
    free(r->scratch);
    free(r->weights);
    policy_model_destroy(r->model);
}

size_t rig_sequence_bytes(const struct rig *r, size_t tokens)
{
    size_t page = policy_kv_floats(r->model) * RIG_PAGE * sizeof(float);
    size_t state = (policy_state_floats(r->model) * sizeof(float) + page - 1) / page * page;

    return ((tokens + RIG_PAGE - 1) / RIG_PAGE + 1) * page + 2 * state;
}

size_t rig_used(struct rig *r)
{
    return engine_stats(r->engine).used_bytes;
}

void rig_new_version(struct rig *r, uint64_t step)
{
    struct lh_error err = {0};

    r->version.step = step;
    r->version.id[0] = (uint8_t)step;
    policy_init(r->model, r->weights, step);
    cr_assert(eq(int, scheduler_resume(&r->scheduler, &r->version, &err), 0), "%s", err.message);
}

void talk_init(struct talk *t, uint64_t prompt_seed, int n, uint64_t seed, int turns)
{
    *t = (struct talk){.seed = seed, .turns_left = turns, .turn_tokens = 20};
    for (int i = 0; i < n; i++) {
        int32_t token = TOKEN_SPECIALS + util_pick(prompt_seed, (uint64_t)i, 256);
        cr_assert(eq(int, transcript_add(&t->transcript, &token, 1, NULL), 0));
    }
}

void talk_finish(struct talk *t)
{
    transcript_finish(&t->transcript);
}

static void observe(struct talk *t)
{
    char text[16];
    int n = snprintf(text, sizeof text, "out %d", (int)(t->seed % 1000));

    cr_assert(eq(int, transcript_add_text(&t->transcript, TOKEN_TOOL, text, (size_t)n, NULL), 0));
}

static void end_turns(struct rig *r, int idle)
{
    for (struct engine_sequence *q; (q = engine_turn_ended(r->engine));) {
        struct talk *t = engine_owner(q);
        t->turns_left--;
        t->idle_for = idle + 1;
    }
}

/* True while one of them has turns to come. */
static bool resume(struct rig *r, struct talk *t, int n)
{
    bool any = false;

    for (int i = 0; i < n; i++) {
        any |= t[i].turns_left > 0;
        if (!t[i].idle_for || --t[i].idle_for || !t[i].turns_left)
            continue;
        observe(&t[i]);
        engine_ask(r->engine, t[i].sequence, (size_t)t[i].turn_tokens);
    }
    return any;
}

void talk_open(struct rig *r, struct talk *t)
{
    struct engine_sequence_spec spec = {.name = "talk",
                                        .transcript = &t->transcript,
                                        .seed = t->seed,
                                        .temperature = 0.9f,
                                        .owner = t};

    t->sequence = engine_open(r->engine, &spec, NULL);
    cr_assert(t->sequence != NULL);
    engine_ask(r->engine, t->sequence, (size_t)t->turn_tokens);
}

void talk_go_on(struct rig *r, struct talk *t, int n, int idle)
{
    struct lh_error err = {0};
    size_t tokens;

    while (resume(r, t, n)) {
        cr_assert(eq(int, scheduler_step(&r->scheduler, &tokens, &err), 0), "%s", err.message);
        if (window_size(&r->scheduler.window) < r->narrowest)
            r->narrowest = window_size(&r->scheduler.window);
        if (!tokens)
            usleep(500); /* a load is on its way */
        end_turns(r, idle);
    }
}

void talk_play(struct rig *r, struct talk *t, int n, int idle)
{
    for (int i = 0; i < n; i++)
        talk_open(r, &t[i]);
    talk_go_on(r, t, n, idle);
}

void talk_once_more(struct rig *r, struct talk *t)
{
    t->turns_left = 1;
    t->idle_for = 1;
    talk_go_on(r, t, 1, 0);
}

void talk_close(struct rig *r, struct talk *t, int n)
{
    for (int i = 0; i < n; i++)
        engine_close(r->engine, t[i].sequence);
}

bool talk_equal(const struct talk *a, const struct talk *b)
{
    const struct transcript *x = &a->transcript, *y = &b->transcript;

    return x->n == y->n && !memcmp(x->tokens, y->tokens, x->n * sizeof *x->tokens) &&
           !memcmp(x->logprobs, y->logprobs, x->n * sizeof *x->logprobs);
}

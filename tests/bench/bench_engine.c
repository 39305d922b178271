/* Tokens a second of the rollout engine at batch 32, beside policy_forward() alone with sampling
 * left out: what scheduling, paging, checkpoints and sampling cost. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "rollout/scheduler/scheduler.h"
#include "tests/bench/bench.h"

enum { BATCH = 32, PROMPT = 16, LENGTH = 96, PAGE = 32, UNIT = 16, MILLISECONDS = 1500 };

static void *memory(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);

    if (p)
        memset(p, 0, bytes);
    return p;
}

static double per_second(int64_t tokens, int64_t from_us)
{
    return (double)tokens * 1e6 / (double)(lh_now_us() - from_us);
}

/* ---- policy_forward alone: the same positions, the same batch ---- */

static int bench_forward(const struct policy_model *m, const float *w, double *rate,
                         struct lh_error *err)
{
    size_t bytes = policy_exec_bytes(m, BATCH), pages = LENGTH / PAGE;
    size_t own = pages * PAGE * policy_kv_floats(m) + policy_state_floats(m);
    int vocab = policy_model_config(m)->vocab;
    lh_autofree void *arena = memory(bytes);
    lh_autofree float *kv = memory(BATCH * own * sizeof *kv);
    lh_autofree float *logits = memory((size_t)BATCH * (size_t)vocab * sizeof *logits);
    lh_auto(policy_exec) x = policy_exec_create(m, w, arena, bytes, BATCH, PAGE, err);
    float *table[BATCH][LENGTH / PAGE];
    struct policy_chunk chunks[BATCH];
    int32_t token = TOKEN_SPECIALS + 'a';
    int64_t from = lh_now_us(), done = 0;
    int r = x && kv && logits ? 0 : LH_RESOURCE_EXHAUSTED;

    for (int i = 0; r == 0 && i < BATCH; i++) {
        float *at = kv + (size_t)i * own;
        for (size_t p = 0; p < pages; p++)
            table[i][p] = at + p * PAGE * policy_kv_floats(m);
        chunks[i] = (struct policy_chunk){
            &token, 1, 0, table[i], at + pages * PAGE * policy_kv_floats(m), 0};
    }
    while (r == 0 && lh_now_us() - from < MILLISECONDS * 1000) {
        r = policy_forward(x, chunks, BATCH, logits, err);
        for (int i = 0; i < BATCH; i++)
            chunks[i].start = (chunks[i].start + 1) % LENGTH;
        done += BATCH;
    }
    *rate = per_second(done, from);
    return r;
}

/* ---- the engine ---- */

struct slot {
    struct transcript transcript;
    struct engine_sequence *sequence;
};

static int restart(struct engine *e, struct slot *s, uint64_t seed, struct lh_error *err)
{
    struct engine_sequence_spec spec = {
        .name = "bench", .transcript = &s->transcript, .seed = seed, .temperature = 1, .owner = s};
    int r = 0;

    engine_close(e, s->sequence);
    transcript_finish(&s->transcript);
    for (int i = 0; r == 0 && i < PROMPT; i++) {
        int32_t token = TOKEN_SPECIALS + (int32_t)((seed * 31 + (uint64_t)i * 7) % 256);
        r = transcript_add(&s->transcript, &token, 1, err);
    }
    s->sequence = r == 0 ? engine_open(e, &spec, err) : NULL;
    if (!s->sequence)
        return LH_RESOURCE_EXHAUSTED;
    engine_ask(e, s->sequence, LENGTH - PROMPT);
    return 0;
}

static int drive(struct scheduler *s, struct slot *slots, double *rate, struct lh_error *err)
{
    int64_t from = lh_now_us();
    uint64_t seed = 0;
    size_t tokens;
    int r = 0;

    for (int i = 0; r == 0 && i < BATCH; i++)
        r = restart(s->engine, &slots[i], ++seed, err);
    while (r == 0 && lh_now_us() - from < MILLISECONDS * 1000) {
        r = scheduler_step(s, &tokens, err);
        for (struct engine_sequence *q; r == 0 && (q = engine_turn_ended(s->engine));)
            r = restart(s->engine, engine_owner(q), ++seed, err);
    }
    struct engine_stats st = engine_stats(s->engine);
    *rate = per_second((int64_t)(st.tokens_decoded + st.tokens_prefilled), from);
    bench_row("engine, batch 32, sampled", per_second((int64_t)st.tokens_decoded, from), 0, 0,
              "tokens/s");
    return r;
}

static int bench_engine(const struct policy_model *m, const float *w, double *rate,
                        struct lh_error *err)
{
    struct engine_options o = {.model = m,
                               .weights = w,
                               .kv_bytes = 64 << 20,
                               .page_tokens = PAGE,
                               .unit_tokens = UNIT,
                               .step_tokens = 256,
                               .max_running = BATCH,
                               .max_context_tokens = 2 * LENGTH};
    struct policy_version version = {.step = 1, .id = {1}};
    struct slot slots[BATCH] = {0};
    struct scheduler s;

    o.scratch_bytes = engine_scratch_bytes(&o);
    lh_autofree void *scratch = o.scratch = memory(o.scratch_bytes);
    lh_autofree void *kv = o.kv = memory(o.kv_bytes);
    lh_auto(engine) e = engine_create(&o, err);
    if (!e)
        return LH_RESOURCE_EXHAUSTED;
    scheduler_init(&s, e, BATCH);
    int r = scheduler_resume(&s, &version, err);
    if (r == 0)
        r = drive(&s, slots, rate, err);
    for (int i = 0; i < BATCH; i++) {
        engine_close(e, slots[i].sequence);
        transcript_finish(&slots[i].transcript);
    }
    return r;
}

static int run(struct lh_error *err)
{
    lh_auto(policy_model) m = policy_model_open(QUICKSTART_MODEL, err);
    lh_autofree float *w = m ? memory(policy_model_floats(m) * sizeof *w) : NULL;
    double alone = 0, engine = 0;

    if (!w)
        return LH_NOT_FOUND;
    policy_init(m, w, 1);
    int r = bench_forward(m, w, &alone, err);
    if (r == 0)
        r = bench_engine(m, w, &engine, err);
    if (r < 0)
        return r;
    bench_row("engine beside policy_forward, batch 32", engine, alone, 0, "tokens/s");
    return 0;
}

int main(void)
{
    struct lh_error err = {0};

    if (run(&err) == 0)
        return 0;
    fprintf(stderr, "bench_engine: %s\n", err.message);
    return 1;
}

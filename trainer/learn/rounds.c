/* Waiting for workers, with an end: progress or an error. */
#include "proto/clock.h"
#include "trainer/learn/trainer.h"

enum { POLL_MS = 500, STALLED_MS = 10 * 60 * 1000 };

/* Grows with every decoded token and every turn: demonstrations decode none. */
static uint64_t measure(struct trainer *t)
{
    struct intake_stats s;

    intake_stats(t->intake, &s);
    return s.tokens_decoded + s.committed + s.invalid + s.reassigned;
}

static int wait_ready(struct trainer *t, const char *round, int64_t ready, struct lh_error *err)
{
    uint64_t moved = 0;
    int64_t since = lh_now_ms();

    for (;;) {
        struct lh_error why = {0};
        int r = intake_wait(t->intake, round, ready, POLL_MS, &why);
        if (r >= 0)
            return 0;
        if (why.code != LH_DEADLINE_EXCEEDED)
            return lh_fail(err, why.code, "%s", why.message);
        if ((r = trainer_check(t, err)) < 0)
            return r;
        uint64_t now = measure(t);
        if (now != moved) {
            moved = now;
            since = lh_now_ms();
        }
        if (lh_now_ms() - since > STALLED_MS)
            return lh_fail(err, LH_DEADLINE_EXCEEDED,
                           "%s; no worker has made progress for 10 minutes, see logs/ of the job",
                           why.message);
    }
}

int trainer_collect(struct trainer *t, const struct intake_round *round, int64_t groups,
                    int64_t ready, struct lh_error *err)
{
    int r = trainer_enter(t, ARBITER_ROLLOUT, err);

    if (r == 0)
        r = intake_open_round(t->intake, round, err);
    if (r == 0)
        r = intake_raise(t->intake, round->name, groups, err);
    return r == 0 ? wait_ready(t, round->name, ready, err) : r;
}

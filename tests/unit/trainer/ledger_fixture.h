/* A ledger in a fresh directory, and segments whose content follows from their coordinates. */
#ifndef TESTS_TRAINER_LEDGER_FIXTURE_H
#define TESTS_TRAINER_LEDGER_FIXTURE_H

#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/file.h"
#include "trainer/intake/ledger.h"

#define JOB "01HQ0000000000000000000000"
#define FINE(x)                                                                                    \
    do {                                                                                           \
        int got_ = (x);                                                                            \
        cr_assert(got_ >= 0, "%s: %s", #x, err.message);                                           \
    } while (0)
#define WRONG(x, status)                                                                           \
    do {                                                                                           \
        memset(&err, 0, sizeof err);                                                               \
        int got_ = (x);                                                                            \
        cr_assert(got_ == (status), "%s gave %s (%s)", #x, lh_status_name(got_), err.message);     \
    } while (0)

enum { TURN_TOKENS = 7 };

struct test_segment {
    int32_t token[TURN_TOKENS];
    float logprob[TURN_TOKENS];
    uint8_t mask[TURN_TOKENS];
    struct ledger_span span;
    struct ledger_segment s;
};

static inline struct ledger_segment *make_segment(struct test_segment *t, const char *id,
                                                  uint32_t attempt, uint32_t turn)
{
    for (uint32_t i = 0; i < TURN_TOKENS; i++) {
        t->token[i] = (int32_t)(turn * 1000 + i);
        t->logprob[i] = -0.25f * (float)(turn + i);
        t->mask[i] = i & 1;
    }
    t->span = (struct ledger_span){.first = turn * TURN_TOKENS, .step = 3};
    memset(t->span.id, 0xab, sizeof t->span.id);
    t->s = (struct ledger_segment){
        .trajectory = id,
        .attempt = attempt,
        .turn = turn,
        .first_token = turn * TURN_TOKENS,
        .tokens = TURN_TOKENS,
        .token = t->token,
        .logprob = t->logprob,
        .mask = t->mask,
        .spans = &t->span,
        .n_spans = 1,
        .snapshot = turn & 1 ? "" : "01SNAP",
        .temperature = 1,
    };
    return &t->s;
}

/* A group of `members` open trajectories "<round>-<index>-<member>"; commits. */
static inline int64_t add_group(struct ledger *l, const char *round, int64_t index,
                                uint32_t members)
{
    struct ledger_group g = {
        .index = index, .task = "t/a", .family = "a", .state = GROUP_DISPATCHED};
    struct lh_error err = {0};

    snprintf(g.round, sizeof g.round, "%s", round);
    FINE(ledger_begin(l, &err));
    FINE(ledger_add_group(l, &g, &err));
    for (uint32_t m = 0; m < members; m++) {
        struct ledger_trajectory t = {
            .group = g.id, .member = m, .attempt = 1, .state = TRAJECTORY_OPEN, .seed = 5};
        snprintf(t.id, sizeof t.id, "%.8s-%lld-%u", round, (long long)index, m);
        FINE(ledger_add_trajectory(l, &t, &err));
    }
    FINE(ledger_commit(l, &err));
    return g.id;
}

static inline void append(struct ledger *l, const char *id, uint32_t attempt, uint32_t turn)
{
    struct test_segment t;
    struct lh_error err = {0};

    FINE(ledger_begin(l, &err));
    FINE(ledger_append(l, make_segment(&t, id, attempt, turn), &err));
    FINE(ledger_commit(l, &err));
}

#endif

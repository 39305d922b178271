#include "rollout/harness/report.h"

#include <errno.h>
#include <stdlib.h>

#include "proto/clock.h"

typedef Longhaul__Experience__V1__Envelope Envelope;
typedef Longhaul__Experience__V1__VersionSpan Span;
typedef Longhaul__Experience__V1__PolicyVersion Version;

enum { SEND_TIMEOUT_MS = 60000 }; /* the intake's window stays full for so long: it is gone */

struct spans {
    Span *spans;
    Version *versions;
    Span **list;
    size_t n;
};

static void free_spans(struct spans *s)
{
    free(s->spans);
    free(s->versions);
    free(s->list);
}

/* The spans that reach into the tokens from `first` on. */
static int make_spans(const struct transcript *t, size_t first, struct spans *out,
                      struct lh_error *err)
{
    size_t from = 0;

    while (from + 1 < t->n_spans && t->spans[from + 1].first <= first)
        from++;
    size_t n = t->n_spans - from;
    *out = (struct spans){calloc(n + 1, sizeof(Span)), calloc(n + 1, sizeof(Version)),
                          calloc(n + 1, sizeof(Span *)), n};
    if (!out->spans || !out->versions || !out->list)
        return lh_fail_errno(err, ENOMEM, "version spans");
    for (size_t i = 0; i < n; i++) {
        struct version_span *s = &t->spans[from + i];
        longhaul__experience__v1__policy_version__init(&out->versions[i]);
        longhaul__experience__v1__version_span__init(&out->spans[i]);
        out->versions[i].step = s->version.step;
        out->versions[i].id = (ProtobufCBinaryData){sizeof s->version.id, s->version.id};
        out->spans[i].first = s->first;
        out->spans[i].version = &out->versions[i];
        out->list[i] = &out->spans[i];
    }
    return 0;
}

static int send_segment(struct trajectory *t, struct spans *spans, const char *snapshot, bool last,
                        uint64_t *seq, struct lh_error *err)
{
    Longhaul__Experience__V1__Segment s = LONGHAUL__EXPERIENCE__V1__SEGMENT__INIT;
    Envelope e = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;
    const struct transcript *tr = &t->transcript;
    size_t first = t->committed, n = tr->n - first;
    struct channel_frame frames[] = {
        {tr->tokens + first, n * sizeof *tr->tokens},
        {tr->logprobs + first, n * sizeof *tr->logprobs},
        {tr->mask + first, n * sizeof *tr->mask},
    };

    s.trajectory = t->assign->trajectory;
    s.attempt = t->assign->attempt;
    s.turn = t->turn;
    s.first_token = (uint32_t)first;
    s.tokens = (uint32_t)n;
    s.snapshot = (char *)snapshot;
    s.versions = spans->list;
    s.n_versions = spans->n;
    s.last = last;
    s.temperature = t->assign->temperature;
    s.agent_ms = (uint64_t)(lh_now_ms() - t->started_ms);
    e.body_case = LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_SEGMENT;
    e.segment = &s;
    int r = channel_worker_send(t->channel, &e, frames, LH_ARRAY_SIZE(frames), true,
                                SEND_TIMEOUT_MS, err);
    if (r == 0)
        *seq = e.seq;
    return r;
}

int report_segment(struct trajectory *t, const char *snapshot, bool last, uint64_t *seq,
                   struct lh_error *err)
{
    struct spans spans = {0};
    int r = make_spans(&t->transcript, t->committed, &spans, err);

    if (r == 0)
        r = send_segment(t, &spans, snapshot, last, seq, err);
    free_spans(&spans);
    if (r < 0)
        return lh_wrap(err, "segment %u", t->turn);
    t->committed = t->transcript.n;
    t->turn++;
    return 0;
}

int report_done(struct trajectory *t, Longhaul__Task__V1__Verdict *verdict,
                Longhaul__Experience__V1__FinishReason finish, struct lh_error *err)
{
    Longhaul__Experience__V1__Done d = LONGHAUL__EXPERIENCE__V1__DONE__INIT;
    Envelope e = LONGHAUL__EXPERIENCE__V1__ENVELOPE__INIT;

    d.trajectory = t->assign->trajectory;
    d.attempt = t->assign->attempt;
    d.verdict = verdict;
    d.finish = finish;
    d.turns = t->turn;
    d.tokens = (uint32_t)t->transcript.n;
    d.sampled_tokens = (uint32_t)t->transcript.sampled;
    d.carried = t->transcript.carried;
    d.wall_ms = (uint32_t)(lh_now_ms() - t->started_ms);
    e.body_case = LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_DONE;
    e.done = &d;
    return channel_worker_send(t->channel, &e, NULL, 0, true, SEND_TIMEOUT_MS, err);
}

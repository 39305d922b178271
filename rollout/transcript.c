#include "rollout/transcript.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/policy.h"

void transcript_finish(struct transcript *t)
{
    free(t->tokens);
    free(t->logprobs);
    free(t->mask);
    free(t->spans);
    *t = (struct transcript){0};
}

static int grow(void *array, size_t n, size_t size)
{
    void *bigger = reallocarray(*(void **)array, n, size);

    if (!bigger)
        return -1;
    *(void **)array = bigger;
    return 0;
}

static int reserve(struct transcript *t, size_t more, struct lh_error *err)
{
    size_t want = t->capacity ? t->capacity : 256;

    if (t->n + more <= t->capacity)
        return 0;
    while (want < t->n + more)
        want *= 2;
    if (grow(&t->tokens, want, sizeof *t->tokens) ||
        grow(&t->logprobs, want, sizeof *t->logprobs) || grow(&t->mask, want, sizeof *t->mask))
        return lh_fail_errno(err, ENOMEM, "transcript of %zu tokens", want);
    t->capacity = want;
    return 0;
}

int transcript_add(struct transcript *t, const int32_t *tokens, size_t n, struct lh_error *err)
{
    int r = reserve(t, n, err);

    if (r < 0)
        return r;
    for (size_t i = 0; i < n; i++) {
        t->tokens[t->n] = tokens[i];
        t->logprobs[t->n] = 0;
        t->mask[t->n++] = 0;
    }
    return 0;
}

int transcript_add_text(struct transcript *t, int32_t role, const char *text, size_t len,
                        struct lh_error *err)
{
    int r = reserve(t, len + 1, err);

    if (r < 0)
        return r;
    t->tokens[t->n] = role;
    size_t n = 1 + policy_encode(text, len, t->tokens + t->n + 1);
    memset(t->logprobs + t->n, 0, n * sizeof *t->logprobs);
    memset(t->mask + t->n, 0, n);
    t->n += n;
    return 0;
}

int transcript_span(struct transcript *t, const struct version_span *span, struct lh_error *err)
{
    if (t->n_spans &&
        !memcmp(t->spans[t->n_spans - 1].version.id, span->version.id, sizeof span->version.id) &&
        t->spans[t->n_spans - 1].version.step == span->version.step)
        return 0;
    if (grow(&t->spans, t->n_spans + 1, sizeof *t->spans))
        return lh_fail_errno(err, ENOMEM, "version spans");
    t->spans[t->n_spans++] = *span;
    return 0;
}

int transcript_sampled(struct transcript *t, int32_t token, float logprob,
                       const struct policy_version *version, struct lh_error *err)
{
    int r = reserve(t, 1, err);

    if (r == 0 && version)
        r = transcript_span(t, &(struct version_span){(uint32_t)t->n, *version}, err);
    if (r < 0)
        return r;
    t->tokens[t->n] = token;
    t->logprobs[t->n] = logprob;
    t->mask[t->n++] = 1;
    t->sampled++;
    return 0;
}

int transcript_restore(struct transcript *t, const int32_t *tokens, const float *logprobs,
                       const uint8_t *mask, size_t n, struct lh_error *err)
{
    int r = reserve(t, n, err);

    if (r < 0)
        return r;
    memcpy(t->tokens + t->n, tokens, n * sizeof *tokens);
    memcpy(t->logprobs + t->n, logprobs, n * sizeof *logprobs);
    memcpy(t->mask + t->n, mask, n);
    for (size_t i = 0; i < n; i++)
        t->sampled += mask[i];
    t->n += n;
    return 0;
}

#include <math.h>

#include "kvstore/throttle.h"

static const double RATE_SECONDS = 1; /* of busy time that weigh as much as all before */
static const double FADE = 0.98;      /* of a pass, by every later one */
static const double SPEED_WEIGHT = 0.1;
static const double TELLING = 0.1; /* 1 - correlation^2 of tokens and contexts */
static const double DECODE_WEIGHT = 0.1;

void kv_rate_add(struct kv_rate *r, double amount, double seconds)
{
    if (amount <= 0 || seconds <= 0)
        return;
    /* In the reciprocal: seconds add up where rates do not. */
    double weight = r->per_s > 0 ? 1 - exp(-seconds / RATE_SECONDS) : 1;
    double before = r->per_s > 0 ? 1 / r->per_s : 0;
    r->per_s = 1 / (before + weight * (seconds / amount - before));
}

void kv_compute_init(struct kv_compute *c, unsigned pass_tokens)
{
    *c = (struct kv_compute){.pass_tokens = pass_tokens};
}

/* Only when the passes tell the two apart, and only a sensible answer. */
static void fit_shape(struct kv_compute *c)
{
    double det = c->nn * c->cc - c->nc * c->nc;

    if (det <= TELLING * c->nn * c->cc)
        return;
    double a = (c->ns * c->cc - c->cs * c->nc) / det;
    double s = (c->cs * c->nn - c->ns * c->nc) / det;
    if (a <= 0 || s < 0)
        return;
    c->shape_a = a;
    c->shape_c = s;
}

static void add_prompt(struct kv_compute *c, double tokens, double contexts, double seconds)
{
    if (!c->slowness) {
        c->slowness = 1;
        c->shape_a = seconds / tokens;
    }
    double expected = c->shape_a * tokens + c->shape_c * contexts;
    c->slowness += SPEED_WEIGHT * (seconds / expected - c->slowness);
    seconds /= c->slowness;
    c->nn = FADE * c->nn + tokens * tokens;
    c->nc = FADE * c->nc + tokens * contexts;
    c->cc = FADE * c->cc + contexts * contexts;
    c->ns = FADE * c->ns + tokens * seconds;
    c->cs = FADE * c->cs + contexts * seconds;
    fit_shape(c);
    c->a_s = c->slowness * c->shape_a;
    c->c_s = c->slowness * c->shape_c;
}

void kv_compute_pass(struct kv_compute *c, unsigned decoding, double tokens, double contexts,
                     double seconds)
{
    if (tokens <= 0) {
        if (decoding)
            c->decode_s += (c->decode_s > 0 ? DECODE_WEIGHT : 1) * (seconds - c->decode_s);
        return;
    }
    double own = decoding ? seconds - c->decode_s : seconds;
    if (own <= 0)
        return;
    add_prompt(c, tokens, contexts, own);
}

bool kv_compute_known(const struct kv_compute *c)
{
    return c->a_s > 0;
}

double kv_compute_seconds(const struct kv_compute *c, double from, double to)
{
    double n = to - from;

    if (n <= 0)
        return 0;
    return c->a_s * n + c->c_s * n * (from + n / 2) + n / c->pass_tokens * c->decode_s;
}

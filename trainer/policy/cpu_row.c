/* Ops that work on a row at a time: norms, gates, activations, and their gradients. */
#include "trainer/policy.h"
#include "trainer/policy/cpu.h"

void OP(cpu_clear)(void *to, size_t bytes)
{
    memset(to, 0, bytes);
}

void OP(cpu_copy_columns)(int m, int n, const real *x, int ldx, real *y, int ldy)
{
    for (int t = 0; t < m; t++)
        memcpy(y + (ptrdiff_t)t * ldy, x + (ptrdiff_t)t * ldx, (size_t)n * sizeof *y);
}

void OP(cpu_clear_columns)(int m, int n, real *y, int ldy)
{
    for (int t = 0; t < m; t++)
        memset(y + (ptrdiff_t)t * ldy, 0, (size_t)n * sizeof *y);
}

void OP(cpu_pick)(int m, int n, const int32_t *list, const real *x, real *y)
{
    for (int t = 0; t < m; t++)
        memcpy(y + (ptrdiff_t)t * n, x + (ptrdiff_t)list[t] * n, (size_t)n * sizeof *y);
}

void OP(cpu_back_pick)(int m, int n, const int32_t *list, const real *dy, wide *dx)
{
    for (int t = 0; t < m; t++)
        for (int i = 0; i < n; i++)
            dx[(ptrdiff_t)list[t] * n + i] += dy[(ptrdiff_t)t * n + i];
}

static real norm_scale(const real *x, int n, real eps)
{
    return 1 / RM(sqrt)(rdot(x, x, n) / (real)n + eps);
}

void OP(cpu_rmsnorm)(int m, int n, real eps, const real *w, const real *x, int ldx, real *y,
                     int ldy)
{
    for (int t = 0; t < m; t++, x += ldx, y += ldy) {
        real r = norm_scale(x, n, eps);

        for (int i = 0; i < n; i++)
            y[i] = x[i] * r * w[i];
    }
}

/* y = x r w, r = (mean x^2 + eps)^-1/2:  dx = r (w dy - x r^2 mean(x w dy)). */
void OP(cpu_back_rmsnorm)(int m, int n, real eps, const real *w, const real *x, int ldx,
                          const real *dy, int ldy, real *dx, int lddx, real *dw)
{
    for (int t = 0; t < m; t++, x += ldx, dy += ldy, dx += lddx) {
        real r = norm_scale(x, n, eps), s = rdot3(x, w, dy, n) * r * r / (real)n;

        for (int i = 0; i < n; i++) {
            dx[i] += r * (w[i] * dy[i] - x[i] * s);
            dw[i] += dy[i] * x[i] * r;
        }
    }
}

void OP(cpu_add)(size_t n, const real *a, const real *b, real *y)
{
    for (size_t i = 0; i < n; i++)
        y[i] = a[i] + b[i];
}

void OP(cpu_silu_mul)(int m, int f, const real *gu, real *h)
{
    for (int t = 0; t < m; t++, gu += 2 * f, h += f)
        for (int i = 0; i < f; i++)
            h[i] = gu[i] * rsigmoid(gu[i]) * gu[f + i];
}

void OP(cpu_back_silu_mul)(int m, int f, const real *gu, const real *dh, real *dgu)
{
    for (int t = 0; t < m; t++, gu += 2 * f, dgu += 2 * f, dh += f)
        for (int i = 0; i < f; i++) {
            real s = rsigmoid(gu[i]);

            dgu[f + i] = dh[i] * gu[i] * s;
            dgu[i] = dh[i] * gu[f + i] * s * (1 + gu[i] * (1 - s));
        }
}

void OP(cpu_gated_norm)(const struct kda_shape *s, int m, real eps, const real *w, const real *o,
                        const real *gate, real *y)
{
    int d = s->dim;

    for (int t = 0; t < m * s->heads; t++, o += d, gate += d, y += d) {
        real r = norm_scale(o, d, eps);

        for (int i = 0; i < d; i++)
            y[i] = o[i] * r * w[i] * rsigmoid(gate[i]);
    }
}

void OP(cpu_back_gated_norm)(const struct kda_shape *s, int m, real eps, const real *w,
                             const real *o, const real *gate, const real *dy, real *do_,
                             real *dgate, real *dw)
{
    int d = s->dim;

    for (int t = 0; t < m * s->heads; t++, o += d, gate += d, dy += d, do_ += d, dgate += d) {
        real r = norm_scale(o, d, eps), dot;

        for (int i = 0; i < d; i++) { /* do_ holds the gradient of the norm's output for a while */
            real sig = rsigmoid(gate[i]);

            dgate[i] = dy[i] * o[i] * r * w[i] * sig * (1 - sig);
            do_[i] = dy[i] * sig;
            dw[i] += do_[i] * o[i] * r;
        }
        dot = rdot3(o, w, do_, d) * r * r / (real)d;
        for (int i = 0; i < d; i++)
            do_[i] = r * (w[i] * do_[i] - o[i] * dot);
    }
}

static void back_logprob_row(int n, const real *logits, real temperature, int32_t token, real d,
                             real *dlogits)
{
    real top = logits[0], sum;

    for (int i = 1; i < n; i++)
        top = logits[i] > top ? logits[i] : top;
    for (int i = 0; i < n; i++)
        dlogits[i] = rexp((logits[i] - top) / temperature);
    sum = rsum(dlogits, n);
    d /= temperature;
    for (int i = 0; i < n; i++)
        dlogits[i] *= -d / sum;
    dlogits[token] += d;
}

void OP(cpu_back_logprob)(int m, int n, const wide *logits, wide temperature, const int32_t *tokens,
                          const wide *d, real *dlogits)
{
    for (int t = 0; t < m; t++)
        back_logprob_row(n, logits + (ptrdiff_t)t * n, temperature, tokens[t], d[t],
                         dlogits + (ptrdiff_t)t * n);
}

#ifdef POLICY_F64
static real logprob(const real *logits, int n, real temperature, int32_t token)
{
    real top = logits[0], sum = 0;

    for (int i = 1; i < n; i++)
        top = logits[i] > top ? logits[i] : top;
    for (int i = 0; i < n; i++)
        sum += rexp((logits[i] - top) / temperature);
    return (logits[token] - top) / temperature - log(sum);
}
#else
#define logprob policy_logprob
#endif

void OP(cpu_logprobs)(int m, int n, const wide *logits, wide temperature, const int32_t *tokens,
                      wide *y)
{
    for (int t = 0; t < m; t++)
        y[t] = logprob(logits + (ptrdiff_t)t * n, n, temperature, tokens[t]);
}

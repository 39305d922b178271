/* Kimi Delta Attention, one token after the other (Kimi Linear, arXiv 2510.26692, eq. 1):
 *
 *     S <- diag(alpha) S        alpha = e^g per key channel
 *     d  = beta (v - S' k)      what the state should say about k, minus what it says
 *     S <- S + k d'
 *     o  = S' q
 *
 * The chunked matrix form is faster on long prompts, but its bits depend on where a chunk begins;
 * rollout cuts where it likes, so every pass uses this one.  The two sweeps over S a token keep a
 * column block in registers, and S (4 KiB at dim 32) stays in the L1 cache.
 *
 * Backward walks the tokens in reverse and needs S after the decay at each.  Forward keeps S every
 * KDA_SPAN tokens; backward recomputes the span, so memory is 1/16 of one state a token. */
#include "trainer/policy/cpu.h"

#define INLINE static inline __attribute__((always_inline))

enum { WIDE = 4 }; /* vectors of a column block */

/* y[c] = sum_j w[j][c] x[t - kernel + 1 + j][c]; taps come transposed so that channels are lanes.
 */
static void conv_row(int c, int kernel, const real *w, const real *const *in, real *y)
{
    for (int i = 0; i < c; i++)
        y[i] = w[i] * in[0][i];
    for (int j = 1; j < kernel; j++)
        for (int i = 0; i < c; i++)
            y[i] = rfma(w[(size_t)j * (size_t)c + (size_t)i], in[j][i], y[i]);
}

static void conv_sequence(int m, int c, int kernel, const real *w, const real *x, int ldx,
                          real *hist, real *y)
{
    const real *in[16];
    int past = kernel - 1;

    for (int t = 0; t < m; t++, y += c) {
        for (int j = 0; j < kernel; j++) {
            int at = t - past + j;

            in[j] = at < 0 ? hist + (ptrdiff_t)(at + past) * c : x + (ptrdiff_t)at * ldx;
        }
        conv_row(c, kernel, w, in, y);
    }
    for (int j = 0; j < past; j++) { /* ascending: a row is read before it is overwritten */
        int at = m - past + j;

        memmove(hist + (ptrdiff_t)j * c,
                at < 0 ? hist + (ptrdiff_t)(at + past) * c : x + (ptrdiff_t)at * ldx,
                (size_t)c * sizeof *hist);
    }
}

void OP(cpu_conv)(const struct R(batch) * b, int c, int kernel, const real *taps, const real *x,
                  int ldx, size_t at, real *y)
{
    for (int i = 0; i < b->n_seqs; i++) {
        const struct R(seq) *s = &b->seqs[i];

        conv_sequence(s->n, c, kernel, taps, x + (ptrdiff_t)s->row * ldx, ldx, s->state + at,
                      y + (ptrdiff_t)s->row * c);
    }
}

void OP(cpu_conv_taps)(int c, int kernel, const real *w, real *taps)
{
    for (int i = 0; i < c; i++)
        for (int j = 0; j < kernel; j++)
            taps[(ptrdiff_t)j * c + i] = w[(ptrdiff_t)i * kernel + j];
}

void OP(cpu_back_conv_taps)(int c, int kernel, const wide *dtaps, wide *dw)
{
    for (int i = 0; i < c; i++)
        for (int j = 0; j < kernel; j++)
            dw[(ptrdiff_t)i * kernel + j] += dtaps[(ptrdiff_t)j * c + i];
}

void OP(cpu_back_conv)(int m, int c, int kernel, const real *w, const real *x, int ldx,
                       const real *dy, real *dx, int lddx, real *dw)
{
    for (int t = 0; t < m; t++) {
        real *dxt = dx + (ptrdiff_t)t * lddx;

        memset(dxt, 0, (size_t)c * sizeof *dxt);
        for (int j = 0; j < kernel && t + j < m; j++) { /* x[t] met tap kernel-1-j of y[t+j] */
            const real *d = dy + (ptrdiff_t)(t + j) * c, *wj = w + (ptrdiff_t)(kernel - 1 - j) * c;
            real *dwj = dw + (ptrdiff_t)(kernel - 1 - j) * c;
            const real *xt = x + (ptrdiff_t)t * ldx;

            for (int i = 0; i < c; i++) {
                dxt[i] = rfma(wj[i], d[i], dxt[i]);
                dwj[i] = rfma(xt[i], d[i], dwj[i]);
            }
        }
    }
}

/* log(1 + e^x).  Float: log(1 + e) = 2 artanh(e / (2 + e)) by its series, at most 1/3 ^ 15 behind,
 * so that the loop over channels vectorises. */
static inline real softplus(real x)
{
#ifdef POLICY_F64
    return (x > 0 ? x : 0) + log1p(exp(-fabs(x)));
#else
    float e = rexp(x > 0 ? -x : x), s = e / (2 + e), s2 = s * s, p;

    p = rfma(s2, 2.0f / 13, 2.0f / 11);
    p = rfma(s2, p, 2.0f / 9);
    p = rfma(s2, p, 2.0f / 7);
    p = rfma(s2, p, 2.0f / 5);
    p = rfma(s2, p, 2.0f / 3);
    p = rfma(s2, p, 2.0f);
    return rfma(s, p, x > 0 ? x : 0);
#endif
}

static real l2_scale(const real *x, int n)
{
    return 1 / RM(sqrt)(rdot(x, x, n) + (real)1e-6);
}

void OP(cpu_kda_inputs)(const struct kda_shape *s, int m, const real *a_log, const real *dt_bias,
                        const real *b, int ldb, const struct R(kda_rows) * r)
{
    int d = s->dim, width = s->heads * d;
    real scale = 1 / RM(sqrt)((real)d);

    for (int t = 0; t < m; t++) {
        const real *conv = r->conv + (ptrdiff_t)t * 3 * width;
        real *qkv = r->qkv + (ptrdiff_t)t * 3 * width;
        const real *z = r->z + (ptrdiff_t)t * width;
        real *g = r->g + (ptrdiff_t)t * width;
        real *alpha = r->alpha + (ptrdiff_t)t * width;

        for (int i = 0; i < 3 * width; i++)
            qkv[i] = conv[i] * rsigmoid(conv[i]);
        for (int h = 0; h < 2 * s->heads; h++) { /* q's heads, then k's */
            real *x = qkv + h * d, n = l2_scale(x, d) * (h < s->heads ? scale : 1);

            for (int i = 0; i < d; i++)
                x[i] *= n;
        }
        for (int i = 0; i < width; i++) {
            g[i] = softplus(z[i] + dt_bias[i]);
        }
        for (int h = 0; h < s->heads; h++) {
            real a = RM(exp)(a_log[h]);

            for (int i = h * d; i < (h + 1) * d; i++)
                g[i] *= -a;
            r->beta[(ptrdiff_t)t * s->heads + h] = rsigmoid(b[(ptrdiff_t)t * ldb + h]);
        }
        for (int i = 0; i < width; i++)
            alpha[i] = rexp(g[i]);
    }
}

/* Gradient through y = scale x / |x|, x = silu(c): dc. */
static void back_l2_silu(int d, real scale, const real *c, const real *y, const real *dy, real *dc)
{
    real x[1024], dot = rdot(y, dy, d) / (scale * scale), r;

    for (int i = 0; i < d; i++)
        x[i] = c[i] * rsigmoid(c[i]);
    r = l2_scale(x, d) * scale;
    for (int i = 0; i < d; i++) {
        real s = rsigmoid(c[i]);

        dc[i] = r * (dy[i] - y[i] * dot) * s * (1 + c[i] * (1 - s));
    }
}

static void back_silu(int n, const real *c, const real *dy, real *dc)
{
    for (int i = 0; i < n; i++) {
        real s = rsigmoid(c[i]);

        dc[i] = dy[i] * s * (1 + c[i] * (1 - s));
    }
}

void OP(cpu_back_kda_inputs)(const struct kda_shape *s, int m, const real *a_log,
                             const real *dt_bias, const struct R(kda_rows) * r,
                             const struct R(kda_rows) * grad, real *db, int lddb, real *da_log,
                             real *ddt_bias)
{
    int d = s->dim, width = s->heads * d;
    real scale = 1 / RM(sqrt)((real)d);

    for (int t = 0; t < m; t++) {
        ptrdiff_t row = (ptrdiff_t)t * width;

        for (int h = 0; h < 2 * s->heads; h++) {
            ptrdiff_t at = 3 * row + h * d;

            back_l2_silu(d, h < s->heads ? scale : 1, r->conv + at, r->qkv + at, grad->qkv + at,
                         grad->conv + at);
        }
        back_silu(width, r->conv + 3 * row + 2 * width, grad->qkv + 3 * row + 2 * width,
                  grad->conv + 3 * row + 2 * width);
        for (int h = 0; h < s->heads; h++) {
            real a = RM(exp)(a_log[h]), beta = r->beta[(ptrdiff_t)t * s->heads + h];

            da_log[h] += rdot(grad->g + row + h * d, r->g + row + h * d, d);
            for (int i = h * d; i < (h + 1) * d; i++)
                grad->z[row + i] = -a * grad->g[row + i] * rsigmoid(r->z[row + i] + dt_bias[i]);
            db[(ptrdiff_t)t * lddb + h] =
                grad->beta[(ptrdiff_t)t * s->heads + h] * beta * (1 - beta);
        }
        for (int i = 0; i < width; i++)
            ddt_bias[i] += grad->z[row + i];
    }
}

/* One token of one head, columns c.. of S and of v and o; n vectors of them. */
INLINE void scan_columns(int n, int dim, const real *q, const real *k, const real *alpha, real beta,
                         const real *v, real *S, real *o)
{
    vec u[WIDE] = {0}, d[WIDE], out[WIDE] = {0};

    for (int i = 0; i < dim; i++) {
        real *row = S + (ptrdiff_t)i * dim;
        vec a = vec_all(alpha[i]), ki = vec_all(k[i]);

        for (int j = 0; j < n; j++) {
            vec x = a * vec_load(row + j * LANES);

            *(vec *)(row + j * LANES) = x;
            u[j] = vec_fma(ki, x, u[j]);
        }
    }
    for (int j = 0; j < n; j++)
        d[j] = vec_all(beta) * (vec_load(v + j * LANES) - u[j]);
    for (int i = 0; i < dim; i++) {
        real *row = S + (ptrdiff_t)i * dim;
        vec qi = vec_all(q[i]), ki = vec_all(k[i]);

        for (int j = 0; j < n; j++) {
            vec x = vec_fma(ki, d[j], vec_load(row + j * LANES));

            *(vec *)(row + j * LANES) = x;
            out[j] = vec_fma(qi, x, out[j]);
        }
    }
    for (int j = 0; j < n; j++)
        *(vec *)(o + j * LANES) = out[j];
}

static void scan_token(int dim, const real *q, const real *k, const real *alpha, real beta,
                       const real *v, real *S, real *o)
{
    int c = 0;

    for (; c + WIDE * LANES <= dim; c += WIDE * LANES)
        scan_columns(WIDE, dim, q, k, alpha, beta, v + c, S + c, o + c);
    for (; c < dim; c += LANES)
        scan_columns(1, dim, q, k, alpha, beta, v + c, S + c, o + c);
}

static void scan_sequence(const struct kda_shape *s, int from, int m, const struct R(kda_rows) * r,
                          real *state, real *snaps)
{
    int d = s->dim, width = s->heads * d;
    size_t states = (size_t)width * (size_t)d;

    for (int t = from; t < from + m; t++) {
        const real *qkv = r->qkv + (ptrdiff_t)t * 3 * width;
        ptrdiff_t row = (ptrdiff_t)t * width;

        if (snaps && (t - from) % KDA_SPAN == 0)
            memcpy(snaps + (size_t)((t - from) / KDA_SPAN) * states, state, states * sizeof *state);
        for (int h = 0; h < s->heads; h++)
            scan_token(d, qkv + h * d, qkv + width + h * d, r->alpha + row + h * d,
                       r->beta[(ptrdiff_t)t * s->heads + h], qkv + 2 * width + h * d,
                       state + (ptrdiff_t)h * d * d, r->o + row + h * d);
    }
}

void OP(cpu_kda_scan)(const struct kda_shape *s, const struct R(batch) * b,
                      const struct R(kda_rows) * r, size_t at, wide *snaps)
{
    for (int i = 0; i < b->n_seqs; i++)
        scan_sequence(s, b->seqs[i].row, b->seqs[i].n, r, b->seqs[i].state + at, snaps);
}

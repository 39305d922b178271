/* Gradient of the KDA recurrence (cpu_kda.c), for one head:
 *
 *     P = diag(alpha) S_before     d = beta (v - P' k)     S = P + k d'     o = S' q
 *
 * With D the gradient of S coming from the tokens after, in reverse order:
 *
 *     D  += q do'            dq = S do = P do + k (d.do)
 *     dd  = D' k             dk = D d
 *     dbeta = dd.(v - P' k)  dv = beta dd      du = -beta dd
 *     D  += k du'            dk += P du        (D is now the gradient of P)
 *     dg_i = sum_j D_ij P_ij                   D  <- diag(alpha) D  */
#include "trainer/policy/cpu.h"

/* What one head of one token needs. */
struct token {
    const real *q, *k, *v, *alpha, *dout;
    real beta;
    real *dq, *dk, *dv, *dg, *dbeta;
};

static struct token token_at(const struct kda_shape *s, const struct R(kda_rows) * r,
                             const struct R(kda_rows) * grad, int t, int h)
{
    int d = s->dim, width = s->heads * d;
    ptrdiff_t row = (ptrdiff_t)t * width + h * d, q = (ptrdiff_t)t * 3 * width + h * d;
    ptrdiff_t b = (ptrdiff_t)t * s->heads + h;

    return (struct token){r->qkv + q,     r->qkv + q + width,    r->qkv + q + 2 * width,
                          r->alpha + row, grad->o + row,         r->beta[b],
                          grad->qkv + q,  grad->qkv + q + width, grad->qkv + q + 2 * width,
                          grad->g + row,  grad->beta + b};
}

/* y[j] += a x[j]: the row operation of everything here. */
static inline void axpy(int n, real a, const real *x, real *y)
{
    for (int j = 0; j < n; j++)
        y[j] = rfma(a, x[j], y[j]);
}

/* P = diag(alpha) S and e = v - P' k. */
static void decay(int n, const struct token *t, const real *S, real *P, real *e)
{
    memcpy(e, t->v, (size_t)n * sizeof *e);
    for (int i = 0; i < n; i++) {
        real *row = P + (ptrdiff_t)i * n;

        for (int j = 0; j < n; j++)
            row[j] = t->alpha[i] * S[(ptrdiff_t)i * n + j];
        axpy(n, -t->k[i], row, e);
    }
}

/* The states after decay of tokens first..first+count; S is consumed. */
static void recompute(const struct kda_shape *s, const struct R(kda_rows) * r,
                      const struct R(kda_rows) * grad, int first, int count, int h, real *S,
                      real *P, real *e)
{
    int n = s->dim;
    size_t size = (size_t)n * (size_t)n;

    for (int j = 0; j < count; j++, P += size) {
        struct token t = token_at(s, r, grad, first + j, h);

        decay(n, &t, S, P, e);
        for (int i = 0; i < n; i++) {
            real *row = S + (ptrdiff_t)i * n;

            memcpy(row, P + (ptrdiff_t)i * n, (size_t)n * sizeof *row);
            axpy(n, t.beta * t.k[i], e, row);
        }
    }
}

/* work: e, dd, du of dim each. */
static void back_token(int n, const struct token *t, const real *P, real *D, real *work)
{
    real *e = work, *dd = work + n, *du = work + 2 * n, seen;

    memcpy(e, t->v, (size_t)n * sizeof *e);
    memset(dd, 0, (size_t)n * sizeof *dd);
    for (int i = 0; i < n; i++) {
        axpy(n, -t->k[i], P + (ptrdiff_t)i * n, e);
        axpy(n, t->q[i], t->dout, D + (ptrdiff_t)i * n);
        axpy(n, t->k[i], D + (ptrdiff_t)i * n, dd);
    }
    *t->dbeta = rdot(dd, e, n);
    for (int j = 0; j < n; j++) {
        t->dv[j] = t->beta * dd[j];
        du[j] = -t->dv[j];
    }
    seen = t->beta * rdot(e, t->dout, n); /* d.do */
    for (int i = 0; i < n; i++) {
        const real *Pi = P + (ptrdiff_t)i * n;
        real *Di = D + (ptrdiff_t)i * n;

        t->dq[i] = rdot(Pi, t->dout, n) + t->k[i] * seen;
        t->dk[i] = t->beta * rdot(Di, e, n) + rdot(Pi, du, n);
        axpy(n, t->k[i], du, Di);
        t->dg[i] = rdot(Di, Pi, n);
        for (int j = 0; j < n; j++)
            Di[j] *= t->alpha[i];
    }
}

void OP(cpu_back_kda_scan)(const struct kda_shape *s, int m, const struct R(kda_rows) * r,
                           const real *snaps, const struct R(kda_rows) * grad, real *work)
{
    int n = s->dim, spans = (m + KDA_SPAN - 1) / KDA_SPAN;
    size_t size = (size_t)n * (size_t)n;
    real *P = work, *S = P + KDA_SPAN * size, *D = S + size, *vectors = D + size;

    for (int h = 0; h < s->heads; h++) {
        memset(D, 0, size * sizeof *D);
        for (int span = spans - 1; span >= 0; span--) {
            int first = span * KDA_SPAN, count = m - first < KDA_SPAN ? m - first : KDA_SPAN;

            memcpy(S, snaps + ((size_t)span * (size_t)s->heads + (size_t)h) * size,
                   size * sizeof *S);
            recompute(s, r, grad, first, count, h, S, P, vectors);
            for (int j = count - 1; j >= 0; j--) {
                struct token t = token_at(s, r, grad, first + j, h);

                back_token(n, &t, P + (size_t)j * size, D, vectors);
            }
        }
    }
}

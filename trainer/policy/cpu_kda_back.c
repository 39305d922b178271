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

#define INLINE static inline __attribute__((always_inline))

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

enum { WIDE = 4 }; /* vectors of a column block, in registers while a loop runs down the rows */

/* P = diag(alpha) S and e = v - P' k, columns of one block. */
INLINE void decay_columns(int n, int width, const struct token *t, int c, const real *S, real *P,
                          real *e)
{
    vec acc[WIDE];

    for (int j = 0; j < width; j++)
        acc[j] = vec_load(t->v + c + j * LANES);
    for (int i = 0; i < n; i++) {
        vec a = vec_all(t->alpha[i]), k = vec_all(-t->k[i]);
        ptrdiff_t at = (ptrdiff_t)i * n + c;

        for (int j = 0; j < width; j++, at += LANES) {
            vec x = a * vec_load(S + at);

            *(vec *)(P + at) = x;
            acc[j] = vec_fma(k, x, acc[j]);
        }
    }
    for (int j = 0; j < width; j++)
        *(vec *)(e + c + j * LANES) = acc[j];
}

/* S = P + beta k e'. */
INLINE void write_state(int n, const struct token *t, const real *P, const real *e, real *S)
{
    for (int i = 0; i < n; i++) {
        vec a = vec_all(t->beta * t->k[i]);

        for (int j = 0; j < n; j += LANES)
            *(vec *)(S + (ptrdiff_t)i * n + j) =
                vec_fma(a, vec_load(e + j), vec_load(P + (ptrdiff_t)i * n + j));
    }
}

/* D += q do' and dd = D' k, columns of one block. */
INLINE void receive_columns(int n, int width, const struct token *t, int c, real *D, real *dd)
{
    vec acc[WIDE] = {0}, d[WIDE];

    for (int j = 0; j < width; j++)
        d[j] = vec_load(t->dout + c + j * LANES);
    for (int i = 0; i < n; i++) {
        vec q = vec_all(t->q[i]), k = vec_all(t->k[i]);
        real *row = D + (ptrdiff_t)i * n + c;

        for (int j = 0; j < width; j++) {
            vec x = vec_fma(q, d[j], vec_load(row + j * LANES));

            *(vec *)(row + j * LANES) = x;
            acc[j] = vec_fma(k, x, acc[j]);
        }
    }
    for (int j = 0; j < width; j++)
        *(vec *)(dd + c + j * LANES) = acc[j];
}

/* Row i of everything after dd is known; leaves D the gradient of the state before. */
INLINE void finish_row(int n, int i, const struct token *t, const real *P, real *D, const real *e,
                       real seen)
{
    vec p_do = {0}, d_e = {0}, p_dv = {0}, d_p = {0}, k = vec_all(-t->k[i]);
    vec alpha = vec_all(t->alpha[i]);
    vec4 sums;

    for (int j = 0; j < n; j += LANES) {
        vec p = vec_load(P + j), d = vec_load(D + j), dv = vec_load(t->dv + j); /* du = -dv */

        p_do = vec_fma(p, vec_load(t->dout + j), p_do);
        d_e = vec_fma(d, vec_load(e + j), d_e);
        p_dv = vec_fma(p, dv, p_dv);
        d = vec_fma(k, dv, d);
        d_p = vec_fma(d, p, d_p);
        *(vec *)(D + j) = alpha * d;
    }
    sums = vec_sum4(p_do, d_e, p_dv, d_p);
    t->dq[i] = sums[0] + t->k[i] * seen;
    t->dk[i] = t->beta * sums[1] - sums[2];
    t->dg[i] = sums[3];
}

INLINE void back_token(int n, const struct token *t, const real *P, real *D, const real *e,
                       real *dd)
{
    real seen = t->beta * rdot(e, t->dout, n); /* d.do */
    int c = 0;

    for (; c + WIDE * LANES <= n; c += WIDE * LANES)
        receive_columns(n, WIDE, t, c, D, dd);
    for (; c < n; c += LANES)
        receive_columns(n, 1, t, c, D, dd);
    *t->dbeta = rdot(dd, e, n);
    for (int j = 0; j < n; j++)
        t->dv[j] = t->beta * dd[j];
    for (int i = 0; i < n; i++)
        finish_row(n, i, t, P + (ptrdiff_t)i * n, D + (ptrdiff_t)i * n, e, seen);
}

/* The state after decay, P, and e of a token; S moves on to the next. */
INLINE void redo_token(int n, const struct token *t, real *S, real *P, real *e)
{
    int c = 0;

    for (; c + WIDE * LANES <= n; c += WIDE * LANES)
        decay_columns(n, WIDE, t, c, S, P, e);
    for (; c < n; c += LANES)
        decay_columns(n, 1, t, c, S, P, e);
    write_state(n, t, P, e, S);
}

/* Tokens first.. of a span: forward again from the kept state, then backward. */
INLINE void back_span(int n, const struct kda_shape *s, const struct R(kda_rows) * r,
                      const struct R(kda_rows) * grad, int first, int count, int h,
                      const real *snap, real *D, real *work)
{
    size_t size = (size_t)n * (size_t)n;
    real *S = work, *dd = S + size, *P = dd + n, *e = P + KDA_SPAN * size;
    struct token t[KDA_SPAN];

    memcpy(S, snap, size * sizeof *S);
    for (int j = 0; j < count; j++) {
        t[j] = token_at(s, r, grad, first + j, h);
        redo_token(n, &t[j], S, P + (size_t)j * size, e + (ptrdiff_t)j * n);
    }
    for (int j = count - 1; j >= 0; j--)
        back_token(n, &t[j], P + (size_t)j * size, D, e + (ptrdiff_t)j * n, dd);
}

INLINE void back_head(int n, const struct kda_shape *s, int m, const struct R(kda_rows) * r,
                      const real *snaps, const struct R(kda_rows) * grad, int h, real *work)
{
    size_t size = (size_t)n * (size_t)n;
    real *D = work;

    memset(D, 0, size * sizeof *D);
    for (int span = (m - 1) / KDA_SPAN; span >= 0; span--) {
        int first = span * KDA_SPAN, count = m - first < KDA_SPAN ? m - first : KDA_SPAN;
        const real *snap = snaps + ((size_t)span * (size_t)s->heads + (size_t)h) * size;

        back_span(n, s, r, grad, first, count, h, snap, D, work + size);
    }
}

void OP(cpu_back_kda_scan)(const struct kda_shape *s, int m, const struct R(kda_rows) * r,
                           const real *snaps, const struct R(kda_rows) * grad, real *work)
{
    for (int h = 0; h < s->heads; h++)
        if (s->dim == 32) /* known to the compiler: half the time */
            back_head(32, s, m, r, snaps, grad, h, work);
        else
            back_head(s->dim, s, m, r, snaps, grad, h, work);
}

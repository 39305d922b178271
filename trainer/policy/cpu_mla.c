/* Multi-head latent attention over cached latents (DeepSeek-V2, arXiv 2405.04434), without
 * positions.
 *
 * Absorbed form, everywhere: the query is carried into the latent space, so a cached token is lora
 * + rope numbers for all heads, and keys and values are never expanded.  The plain form multiplies
 * less on long prompts, but rounds differently, and rollout and trainer must agree to the bit.
 *
 * The softmax runs over blocks of MLA_BLOCK keys counted from position 0, so its bits do not depend
 * on pages or chunks. */
#include "trainer/policy/cpu.h"

struct R(running) {
    real top, sum;
};

/* Scores of one head over n keys become e^(score - top); returns the factor for what came before.
 */
static real soften(struct R(running) * st, int n, real scale, real *s, int first)
{
    real top, before;

    for (int j = 0; j < n; j++)
        s[j] *= scale;
    top = first ? s[0] : st->top;
    for (int j = 0; j < n; j++)
        top = s[j] > top ? s[j] : top;
    before = first ? 0 : rexp(st->top - top);
    for (int j = 0; j < n; j++)
        s[j] = rexp(s[j] - top);
    st->sum *= before;
    for (int j = 0; j < n; j++)
        st->sum += s[j];
    st->top = top;
    return before;
}

static real *latents_at(const struct R(seq) * seq, const struct mla_layout *l, int64_t position,
                        int width)
{
    return seq->pages[position / l->page_tokens] + l->offset +
           (size_t)(position % l->page_tokens) * (size_t)width;
}

void OP(cpu_mla_absorb)(const struct mla_shape *s, int m, const real *q, int ldq, const real *kv_b,
                        real *qabs)
{
    int width = s->lora + s->rope, ld = s->heads * width;

    for (int h = 0; h < s->heads; h++) {
        const real *from = q + (ptrdiff_t)h * (s->nope + s->rope);
        const real *keys = kv_b + (ptrdiff_t)h * (s->nope + s->value) * s->lora;
        real *to = qabs + (ptrdiff_t)h * width;

        OP(cpu_linear_t)(m, s->lora, s->nope, from, ldq, keys, s->lora, to, ld, 0);
        OP(cpu_copy_columns)(m, s->rope, from + s->nope, ldq, to + s->lora, ld);
    }
}

void OP(cpu_mla_store)(const struct mla_shape *s, const struct R(batch) * b,
                       const struct mla_layout *l, wide eps, const real *w, const real *kv,
                       int ldkv)
{
    int width = s->lora + s->rope;

    for (int i = 0; i < b->n_seqs; i++)
        for (int j = 0; j < b->seqs[i].n; j++) {
            const real *from = kv + (ptrdiff_t)(b->seqs[i].row + j) * ldkv;
            real *to = latents_at(&b->seqs[i], l, b->seqs[i].start + j, width);

            OP(cpu_rmsnorm)(1, s->lora, eps, w, from, ldkv, to, width);
            memcpy(to + s->lora, from + s->lora, (size_t)s->rope * sizeof *to);
        }
}

void OP(cpu_mla_values)(const struct mla_shape *s, int m, const real *o, const real *kv_b, real *y)
{
    for (int h = 0; h < s->heads; h++) {
        ptrdiff_t skip = (ptrdiff_t)h * (s->nope + s->value) + s->nope;

        OP(cpu_linear)
        (m, s->value, s->lora, o + (ptrdiff_t)h * s->lora, s->heads * s->lora,
         kv_b + skip * s->lora, y + (ptrdiff_t)h * s->value, s->heads * s->value);
    }
}

static void attend_token(const struct mla_shape *s, const struct R(seq) * seq,
                         const struct mla_layout *l, int64_t t, const real *q, real *o, real *lse)
{
    int width = s->lora + s->rope;
    real scale = 1 / RM(sqrt)((real)(s->nope + s->rope)), scores[MAX_HEADS * MLA_BLOCK];
    struct R(running) st[MAX_HEADS];

    memset(st, 0, (size_t)s->heads * sizeof *st);
    for (int64_t from = 0; from <= t; from += MLA_BLOCK) {
        int n = t - from + 1 < MLA_BLOCK ? (int)(t - from + 1) : MLA_BLOCK;
        const real *keys = latents_at(seq, l, from, width);

        OP(cpu_linear)(s->heads, n, width, q, width, keys, scores, MLA_BLOCK);
        for (int h = 0; h < s->heads; h++) {
            real before = soften(&st[h], n, scale, scores + h * MLA_BLOCK, from == 0);

            for (int i = 0; i < s->lora; i++)
                o[h * s->lora + i] = from == 0 ? 0 : o[h * s->lora + i] * before;
        }
        OP(cpu_linear_t)(s->heads, s->lora, n, scores, MLA_BLOCK, keys, width, o, s->lora, 1);
    }
    for (int h = 0; h < s->heads; h++) {
        for (int i = 0; i < s->lora; i++)
            o[h * s->lora + i] /= st[h].sum;
        lse[h] = st[h].top + RM(log)(st[h].sum);
    }
}

void OP(cpu_mla_attend)(const struct mla_shape *s, const struct R(batch) * b,
                        const struct mla_layout *l, const real *q, real *o, wide *lse)
{
    for (int i = 0; i < b->n_seqs; i++)
        for (int j = 0; j < b->seqs[i].n; j++) {
            ptrdiff_t row = b->seqs[i].row + j;

            attend_token(s, &b->seqs[i], l, b->seqs[i].start + j,
                         q + row * s->heads * (s->lora + s->rope), o + row * s->heads * s->lora,
                         lse + row * s->heads);
        }
}

/* A tile of queries t0..t0+n of one head.  p: probabilities, then dscore in ds. */
static void back_softmax(int n, int t0, int keys, int lora, real scale, const real *o,
                         const real *do_, int ldo, const real *lse, int heads, real *p, real *ds)
{
    for (int i = 0; i < n; i++, p += keys, ds += keys) {
        int seen = t0 + i + 1;
        real delta = rdot(o + (ptrdiff_t)i * ldo, do_ + (ptrdiff_t)i * ldo, lora);

        for (int j = 0; j < seen; j++) {
            p[j] = rexp(p[j] * scale - lse[i * heads]);
            ds[j] = p[j] * (ds[j] - delta) * scale;
        }
        memset(p + seen, 0, (size_t)(keys - seen) * sizeof *p);
        memset(ds + seen, 0, (size_t)(keys - seen) * sizeof *ds);
    }
}

void OP(cpu_back_mla_attend)(const struct mla_shape *s, int m, const real *c, const real *q,
                             const real *o, const real *lse, const real *do_, real *dq, real *dc,
                             real *work)
{
    int width = s->lora + s->rope, ldq = s->heads * width, ldo = s->heads * s->lora;
    real scale = 1 / RM(sqrt)((real)(s->nope + s->rope));

    memset(dc, 0, (size_t)m * (size_t)width * sizeof *dc);
    for (int t0 = 0; t0 < m; t0 += MLA_TILE) {
        int n = m - t0 < MLA_TILE ? m - t0 : MLA_TILE, keys = t0 + n;
        real *p = work, *ds = work + (ptrdiff_t)MLA_TILE * m;

        for (int h = 0; h < s->heads; h++) {
            ptrdiff_t qa = (ptrdiff_t)t0 * ldq + h * width, oa = (ptrdiff_t)t0 * ldo + h * s->lora;

            OP(cpu_product)(n, keys, width, q + qa, ldq, c, width, p, keys);
            OP(cpu_product)(n, keys, s->lora, do_ + oa, ldo, c, width, ds, keys);
            back_softmax(n, t0, keys, s->lora, scale, o + oa, do_ + oa, ldo,
                         lse + (ptrdiff_t)t0 * s->heads + h, s->heads, p, ds);
            OP(cpu_back_input)(n, keys, width, ds, keys, c, dq + qa, ldq, 0);
            OP(cpu_back_weight)(n, keys, width, ds, keys, q + qa, ldq, dc, width);
            OP(cpu_back_weight)(n, keys, s->lora, p, keys, do_ + oa, ldo, dc, width);
        }
    }
}

size_t OP(cpu_work)(const struct kda_shape *k, const struct mla_shape *a, int m)
{
    size_t dim = (size_t)k->dim, scan = (KDA_SPAN + 2) * dim * dim + (KDA_SPAN + 1) * dim;
    size_t attend = 2 * MLA_TILE * (size_t)m;

    return scan > attend ? scan : attend;
}

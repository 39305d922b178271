/* Mixture of experts.  Router: sigmoid scores; the bias takes part in choosing only.  Rows are then
 * sorted by expert, so that an expert's are neighbours, and added up again in a token's own order
 * of choice. */
#include "trainer/policy/cpu.h"

static int taken(const int32_t *choice, int n, int e)
{
    for (int i = 0; i < n; i++)
        if (choice[i] == e)
            return 1;
    return 0;
}

/* The best expert not yet chosen; the lowest number wins a tie. */
static int32_t best(int experts, const real *bias, const real *scores, const int32_t *choice, int n)
{
    int32_t top = -1;

    for (int e = 0; e < experts; e++)
        if (!taken(choice, n, e) && (top < 0 || scores[e] + bias[e] > scores[top] + bias[top]))
            top = e;
    return top;
}

/* What the weights are: score * factor, factor = scale / sum of the chosen, or scale. */
static real factor(int top, int renormalize, real scale, const real *scores, const int32_t *choice)
{
    real sum = 0;

    if (!renormalize || top == 1)
        return scale;
    for (int i = 0; i < top; i++)
        sum += scores[choice[i]];
    return scale / (sum + (real)1e-20);
}

void OP(cpu_route)(int m, int experts, int top, int renormalize, real scale, const real *bias,
                   real *scores, int32_t *choice, real *weight)
{
    for (int t = 0; t < m; t++, scores += experts, choice += top, weight += top) {
        real f;

        for (int e = 0; e < experts; e++)
            scores[e] = rsigmoid(scores[e]);
        for (int i = 0; i < top; i++)
            choice[i] = best(experts, bias, scores, choice, i);
        f = factor(top, renormalize, scale, scores, choice);
        for (int i = 0; i < top; i++)
            weight[i] = scores[choice[i]] * f;
    }
}

/* weight_i = f s_i, f = scale / sum s:  ds_i = f (dw_i - sum_j dw_j s_j / sum s). */
void OP(cpu_back_route)(int m, int experts, int top, int renormalize, real scale,
                        const real *scores, const int32_t *choice, const real *dweight,
                        real *dlogits)
{
    for (int t = 0; t < m;
         t++, scores += experts, choice += top, dweight += top, dlogits += experts) {
        real f = factor(top, renormalize, scale, scores, choice), mean = 0;

        if (renormalize && top > 1)
            for (int i = 0; i < top; i++)
                mean += dweight[i] * scores[choice[i]] * f / scale;
        memset(dlogits, 0, (size_t)experts * sizeof *dlogits);
        for (int i = 0; i < top; i++) {
            real s = scores[choice[i]];

            dlogits[choice[i]] = f * (dweight[i] - mean) * s * (1 - s);
        }
    }
}

void OP(cpu_dispatch)(int choices, int experts, const int32_t *choice, int32_t *place,
                      int32_t *first)
{
    memset(first, 0, (size_t)(experts + 1) * sizeof *first);
    for (int i = 0; i < choices; i++)
        first[choice[i] + 1]++;
    for (int e = 0; e < experts; e++)
        first[e + 1] += first[e];
    for (int i = 0; i < choices; i++)
        place[i] = first[choice[i]]++;
    for (int e = experts; e > 0; e--)
        first[e] = first[e - 1];
    first[0] = 0;
}

void OP(cpu_gather)(int m, int n, int top, const int32_t *place, const real *x, real *y)
{
    for (int i = 0; i < m * top; i++)
        memcpy(y + (ptrdiff_t)place[i] * n, x + (ptrdiff_t)(i / top) * n, (size_t)n * sizeof *y);
}

void OP(cpu_experts_linear)(int experts, const int32_t *first, int m, int n, int k, const real *x,
                            const real *w, size_t stride, real *y)
{
    for (int e = 0; e < experts; e++)
        OP(cpu_linear)
    (first[e + 1] - first[e], n, k, x + (ptrdiff_t)first[e] * k, k, w + (size_t)e * stride,
     y + (ptrdiff_t)first[e] * n, n);
}

void OP(cpu_mix)(int m, int n, int top, const int32_t *place, const wide *weight, const real *y,
                 real *out)
{
    for (int i = 0; i < m * top; i++) { /* in a token's order of choice */
        real *to = out + (ptrdiff_t)(i / top) * n;
        const real *from = y + (ptrdiff_t)place[i] * n;

        for (int j = 0; j < n; j++)
            to[j] = rfma(weight[i], from[j], to[j]);
    }
}

void OP(cpu_back_experts_input)(int experts, const int32_t *first, int m, int n, int k,
                                const real *dy, const real *w, size_t stride, real *dx)
{
    for (int e = 0; e < experts; e++)
        OP(cpu_back_input)
    (first[e + 1] - first[e], n, k, dy + (ptrdiff_t)first[e] * n, n, w + (size_t)e * stride,
     dx + (ptrdiff_t)first[e] * k, k, 0);
}

void OP(cpu_back_experts_weight)(int experts, const int32_t *first, int m, int n, int k,
                                 const real *dy, const real *x, wide *dw, size_t stride)
{
    for (int e = 0; e < experts; e++)
        OP(cpu_back_weight)
    (first[e + 1] - first[e], n, k, dy + (ptrdiff_t)first[e] * n, n, x + (ptrdiff_t)first[e] * k, k,
     dw + (size_t)e * stride, k);
}

void OP(cpu_back_mix)(int m, int n, int top, const int32_t *place, const wide *weight,
                      const real *y, const real *dout, real *dy, wide *dweight)
{
    for (int i = 0; i < m * top; i++) {
        const real *d = dout + (ptrdiff_t)(i / top) * n;
        ptrdiff_t at = (ptrdiff_t)place[i] * n;

        dweight[i] = rdot(d, y + at, n);
        for (int j = 0; j < n; j++)
            dy[at + j] = weight[i] * d[j];
    }
}

void OP(cpu_back_gather)(int m, int n, int top, const int32_t *place, const real *dy, real *dx)
{
    for (int i = 0; i < m * top; i++) {
        real *to = dx + (ptrdiff_t)(i / top) * n;
        const real *from = dy + (ptrdiff_t)place[i] * n;

        for (int j = 0; j < n; j++)
            to[j] += from[j];
    }
}

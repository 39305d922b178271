/* Router of the mixture of experts: sigmoid scores; the bias takes part in choosing only. */
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

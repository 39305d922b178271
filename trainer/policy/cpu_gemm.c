/* Matrix products.
 *
 * Forward products must give a row the same bits alone, in a batch, and in any chunk.  OpenBLAS
 * promises nothing of the kind, and padding rows to fixed tiles to force it costs a third of the
 * speed at our shapes and 5/6 of it at batch 1, so linear() is our own: each element is one dot
 * product in one written order (eight lanes along k, then a fixed tree), whatever tile it is
 * computed in. linear_t() adds along k one by one, as every lane of its output would alone.
 *
 * Backward has no such contract: it is OpenBLAS, one thread, so deterministic. */
#include <cblas.h>

#include "trainer/policy/cpu.h"

#ifdef POLICY_F64
#define GEMM cblas_dgemm
#else
#define GEMM cblas_sgemm
#endif

#define INLINE static inline __attribute__((always_inline))

enum { TILE_M = 3, TILE_N = 4, PANEL = 48 /* rows of x that stay in the L1 and L2 caches */ };

/* One step along k: all lanes, or the first `lanes` of them at the end. */
INLINE void dot_step(int mr, int nr, int lanes, const real *x, int ldx, const real *w, int ldw,
                     vec acc[TILE_M][TILE_N])
{
    vec b[TILE_N];

    for (int j = 0; j < nr; j++) {
        const real *at = w + (size_t)j * (size_t)ldw;

        b[j] = lanes == LANES ? vec_load(at) : vec_load_part(at, lanes);
    }
    for (int i = 0; i < mr; i++) {
        const real *at = x + (size_t)i * (size_t)ldx;
        vec a = lanes == LANES ? vec_load(at) : vec_load_part(at, lanes);

        for (int j = 0; j < nr; j++)
            acc[i][j] = vec_fma(a, b[j], acc[i][j]);
    }
}

/* mr x nr dot products; both are constants after inlining. */
INLINE void dot_tile(int mr, int nr, int k, const real *x, int ldx, const real *w, real *y, int ldy)
{
    vec acc[TILE_M][TILE_N] = {0};
    int p = 0;

    for (; p + LANES <= k; p += LANES)
        dot_step(mr, nr, LANES, x + p, ldx, w + p, k, acc);
    if (p < k)
        dot_step(mr, nr, k - p, x + p, ldx, w + p, k, acc);
    for (int i = 0; i < mr; i++) {
        vec4 sums = vec_sum4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);

        memcpy(y + (size_t)i * (size_t)ldy, &sums, (size_t)nr * sizeof *y);
    }
}

/* Columns n..n+nr of rows 0..m. */
INLINE void dot_columns(int m, int nr, int k, const real *x, int ldx, const real *w, real *y,
                        int ldy)
{
    int i = 0;

    for (; i + TILE_M <= m; i += TILE_M)
        dot_tile(TILE_M, nr, k, x + (size_t)i * (size_t)ldx, ldx, w, y + (size_t)i * (size_t)ldy,
                 ldy);
    for (; i < m; i++)
        dot_tile(1, nr, k, x + (size_t)i * (size_t)ldx, ldx, w, y + (size_t)i * (size_t)ldy, ldy);
}

void OP(cpu_linear)(int m, int n, int k, const real *x, int ldx, const real *w, real *y, int ldy)
{
    for (int i = 0; i < m; i += PANEL) {
        int rows = m - i < PANEL ? m - i : PANEL;
        const real *xi = x + (size_t)i * (size_t)ldx;
        real *yi = y + (size_t)i * (size_t)ldy;
        int j = 0;

        for (; j + TILE_N <= n; j += TILE_N)
            dot_columns(rows, TILE_N, k, xi, ldx, w + (size_t)j * (size_t)k, yi + j, ldy);
        for (; j < n; j++)
            dot_columns(rows, 1, k, xi, ldx, w + (size_t)j * (size_t)k, yi + j, ldy);
    }
}

void OP(cpu_linear_wide)(int m, int n, int k, const real *x, int ldx, const real *w, wide *y,
                         int ldy)
{
    OP(cpu_linear)(m, n, k, x, ldx, w, y, ldy);
}

/* mr rows x nv vectors of the output, constants after inlining. */
INLINE void axpy_tile(int mr, int nv, int k, const real *x, int ldx, const real *w, int ldw,
                      real *y, int ldy, int add)
{
    vec acc[4][3];

    for (int i = 0; i < mr; i++)
        for (int j = 0; j < nv; j++)
            acc[i][j] = add ? vec_load(y + (size_t)i * (size_t)ldy + j * LANES) : (vec){0};
    for (int p = 0; p < k; p++) {
        const real *row = w + (size_t)p * (size_t)ldw;

        for (int i = 0; i < mr; i++) {
            vec a = vec_all(x[(size_t)i * (size_t)ldx + p]);

            for (int j = 0; j < nv; j++)
                acc[i][j] = vec_fma(a, vec_load(row + j * LANES), acc[i][j]);
        }
    }
    for (int i = 0; i < mr; i++)
        for (int j = 0; j < nv; j++)
            *(vec *)(y + (size_t)i * (size_t)ldy + j * LANES) = acc[i][j];
}

static void axpy_tail(int n, int k, const real *x, const real *w, int ldw, real *y, int add)
{
    for (int j = 0; j < n; j++) {
        real acc = add ? y[j] : 0;

        for (int p = 0; p < k; p++)
            acc = rfma(x[p], w[(size_t)p * (size_t)ldw + j], acc);
        y[j] = acc;
    }
}

INLINE void axpy_rows(int mr, int n, int k, const real *x, int ldx, const real *w, int ldw, real *y,
                      int ldy, int add)
{
    int j = 0;

    for (; j + 3 * LANES <= n; j += 3 * LANES)
        axpy_tile(mr, 3, k, x, ldx, w + j, ldw, y + j, ldy, add);
    for (; j + LANES <= n; j += LANES)
        axpy_tile(mr, 1, k, x, ldx, w + j, ldw, y + j, ldy, add);
    for (int i = 0; i < mr; i++)
        axpy_tail(n - j, k, x + (size_t)i * (size_t)ldx, w + j, ldw,
                  y + (size_t)i * (size_t)ldy + j, add);
}

void OP(cpu_linear_t)(int m, int n, int k, const real *x, int ldx, const real *w, int ldw, real *y,
                      int ldy, int add)
{
    int i = 0;

    for (; i + 4 <= m; i += 4)
        axpy_rows(4, n, k, x + (size_t)i * (size_t)ldx, ldx, w, ldw, y + (size_t)i * (size_t)ldy,
                  ldy, add);
    for (; i < m; i++)
        axpy_rows(1, n, k, x + (size_t)i * (size_t)ldx, ldx, w, ldw, y + (size_t)i * (size_t)ldy,
                  ldy, add);
}

void OP(cpu_back_input)(int m, int n, int k, const real *dy, int ldy, const real *w, real *dx,
                        int ldx, int add)
{
    if (m > 0)
        GEMM(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, k, n, 1, dy, ldy, w, k, add ? 1 : 0, dx,
             ldx);
}

void OP(cpu_back_weight)(int m, int n, int k, const real *dy, int ldy, const real *x, int ldx,
                         real *dw, int ldw)
{
    if (m > 0)
        GEMM(CblasRowMajor, CblasTrans, CblasNoTrans, n, k, m, 1, dy, ldy, x, ldx, 1, dw, ldw);
}

void OP(cpu_product)(int m, int n, int k, const real *x, int ldx, const real *w, int ldw, real *y,
                     int ldy)
{
    if (m > 0)
        GEMM(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, k, 1, x, ldx, w, ldw, 0, y, ldy);
}

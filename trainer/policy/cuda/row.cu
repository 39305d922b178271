/* Ops that work on a row at a time: copies, norms, gates, activations, and their gradients.
 *
 * rmsnorm: y = x r w, r = (mean x^2 + eps)^-1/2;  dx = r (w dy - x r^2 mean(x w dy)), dw = sum dy x
 * r. A block takes a row; sums over rows (dw) are a second pass by column, in order of rows, so
 * that they are the same every time.  The floor of all of these is bytes. */
#include "trainer/policy/cuda/common.cuh"

enum { BLOCK = 256 };

static __global__ void copy_columns(int m, int n, const real *x, int ldx, real *y, int ldy)
{
    size_t i = blockIdx.x * (size_t)BLOCK + threadIdx.x, t = i / n, c = i % n;

    if (t < m)
        y[t * ldy + c] = x ? x[t * ldx + c] : real(0.0f);
}

static __global__ void pick(size_t size, int n, const int32_t *list, const real *x, real *y)
{
    size_t i = blockIdx.x * (size_t)BLOCK + threadIdx.x;

    if (i < size)
        y[i] = x[(size_t)list[i / n] * n + i % n];
}

/* One thread a column, rows in order: a row may be named many times. */
static __global__ void back_pick(int m, int n, const int32_t *list, const real *dy, wide *dx)
{
    int c = blockIdx.x * BLOCK + threadIdx.x;

    if (c < n)
        for (int t = 0; t < m; t++)
            dx[(size_t)list[t] * n + c] += load(dy + (size_t)t * n + c);
}

static __global__ void add(size_t n, const real *a, const real *b, real *y)
{
    size_t i = blockIdx.x * (size_t)BLOCK + threadIdx.x;

    if (i < n)
        store(y + i, load(a + i) + load(b + i));
}

static __global__ void silu_mul(size_t size, int f, const real *gu, real *h)
{
    size_t i = blockIdx.x * (size_t)BLOCK + threadIdx.x;

    if (i < size) {
        const real *row = gu + i / f * 2 * f + i % f;
        float g = load(row);

        store(h + i, g * sigmoid(g) * load(row + f));
    }
}

static __global__ void back_silu_mul(size_t size, int f, const real *gu, const real *dh, real *dgu)
{
    size_t i = blockIdx.x * (size_t)BLOCK + threadIdx.x;

    if (i < size) {
        size_t at = i / f * 2 * f + i % f;
        float g = load(gu + at), u = load(gu + at + f), d = load(dh + i), s = sigmoid(g);

        store(dgu + at + f, d * g * s);
        store(dgu + at, d * u * s * (1 + g * (1 - s)));
    }
}

static __device__ float norm_scale(const real *x, int n, float eps)
{
    float sum = 0;

    for (int i = threadIdx.x; i < n; i += blockDim.x)
        sum += load(x + i) * load(x + i);
    return rsqrtf(block_sum(sum) / n + eps);
}

static __global__ void rmsnorm(int n, float eps, const real *w, const real *x, int ldx, real *y,
                               int ldy)
{
    x += (size_t)blockIdx.x * ldx;
    y += (size_t)blockIdx.x * ldy;
    float r = norm_scale(x, n, eps);

    for (int i = threadIdx.x; i < n; i += BLOCK)
        store(y + i, load(x + i) * r * load(w + i));
}

static __global__ void back_rmsnorm(int n, float eps, const real *w, const real *x, int ldx,
                                    const real *dy, int ldy, real *dx, int lddx, float *scale)
{
    x += (size_t)blockIdx.x * ldx;
    dy += (size_t)blockIdx.x * ldy;
    dx += (size_t)blockIdx.x * lddx;
    float r = norm_scale(x, n, eps), dot = 0;

    for (int i = threadIdx.x; i < n; i += BLOCK)
        dot += load(x + i) * load(w + i) * load(dy + i);
    dot = block_sum(dot) * r * r / n;
    if (threadIdx.x == 0)
        scale[blockIdx.x] = r;
    for (int i = threadIdx.x; i < n; i += BLOCK)
        store(dx + i, load(dx + i) + r * (load(w + i) * load(dy + i) - load(x + i) * dot));
}

/* y = rmsnorm(o) w sigmoid(gate), a block for each head of each token. */
static __global__ void gated_norm(int d, float eps, const real *w, const real *o, const real *gate,
                                  real *y)
{
    size_t at = (size_t)blockIdx.x * d;
    float r = norm_scale(o + at, d, eps);

    for (int i = threadIdx.x; i < d; i += blockDim.x)
        store(y + at + i, load(o + at + i) * r * load(w + i) * sigmoid(load(gate + at + i)));
}

static __global__ void back_gated_norm(int d, float eps, const real *w, const real *o,
                                       const real *gate, const real *dy, real *do_, real *dgate,
                                       float *scale)
{
    size_t at = (size_t)blockIdx.x * d;
    float r = norm_scale(o + at, d, eps), dot = 0;

    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float x = load(o + at + i), s = sigmoid(load(gate + at + i)), dn = load(dy + at + i) * s;

        dot += x * load(w + i) * dn;
        store(dgate + at + i, load(dy + at + i) * x * r * load(w + i) * s * (1 - s));
    }
    dot = block_sum(dot) * r * r / d;
    if (threadIdx.x == 0)
        scale[blockIdx.x] = r;
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float dn = load(dy + at + i) * sigmoid(load(gate + at + i));

        store(do_ + at + i, r * (load(w + i) * dn - load(o + at + i) * dot));
    }
}

/* part[chunk][c] = sum over the chunk's rows of dy x r, times sigmoid(gate) where there is one: a
 * block takes WARP columns of a chunk of rows, its warps rows in turn. */
static __global__ void norm_weights(int m, int n, const float *scale, const real *x, int ldx,
                                    const real *dy, int ldy, const real *gate, float *part)
{
    __shared__ float sums[BLOCK / WARP][WARP];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, c = blockIdx.x * WARP + lane;
    int rows = (m + CUDA_CHUNKS - 1) / CUDA_CHUNKS, from = blockIdx.y * rows;
    int to = min(from + rows, m);
    float sum = 0;

    for (int t = from + warp; t < to && c < n; t += BLOCK / WARP) {
        float d = load(dy + (size_t)t * ldy + c) * load(x + (size_t)t * ldx + c) * scale[t];

        sum += gate ? d * sigmoid(load(gate + (size_t)t * ldx + c)) : d;
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && c < n) {
        for (int i = 1; i < BLOCK / WARP; i++)
            sum += sums[i][lane];
        part[(size_t)blockIdx.y * n + c] = sum;
    }
}

static __global__ void add_parts(int n, const float *part, wide *to)
{
    int c = blockIdx.x * BLOCK + threadIdx.x;
    float sum = 0;

    if (c >= n)
        return;
    for (int i = 0; i < CUDA_CHUNKS; i++)
        sum += part[(size_t)i * n + c];
    to[c] += sum;
}

void R(cuda_add_parts)(int n, const float *part, wide *to)
{
    add_parts<<<blocks(n, BLOCK), BLOCK, 0, policy_cuda.stream>>>(n, part, to);
}

/* Rows whose scales fit in half of the workspace; the other half is for the parts. */
enum { SCALES = CUDA_WORKSPACE / 2 / sizeof(float) };

/* dw += of m rows whose scales are in the workspace. */
static void add_norm_weights(int m, int n, const real *x, int ldx, const real *dy, int ldy,
                             const real *gate, wide *dw)
{
    float *scale = (float *)policy_cuda.workspace, *part = scale + SCALES;
    dim3 grid(blocks(n, WARP), CUDA_CHUNKS);

    norm_weights<<<grid, BLOCK, 0, policy_cuda.stream>>>(m, n, scale, x, ldx, dy, ldy, gate, part);
    R(cuda_add_parts)(n, part, dw);
}

void R(cuda_clear)(void *to, size_t bytes)
{
    cudaMemsetAsync(to, 0, bytes, policy_cuda.stream);
}

void R(cuda_copy_columns)(int m, int n, const real *x, int ldx, real *y, int ldy)
{
    if (m > 0 && n > 0)
        copy_columns<<<blocks((size_t)m * n, BLOCK), BLOCK, 0, policy_cuda.stream>>>(m, n, x, ldx,
                                                                                     y, ldy);
}

void R(cuda_clear_columns)(int m, int n, real *y, int ldy)
{
    R(cuda_copy_columns)(m, n, NULL, 0, y, ldy);
}

void R(cuda_pick)(int m, int n, const int32_t *list, const real *x, real *y)
{
    size_t size = (size_t)m * n;

    pick<<<blocks(size, BLOCK), BLOCK, 0, policy_cuda.stream>>>(size, n, list, x, y);
}

void R(cuda_back_pick)(int m, int n, const int32_t *list, const real *dy, wide *dx)
{
    back_pick<<<blocks(n, BLOCK), BLOCK, 0, policy_cuda.stream>>>(m, n, list, dy, dx);
}

void R(cuda_add)(size_t n, const real *a, const real *b, real *y)
{
    add<<<blocks(n, BLOCK), BLOCK, 0, policy_cuda.stream>>>(n, a, b, y);
}

void R(cuda_silu_mul)(int m, int f, const real *gu, real *h)
{
    size_t size = (size_t)m * f;

    silu_mul<<<blocks(size, BLOCK), BLOCK, 0, policy_cuda.stream>>>(size, f, gu, h);
}

void R(cuda_back_silu_mul)(int m, int f, const real *gu, const real *dh, real *dgu)
{
    size_t size = (size_t)m * f;

    back_silu_mul<<<blocks(size, BLOCK), BLOCK, 0, policy_cuda.stream>>>(size, f, gu, dh, dgu);
}

void R(cuda_rmsnorm)(int m, int n, wide eps, const real *w, const real *x, int ldx, real *y,
                     int ldy)
{
    rmsnorm<<<m, BLOCK, 0, policy_cuda.stream>>>(n, eps, w, x, ldx, y, ldy);
}

void R(cuda_back_rmsnorm)(int m, int n, wide eps, const real *w, const real *x, int ldx,
                          const real *dy, int ldy, real *dx, int lddx, wide *dw)
{
    for (int t = 0; t < m; t += SCALES) {
        int rows = m - t < SCALES ? m - t : SCALES;

        const real *xt = x + (size_t)t * ldx, *dyt = dy + (size_t)t * ldy;

        back_rmsnorm<<<rows, BLOCK, 0, policy_cuda.stream>>>(n, eps, w, xt, ldx, dyt, ldy,
                                                             dx + (size_t)t * lddx, lddx,
                                                             (float *)policy_cuda.workspace);
        add_norm_weights(rows, n, xt, ldx, dyt, ldy, NULL, dw);
    }
}

void R(cuda_gated_norm)(const struct kda_shape *s, int m, wide eps, const real *w, const real *o,
                        const real *gate, real *y)
{
    gated_norm<<<m * s->heads, head_block(s->dim), 0, policy_cuda.stream>>>(s->dim, eps, w, o, gate,
                                                                            y);
}

void R(cuda_back_gated_norm)(const struct kda_shape *s, int m, wide eps, const real *w,
                             const real *o, const real *gate, const real *dy, real *do_,
                             real *dgate, wide *dw)
{
    int all = m * s->heads, d = s->dim;

    for (int t = 0; t < all; t += SCALES) {
        int rows = all - t < SCALES ? all - t : SCALES;
        size_t at = (size_t)t * d;

        back_gated_norm<<<rows, head_block(d), 0, policy_cuda.stream>>>(
            d, eps, w, o + at, gate + at, dy + at, do_ + at, dgate + at,
            (float *)policy_cuda.workspace);
        add_norm_weights(rows, d, o + at, d, dy + at, d, gate + at, dw);
    }
}

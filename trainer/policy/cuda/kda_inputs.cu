/* What goes into the KDA recurrence: a short causal convolution of q, k and v, SiLU, the norms of q
 * and k, the decay g = -e^A softplus(z + dt) and beta = sigmoid(b) (Kimi Linear, arXiv 2510.26692,
 * section 3; the formulas are those of cpu_kda.c).
 *
 * Convolution: a thread a channel of a row; the kernel-1 inputs before a sequence's rows come from
 * its state.  A second launch moves that history on, because blocks of the first still read it. */
#include "trainer/policy/cuda/common.cuh"

enum { BLOCK = 256, MAX_KERNEL = 16 };

/* Sequences lie in order of their rows. */
static __device__ const struct R(seq) * sequence_of(const struct R(seq) * seqs, int n, int row)
{
    int from = 0;

    while (n > 1) {
        int half = n / 2;

        if (seqs[from + half].row <= row) {
            from += half;
            n -= half;
        } else {
            n = half;
        }
    }
    return seqs + from;
}

static __global__ void conv(struct R(batch) b, int c, int kernel, const real *taps, const real *x,
                            int ldx, size_t at, real *y)
{
    int i = blockIdx.y * BLOCK + threadIdx.x, row = blockIdx.x;
    const struct R(seq) *s = sequence_of(b.seqs, b.n_seqs, row);
    const wide *hist = s->state + at;
    float sum = 0;

    if (i >= c)
        return;
    for (int j = 0; j < kernel; j++) {
        int t = row - s->row - (kernel - 1) + j;
        float in = t < 0 ? hist[(size_t)(t + kernel - 1) * c + i]
                         : load(x + (size_t)(s->row + t) * ldx + i);

        sum = fmaf(load(taps + (size_t)j * c + i), in, sum);
    }
    store(y + (size_t)row * c + i, sum);
}

static __global__ void move_history(struct R(batch) b, int c, int kernel, const real *x, int ldx,
                                    size_t at)
{
    int i = blockIdx.y * BLOCK + threadIdx.x;
    const struct R(seq) *s = b.seqs + blockIdx.x;
    wide *hist = s->state + at;

    if (i >= c)
        return;
    for (int j = 0; j < kernel - 1; j++) { /* ascending: a row is read before it is overwritten */
        int t = s->n - (kernel - 1) + j;

        hist[(size_t)j * c + i] = t < 0 ? hist[(size_t)(t + kernel - 1) * c + i]
                                        : load(x + (size_t)(s->row + t) * ldx + i);
    }
}

static __global__ void conv_taps(int c, int kernel, const real *w, real *taps)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;

    if (i < c * kernel)
        taps[i] = w[(size_t)(i % c) * kernel + i / c];
}

static __global__ void back_conv_taps(int c, int kernel, const wide *dtaps, wide *dw)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;

    if (i < c * kernel)
        dw[(size_t)(i % c) * kernel + i / c] += dtaps[i];
}

/* x[t] met tap kernel-1-j of y[t+j]. */
static __global__ void back_conv(int m, int c, int kernel, const real *taps, const real *dy,
                                 real *dx, int lddx)
{
    int i = blockIdx.y * BLOCK + threadIdx.x, t = blockIdx.x;
    float sum = 0;

    if (i >= c)
        return;
    for (int j = 0; j < kernel && t + j < m; j++)
        sum = fmaf(load(taps + (size_t)(kernel - 1 - j) * c + i),
                   load(dy + (size_t)(t + j) * c + i), sum);
    store(dx + (size_t)t * lddx + i, sum);
}

/* dtaps[j][c] += sum_t dy[t][c] x[t-(kernel-1)+j][c]: WARP channels and one tap a block; its warps
 * take rows in turn. */
static __global__ void back_taps(int m, int c, int kernel, const real *x, int ldx, const real *dy,
                                 wide *dtaps)
{
    __shared__ float part[BLOCK / WARP][WARP];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int i = blockIdx.x * WARP + lane, j = blockIdx.y, past = kernel - 1 - j;
    float sum = 0;

    for (int t = past + warp; t < m && i < c; t += BLOCK / WARP)
        sum = fmaf(load(dy + (size_t)t * c + i), load(x + (size_t)(t - past) * ldx + i), sum);
    part[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && i < c) {
        for (int k = 1; k < BLOCK / WARP; k++)
            sum += part[k][lane];
        dtaps[(size_t)j * c + i] += sum;
    }
}

static __device__ float softplus(float x)
{
    return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

static __device__ float silu(float x)
{
    return x * sigmoid(x);
}

static __device__ float back_silu(float x)
{
    float s = sigmoid(x);

    return s * (1 + x * (1 - s));
}

/* A block for a head of a token; blockIdx.x = token * heads + head. */
static __global__ void kda_inputs(struct kda_shape s, const real *a_log, const real *dt_bias,
                                  const real *b, int ldb, struct R(kda_rows) r)
{
    int t = blockIdx.x / s.heads, h = blockIdx.x % s.heads, d = s.dim, width = s.heads * d;
    size_t q = (size_t)t * 3 * width + h * d, k = q + width, v = k + width;
    size_t row = (size_t)t * width + h * d;
    float qq = 0, kk = 0, a = -expf(load(a_log + h));

    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float x = silu(load(r.conv + q + i)), y = silu(load(r.conv + k + i));

        qq += x * x;
        kk += y * y;
    }
    qq = rsqrtf(block_sum(qq) + 1e-6f) * rsqrtf((float)d);
    kk = rsqrtf(block_sum(kk) + 1e-6f);
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float g = a * softplus(load(r.z + row + i) + load(dt_bias + h * d + i));

        store(r.qkv + q + i, silu(load(r.conv + q + i)) * qq);
        store(r.qkv + k + i, silu(load(r.conv + k + i)) * kk);
        store(r.qkv + v + i, silu(load(r.conv + v + i)));
        r.g[row + i] = g;
        r.alpha[row + i] = expf(g);
    }
    if (threadIdx.x == 0)
        r.beta[(size_t)t * s.heads + h] = sigmoid(load(b + (size_t)t * ldb + h));
}

/* Gradient through y = scale x / |x|, x = silu(c). */
static __device__ void back_norm(int d, float scale, const real *c, const real *dy, real *dc)
{
    float xx = 0, xdy = 0;

    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float x = silu(load(c + i));

        xx += x * x;
        xdy += x * load(dy + i);
    }
    float r = rsqrtf(block_sum(xx) + 1e-6f), dot = block_sum(xdy) * r * r;
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float ci = load(c + i);

        store(dc + i, scale * r * (load(dy + i) - silu(ci) * dot) * back_silu(ci));
    }
}

static __global__ void back_kda_inputs(struct kda_shape s, const real *a_log, const real *dt_bias,
                                       struct R(kda_rows) r, struct R(kda_rows) grad, real *db,
                                       int lddb)
{
    int t = blockIdx.x / s.heads, h = blockIdx.x % s.heads, d = s.dim, width = s.heads * d;
    size_t q = (size_t)t * 3 * width + h * d, k = q + width, v = k + width;
    size_t row = (size_t)t * width + h * d, beta = (size_t)t * s.heads + h;
    float a = -expf(load(a_log + h));

    back_norm(d, rsqrtf((float)d), r.conv + q, grad.qkv + q, grad.conv + q);
    back_norm(d, 1, r.conv + k, grad.qkv + k, grad.conv + k);
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float z = load(r.z + row + i) + load(dt_bias + h * d + i);

        store(grad.conv + v + i, load(grad.qkv + v + i) * back_silu(load(r.conv + v + i)));
        store(grad.z + row + i, a * grad.g[row + i] * sigmoid(z));
    }
    if (threadIdx.x == 0)
        store(db + (size_t)t * lddb + h, grad.beta[beta] * r.beta[beta] * (1 - r.beta[beta]));
}

/* Parts of dA_log[h] = sum g dg and ddt_bias[c] = sum dz: a block a head and a chunk of rows, a
 * thread a channel. */
static __global__ void back_decay(struct kda_shape s, int m, const real *a_log, const real *dt_bias,
                                  struct R(kda_rows) r, struct R(kda_rows) grad, float *da_log,
                                  float *ddt_bias)
{
    int h = blockIdx.x, d = s.dim, width = s.heads * d;
    int rows = (m + CUDA_CHUNKS - 1) / CUDA_CHUNKS, from = blockIdx.y * rows;
    int to = min(from + rows, m);
    float a = -expf(load(a_log + h)), da = 0;

    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float dz = 0;

        for (int t = from; t < to; t++) {
            size_t at = (size_t)t * width + h * d + i;

            da += r.g[at] * grad.g[at];
            dz += a * grad.g[at] * sigmoid(load(r.z + at) + load(dt_bias + h * d + i));
        }
        ddt_bias[(size_t)blockIdx.y * width + h * d + i] = dz;
    }
    da = block_sum(da);
    if (threadIdx.x == 0)
        da_log[blockIdx.y * s.heads + h] = da;
}

void R(cuda_conv_taps)(int c, int kernel, const real *w, real *taps)
{
    conv_taps<<<blocks((size_t)c * kernel, BLOCK), BLOCK, 0, policy_cuda.stream>>>(c, kernel, w,
                                                                                   taps);
}

void R(cuda_back_conv_taps)(int c, int kernel, const wide *dtaps, wide *dw)
{
    back_conv_taps<<<blocks((size_t)c * kernel, BLOCK), BLOCK, 0, policy_cuda.stream>>>(c, kernel,
                                                                                        dtaps, dw);
}

void R(cuda_conv)(const struct R(batch) * b, int c, int kernel, const real *taps, const real *x,
                  int ldx, size_t at, real *y)
{
    dim3 rows(b->rows, blocks(c, BLOCK)), seqs(b->n_seqs, blocks(c, BLOCK));

    conv<<<rows, BLOCK, 0, policy_cuda.stream>>>(*b, c, kernel, taps, x, ldx, at, y);
    move_history<<<seqs, BLOCK, 0, policy_cuda.stream>>>(*b, c, kernel, x, ldx, at);
}

void R(cuda_back_conv)(int m, int c, int kernel, const real *taps, const real *x, int ldx,
                       const real *dy, real *dx, int lddx, wide *dtaps)
{
    dim3 rows(m, blocks(c, BLOCK)), taps_grid(blocks(c, WARP), kernel);

    back_conv<<<rows, BLOCK, 0, policy_cuda.stream>>>(m, c, kernel, taps, dy, dx, lddx);
    back_taps<<<taps_grid, BLOCK, 0, policy_cuda.stream>>>(m, c, kernel, x, ldx, dy, dtaps);
}

void R(cuda_kda_inputs)(const struct kda_shape *s, int m, const real *a_log, const real *dt_bias,
                        const real *b, int ldb, const struct R(kda_rows) * r)
{
    kda_inputs<<<m * s->heads, head_block(s->dim), 0, policy_cuda.stream>>>(*s, a_log, dt_bias, b,
                                                                            ldb, *r);
}

void R(cuda_back_kda_inputs)(const struct kda_shape *s, int m, const real *a_log,
                             const real *dt_bias, const struct R(kda_rows) * r,
                             const struct R(kda_rows) * d, real *db, int lddb, wide *da_log,
                             wide *ddt_bias)
{
    dim3 grid(s->heads, CUDA_CHUNKS);
    float *da = (float *)policy_cuda.workspace;

    back_kda_inputs<<<m * s->heads, head_block(s->dim), 0, policy_cuda.stream>>>(*s, a_log, dt_bias,
                                                                                 *r, *d, db, lddb);
    back_decay<<<grid, head_block(s->dim), 0, policy_cuda.stream>>>(
        *s, m, a_log, dt_bias, *r, *d, da, da + CUDA_CHUNKS * s->heads);
    R(cuda_add_parts)(s->heads, da, da_log);
    R(cuda_add_parts)(s->heads * s->dim, da + CUDA_CHUNKS * s->heads, ddt_bias);
}

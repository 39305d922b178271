/* Mixture of experts: the router, the order of rows by expert, grouped products, and the way back.
 *
 * Router (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): s = sigmoid(logits); the bias takes part
 * in choosing only; weight = scale s / sum of the chosen s.
 *
 * Experts' rows are sorted so that each expert's are neighbours.  How many each got is known on the
 * device alone: the grouped products start a block for every tile that any expert could have, and
 * blocks without rows leave at once, so nothing waits for the host.  Tiles are 64 x 64 x 16 in
 * shared memory, 4 x 4 sums a thread: plain, and right for float32; bf16 uses the tensor cores. */
#include "trainer/policy/cuda/common.cuh"
#include "trainer/policy/cuda/mma.cuh"

enum { BLOCK = 256, TILE = 64, STEP = 16, PER = 4 };

static __device__ float factor(int top, int renormalize, float scale, const wide *scores,
                               const int32_t *choice)
{
    float sum = 0;

    if (!renormalize || top == 1)
        return scale;
    for (int i = 0; i < top; i++)
        sum += scores[choice[i]];
    return scale / (sum + 1e-20f);
}

/* A warp a token; the lowest number wins a tie. */
static __global__ void route(int m, int experts, int top, int renormalize, float scale,
                             const real *bias, wide *scores, int32_t *choice, wide *weight)
{
    int t = blockIdx.x * (BLOCK / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;

    if (t >= m)
        return;
    scores += (size_t)t * experts;
    choice += (size_t)t * top;
    weight += (size_t)t * top;
    for (int e = lane; e < experts; e += WARP)
        scores[e] = 1.0f / (1.0f + expf(-scores[e]));
    __syncwarp();
    for (int i = 0; i < top; i++) {
        float best = -INFINITY;
        int at = experts;

        for (int e = lane; e < experts; e += WARP) {
            bool taken = false;

            for (int j = 0; j < i; j++)
                taken |= choice[j] == e;
            if (!taken && scores[e] + load(bias + e) > best) {
                best = scores[e] + load(bias + e);
                at = e;
            }
        }
        for (int d = WARP / 2; d; d /= 2) {
            float other = __shfl_xor_sync(0xffffffffu, best, d);
            int other_at = __shfl_xor_sync(0xffffffffu, at, d);

            if (other > best || (other == best && other_at < at)) {
                best = other;
                at = other_at;
            }
        }
        if (lane == 0)
            choice[i] = at;
        __syncwarp();
    }
    for (int i = lane; i < top; i += WARP)
        weight[i] = scores[choice[i]] * factor(top, renormalize, scale, scores, choice);
}

/* weight_i = f s_i:  ds_i = f (dw_i - sum_j dw_j s_j / sum s). */
static __global__ void back_route(int m, int experts, int top, int renormalize, float scale,
                                  const wide *scores, const int32_t *choice, const wide *dweight,
                                  real *dlogits)
{
    int t = blockIdx.x * BLOCK + threadIdx.x;
    float f, mean = 0;

    if (t >= m)
        return;
    scores += (size_t)t * experts;
    choice += (size_t)t * top;
    dweight += (size_t)t * top;
    dlogits += (size_t)t * experts;
    f = factor(top, renormalize, scale, scores, choice);
    if (renormalize && top > 1)
        for (int i = 0; i < top; i++)
            mean += dweight[i] * scores[choice[i]] * f / scale;
    for (int e = 0; e < experts; e++)
        store(dlogits + e, 0.0f);
    for (int i = 0; i < top; i++) {
        float s = scores[choice[i]];

        store(dlogits + choice[i], f * (dweight[i] - mean) * s * (1 - s));
    }
}

/* Stable counting sort by one block: a warp an expert walks the choices twice, once to count and
 * once to place. */
static __global__ void dispatch(int choices, int experts, const int32_t *choice, int32_t *place,
                                int32_t *first)
{
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;

    for (int e = warp; e < experts; e += warps) {
        int count = 0;

        for (int i = lane; i < choices; i += WARP)
            count += choice[i] == e;
        for (int d = WARP / 2; d; d /= 2)
            count += __shfl_xor_sync(0xffffffffu, count, d);
        if (lane == 0)
            first[e + 1] = count;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        first[0] = 0;
        for (int e = 0; e < experts; e++)
            first[e + 1] += first[e];
    }
    __syncthreads();
    for (int e = warp; e < experts; e += warps) {
        int at = first[e];

        for (int from = 0; from < choices; from += WARP) {
            int i = from + lane;
            bool mine = i < choices && choice[i] == e;
            unsigned all = __ballot_sync(0xffffffffu, mine);

            if (mine)
                place[i] = at + __popc(all & ((1u << lane) - 1));
            at += __popc(all);
        }
    }
}

static __global__ void gather(int n, int top, const int32_t *place, const real *x, real *y)
{
    const real *from = x + (size_t)(blockIdx.x / top) * n;
    real *to = y + (size_t)place[blockIdx.x] * n;

    for (int i = threadIdx.x; i < n; i += BLOCK)
        to[i] = from[i];
}

/* A block a token: in its own order of choice. */
static __global__ void mix(int n, int top, const int32_t *place, const wide *weight, const real *y,
                           real *out)
{
    size_t t = blockIdx.x;

    for (int i = threadIdx.x; i < n; i += BLOCK) {
        float sum = load(out + t * n + i);

        for (int j = 0; j < top; j++)
            sum = fmaf(weight ? weight[t * top + j] : 1.0f,
                       load(y + (size_t)place[t * top + j] * n + i), sum);
        store(out + t * n + i, sum);
    }
}

static __global__ void back_mix(int n, int top, const int32_t *place, const wide *weight,
                                const real *y, const real *dout, real *dy, wide *dweight)
{
    const real *d = dout + (size_t)(blockIdx.x / top) * n;
    size_t at = (size_t)place[blockIdx.x] * n;
    float dot = 0, w = weight[blockIdx.x];

    for (int i = threadIdx.x; i < n; i += BLOCK) {
        dot += load(d + i) * load(y + at + i);
        store(dy + at + i, w * load(d + i));
    }
    dot = block_sum(dot);
    if (threadIdx.x == 0)
        dweight[blockIdx.x] = dot;
}

/* Rows first[e].. of an expert as a matrix: c[i][j] = sum_p a(i,p) b(p,j). */
struct operand {
    const real *at;
    size_t row, column; /* strides of (i, p) or (p, j) */
};

#ifdef POLICY_BF16
enum { DEPTH = 64, ROW = DEPTH + 8 /* spreads a warp's loads over all banks */ };
enum { VECTORS = TILE * DEPTH / 8 / BLOCK }; /* of 8 numbers, a thread's of a tile */

/* The tile (i0, p0) of x (i, p), on its way from device memory: eight neighbours at a time along
 * whichever of i and p is contiguous, one by one where rows are not aligned. */
struct tile {
    uint4 v[VECTORS];
};

static __device__ __forceinline__ uint4 load_eight(const real *x, size_t stride, int n)
{
    union {
        real r[8];
        uint4 v;
    } u;

    if (stride == 1 && n >= 8 && (uintptr_t)x % 16 == 0)
        return *(const uint4 *)x;
#pragma unroll
    for (int i = 0; i < 8; i++)
        u.r[i] = i < n ? x[i * stride] : __float2bfloat16(0.0f);
    return u.v;
}

static __device__ __forceinline__ void fetch(struct tile *to, int I, int P, int i0, int p0,
                                             size_t row, size_t column, const real *x)
{
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        int v = threadIdx.x + k * BLOCK;
        int i = column == 1 ? v / (DEPTH / 8) : v % (TILE / 8) * 8;
        int p = column == 1 ? v % (DEPTH / 8) * 8 : v / (TILE / 8);
        const real *at = x + (i0 + i) * row + (p0 + p) * column;

        if (i0 + i >= I || p0 + p >= P)
            to->v[k] = make_uint4(0, 0, 0, 0);
        else if (column == 1)
            to->v[k] = load_eight(at, 1, P - p0 - p);
        else
            to->v[k] = load_eight(at, row, I - i0 - i);
    }
}

/* To shared memory, rows of DEPTH neighbours. */
static __device__ __forceinline__ void put(real *to, const struct tile *from, size_t column)
{
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        int v = threadIdx.x + k * BLOCK;
        const real *r = (const real *)&from->v[k];

        if (column == 1) {
            *(uint4 *)(to + v / (DEPTH / 8) * ROW + v % (DEPTH / 8) * 8) = from->v[k];
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++)
                to[(v % (TILE / 8) * 8 + i) * ROW + v / (TILE / 8)] = r[i];
        }
    }
}

/* The same on the tensor cores (mma.cuh): warp / 2 is a band of 16 rows, warp % 2 half of the
 * columns. */
template <typename T>
static __device__ void tile_product(int I, int J, int P, int i0, int j0, struct operand a,
                                    struct operand b, T *c, size_t ldc, bool add)
{
    __shared__ __align__(16) real as[TILE * ROW], bs[TILE * ROW];
    int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4 * 2;
    float sum[4][4] = {};
    struct tile next_a, next_b;

    fetch(&next_a, I, P, i0, 0, a.row, a.column, a.at);
    fetch(&next_b, J, P, j0, 0, b.column, b.row, b.at);
    for (int p0 = 0; p0 < P; p0 += DEPTH) {
        put(as, &next_a, a.column);
        put(bs, &next_b, b.row);
        __syncthreads();
        if (p0 + DEPTH < P) { /* while this one is multiplied */
            fetch(&next_a, I, P, i0, p0 + DEPTH, a.row, a.column, a.at);
            fetch(&next_b, J, P, j0, p0 + DEPTH, b.column, b.row, b.at);
        }
#pragma unroll
        for (int p = 0; p < DEPTH; p += 16) {
            uint32_t x[4];

            left(x, as, ROW, warp / 2 * 16, p);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const real *y = bs + (warp % 2 * 32 + 8 * i + g) * ROW + p + t;

                mma(sum[i], x, pair(y), pair(y + 8));
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int r = i0 + warp / 2 * 16 + g + j / 2 * 8, q = j0 + warp % 2 * 32 + 8 * i + t + j % 2;

            if (r < I && q < J)
                store(c + r * ldc + q, sum[i][j] + (add ? load(c + r * ldc + q) : 0.0f));
        }
}
#else
/* The tile (i0, j0) of an I x J product over P; (+)= into c. */
template <typename T>
static __device__ void tile_product(int I, int J, int P, int i0, int j0, struct operand a,
                                    struct operand b, T *c, size_t ldc, bool add)
{
    __shared__ float as[STEP][TILE + 1], bs[STEP][TILE + 1];
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    float sum[PER][PER] = {};

    for (int p0 = 0; p0 < P; p0 += STEP) {
        for (int k = threadIdx.x; k < TILE * STEP; k += BLOCK) {
            /* neighbours in memory to neighbouring threads */
            int i = a.column == 1 ? k / STEP : k % TILE, p = a.column == 1 ? k % STEP : k / TILE;
            int q = b.row == 1 ? k % STEP : k / TILE, j = b.row == 1 ? k / STEP : k % TILE;

            as[p][i] = i0 + i < I && p0 + p < P
                           ? load(a.at + (i0 + i) * a.row + (p0 + p) * a.column)
                           : 0.0f;
            bs[q][j] = j0 + j < J && p0 + q < P
                           ? load(b.at + (p0 + q) * b.row + (j0 + j) * b.column)
                           : 0.0f;
        }
        __syncthreads();
        for (int p = 0; p < STEP; p++)
            for (int i = 0; i < PER; i++)
                for (int j = 0; j < PER; j++)
                    sum[i][j] = fmaf(as[p][ty * PER + i], bs[p][tx * PER + j], sum[i][j]);
        __syncthreads();
    }
    for (int i = 0; i < PER; i++)
        for (int j = 0; j < PER; j++) {
            int r = i0 + ty * PER + i, s = j0 + tx * PER + j;

            if (r < I && s < J)
                store(c + r * ldc + s, sum[i][j] + (add ? load(c + r * ldc + s) : 0.0f));
        }
}
#endif

static __global__ void experts_linear(const int32_t *first, int n, int k, const real *x,
                                      const real *w, size_t stride, real *y)
{
    int from = first[blockIdx.z], rows = first[blockIdx.z + 1] - from, i0 = blockIdx.y * TILE;

    if (i0 < rows)
        tile_product<real>(rows, n, k, i0, blockIdx.x * TILE, {x + (size_t)from * k, (size_t)k, 1},
                           {w + blockIdx.z * stride, 1, (size_t)k}, y + (size_t)from * n, n, false);
}

static __global__ void back_experts_input(const int32_t *first, int n, int k, const real *dy,
                                          const real *w, size_t stride, real *dx)
{
    int from = first[blockIdx.z], rows = first[blockIdx.z + 1] - from, i0 = blockIdx.y * TILE;

    if (i0 < rows)
        tile_product<real>(rows, k, n, i0, blockIdx.x * TILE, {dy + (size_t)from * n, (size_t)n, 1},
                           {w + blockIdx.z * stride, (size_t)k, 1}, dx + (size_t)from * k, k,
                           false);
}

static __global__ void back_experts_weight(const int32_t *first, int n, int k, const real *dy,
                                           const real *x, wide *dw, size_t stride)
{
    int from = first[blockIdx.z], rows = first[blockIdx.z + 1] - from;

    if (rows)
        tile_product<wide>(n, k, rows, blockIdx.y * TILE, blockIdx.x * TILE,
                           {dy + (size_t)from * n, 1, (size_t)n},
                           {x + (size_t)from * k, (size_t)k, 1}, dw + blockIdx.z * stride, k, true);
}

void R(cuda_route)(int m, int experts, int top, int renormalize, wide scale, const real *bias,
                   wide *scores, int32_t *choice, wide *weight)
{
    route<<<blocks(m, BLOCK / WARP), BLOCK, 0, policy_cuda.stream>>>(
        m, experts, top, renormalize, scale, bias, scores, choice, weight);
}

void R(cuda_back_route)(int m, int experts, int top, int renormalize, wide scale,
                        const wide *scores, const int32_t *choice, const wide *dweight,
                        real *dlogits)
{
    back_route<<<blocks(m, BLOCK), BLOCK, 0, policy_cuda.stream>>>(
        m, experts, top, renormalize, scale, scores, choice, dweight, dlogits);
}

void R(cuda_dispatch)(int choices, int experts, const int32_t *choice, int32_t *place,
                      int32_t *first)
{
    dispatch<<<1, 1024, 0, policy_cuda.stream>>>(choices, experts, choice, place, first);
}

void R(cuda_gather)(int m, int n, int top, const int32_t *place, const real *x, real *y)
{
    gather<<<m * top, BLOCK, 0, policy_cuda.stream>>>(n, top, place, x, y);
}

void R(cuda_mix)(int m, int n, int top, const int32_t *place, const wide *weight, const real *y,
                 real *out)
{
    mix<<<m, BLOCK, 0, policy_cuda.stream>>>(n, top, place, weight, y, out);
}

void R(cuda_back_gather)(int m, int n, int top, const int32_t *place, const real *dy, real *dx)
{
    mix<<<m, BLOCK, 0, policy_cuda.stream>>>(n, top, place, NULL, dy, dx);
}

void R(cuda_back_mix)(int m, int n, int top, const int32_t *place, const wide *weight,
                      const real *y, const real *dout, real *dy, wide *dweight)
{
    back_mix<<<m * top, BLOCK, 0, policy_cuda.stream>>>(n, top, place, weight, y, dout, dy,
                                                        dweight);
}

void R(cuda_experts_linear)(int experts, const int32_t *first, int m, int n, int k, const real *x,
                            const real *w, size_t stride, real *y)
{
    dim3 grid(blocks(n, TILE), blocks(m, TILE), experts);

    experts_linear<<<grid, BLOCK, 0, policy_cuda.stream>>>(first, n, k, x, w, stride, y);
}

void R(cuda_back_experts_input)(int experts, const int32_t *first, int m, int n, int k,
                                const real *dy, const real *w, size_t stride, real *dx)
{
    dim3 grid(blocks(k, TILE), blocks(m, TILE), experts);

    back_experts_input<<<grid, BLOCK, 0, policy_cuda.stream>>>(first, n, k, dy, w, stride, dx);
}

void R(cuda_back_experts_weight)(int experts, const int32_t *first, int m, int n, int k,
                                 const real *dy, const real *x, wide *dw, size_t stride)
{
    dim3 grid(blocks(k, TILE), blocks(n, TILE), experts);

    (void)m;
    back_experts_weight<<<grid, BLOCK, 0, policy_cuda.stream>>>(first, n, k, dy, x, dw, stride);
}

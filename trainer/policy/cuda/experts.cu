/* Grouped products: one matrix a group of rows.
 *
 * Experts' rows are sorted so that each expert's are neighbours (moe.cu).  How many each got is
 * known on the device alone: a block is started for every tile that any expert could have, and
 * blocks without rows leave at once, so nothing waits for the host.
 *
 * float32: tiles of 64 x 64 x 16 in shared memory, 4 x 4 sums a thread, plain.  bf16: the tensor
 * cores, the next tile on its way from device memory while one is multiplied. */
#include "trainer/policy/cuda/common.cuh"
#include "trainer/policy/cuda/mma.cuh"

enum { BLOCK = 256, TILE = 64, STEP = 16, PER = 4 };

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

/* Kimi Delta Attention, forward: chunks for many tokens (kda_chunk.cuh), one step for one.
 *
 * The columns of the state do not see each other, so a block takes COLUMNS of them, of one head of
 * one sequence, and goes through the chunks in order with its part of the state in shared memory.
 * Each repeats the little matrices A and B; sharing them would take a second launch and a trip
 * through memory.  The step for decode reads and writes the state once, which is its floor. */
#include "trainer/policy/cuda/kda_chunk.cuh"

/* What a block of the chunk kernels holds beside the chunk. */
template <int DIM> struct scan {
    struct chunk<DIM> c;
    float S[DIM][COLUMNS + 1];
    float U[CHUNK][COLUMNS + 1]; /* then D */
};

template <int DIM>
static __device__ void load_values(struct scan<DIM> *x, const struct kda_shape &s,
                                   const struct R(kda_rows) & r, size_t first, int n, int column)
{
    int width = s.heads * DIM;

    for (int i = threadIdx.x; i < CHUNK * COLUMNS; i += KDA_BLOCK) {
        int t = i / COLUMNS, j = i % COLUMNS;

        x->U[t][j] = t < n ? load(r.qkv + (first + t) * 3 * width + 2 * width + column + j) : 0.0f;
    }
}

/* U = V - Kt S and, where o wants it, Qt S in registers: rows warp and warp + CHUNK / 2. */
template <int DIM> static __device__ void read_state(struct scan<DIM> *x, float out[2])
{
    int j = threadIdx.x % COLUMNS, t = threadIdx.x / COLUMNS;
    float u[2] = {};

    out[0] = out[1] = 0;
#pragma unroll 8
    for (int i = 0; i < DIM; i++)
        for (int k = 0; k < 2; k++) {
            u[k] = fmaf(x->c.k[t + 8 * k][i], x->S[i][j], u[k]);
            out[k] = fmaf(x->c.q[t + 8 * k][i], x->S[i][j], out[k]);
        }
    for (int k = 0; k < 2; k++)
        x->U[t + 8 * k][j] -= u[k];
    __syncthreads();
}

/* D from U, a thread a column. */
template <int DIM> static __device__ void substitute(struct scan<DIM> *x)
{
    float d[CHUNK];

    if (threadIdx.x < COLUMNS) {
#pragma unroll
        for (int r = 0; r < CHUNK; r++) {
            float sum = x->U[r][threadIdx.x];

#pragma unroll
            for (int i = 0; i < r; i++)
                sum = fmaf(-x->c.A[r][i], d[i], sum);
            d[r] = x->c.beta[r] * sum;
            x->U[r][threadIdx.x] = d[r];
        }
    }
    __syncthreads();
}

template <int DIM> static __device__ void move_state(struct scan<DIM> *x)
{
    int j = threadIdx.x % COLUMNS;
    float d[CHUNK];

#pragma unroll
    for (int t = 0; t < CHUNK; t++)
        d[t] = x->U[t][j];
#pragma unroll 4
    for (int i = threadIdx.x / COLUMNS; i < DIM; i += KDA_BLOCK / COLUMNS) {
        float sum = x->c.decay[i] * x->S[i][j];

#pragma unroll
        for (int t = 0; t < CHUNK; t++)
            sum = fmaf(x->c.G[t][i], d[t], sum);
        x->S[i][j] = sum;
    }
    __syncthreads();
}

template <int DIM> static __device__ void copy_state(const struct scan<DIM> *x, wide *to)
{
    for (int y = threadIdx.x; y < DIM * COLUMNS; y += KDA_BLOCK)
        to[(size_t)(y / COLUMNS) * DIM + y % COLUMNS] = x->S[y / COLUMNS][y % COLUMNS];
}

template <int DIM>
static __device__ void write_output(const struct scan<DIM> *x, const float out[2], real *o,
                                    size_t stride, int n)
{
    int j = threadIdx.x % COLUMNS, t = threadIdx.x / COLUMNS;

    for (int k = 0; k < 2; k++, t += 8) {
        float sum = out[k];

        for (int i = 0; i <= t; i++)
            sum = fmaf(x->c.B[t][i], x->U[i][j], sum);
        if (t < n)
            store(o + t * stride + j, sum);
    }
    __syncthreads();
}

/* Grid: columns, heads, sequences. */
template <int DIM>
static __global__ void __launch_bounds__(KDA_BLOCK)
    kda_chunks(struct kda_shape s, struct R(batch) b, struct R(kda_rows) r, size_t at, wide *snaps)
{
    __shared__ struct scan<DIM> x;
    const struct R(seq) *seq = b.seqs + blockIdx.z;
    int h = blockIdx.y, j0 = blockIdx.x * COLUMNS, width = s.heads * DIM;
    size_t slice = (size_t)h * DIM * DIM + j0, size = (size_t)width * DIM;
    wide *state = seq->state + at + slice;
    float out[2];

    for (int y = threadIdx.x; y < DIM * COLUMNS; y += KDA_BLOCK)
        x.S[y / COLUMNS][y % COLUMNS] = state[(size_t)(y / COLUMNS) * DIM + y % COLUMNS];
    for (int t = 0; t < seq->n; t += CHUNK) {
        size_t first = (size_t)seq->row + t;
        int n = min(seq->n - t, (int)CHUNK);

        chunk_load<DIM>(&x.c, s, r, first, n, h);
        if (snaps)
            copy_state<DIM>(&x, snaps + t / CHUNK * size + slice);
        chunk_pairs<DIM>(&x.c);
        chunk_decay<DIM>(&x.c);
        load_values<DIM>(&x, s, r, first, n, h * DIM + j0);
        __syncthreads();
        read_state<DIM>(&x, out);
        substitute<DIM>(&x);
        write_output<DIM>(&x, out, r.o + first * width + h * DIM + j0, width, n);
        move_state<DIM>(&x);
    }
    copy_state<DIM>(&x, state);
}

/* One token: S <- diag(alpha) S, d = beta (v - S' k), S <- S + k d', o = S' q.  A block takes WARP
 * columns of a head; its warps share the rows. */
template <int DIM>
static __global__ void __launch_bounds__(128)
    kda_step(struct kda_shape s, struct R(batch) b, struct R(kda_rows) r, size_t at)
{
    enum { WARPS = 4, ROWS = DIM / WARPS };
    __shared__ float part[WARPS][WARP];
    const struct R(seq) *seq = b.seqs + blockIdx.z;
    int h = blockIdx.y, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int column = blockIdx.x * WARP + lane, width = s.heads * DIM;
    size_t row = (size_t)seq->row * width + h * DIM;
    const real *q = r.qkv + (size_t)seq->row * 3 * width + h * DIM, *k = q + width, *v = k + width;
    wide *state = seq->state + at + (size_t)h * DIM * DIM + column;
    float S[ROWS], u = 0, o = 0;

#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int c = warp * ROWS + i;

        S[i] = r.alpha[row + c] * state[(size_t)c * DIM];
        u = fmaf(load(k + c), S[i], u);
    }
    part[warp][lane] = u;
    __syncthreads();
    u = part[0][lane] + part[1][lane] + part[2][lane] + part[3][lane];
    u = r.beta[(size_t)seq->row * s.heads + h] * (load(v + column) - u);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int c = warp * ROWS + i;

        S[i] = fmaf(load(k + c), u, S[i]);
        o = fmaf(load(q + c), S[i], o);
        state[(size_t)c * DIM] = S[i];
    }
    part[warp][lane] = o;
    __syncthreads();
    if (warp == 0)
        store(r.o + row + column, part[0][lane] + part[1][lane] + part[2][lane] + part[3][lane]);
}

void R(cuda_kda_scan)(const struct kda_shape *s, const struct R(batch) * b,
                      const struct R(kda_rows) * r, size_t at, wide *snaps)
{
    dim3 grid(s->dim / COLUMNS, s->heads, b->n_seqs);

    if (b->longest == 1 && !snaps)
        KDA_LAUNCH(s->dim, kda_step, <<<grid, 128, 0, policy_cuda.stream>>>(*s, *b, *r, at));
    else
        KDA_LAUNCH(s->dim, kda_chunks,
                   <<<grid, KDA_BLOCK, 0, policy_cuda.stream>>>(*s, *b, *r, at, snaps));
}

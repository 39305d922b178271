/* Gradient of Kimi Delta Attention, chunk by chunk (kda_chunk.cuh for the forward formulas).
 *
 * Two launches.  The first goes backward through the chunks with dS, the gradient of the state
 * after a chunk, and keeps it for each; columns do not see each other, as in the forward pass:
 *
 *     dD = B' dO + Kh dS        M' dX = dD,  M = I + diag(beta) A       dU = beta dX
 *     dS <- diag(e^G_C) dS + Qt' dO - Kt' dU
 *
 * The second has all chunks at once, from S0 (kept by forward) and dS (kept by the first):
 *
 *     dV = dU    dbeta_r = dX_r . e_r,  e_r = U_r - sum_{i<r} A_ri D_i
 *     dA_ri = -dU_r . D_i    dB_ri = dO_r . D_i
 *     dKt = -dU S0'    dQt = dO S0'    dKh = D dS'    de^G_C = rows of dS . S0
 *
 * and then, with E_ri = e^(G_r - G_i):
 *
 *     dq_r  = dQt_r e^G_r + sum_i dB_ri k_i E_ri
 *     dk'_r = dKt_r e^G_r + sum_i dA_ri k_i E_ri                       (k as the later token)
 *     dk"_i = dKh_i e^(G_C - G_i) + sum_r (dA_ri k_r + dB_ri q_r) E_ri (k as the earlier one)
 *     dk = dk' + dk"     dG_r = q_r dq_r + k_r (dk'_r - dk"_r)
 *     dG_C += sum_i k_i dKh_i e^(G_C - G_i) + e^G_C de^G_C             dg_t = sum_{r >= t} dG_r  */
#include "trainer/policy/cuda/kda_chunk.cuh"

/* ---- first launch ---- */

template <int DIM> struct reverse {
    struct chunk<DIM> c;
    float dS[DIM][COLUMNS + 1];
    float dO[CHUNK][COLUMNS + 1], dD[CHUNK][COLUMNS + 1]; /* dD: then dU */
};

/* dD of two rows and a column a thread. */
template <int DIM> static __device__ void write_gradient(struct reverse<DIM> *x)
{
    int j = threadIdx.x % COLUMNS, t = threadIdx.x / COLUMNS;

    for (int k = 0; k < 2; k++, t += 8) {
        float sum = 0;

        for (int r = t; r < CHUNK; r++)
            sum = fmaf(x->c.B[r][t], x->dO[r][j], sum);
#pragma unroll 8
        for (int i = 0; i < DIM; i++)
            sum = fmaf(x->c.G[t][i], x->dS[i][j], sum);
        x->dD[t][j] = sum;
    }
    __syncthreads();
}

/* dU of a column from its dD, in place at distance ld; dX goes to registers. */
static __device__ void substitute_back(const float A[CHUNK][CHUNK + 1], const float *beta,
                                       float *dD, int ld, float dX[CHUNK])
{
#pragma unroll
    for (int i = CHUNK - 1; i >= 0; i--) {
        float sum = dD[i * ld];

#pragma unroll
        for (int r = i + 1; r < CHUNK; r++)
            sum = fmaf(-beta[r] * A[r][i], dX[r], sum);
        dX[i] = sum;
    }
#pragma unroll
    for (int i = 0; i < CHUNK; i++)
        dD[i * ld] = beta[i] * dX[i];
}

template <int DIM> static __device__ void move_gradient(struct reverse<DIM> *x)
{
    int j = threadIdx.x % COLUMNS;
    float o[CHUNK], d[CHUNK];

#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        o[t] = x->dO[t][j];
        d[t] = x->dD[t][j];
    }
#pragma unroll 4
    for (int i = threadIdx.x / COLUMNS; i < DIM; i += KDA_BLOCK / COLUMNS) {
        float sum = x->c.decay[i] * x->dS[i][j];

#pragma unroll
        for (int t = 0; t < CHUNK; t++)
            sum += x->c.q[t][i] * o[t] - x->c.k[t][i] * d[t];
        x->dS[i][j] = sum;
    }
    __syncthreads();
}

/* Grid: columns, heads.  kept: dS after each chunk. */
template <int DIM>
static __global__ void __launch_bounds__(KDA_BLOCK)
    state_gradients(struct kda_shape s, int m, struct R(kda_rows) r, struct R(kda_rows) d,
                    wide *kept)
{
    extern __shared__ float memory[];
    struct reverse<DIM> *x = (struct reverse<DIM> *)memory;
    int h = blockIdx.y, j0 = blockIdx.x * COLUMNS, width = s.heads * DIM;
    size_t slice = (size_t)h * DIM * DIM + j0, size = (size_t)width * DIM;
    float dX[CHUNK];

    for (int y = threadIdx.x; y < DIM * COLUMNS; y += KDA_BLOCK)
        x->dS[y / COLUMNS][y % COLUMNS] = 0;
    for (int chunk = (m - 1) / CHUNK; chunk >= 0; chunk--) {
        size_t first = (size_t)chunk * CHUNK;
        int n = min(m - (int)first, (int)CHUNK);

        chunk_load<DIM>(&x->c, s, r, first, n, h);
        for (int y = threadIdx.x; y < DIM * COLUMNS; y += KDA_BLOCK)
            kept[chunk * size + slice + (size_t)(y / COLUMNS) * DIM + y % COLUMNS] =
                x->dS[y / COLUMNS][y % COLUMNS];
        for (int y = threadIdx.x; y < CHUNK * COLUMNS; y += KDA_BLOCK) {
            int t = y / COLUMNS, j = y % COLUMNS;

            x->dO[t][j] = t < n ? load(d.o + (first + t) * width + h * DIM + j0 + j) : 0.0f;
        }
        chunk_pairs<DIM>(&x->c);
        chunk_decay<DIM>(&x->c);
        write_gradient<DIM>(x);
        if (threadIdx.x < COLUMNS)
            substitute_back(x->c.A, x->c.beta, &x->dD[0][threadIdx.x], COLUMNS + 1, dX);
        __syncthreads();
        move_gradient<DIM>(x);
    }
}

/* ---- second launch ---- */

template <int DIM> struct parts {
    struct chunk<DIM> c; /* q, k, G stay as loaded */
    float dO[CHUNK][DIM], D[CHUNK][DIM], dU[CHUNK][DIM];
    float dA[CHUNK][CHUNK + 1], dB[CHUNK][CHUNK + 1];
    float S[DIM][COLUMNS + 1], dS[DIM][COLUMNS + 1];
    float dG[CHUNK][DIM];
    float last[DIM]; /* what G_C gets beside the rows' */
};

/* How a block's threads share CHUNK x DIM: thread = channel + DIM * group, a group takes ROWS rows.
 */
template <int DIM> struct share {
    enum { GROUPS = KDA_BLOCK / DIM, ROWS = CHUNK / GROUPS };
};

/* U (into D) and dD (into dU), from S0 and dS in global memory, columns to neighbours. */
template <int DIM>
static __device__ void read_states(struct parts<DIM> *x, const wide *S, const wide *dS)
{
    enum { ROWS = share<DIM>::ROWS };
    int j = threadIdx.x % DIM, t0 = threadIdx.x / DIM * ROWS;
    float u[ROWS] = {}, d[ROWS] = {};

    for (int i = 0; i < DIM; i++) {
        float a = S[(size_t)i * DIM + j], b = dS[(size_t)i * DIM + j];

        for (int k = 0; k < ROWS; k++) {
            float G = x->c.G[t0 + k][i], key = x->c.k[t0 + k][i];

            u[k] = fmaf(key * __expf(G), a, u[k]);
            d[k] = fmaf(key * __expf(x->c.total[i] - G), b, d[k]);
        }
    }
    for (int k = 0; k < ROWS; k++) {
        for (int r = t0 + k; r < CHUNK; r++)
            d[k] = fmaf(x->c.B[r][t0 + k], x->dO[r][j], d[k]);
        x->D[t0 + k][j] -= u[k]; /* held V */
        x->dU[t0 + k][j] = d[k];
    }
    __syncthreads();
}

/* D, dU and dbeta.  dX e of each row and column passes through dG. */
template <int DIM> static __device__ void solve(struct parts<DIM> *x, wide *dbeta, int heads, int n)
{
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    if (threadIdx.x < DIM) {
        float d[CHUNK], e[CHUNK], dX[CHUNK];
        int j = threadIdx.x;

#pragma unroll
        for (int r = 0; r < CHUNK; r++) {
            e[r] = x->D[r][j];
#pragma unroll
            for (int i = 0; i < r; i++)
                e[r] = fmaf(-x->c.A[r][i], d[i], e[r]);
            d[r] = x->c.beta[r] * e[r];
            x->D[r][j] = d[r];
        }
        substitute_back(x->c.A, x->c.beta, &x->dU[0][j], DIM, dX);
#pragma unroll
        for (int r = 0; r < CHUNK; r++)
            x->dG[r][j] = dX[r] * e[r];
    }
    __syncthreads();
    for (int r = warp; r < n; r += KDA_BLOCK / WARP) {
        float sum = 0;

        for (int j = lane; j < DIM; j += WARP)
            sum += x->dG[r][j];
        sum = warp_sum(sum);
        if (lane == 0)
            dbeta[(size_t)r * heads] = sum;
    }
    __syncthreads();
}

template <int DIM> static __device__ void pair_gradients(struct parts<DIM> *x)
{
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    for (int y = warp; y < CHUNK * CHUNK; y += KDA_BLOCK / WARP) {
        int r = y / CHUNK, i = y % CHUNK;
        float a = 0, b = 0;

        if (i <= r) {
            for (int j = lane; j < DIM; j += WARP) {
                a = fmaf(x->dU[r][j], x->D[i][j], a);
                b = fmaf(x->dO[r][j], x->D[i][j], b);
            }
            a = warp_sum(a);
            b = warp_sum(b);
        }
        if (lane == 0) {
            x->dA[r][i] = i < r ? -a : 0.0f;
            x->dB[r][i] = b;
        }
    }
    __syncthreads();
}

/* dKt, dQt, dKh of the thread's rows and channel, and de^G_C of its channel. */
template <int DIM> struct through_state {
    float kt[share<DIM>::ROWS], qt[share<DIM>::ROWS], kh[share<DIM>::ROWS], decay;
};

template <int DIM>
static __device__ void state_products(struct parts<DIM> *x, const wide *S, const wide *dS,
                                      struct through_state<DIM> *to)
{
    enum { ROWS = share<DIM>::ROWS };
    int i = threadIdx.x % DIM, t0 = threadIdx.x / DIM * ROWS;

    for (int j0 = 0; j0 < DIM; j0 += COLUMNS) {
        for (int y = threadIdx.x; y < DIM * COLUMNS; y += KDA_BLOCK) {
            size_t at = (size_t)(y / COLUMNS) * DIM + j0 + y % COLUMNS;

            x->S[y / COLUMNS][y % COLUMNS] = S[at];
            x->dS[y / COLUMNS][y % COLUMNS] = dS[at];
        }
        __syncthreads();
        for (int j = 0; j < COLUMNS; j++) {
            float a = x->S[i][j], b = x->dS[i][j];

            to->decay = fmaf(a, b, to->decay);
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                to->kt[k] = fmaf(-x->dU[t0 + k][j0 + j], a, to->kt[k]);
                to->qt[k] = fmaf(x->dO[t0 + k][j0 + j], a, to->qt[k]);
                to->kh[k] = fmaf(x->D[t0 + k][j0 + j], b, to->kh[k]);
            }
        }
        __syncthreads();
    }
}

/* dq, dk and dG of row t, channel i. */
template <int DIM>
static __device__ void row_gradient(struct parts<DIM> *x, int t, int i, float kt, float qt,
                                    float kh, float *dq, float *dk)
{
    float G = x->c.G[t][i], e = expf(G), k = x->c.k[t][i], late, early;

    *dq = qt * e;
    late = kt * e;
    for (int p = 0; p <= t; p++) {
        float key = x->c.k[p][i] * expf(G - x->c.G[p][i]);

        *dq = fmaf(x->dB[t][p], key, *dq);
        late = fmaf(x->dA[t][p], key, late);
    }
    early = kh * expf(x->c.total[i] - G);
    for (int p = t; p < CHUNK; p++)
        early = fmaf(fmaf(x->dA[p][t], x->c.k[p][i], x->dB[p][t] * x->c.q[p][i]),
                     expf(x->c.G[p][i] - G), early);
    *dk = late + early;
    x->dG[t][i] = x->c.q[t][i] * *dq + k * (late - early);
}

/* dg from dG, and its share of the chunk's last token. */
template <int DIM>
static __device__ void decay_gradient(struct parts<DIM> *x, wide *dg, int width, int n)
{
    for (int i = threadIdx.x; i < DIM; i += KDA_BLOCK) {
        float sum = x->last[i];

        for (int t = CHUNK - 1; t >= 0; t--) {
            sum += x->dG[t][i];
            if (t < n)
                dg[(size_t)t * width + i] = sum;
        }
    }
}

/* dq and dk of the thread's rows; last[i] = e^G_C de^G_C + sum_t k_t dKh_t e^(G_C - G_t). */
template <int DIM>
static __device__ void finish_rows(struct parts<DIM> *x, const struct through_state<DIM> *state,
                                   real *dqkv, int width, int n)
{
    enum { ROWS = share<DIM>::ROWS };
    int i = threadIdx.x % DIM, t0 = threadIdx.x / DIM * ROWS;
    float dq, dk, last = 0;

    if (threadIdx.x < DIM)
        x->last[i] = x->c.decay[i] * state->decay;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        int t = t0 + k;

        last += x->c.k[t][i] * state->kh[k] * expf(x->c.total[i] - x->c.G[t][i]);
        row_gradient<DIM>(x, t, i, state->kt[k], state->qt[k], state->kh[k], &dq, &dk);
        if (t < n) {
            store(dqkv + (size_t)t * 3 * width + i, dq);
            store(dqkv + (size_t)t * 3 * width + width + i, dk);
            store(dqkv + (size_t)t * 3 * width + 2 * width + i, x->dU[t][i]);
        }
    }
    for (int group = 0; group < share<DIM>::GROUPS; group++) { /* in one order, without atomics */
        if (threadIdx.x / DIM == group)
            x->last[i] += last;
        __syncthreads();
    }
}

/* Grid: chunks, heads. */
template <int DIM>
static __global__ void __launch_bounds__(KDA_BLOCK)
    chunk_gradients(struct kda_shape s, int m, struct R(kda_rows) r, const wide *snaps,
                    struct R(kda_rows) d, const wide *kept)
{
    extern __shared__ float memory[];
    struct parts<DIM> *x = (struct parts<DIM> *)memory;
    int h = blockIdx.y, width = s.heads * DIM;
    size_t first = (size_t)blockIdx.x * CHUNK;
    size_t state = (blockIdx.x * (size_t)s.heads + h) * DIM * DIM;
    int n = min(m - (int)first, (int)CHUNK);
    struct through_state<DIM> through = {
    };

    for (int y = threadIdx.x; y < CHUNK * DIM; y += KDA_BLOCK) {
        int t = y / DIM, j = y % DIM;
        size_t row = first + t;

        x->dO[t][j] = t < n ? load(d.o + row * width + h * DIM + j) : 0.0f;
        x->D[t][j] = t < n ? load(r.qkv + row * 3 * width + 2 * width + h * DIM + j) : 0.0f;
    }
    chunk_load<DIM>(&x->c, s, r, first, n, h);
    chunk_pairs<DIM>(&x->c);
    read_states<DIM>(x, snaps + state, kept + state);
    solve<DIM>(x, d.beta + first * s.heads + h, s.heads, n);
    pair_gradients<DIM>(x);
    state_products<DIM>(x, snaps + state, kept + state, &through);
    finish_rows<DIM>(x, &through, d.qkv + first * 3 * width + h * DIM, width, n);
    decay_gradient<DIM>(x, d.g + first * width + h * DIM, width, n);
}

template <int DIM>
static void launch(const struct kda_shape *s, int m, const struct R(kda_rows) * r,
                   const wide *snaps, const struct R(kda_rows) * d, wide *work)
{
    dim3 columns(DIM / COLUMNS, s->heads), chunks(blocks(m, CHUNK), s->heads);
    int first = (int)sizeof(struct reverse<DIM>), second = (int)sizeof(struct parts<DIM>);

    cudaFuncSetAttribute(state_gradients<DIM>, cudaFuncAttributeMaxDynamicSharedMemorySize, first);
    cudaFuncSetAttribute(chunk_gradients<DIM>, cudaFuncAttributeMaxDynamicSharedMemorySize, second);
    state_gradients<DIM><<<columns, KDA_BLOCK, first, policy_cuda.stream>>>(*s, m, *r, *d, work);
    chunk_gradients<DIM>
        <<<chunks, KDA_BLOCK, second, policy_cuda.stream>>>(*s, m, *r, snaps, *d, work);
}

void R(cuda_back_kda_scan)(const struct kda_shape *s, int m, const struct R(kda_rows) * r,
                           const wide *snaps, const struct R(kda_rows) * d, wide *work)
{
    KDA_LAUNCH(s->dim, launch, (s, m, r, snaps, d, work));
}

size_t R(cuda_work)(const struct kda_shape *k, const struct mla_shape *a, int m)
{
    size_t states = (size_t)(m + CHUNK - 1) / CHUNK * k->heads * k->dim * k->dim;
    /* delta of each query; for bf16 the parts of dc behind them */
    size_t attend = (size_t)m * a->heads + CUDA_SPLITS * (size_t)m * (a->lora + a->rope);

    return states > attend ? states : attend;
}

/* Matrix products, by cuBLASLt.
 *
 * cuBLASLt is column-major: a row-major y[m,n] is its y'[n,m].  So y = x w' becomes y' = w x', with
 * w stored as w' and therefore transposed back.  The algorithm of a shape is asked for once and
 * kept: asking takes longer than many of these products.
 *
 * float32 products are IEEE float32 (no TF32): this kind exists to be compared. */
#include "trainer/policy/cuda/common.cuh"

#include <string.h>

/* d (M x N) = op(a) (M x K) op(b) (K x N) + beta d, all column-major. */
struct shape {
    int M, N, K, lda, ldb, ldd, batch, align_a, align_b, align_d;
    long long stride_a, stride_b, stride_d;
    cublasOperation_t op_a, op_b;
    int wide_out;
    float beta;
};

struct plan {
    struct shape shape;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    struct plan *next;
};

enum { BUCKETS = 1024 };

static struct plan *plans[BUCKETS];

static const cudaDataType_t stored = sizeof(real) == 4 ? CUDA_R_32F : CUDA_R_16BF;

static void failed(const char *what, cublasStatus_t status)
{
    if (status && !policy_cuda.failed) {
        policy_cuda.failed = what;
        policy_cuda.status = status;
    }
}

static cublasLtMatrixLayout_t layout(cudaDataType_t type, int rows, int columns, int ld, int batch,
                                     long long stride)
{
    cublasLtMatrixLayout_t l = NULL;

    failed("cublasLtMatrixLayoutCreate", cublasLtMatrixLayoutCreate(&l, type, rows, columns, ld));
    if (l && batch > 1) {
        cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch,
                                         sizeof batch);
        cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                         sizeof stride);
    }
    return l;
}

static void choose(struct plan *p)
{
    const struct shape *s = &p->shape;
    size_t workspace = CUDA_WORKSPACE;
    uint32_t align[3] = {(uint32_t)s->align_a, (uint32_t)s->align_b, (uint32_t)s->align_d};
    cublasLtMatmulPreference_t want;
    cublasLtMatmulHeuristicResult_t found;
    cublasStatus_t status;
    int n = 0;

    cublasLtMatmulPreferenceCreate(&want);
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                         sizeof workspace);
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                                         &align[0], sizeof align[0]);
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                         &align[1], sizeof align[1]);
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                                         &align[2], sizeof align[2]);
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
                                         &align[2], sizeof align[2]);
    status = cublasLtMatmulAlgoGetHeuristic(policy_cuda.lt, p->desc, p->a, p->b, p->d, p->d, want,
                                            1, &found, &n);
    failed("cublasLtMatmulAlgoGetHeuristic", n ? status : CUBLAS_STATUS_NOT_SUPPORTED);
    p->algo = found.algo;
    cublasLtMatmulPreferenceDestroy(want);
}

static struct plan *make_plan(const struct shape *s)
{
    struct plan *p = (struct plan *)calloc(1, sizeof *p);
    cudaDataType_t out = s->wide_out ? CUDA_R_32F : stored;
    bool ta = s->op_a == CUBLAS_OP_T, tb = s->op_b == CUBLAS_OP_T;

    if (!p) {
        failed("a plan of cuBLASLt", CUBLAS_STATUS_ALLOC_FAILED);
        return NULL;
    }
    p->shape = *s;
    failed("cublasLtMatmulDescCreate",
           cublasLtMatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &s->op_a, sizeof s->op_a);
    cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &s->op_b, sizeof s->op_b);
    p->a = layout(stored, ta ? s->K : s->M, ta ? s->M : s->K, s->lda, s->batch, s->stride_a);
    p->b = layout(stored, tb ? s->N : s->K, tb ? s->K : s->N, s->ldb, s->batch, s->stride_b);
    p->d = layout(out, s->M, s->N, s->ldd, s->batch, s->stride_d);
    choose(p);
    return p;
}

static struct plan *find_plan(const struct shape *s)
{
    const unsigned char *bytes = (const unsigned char *)s;
    unsigned hash = 2166136261u;

    for (size_t i = 0; i < sizeof *s; i++)
        hash = (hash ^ bytes[i]) * 16777619u;
    struct plan **at = &plans[hash % BUCKETS];
    for (struct plan *p = *at; p; p = p->next)
        if (!memcmp(&p->shape, s, sizeof *s))
            return p;
    struct plan *p = make_plan(s);
    if (p) {
        p->next = *at;
        *at = p;
    }
    return p;
}

static int alignment(const void *p)
{
    int a = 256;

    while ((uintptr_t)p % a)
        a /= 2;
    return a;
}

/* Padding in `s` must be zero: memset, then fields. */
static void multiply(struct shape *s, const real *a, const real *b, void *d)
{
    const float one = 1;
    struct plan *p;

    if (s->M <= 0 || s->N <= 0)
        return;
    s->align_a = alignment(a);
    s->align_b = alignment(b);
    s->align_d = alignment(d);
    p = policy_cuda.failed ? NULL : find_plan(s);
    if (p && !policy_cuda.failed)
        failed("cublasLtMatmul",
               cublasLtMatmul(policy_cuda.lt, p->desc, &one, a, p->a, b, p->b, &s->beta, d, p->d, d,
                              p->d, &p->algo, policy_cuda.workspace, CUDA_WORKSPACE,
                              policy_cuda.stream));
}

static struct shape shape(int M, int N, int K, int lda, int ldb, int ldd, cublasOperation_t op_a,
                          cublasOperation_t op_b)
{
    struct shape s;

    memset(&s, 0, sizeof s);
    s.M = M, s.N = N, s.K = K, s.lda = lda, s.ldb = ldb, s.ldd = ldd;
    s.op_a = op_a, s.op_b = op_b, s.batch = 1;
    return s;
}

void R(cuda_linear)(int m, int n, int k, const real *x, int ldx, const real *w, real *y, int ldy)
{
    struct shape s = shape(n, m, k, k, ldx, ldy, CUBLAS_OP_T, CUBLAS_OP_N);

    multiply(&s, w, x, y);
}

void R(cuda_linear_wide)(int m, int n, int k, const real *x, int ldx, const real *w, wide *y,
                         int ldy)
{
    struct shape s = shape(n, m, k, k, ldx, ldy, CUBLAS_OP_T, CUBLAS_OP_N);

    s.wide_out = 1;
    multiply(&s, w, x, y);
}

void R(cuda_product)(int m, int n, int k, const real *x, int ldx, const real *w, int ldw, real *y,
                     int ldy)
{
    struct shape s = shape(n, m, k, ldw, ldx, ldy, CUBLAS_OP_T, CUBLAS_OP_N);

    multiply(&s, w, x, y);
}

void R(cuda_back_input)(int m, int n, int k, const real *dy, int ldy, const real *w, real *dx,
                        int ldx, int add)
{
    struct shape s = shape(k, m, n, k, ldy, ldx, CUBLAS_OP_N, CUBLAS_OP_N);

    s.beta = add ? 1 : 0;
    multiply(&s, w, dy, dx);
}

void R(cuda_back_weight)(int m, int n, int k, const real *dy, int ldy, const real *x, int ldx,
                         wide *dw, int ldw)
{
    struct shape s = shape(k, n, m, ldx, ldy, ldw, CUBLAS_OP_N, CUBLAS_OP_T);

    s.beta = 1;
    s.wide_out = 1;
    multiply(&s, x, dy, dw);
}

/* All heads at once: qabs[m, lora] = q_nope[m, nope] W_uk[nope, lora]. */
void R(cuda_mla_absorb)(const struct mla_shape *s, int m, const real *q, int ldq, const real *kv_b,
                        real *qabs)
{
    int width = s->lora + s->rope, ld = s->heads * width;
    struct shape p = shape(s->lora, m, s->nope, s->lora, ldq, ld, CUBLAS_OP_N, CUBLAS_OP_N);

    p.batch = s->heads;
    p.stride_a = (long long)(s->nope + s->value) * s->lora;
    p.stride_b = s->nope + s->rope;
    p.stride_d = width;
    multiply(&p, kv_b, q, qabs);
    for (int h = 0; h < s->heads; h++)
        R(cuda_copy_columns)
    (m, s->rope, q + h * (s->nope + s->rope) + s->nope, ldq, qabs + h * width + s->lora, ld);
}

/* y[m, value] = o[m, lora] W_uv[value, lora]'. */
void R(cuda_mla_values)(const struct mla_shape *s, int m, const real *o, const real *kv_b, real *y)
{
    struct shape p = shape(s->value, m, s->lora, s->lora, s->heads * s->lora, s->heads * s->value,
                           CUBLAS_OP_T, CUBLAS_OP_N);

    p.batch = s->heads;
    p.stride_a = (long long)(s->nope + s->value) * s->lora;
    p.stride_b = s->lora;
    p.stride_d = s->value;
    multiply(&p, kv_b + (size_t)s->nope * s->lora, o, y);
}

/* CRC32C at the speed of memory.
 *
 * The crc32 instruction takes 8 bytes every 3 cycles, because each step waits for the one before:
 * about 7 GB/s, less than a core copies.  So large pieces are folded by carry-less multiplication:
 * four vectors hold a polynomial of 1024 bits that is congruent to all data so far; moving it up by
 * 1024 bits and adding the next 128 bytes keeps it so, and the four vectors do not wait for each
 * other (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
 * Instruction", Intel 2009).  What is left of the data in the end is 128 bytes for the crc32
 * instruction.  Three interleaved streams of crc32 instructions were tried instead; they defeat the
 * hardware's prefetching and came out at half the speed.
 *
 * A large copy is stored past the caches: the destination's lines need not be read first, which
 * saves a third of the memory traffic, and what the caches hold is not pushed out by bytes that
 * somebody else will read.  Loads go 128 bytes ahead of the stores: word by word, source and
 * destination at the same offset of a page look dependent to the processor, and a copy out of
 * page-aligned memory into malloc's was at half speed. */
#include "proto/crc.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

enum { POLYNOMIAL = 0x82f63b78 }; /* reflected: the highest power is the lowest bit */

static uint32_t table[256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint32_t times_x(uint32_t c)
{
    return c & 1 ? c >> 1 ^ (uint32_t)POLYNOMIAL : c >> 1;
}

static void make_table(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        table[i] = i;
        for (int k = 0; k < 8; k++)
            table[i] = times_x(table[i]);
    }
}

static uint32_t crc_table(uint32_t crc, const uint8_t *p, size_t len)
{
    pthread_once(&once, make_table);
    for (; len; len--)
        crc = crc >> 8 ^ table[(crc ^ *p++) & 0xff];
    return crc;
}

#ifdef __x86_64__
#include <immintrin.h>

#define CRC_TARGET  __attribute__((target("sse4.2")))
#define FOLD_TARGET __attribute__((target("sse4.2,avx2,pclmul,vpclmulqdq")))

enum {
    VECTORS = 4,
    FOLD = VECTORS * sizeof(__m256i),
    FOLD_MIN = 8 * FOLD,         /* less is not worth the preparation */
    PAST_CACHES_MIN = 256 << 10, /* a smaller copy is likely to be used soon */
};

CRC_TARGET static uint32_t crc_hardware(uint32_t crc, const uint8_t *p, size_t len)
{
    uint64_t c = crc, word;

    for (; len >= 8; len -= 8, p += 8) {
        memcpy(&word, p, 8);
        c = __builtin_ia32_crc32di(c, word);
    }
    for (; len; len--)
        c = __builtin_ia32_crc32qi((uint32_t)c, *p++);
    return (uint32_t)c;
}

CRC_TARGET static uint32_t copy_hardware(uint32_t crc, uint8_t *to, const uint8_t *from, size_t len)
{
    uint64_t c = crc, word;

    for (; len >= 8; len -= 8, from += 8, to += 8) {
        memcpy(&word, from, 8);
        memcpy(to, &word, 8);
        c = __builtin_ia32_crc32di(c, word);
    }
    for (; len; len--) {
        uint8_t byte = *from++;
        *to++ = byte;
        c = __builtin_ia32_crc32qi((uint32_t)c, byte);
    }
    return (uint32_t)c;
}

/* What multiplies the two halves of 128 bits to move them up by FOLD bytes: x^(8 FOLD + 32) and
 * x^(8 FOLD - 32) modulo the polynomial, shifted by the one bit that a product of reflected factors
 * lacks. */
static uint64_t fold_low, fold_high;
static pthread_once_t fold_once = PTHREAD_ONCE_INIT;

static void make_fold(void)
{
    uint32_t power = 0x80000000; /* x^0 */

    for (int i = 0; i < 8 * FOLD + 32; i++) {
        if (i == 8 * FOLD - 32)
            fold_high = (uint64_t)power << 1;
        power = times_x(power);
    }
    fold_low = (uint64_t)power << 1;
}

FOLD_TARGET static __m256i folded(__m256i sum, __m256i by, __m256i next)
{
    __m256i low = _mm256_clmulepi64_epi128(sum, by, 0x00);
    __m256i high = _mm256_clmulepi64_epi128(sum, by, 0x11);

    return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}

typedef void store_vector(uint8_t *to, __m256i v);

FOLD_TARGET static inline void store_none(uint8_t *to, __m256i v)
{
}

FOLD_TARGET static inline void store_cached(uint8_t *to, __m256i v)
{
    _mm256_storeu_si256((__m256i *)to, v);
}

FOLD_TARGET static inline void store_past_caches(uint8_t *to, __m256i v)
{
    _mm256_stream_si256((__m256i *)to, v);
}

/* `len` is a multiple of FOLD, at least one.  Inlined for each way to store. */
FOLD_TARGET __attribute__((always_inline)) static inline uint32_t
fold(uint32_t crc, uint8_t *to, const uint8_t *from, size_t len, store_vector *store)
{
    __m256i sum[VECTORS] = {0}, next[VECTORS];
    uint8_t rest[FOLD];

    pthread_once(&fold_once, make_fold);
    __m256i by = _mm256_broadcastsi128_si256(_mm_set_epi64x((int64_t)fold_high, (int64_t)fold_low));
    __m256i start = _mm256_castsi128_si256(_mm_cvtsi32_si128((int)crc));
    start = _mm256_inserti128_si256(start, _mm_setzero_si128(), 1);
    for (size_t at = 0; at < len; at += FOLD) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            next[v] = _mm256_loadu_si256((const __m256i *)(from + at) + v);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            store(to + at + v * sizeof *next, next[v]);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            sum[v] = at ? folded(sum[v], by, next[v]) : next[v];
        if (!at)
            sum[0] = _mm256_xor_si256(sum[0], start);
    }
    memcpy(rest, sum, sizeof rest);
    return crc_hardware(0, rest, sizeof rest);
}

FOLD_TARGET static uint32_t crc_fold(uint32_t crc, const uint8_t *p, size_t len)
{
    size_t whole = len - len % FOLD;

    return crc_hardware(fold(crc, NULL, p, whole, store_none), p + whole, len - whole);
}

FOLD_TARGET static uint32_t copy_fold(uint32_t crc, uint8_t *to, const uint8_t *from, size_t len)
{
    size_t head = -(uintptr_t)to % sizeof(__m256i), whole = (len - head) / FOLD * FOLD;

    crc = copy_hardware(crc, to, from, head);
    if (len < PAST_CACHES_MIN) {
        crc = fold(crc, to + head, from + head, whole, store_cached);
    } else {
        crc = fold(crc, to + head, from + head, whole, store_past_caches);
        _mm_sfence();
    }
    head += whole;
    return copy_hardware(crc, to + head, from + head, len - head);
}

static bool can_fold(void)
{
    return __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx2") &&
           __builtin_cpu_supports("pclmul");
}
#endif

uint32_t lh_crc32c(uint32_t crc, const void *data, size_t len)
{
    crc = ~crc;
#ifdef __x86_64__
    if (len >= FOLD_MIN && can_fold())
        return ~crc_fold(crc, data, len);
    if (__builtin_cpu_supports("sse4.2"))
        return ~crc_hardware(crc, data, len);
#endif
    return ~crc_table(crc, data, len);
}

uint32_t lh_crc32c_copy(uint32_t crc, void *to, const void *from, size_t len)
{
    crc = ~crc;
#ifdef __x86_64__
    if (len >= FOLD_MIN && can_fold())
        return ~copy_fold(crc, to, from, len);
    if (__builtin_cpu_supports("sse4.2"))
        return ~copy_hardware(crc, to, from, len);
#endif
    memcpy(to, from, len);
    return ~crc_table(crc, to, len);
}

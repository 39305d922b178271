#include "proto/crc.h"

#include <pthread.h>
#include <string.h>

static uint32_t table[256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_table(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++)
            c = c & 1 ? c >> 1 ^ 0x82f63b78u : c >> 1;
        table[i] = c;
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
__attribute__((target("sse4.2"))) static uint32_t crc_hardware(uint32_t crc, const uint8_t *p,
                                                               size_t len)
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

/* Through registers: memcpy of a piece followed by a checksum of it is three times slower where
 * memcpy is `rep movsb`, which leaves the copy outside of the cache. */
__attribute__((target("sse4.2"))) static uint32_t copy_hardware(uint32_t crc, uint8_t *to,
                                                                const uint8_t *from, size_t len)
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
#endif

uint32_t lh_crc32c(uint32_t crc, const void *data, size_t len)
{
    crc = ~crc;
#ifdef __x86_64__
    if (__builtin_cpu_supports("sse4.2"))
        return ~crc_hardware(crc, data, len);
#endif
    return ~crc_table(crc, data, len);
}

uint32_t lh_crc32c_copy(uint32_t crc, void *to, const void *from, size_t len)
{
    crc = ~crc;
#ifdef __x86_64__
    if (__builtin_cpu_supports("sse4.2"))
        return ~copy_hardware(crc, to, from, len);
#endif
    memcpy(to, from, len);
    return ~crc_table(crc, to, len);
}

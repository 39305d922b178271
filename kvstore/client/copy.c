/* Copy and checksum in one pass: pieces small enough for the first-level cache, so that memory is
 * read once.  Out of the store the checksum is of the private copy: what was checked is what will
 * be used, whatever happens to the shared pages meanwhile. */
#include <string.h>

#include "kvstore/client/internal.h"
#include "proto/crc.h"

enum { PIECE = 16 << 10 };

static uint32_t copy(void *to, const void *from, size_t len, const uint8_t *checked)
{
    uint32_t crc = 0;

    for (size_t at = 0; at < len; at += PIECE) {
        size_t n = len - at < PIECE ? len - at : PIECE;
        memcpy((uint8_t *)to + at, (const uint8_t *)from + at, n);
        crc = lh_crc32c(crc, checked + at, n);
    }
    return crc;
}

uint32_t kv_copy_out(void *to, const void *from, size_t len)
{
    return copy(to, from, len, to);
}

uint32_t kv_copy_in(void *to, const void *from, size_t len)
{
    return copy(to, from, len, from);
}

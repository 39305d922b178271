/* CRC32C (Castagnoli), the checksum of every chunk that leaves a process: KV objects, ledger
 * segments.  Hardware instruction where the CPU has it, table otherwise; same value. */
#ifndef PROTO_CRC_H
#define PROTO_CRC_H

#include <stddef.h>
#include <stdint.h>

/* Continues from `crc`; start with 0. */
uint32_t lh_crc32c(uint32_t crc, const void *data, size_t len);
/* memcpy and checksum in one pass over memory: the value is of what was written to `to`, even if
 * `from` changes meanwhile. */
uint32_t lh_crc32c_copy(uint32_t crc, void *to, const void *from, size_t len);

#endif

/* Bytes as hexadecimal digits, for digests and version ids that people see. */
#ifndef PROTO_HEX_H
#define PROTO_HEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* `text` has room for 2n + 1 characters. */
void lh_hex_print(const uint8_t *bytes, size_t n, char *text);
/* False unless text is exactly 2n digits of either case. */
bool lh_hex_parse(const char *text, uint8_t *bytes, size_t n);

#endif

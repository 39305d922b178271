/* Identifiers: 128 bits, 48 of them milliseconds since 1970, the rest random; sortable by time.
 *
 * Printed in 26 characters of Crockford's base 32 (the ULID text form): no I, L, O, U; upper case.
 * Everything that is created outside the process (sandbox, cgroup, layer, segment file) carries
 * one, recorded before the thing is created. */
#ifndef PROTO_ID_H
#define PROTO_ID_H

#include <stdbool.h>
#include <stdint.h>

enum { LH_ID_TEXT = 26, LH_ID_SIZE = LH_ID_TEXT + 1 }; /* with the terminating NUL */

struct lh_id {
    uint8_t bytes[16];
};

/* A new id; never the same twice, also across processes (getrandom). */
struct lh_id lh_id_new(void);
void lh_id_print(const struct lh_id *id, char text[LH_ID_SIZE]);
/* False when text is not exactly 26 characters of the alphabet or exceeds 128 bits. */
bool lh_id_parse(const char *text, struct lh_id *id);
/* lh_id_new + lh_id_print. */
void lh_id_new_text(char text[LH_ID_SIZE]);
bool lh_id_text_valid(const char *text);

#endif

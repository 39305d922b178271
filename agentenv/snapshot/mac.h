/* A message authentication code for what is restored with privilege.
 *
 * A process image that comes from outside is believed only with the code that our key gives it
 * (docs/DESIGN.md 3.4): HMAC-SHA-512/256 (libsodium's crypto_auth) of the manifest that names all
 * of its files with their digests. */
#ifndef AGENTENV_SNAPSHOT_MAC_H
#define AGENTENV_SNAPSHOT_MAC_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/error.h"

enum { MAC_KEY = 32, MAC_BYTES = 32 };

struct mac_key {
    uint8_t bytes[MAC_KEY];
};

/* Reads a key file: 32 bytes, or 64 hexadecimal digits and a newline.  PERMISSION_DENIED when
 * others than its owner may read or write it. */
int mac_key_load(const char *path, struct mac_key *key, struct lh_error *err);
/* Makes one, mode 0600, which is there whole or not at all; ALREADY_EXISTS rather than replace it.
 */
int mac_key_create(const char *path, struct lh_error *err);
void mac_key_forget(struct mac_key *key);

int mac_of_text(const struct mac_key *key, const char *text, uint8_t mac[MAC_BYTES],
                struct lh_error *err);

/* In constant time. */
bool mac_equal(const uint8_t a[MAC_BYTES], const uint8_t b[MAC_BYTES]);

#endif

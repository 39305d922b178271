/* What a layer is called by its content. */
#ifndef AGENTENV_SNAPSHOT_ADDRESS_H
#define AGENTENV_SNAPSHOT_ADDRESS_H

#include <stdint.h>

#include "proto/error.h"

enum { LAYER_ADDRESS = 32, LAYER_ADDRESS_SIZE = 2 * LAYER_ADDRESS + 1 };

/* BLAKE2b-256 over the canonical walk (layerwalk.h) of the layer at `path`, in hexadecimal.  Reads
 * every byte of it; *bytes (may be NULL) is how many those were. */
int layer_address(const char *path, char address[LAYER_ADDRESS_SIZE], uint64_t *bytes,
                  struct lh_error *err);

#endif

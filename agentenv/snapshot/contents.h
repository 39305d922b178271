/* Layers by content (address.h): found out in the background, used to keep one of equal layers, to
 * check what lies there, and to export. */
#ifndef AGENTENV_SNAPSHOT_CONTENTS_H
#define AGENTENV_SNAPSHOT_CONTENTS_H

#include "agentenv/daemon/internal.h"
#include "agentenv/snapshot/address.h"

/* The thread that addresses layers which have been kept for CONTENTS_AFTER_MS. */
int contents_start(struct daemon *d, struct lh_error *err);
void contents_stop(struct daemon *d);

/* One round of that thread, for layers older than `after_ms`; how many it addressed, or an error.
 */
int contents_round(struct daemon *d, int64_t after_ms, struct lh_error *err);

/* The address of a sealed layer, computed now if it is not known. */
int contents_of(struct daemon *d, const char *layer, char address[LAYER_ADDRESS_SIZE],
                struct lh_error *err);

/* Reads every addressed layer again; problem() for each that is not what it was. */
int contents_audit(struct daemon *d, void (*problem)(void *ctx, const char *text), void *ctx,
                   struct lh_error *err);

#endif

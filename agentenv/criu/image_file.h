/* A file of CRIU's: a magic number, then messages, each behind its length. */
#ifndef AGENTENV_CRIU_IMAGE_FILE_H
#define AGENTENV_CRIU_IMAGE_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "proto/error.h"
#include "proto/parse.h"

enum { IMAGE_MAGIC = 8 }; /* bytes in front of the first message */

struct image {
    uint8_t *bytes;
    size_t len, at; /* of the next message */
};

/* Of a directory; NOT_FOUND without the file.  The caller frees out->bytes, also after an error. */
int image_read(int dir, const char *name, struct image *out, struct lh_error *err);
bool image_at_end(const struct image *i);
/* The next message, with what is unknown of it; the caller frees.  NULL is an error: ask for the
 * end first. */
ProtobufCMessage *image_next(struct image *i, const ProtobufCMessageDescriptor *type,
                             struct lh_error *err);
int image_write(int fd, const ProtobufCMessage *m, struct lh_error *err);

#endif

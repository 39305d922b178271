/* Credentials of a remote tier, from a file that nobody but its owner may read.  Lines of
 * "name = value", as in the files of the AWS command line, whose names these are; [sections] and
 * lines that begin with # mean nothing.
 *
 *     aws_access_key_id, aws_secret_access_key, aws_session_token, region, endpoint_url     S3
 *     user, password                                                                     Redis
 *
 * They are never logged and never leave the process but to the peer. */
#ifndef KVSTORE_TIER_REMOTE_SECRETS_H
#define KVSTORE_TIER_REMOTE_SECRETS_H

#include <stddef.h>

#include "proto/error.h"

enum kv_secret {
    KV_S3_KEY,
    KV_S3_SECRET,
    KV_S3_TOKEN,
    KV_S3_REGION,
    KV_S3_ENDPOINT,
    KV_REDIS_USER,
    KV_REDIS_PASSWORD,
    KV_SECRETS
};

struct kv_secrets {
    char *text; /* owns what values point to */
    size_t len;
    const char *value[KV_SECRETS]; /* NULL = not given */
};

/* No path: nothing is given.  FAILED_PRECONDITION when group or others may read the file,
 * INVALID_ARGUMENT for a name that is not known. */
int kv_secrets_read(struct kv_secrets *s, const char *path, struct lh_error *err);
void kv_secrets_wipe(struct kv_secrets *s);

#endif

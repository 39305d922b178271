/* Images that share their pages with those of an earlier checkpoint. */
#ifndef AGENTENV_CRIU_SHARE_H
#define AGENTENV_CRIU_SHARE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/error.h"

struct criu_shared {
    uint64_t pages;  /* of the tasks' memory */
    uint64_t shared; /* of them, in the images of `base` */
};

/* All directories are descriptors; `to` is empty, of the same file system as the others, and
 * becomes what `images` are, with less in it.  It goes with its content after an error.  Nothing
 * else is changed, nothing is flushed. */
int criu_share(int images, int base, int to, struct criu_shared *out, struct lh_error *err);

bool criu_shares(int images); /* whether they are such already */
/* DATA_LOSS when a page that the images tell of is not there; looks at maps and sizes, reads no
 * page. */
int criu_check(int images, struct lh_error *err);

#endif

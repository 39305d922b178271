#include "agentenv/snapshot/outside.h"

#include <errno.h>
#include <fcntl.h>

#include "proto/clock.h"
#include "proto/file.h"

enum { TRANSFER_MS = 3600000 };

char *outside_layer_name(const char *address)
{
    return lh_format(OUTSIDE_LAYERS "/%s.tar.zst", address);
}

char *outside_manifest_name(const char *digest)
{
    return lh_format("manifests/%s.json", digest);
}

char *outside_processes_name(const char *digest)
{
    return lh_format(OUTSIDE_PROCESSES "/%s.tar.zst", digest);
}

int outside_temporary(struct daemon *d, struct lh_error *err)
{
    int fd = open(d->state_dir, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);

    return fd < 0 ? lh_fail_errno(err, errno, "a temporary file in %s", d->state_dir) : fd;
}

int64_t outside_deadline_ms(const struct rpc_call *call)
{
    int64_t theirs = call ? rpc_deadline_ms(call) : INT64_MAX;

    return theirs == INT64_MAX ? lh_now_ms() + TRANSFER_MS : theirs;
}

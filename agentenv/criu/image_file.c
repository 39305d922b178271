#include "agentenv/criu/image_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/file.h"

enum { IMAGE_MAX = 64 << 20 };

int image_read(int dir, const char *name, struct image *out, struct lh_error *err)
{
    lh_autoclose int fd = openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    struct stat st;

    if (fd < 0 || fstat(fd, &st) < 0)
        return lh_fail_errno(err, errno, "image %s", name);
    if (st.st_size < IMAGE_MAGIC || st.st_size > IMAGE_MAX)
        return lh_fail(err, LH_DATA_LOSS, "image %s has %lld bytes", name, (long long)st.st_size);
    *out = (struct image){malloc((size_t)st.st_size), (size_t)st.st_size, IMAGE_MAGIC};
    if (!out->bytes || pread(fd, out->bytes, out->len, 0) != st.st_size)
        return lh_fail_errno(err, out->bytes ? EIO : ENOMEM, "reading image %s", name);
    return 0;
}

bool image_at_end(const struct image *i)
{
    return i->at == i->len;
}

ProtobufCMessage *image_next(struct image *i, const ProtobufCMessageDescriptor *type,
                             struct lh_error *err)
{
    size_t left = i->len - i->at;
    uint32_t len = 0;

    if (left >= sizeof len)
        memcpy(&len, i->bytes + i->at, sizeof len);
    if (len == 0 || len > left - sizeof len)
        return lh_fail(err, LH_DATA_LOSS, "a message of %u bytes in an image of %zu", len, i->len),
               NULL;
    const uint8_t *at = i->bytes + i->at + sizeof len;
    i->at += sizeof len + len;
    return lh_parse(type, at, len, (struct lh_parse_limits){0}, err);
}

int image_write(int fd, const ProtobufCMessage *m, struct lh_error *err)
{
    size_t len;
    lh_autofree uint8_t *bytes = lh_pack(m, &len, err);
    uint32_t head = (uint32_t)len;

    if (!bytes)
        return LH_RESOURCE_EXHAUSTED;
    int r = lh_write_all(fd, &head, sizeof head, err);
    return r < 0 ? r : lh_write_all(fd, bytes, len, err);
}

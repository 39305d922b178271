/* One correction to CRIU's images.
 *
 * PID 1 of a sandbox runs a memfd (sandbox/host.c), so that no image can provide or overwrite it.
 * CRIU dumps and restores the mappings of a memfd, but not a memfd as the executable, to which
 * /proc/1/exe points: it looks for a regular file under that number and finds none.  So PID 1 is
 * given another file for an executable, one that exists in the restored root; nothing is ever
 * mapped from it.  Otherwise init would need a name inside, in reach of the agent.
 *
 * An image is a magic number and messages, each behind its length. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/criu/engine.h"
#include "criu/criu.pb-c.h"
#include "proto/cleanup.h"
#include "proto/file.h"
#include "proto/parse.h"

enum { MAGIC = 8, IMAGE_MAX = 64 << 20, REGULAR = 1, OUR_ID = 0x7ffffff0 };

struct image {
    uint8_t *bytes;
    size_t len;
};

static int image_read(int dir, const char *name, struct image *out, struct lh_error *err)
{
    lh_autoclose int fd = openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    struct stat st;

    if (fd < 0 || fstat(fd, &st) < 0)
        return lh_fail_errno(err, errno, "image %s", name);
    if (st.st_size < MAGIC || st.st_size > IMAGE_MAX)
        return lh_fail(err, LH_DATA_LOSS, "image %s has %lld bytes", name, (long long)st.st_size);
    out->len = (size_t)st.st_size;
    out->bytes = malloc(out->len);
    if (!out->bytes || pread(fd, out->bytes, out->len, 0) != st.st_size)
        return lh_fail_errno(err, out->bytes ? EIO : ENOMEM, "reading image %s", name);
    return 0;
}

static int write_message(int fd, const ProtobufCMessage *m, struct lh_error *err)
{
    size_t len;
    lh_autofree uint8_t *bytes = lh_pack(m, &len, err);
    uint32_t head = (uint32_t)len;

    if (!bytes)
        return LH_RESOURCE_EXHAUSTED;
    int r = lh_write_all(fd, &head, sizeof head, err);
    return r < 0 ? r : lh_write_all(fd, bytes, len, err);
}

/* The first message of the image, with what is unknown of it. */
static ProtobufCMessage *first_message(const struct image *i,
                                       const ProtobufCMessageDescriptor *type, struct lh_error *err)
{
    uint32_t len = 0;

    if (i->len >= MAGIC + sizeof len)
        memcpy(&len, i->bytes + MAGIC, sizeof len);
    if (len == 0 || len > i->len - MAGIC - sizeof len)
        return lh_fail(err, LH_DATA_LOSS, "a message of %u bytes in an image of %zu", len, i->len),
               NULL;
    return lh_parse(type, i->bytes + MAGIC + sizeof len, len, (struct lh_parse_limits){0}, err);
}

static int point_to_ours(int images, struct lh_error *err)
{
    static const char name[] = "mm-1.img";
    struct image i = {0};
    int r = image_read(images, name, &i, err);
    lh_autofree uint8_t *bytes = i.bytes;

    if (r < 0)
        return r;
    lh_automsg(Criu__MemoryMap) mm =
        (Criu__MemoryMap *)first_message(&i, &criu__memory_map__descriptor, err);
    if (!mm)
        return lh_wrap(err, "image %s", name);
    mm->exe_file_id = OUR_ID;
    lh_autoclose int fd = openat(images, name, O_WRONLY | O_TRUNC | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return lh_fail_errno(err, errno, "image %s", name);
    r = lh_write_all(fd, bytes, MAGIC, err);
    return r < 0 ? r : write_message(fd, &mm->base, err);
}

static int append_ours(int images, const char *path, int mount_id, struct lh_error *err)
{
    Criu__Owner owner = CRIU__OWNER__INIT;
    Criu__RegularFile reg = CRIU__REGULAR_FILE__INIT;
    Criu__File file = CRIU__FILE__INIT;

    reg.id = file.id = OUR_ID;
    reg.fown = &owner;
    reg.name = (char *)path;
    reg.has_mnt_id = 1;
    reg.mnt_id = mount_id;
    file.type = REGULAR;
    file.reg = &reg;
    lh_autoclose int fd = openat(images, "files.img", O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return lh_fail_errno(err, errno, "image files.img");
    return write_message(fd, &file.base, err);
}

int criu_set_executable(int images, const char *path, int mount_id, struct lh_error *err)
{
    int r = point_to_ours(images, err);

    return r < 0 ? r : append_ours(images, path, mount_id, err);
}

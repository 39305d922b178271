/* One correction to CRIU's images.
 *
 * PID 1 of a sandbox runs a memfd (sandbox/host.c), so that no image can provide or overwrite it.
 * CRIU dumps and restores the mappings of a memfd, but not a memfd as the executable, to which
 * /proc/1/exe points: it looks for a regular file under that number and finds none.  So PID 1 is
 * given another file for an executable, one that exists in the restored root; nothing is ever
 * mapped from it.  Otherwise init would need a name inside, in reach of the agent. */
#include <errno.h>
#include <fcntl.h>

#include "agentenv/criu/engine.h"
#include "agentenv/criu/image_file.h"
#include "criu/criu.pb-c.h"
#include "proto/cleanup.h"
#include "proto/file.h"
#include "proto/parse.h"

enum { REGULAR = 1, OUR_ID = 0x7ffffff0 };

static int point_to_ours(int images, struct lh_error *err)
{
    static const char name[] = "mm-1.img";
    struct image i = {0};
    int r = image_read(images, name, &i, err);
    lh_autofree uint8_t *bytes = i.bytes;

    if (r < 0)
        return r;
    lh_automsg(Criu__MemoryMap) mm =
        (Criu__MemoryMap *)image_next(&i, &criu__memory_map__descriptor, err);
    if (!mm)
        return lh_wrap(err, "image %s", name);
    mm->exe_file_id = OUR_ID;
    lh_autoclose int fd = openat(images, name, O_WRONLY | O_TRUNC | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return lh_fail_errno(err, errno, "image %s", name);
    r = lh_write_all(fd, bytes, IMAGE_MAGIC, err);
    return r < 0 ? r : image_write(fd, &mm->base, err);
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
    return image_write(fd, &file.base, err);
}

int criu_set_executable(int images, const char *path, int mount_id, struct lh_error *err)
{
    int r = point_to_ours(images, err);

    return r < 0 ? r : append_ours(images, path, mount_id, err);
}

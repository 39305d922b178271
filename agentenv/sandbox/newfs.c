/* Apart from overlay.c because the spawner's program is linked of few parts. */
#include <sys/mount.h>

#include "agentenv/sandbox/overlay.h"

int overlay_new_fs(const char *type, const char *const options[], unsigned attributes)
{
    lh_autoclose int ctx = fsopen(type, FSOPEN_CLOEXEC);

    if (ctx < 0)
        return -1;
    for (; options && *options; options += 2)
        if (fsconfig(ctx, FSCONFIG_SET_STRING, options[0], options[1], 0) < 0)
            return -1;
    if (fsconfig(ctx, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
        return -1;
    return fsmount(ctx, FSMOUNT_CLOEXEC, attributes);
}

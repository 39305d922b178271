/* An ordinary user's overlay keeps its notes in user.overlay.*, and what programs set under such
 * names one level deeper.  In a layer's address and in archives all have root's names. */
#include <stdio.h>
#include <string.h>

#include "agentenv/sandbox/facts.h"
#include "agentenv/snapshot/layerwalk.h"

#define ROOTS "trusted.overlay."
#define USERS "user.overlay."
#define DEEP  "overlay."

static bool begins(const char *text, const char *with)
{
    return strncmp(text, with, strlen(with)) == 0;
}

const char *layer_xattr_canonical(const char *name, char out[LAYER_XATTR_NAME])
{
    if (!box_facts()->rootless || !begins(name, USERS))
        return name;
    const char *rest = name + strlen(USERS);
    if (begins(rest, DEEP))
        snprintf(out, LAYER_XATTR_NAME, USERS "%s", rest + strlen(DEEP));
    else
        snprintf(out, LAYER_XATTR_NAME, ROOTS "%s", rest);
    return out;
}

const char *layer_xattr_on_disk(const char *name, char out[LAYER_XATTR_NAME])
{
    if (!box_facts()->rootless || (!begins(name, ROOTS) && !begins(name, USERS)))
        return name;
    if (begins(name, ROOTS))
        snprintf(out, LAYER_XATTR_NAME, USERS "%s", name + strlen(ROOTS));
    else
        snprintf(out, LAYER_XATTR_NAME, USERS DEEP "%s", name + strlen(USERS));
    return out;
}

const char *layer_opaque(void)
{
    return box_facts()->rootless ? USERS "opaque" : LAYER_OPAQUE;
}

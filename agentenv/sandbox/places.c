#include "agentenv/sandbox/places.h"

#include <stdlib.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/file.h"

/* The specification takes absolute paths only. */
static const char *absolute(const char *name)
{
    const char *value = getenv(name);

    return value && value[0] == '/' ? value : NULL;
}

char *box_default_state(void)
{
    const char *data = absolute("XDG_DATA_HOME"), *home = absolute("HOME");

    if (geteuid() == 0 || (!data && !home))
        return NULL;
    return data ? lh_format("%s/agentenv", data) : lh_format("%s/.local/share/agentenv", home);
}

char *box_default_socket(void)
{
    const char *runtime = absolute("XDG_RUNTIME_DIR");

    if (geteuid() == 0)
        return NULL;
    if (runtime)
        return lh_format("%s/agentenv.sock", runtime);
    lh_autofree char *state = box_default_state();
    return state ? lh_format("%s/socket", state) : NULL;
}

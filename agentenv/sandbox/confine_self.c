#include <stdbool.h>
#include <sys/capability.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include "agentenv/sandbox/confine.h"
#include "proto/cleanup.h"

/* What the root of a sandbox keeps: what package managers, su and chown need, over ids of the
 * sandbox only. */
static const cap_value_t kept[] = {CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID,
                                   CAP_KILL,  CAP_SETGID,       CAP_SETUID};

static int cut_bounding_set(void)
{
    for (cap_value_t v = 0; v < cap_max_bits(); v++) {
        bool keep = false;
        for (size_t i = 0; i < LH_ARRAY_SIZE(kept); i++)
            keep |= kept[i] == v;
        if (!keep && cap_drop_bound(v) < 0)
            return -1;
    }
    return 0;
}

/* Of what a new user namespace gives.  Only the bounding set would be left to an exec to apply, and
 * none follows. */
static int keep_few(void)
{
    cap_t c = cap_init();
    int r = -1;

    if (c && cap_set_flag(c, CAP_PERMITTED, LH_ARRAY_SIZE(kept), kept, CAP_SET) == 0 &&
        cap_set_flag(c, CAP_EFFECTIVE, LH_ARRAY_SIZE(kept), kept, CAP_SET) == 0)
        r = cap_set_proc(c);
    cap_free(c);
    return r;
}

/* Lower, never higher, which needs a right that not every daemon has. */
static int lower(int what, rlim_t value)
{
    struct rlimit l;

    if (getrlimit(what, &l) < 0)
        return -1;
    if (l.rlim_max > value)
        l.rlim_max = value;
    l.rlim_cur = l.rlim_max;
    return setrlimit(what, &l);
}

/* Inherited limits are often huge.  Open files are limited for each command, not for init. */
int confine_self(const struct confine_limits *limits)
{
    const rlim_t any = RLIM_INFINITY;
    const struct {
        int what;
        rlim_t value;
    } table[] = {{RLIMIT_CORE, 0},
                 {RLIMIT_MEMLOCK, 64 * 1024},
                 {RLIMIT_MSGQUEUE, 819200},
                 {RLIMIT_FSIZE, limits->file_bytes},
                 {RLIMIT_DATA, limits->data_bytes ? limits->data_bytes : any},
                 {RLIMIT_NPROC, limits->processes ? limits->processes : any}};

    for (size_t i = 0; i < LH_ARRAY_SIZE(table); i++)
        if (table[i].value != any && lower(table[i].what, table[i].value) < 0)
            return -1;
    return cut_bounding_set() < 0 || keep_few() < 0 ? -1 : prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
}

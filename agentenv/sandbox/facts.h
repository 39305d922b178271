/* What this process may count on: decided once, at the start, and the same for its life.
 *
 * Root has everything; that is the table's initial content, which costs nothing and is never
 * changed.  An ordinary user's daemon (rootless.h) fills it in before box_host_create().  All that
 * root and an ordinary user do differently hangs on a field of this table, not on who they are.
 *
 * Threads: written only while there is one. */
#ifndef AGENTENV_SANDBOX_FACTS_H
#define AGENTENV_SANDBOX_FACTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct box_facts {
    bool rootless;
    uid_t uid_base;     /* of a sandbox's id 0, as this process sees it: its own, with one id */
    uint32_t uid_count; /* ids 0 to uid_count - 1 exist inside: 1, or nearly 65536 */
    uid_t init_uid;     /* of init, inside: BOX_INIT_UID, or 0 with one id */
    uid_t host_root;    /* who owns the files of the host's root, as this process sees them */
    bool idmap;         /* files with the ids of an image can be mapped; else they are shifted */
    bool cgroups;       /* sandboxes are stopped, killed and counted by cgroups */
    bool limits;        /* memory, pids and cpu are limited by them */
    const char *overlay_xattr; /* what overlay's attributes begin with */
    char *processes;           /* without cgroups: the directory that stands for them */
    char no_cgroups[200];      /* why not; and the same of limits */
    char no_limits[200];
};

const struct box_facts *box_facts(void);
/* For rootless.c and cgroup_rootless.c. */
struct box_facts *box_facts_set(void);

/* The i-th thing that root has and this process may go without; false behind the last.  `cost` says
 * what its absence means and what to do about it. */
struct box_offer {
    const char *what;
    bool there;
    const char *cost;
};

bool box_offer(size_t i, struct box_offer *out);

#endif

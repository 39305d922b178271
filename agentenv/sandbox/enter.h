/* From a fresh process in fresh namespaces to agentenv-init: the part of a start that runs inside.
 */
#ifndef AGENTENV_SANDBOX_ENTER_H
#define AGENTENV_SANDBOX_ENTER_H

#include <stdint.h>

#include "agentenv/sandbox/box.h"
#include "agentenv/sandbox/confine.h"

struct enter {
    int root;    /* detached overlay */
    int control; /* init's end of the first control socket; failures are reported there */
    struct confine_limits limits;
    bool one_uid; /* no id but 0 is mapped, and groups cannot be set */
    enum box_network network;
    char hostname[65];
};

/* In namespaces of its own, with the cgroups entered.  When it returns the process
 * is confined, has no descriptor but 0 to 2 and the control socket, and is to serve as init; a
 * failure is reported on that socket and ends it. */
void enter_sandbox(const struct enter *e);

/* For a live seal, in a child of the spawner: enters the namespaces and puts the overlay `root`
 * under the processes there; /proc and the mounts in /dev move over.  0 or an errno. */
int enter_switch_root(int user_ns, int mount_ns, int root);

/* lo of the network namespace that the caller is in.  0, or -1 with errno. */
int enter_loopback_up(void);

/* The i-th file of the host that is bind-mounted in every sandbox, as far as its kernel has what it
 * covers; false behind the last. */
bool enter_bind(size_t i, char inside[64], char outside[64]);

/* A device that the host's root, who appears here as `root`, does not own may be changed by every
 * sandbox: see enter.c. NULL = all is well, else the name of one that is wrong. */
const char *enter_bad_device(uid_t root);

#endif

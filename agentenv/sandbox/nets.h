/* Network namespaces of throw-away sandboxes without a network, used again.  See nets.c. */
#ifndef AGENTENV_SANDBOX_NETS_H
#define AGENTENV_SANDBOX_NETS_H

/* Puts the calling process into an empty network namespace; the number of its place for
 * nets_leave(), or -1: there is none, and the caller asks the kernel for its own. */
int nets_enter(void);
/* The process goes back to the host's; `pidfd` (-1 = it was not used after all) is of the init that
 * stays there.  Copies the descriptor. */
void nets_leave(int place, int pidfd);

#endif

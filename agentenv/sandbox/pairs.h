/* Pairs of a user and a network namespace, used by one sandbox after the other; in the spawner. */
#ifndef AGENTENV_SANDBOX_PAIRS_H
#define AGENTENV_SANDBOX_PAIRS_H

#include <stdbool.h>

struct pair;

/* One that nobody lives in; with `fresh` one that nobody ever did.  `map`, of user ids and of group
 * ids, is the same each time.  NULL with errno. */
struct pair *pairs_take(bool fresh, const char *map);
/* A process with one thread goes there.  0 or -errno. */
int pairs_enter(const struct pair *p);
/* Who took it says who lives there: a pidfd, of which a copy is kept; -1 = nobody. */
void pairs_leave(struct pair *p, int pidfd);

#endif

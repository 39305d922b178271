/* What the processes of a job agree on (docs/JOBDIR.md): their exit statuses, and that none of them
 * outlives its supervisor. */
#ifndef PROTO_PROCESS_H
#define PROTO_PROCESS_H

#include <stdbool.h>

/* Beside EXIT_SUCCESS and EXIT_FAILURE. */
enum {
    LH_EXIT_USAGE = 2,
    LH_EXIT_TRY_AGAIN = 75, /* a peer it needs is gone: the supervisor restarts it */
};

/* Set by the supervisor, to its pid. */
#define LH_SUPERVISED "LONGHAUL_SUPERVISED"

/* Asks the kernel for `signal` when the supervisor dies.  False: it is dead already, so end now.
 * True without a supervisor. */
bool lh_follow_supervisor(int signal);

#endif

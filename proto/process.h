/* What the processes of a job agree on (docs/JOBDIR.md): their exit statuses, that none of them
 * outlives its supervisor, and where they find each other. */
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

/* The directory of the running program, where its siblings are.  Owned by the caller; NULL without
 * memory or /proc. */
char *lh_program_dir(void);

#endif

/* What other programs, and the kernel alone, take for a command in a fresh sandbox.
 *
 * To be asked before anything has threads: each is measured in a child that forks.  A figure of 0
 * says that the program is not there, or cannot do it here, and stderr says why. */
#ifndef TESTS_BENCH_PEERS_H
#define TESTS_BENCH_PEERS_H

struct peer_figures {
    double ms;         /* median of one after the other */
    double per_second; /* four at a time */
};

enum peer {
    PEER_FLOOR, /* bare system calls: the namespaces, an overlay, four cgroups, exec; and their end
                 */
    PEER_BWRAP, /* bwrap --unshare-all */
    PEER_CRUN,  /* crun run */
    PEER_SPAWN, /* posix_spawn() of the command, without any sandbox */
    PEERS,
};

const char *peer_name(enum peer which);
/* /bin/true in the root file system `root`; `dir` is for what it needs. */
struct peer_figures peer_measure(enum peer which, const char *root, const char *dir);

#endif

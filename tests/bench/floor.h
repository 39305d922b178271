/* The least that this kernel takes for a sandbox as agentenv makes them: the same namespaces, an
 * overlay with a fresh upper directory, an ID-mapped base, pivot_root, a new /proc, the same
 * cgroups, one command, and the end of it all.  No checks, no init, no second command, no record,
 * no device nodes, no seccomp, no limits: nobody could use it. */
#ifndef TESTS_BENCH_FLOOR_H
#define TESTS_BENCH_FLOOR_H

int floor_prepare(const char *dir); /* in each process that runs some */
int floor_run(const char *root, const char *dir, const char *name); /* 0, or -1 with errno */

#endif

/* What processes really hold, read from /proc rather than believed from their acks. */
#ifndef ARBITER_HOLDERS_H
#define ARBITER_HOLDERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Bytes of mappings in /proc/PID/maps for whose inode `counts` says true.  0 when the process is
 * gone. */
typedef bool holders_counts_fn(const void *ctx, ino_t inode);
uint64_t holders_mapped_bytes(pid_t pid, holders_counts_fn *counts, const void *ctx);

/* Anonymous resident memory: what a process has outside every segment. */
uint64_t holders_outside_bytes(pid_t pid);

#endif

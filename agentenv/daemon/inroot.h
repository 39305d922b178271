/* Paths inside a sandbox, used from outside.
 *
 * The sandbox's processes may exchange any directory for a symbolic link at any moment, and we act
 * as the host's root.  So no path is ever resolved by the kernel's ordinary rules: a path the user
 * gave goes through openat2(RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS) from the sandbox's root, names
 * found inside archives or directories are taken one component at a time with O_NOFOLLOW, and what
 * was opened is judged by its descriptor, never by its name.  Files are opened only after an O_PATH
 * descriptor has shown a regular file (opening a FIFO blocks, a device acts), and only on overlay
 * or tmpfs: the sandbox's /proc would take a write of ours as the host root's. */
#ifndef AGENTENV_DAEMON_INROOT_H
#define AGENTENV_DAEMON_INROOT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#include "proto/error.h"

struct inroot {
    int fd;         /* O_PATH of the sandbox's / */
    uid_t uid_base; /* host id of the sandbox's 0, users and groups alike */
    uid_t uid_count;
};

/* All return an O_PATH, close-on-exec descriptor.  Paths are absolute inside the sandbox. */
int inroot_find(const struct inroot *r, const char *path, struct lh_error *err);
/* A directory; with `create`, missing ones are made (0755, owned by the sandbox's root). */
int inroot_find_dir(const struct inroot *r, const char *path, bool create, struct lh_error *err);
/* The directory that holds `path`; *name is its last component, within path. */
int inroot_find_parent(const struct inroot *r, const char *path, bool create, const char **name,
                       struct lh_error *err);

/* One component below `dir`, not following; with `create`, a missing directory is made. */
int inroot_step(const struct inroot *r, int dir, const char *name, bool create,
                struct lh_error *err);

/* A new, empty regular file for writing at dir/name; what was there before (unless a directory) is
 * replaced.  The owner is the sandbox's root. */
int inroot_create(const struct inroot *r, int dir, const char *name, mode_t mode,
                  struct lh_error *err);
/* Reopens an O_PATH descriptor for reading; refuses anything but regular files and directories on
 * the sandbox's own file systems. */
int inroot_reopen(int path_fd, struct lh_error *err);

uid_t inroot_to_host(const struct inroot *r, int64_t id); /* out of range: the sandbox's root */
uid_t inroot_from_host(const struct inroot *r, uid_t id); /* out of range: 65534 */

#endif

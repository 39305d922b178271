/* Small things about files that every room needs, each with the project's error contract. */
#ifndef PROTO_FILE_H
#define PROTO_FILE_H

#include <stddef.h>
#include <sys/types.h>

#include "proto/error.h"

/* printf into a new string; NULL when memory is out.  The caller frees. */
char *lh_format(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Whole file into a new buffer with a NUL behind it (not counted in *len).  Refuses more than
 * `max` bytes.  len may be NULL. */
char *lh_read_file(const char *path, size_t max, size_t *len, struct lh_error *err);

/* Replaces the file atomically: temporary file in the same directory, fdatasync, rename, fsync of
 * the directory.  After a crash either the old or the new content is there. */
int lh_write_file(const char *path, const void *data, size_t len, mode_t mode,
                  struct lh_error *err);

/* Full write, or an error; handles short writes and EINTR. */
int lh_write_all(int fd, const void *data, size_t len, struct lh_error *err);

/* fsync of a directory, after which names made in it outlive the host; of the one a path is in. */
int lh_sync_dir(const char *path, struct lh_error *err);
int lh_sync_dir_of(const char *path, struct lh_error *err);

/* mkdir -p. */
int lh_make_dirs(const char *path, mode_t mode, struct lh_error *err);

/* rm -r, never following symbolic links or crossing into another file system; absent is fine. */
int lh_remove_tree(const char *path, struct lh_error *err);

#endif

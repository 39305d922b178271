/* Append-only files of the ledger: numbered, rolled at a size, synced by the caller's commit.
 * Knows bytes and offsets, not what they mean. */
#ifndef TRAINER_INTAKE_SEGMENT_FILE_H
#define TRAINER_INTAKE_SEGMENT_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "proto/error.h"

enum { SEGMENT_FILE_BYTES = 256 << 20 };

struct segment_files {
    char *dir;
    int fd;          /* the file being appended to; -1 = none yet */
    uint32_t number; /* its number, 1.. */
    uint64_t end;    /* where the next bytes go */
    uint64_t committed_end;
    uint32_t committed_number;
    bool dirty;
};

struct segment_place {
    uint32_t file;
    uint64_t offset, length;
    uint32_t crc;
};

/* Cuts `number` at `end` (what the last row says), removes files after it, creates the directory.
 */
int segment_files_open(struct segment_files *f, const char *dir, uint32_t number, uint64_t end,
                       struct lh_error *err);
void segment_files_close(struct segment_files *f);
/* Appends and tells where; not durable before segment_files_sync(). */
int segment_files_append(struct segment_files *f, const struct iovec *parts, int n,
                         struct segment_place *at, struct lh_error *err);
int segment_files_sync(struct segment_files *f, struct lh_error *err);
/* Forgets what was appended since the last sync that was followed by segment_files_committed(). */
void segment_files_committed(struct segment_files *f);
void segment_files_rollback(struct segment_files *f);
/* DATA_LOSS when the file is short or the checksum differs.  `to` has at->length bytes. */
int segment_files_read(const char *dir, const struct segment_place *at, void *to,
                       struct lh_error *err);

#endif

/* The disk tier's file: one preallocated extent file on one device, its index, and its I/O.
 *
 *     superblock      4 KiB
 *     roots           KV_ROOT_SLOTS of 64 bytes
 *     slots           one of 64 bytes for every page: the object that begins there
 *     data            the pages
 *
 * The slots are the index.  One for every page, instead of a log or a tree: a slot needs no
 * allocation, is overwritten in place by the next object that begins at its page, and all of them
 * are read in one go at start (64 MB for a million objects), after which not a byte of data has to
 * be looked at.  Every slot and root carries a CRC32C; that of a slot covers its root's key, so it
 * means nothing under another root.  The index in memory is the truth and sectors of 64 slots are
 * written from it, after the data they speak of and in no other order: a slot that a crash left
 * behind is either right or its object's checksum is wrong, which is a miss.  A journal would buy
 * what a cache does not need.
 *
 * Reads and writes are io_uring, O_DIRECT where the file system has it, straight between the shared
 * segment and the device.  Nothing here waits: a device that has not answered for KV_DISK_STALL_US
 * gets no more work until it does.  A failed write (no space, I/O error) closes the tier for
 * writing for a while.
 *
 * One thread. */
#ifndef KVSTORE_TIER_DISK_H
#define KVSTORE_TIER_DISK_H

#include <liburing.h>
#include <stdbool.h>
#include <stdint.h>

#include "kvstore/index/index.h"
#include "kvstore/tier/pages.h"
#include "proto/error.h"

enum {
    KV_DISK_IOS = 64, /* under way at a time */
    KV_SECTOR = 4096,
    KV_SLOT = 64,
    KV_SLOTS_A_SECTOR = KV_SECTOR / KV_SLOT,
    KV_DISK_MAX_PAGES = 1 << 22,
    KV_DISK_MIN = 16 << 20,
    KV_DISK_STALL_US = 2000000,
    KV_DISK_PAUSE_US = 5000000,
    KV_DISK_FLUSH_MS =
        50, /* a sector waits so long for others, for its neighbours may change too */
    KV_DISK_FLUSH_SECTORS = 16,
};

/* As they lie in the file, in this machine's byte order: the file never leaves the machine. */
struct kv_disk_super {
    uint8_t magic[8];
    uint32_t format, page_bytes, pages, byte_order;
    uint64_t file_bytes;
    uint8_t zero[28];
    uint32_t crc32c;
};

struct kv_disk_root {
    struct kv_key key;
    uint32_t used, block_bytes, state_bytes, unit_tokens;
    uint64_t policy_step;
    uint8_t zero[20];
    uint32_t crc32c;
};

struct kv_disk_slot {
    struct kv_key hash, parent;
    uint32_t bytes, data_crc32c; /* bytes == 0: nothing begins here */
    uint16_t root, unit;
    uint8_t part, zero[15];
    uint32_t crc32c; /* of the above and the root's key */
};

enum kv_io_kind { KV_IO_LOAD, KV_IO_STORE, KV_IO_SECTOR };

struct kv_io {
    enum kv_io_kind kind;
    kv_ref node;   /* of a load or store */
    uint32_t page; /* first of its extent on disk; a sector's number */
    uint32_t memory_page;
    uint32_t bytes; /* as asked of the device */
    uint8_t part;
    bool busy;
    int64_t began_us;
    int result; /* bytes, or -errno */
};

struct kv_disk {
    char *path;
    int fd, event_fd; /* event_fd is readable when something has ended */
    uint32_t page_bytes;
    uint64_t file_bytes, data_at;
    struct kv_pages pages;
    uint32_t *owner; /* of every page: node << 1 | part of the object that begins there; 0 = none */
    uint64_t *stale, *writing; /* a bit for every sector of roots and slots */
    uint32_t sectors, next_sector, n_stale;
    int64_t flush_at_us;
    struct io_uring ring;
    struct kv_io ios[KV_DISK_IOS];
    uint8_t *sector_buffers; /* KV_SECTOR for each of ios */
    unsigned in_flight;
    int64_t paused_until_us; /* no writes before */
    bool recovered;          /* the file was there and fits */
    bool stalled;
    uint64_t read_errors, write_errors, stalls;
};

/* Opens the file, or makes it when it is not one of ours, has another size or is damaged.
 * RESOURCE_EXHAUSTED: no space for it.  UNAVAILABLE: another process has it. */
int kv_disk_open(struct kv_disk *d, const char *path, uint64_t bytes, struct lh_error *err);
void kv_disk_close(struct kv_disk *d);

/* True when I/O may begin: not stalled, something is free, and for writes not paused. */
bool kv_disk_ready(struct kv_disk *d, bool write, int64_t now_us);
/* Begins a read into or a write from `buffer` (aligned to KV_SECTOR), of `bytes` rounded up to
 * sectors.  Only after kv_disk_ready(); submitted by kv_disk_submit(). */
void kv_disk_begin(struct kv_disk *d, struct kv_io io, void *buffer, int64_t now_us);
void kv_disk_submit(struct kv_disk *d);
/* The next I/O that has ended, sectors excepted; NULL = none.  Its memory is reused by the next
 * kv_disk_begin(). */
struct kv_io *kv_disk_ended(struct kv_disk *d, int64_t now_us);

/* The object's data is on the device: from now on its slot says so. */
void kv_disk_claim(struct kv_disk *d, uint32_t page, kv_ref node, enum kv_part part);
void kv_disk_forget(struct kv_disk *d, uint32_t page);
void kv_disk_root_changed(struct kv_disk *d, uint32_t slot);
/* Begins writing sectors that have changed, as many as may be. */
void kv_disk_flush(struct kv_disk *d, const struct kv_index *ix, int64_t now_us);

/* ---- recovery (recover.c) ---- */
struct kv_recovery {
    uint64_t objects, damaged; /* damaged: slots with a wrong checksum, overlapping or orphaned */
};
/* Fills an empty index with what the file holds. */
int kv_disk_recover(struct kv_disk *d, struct kv_index *ix, const uint32_t page_bytes[KV_TIERS],
                    struct kv_recovery *out, struct lh_error *err);
uint32_t kv_disk_root_crc(const struct kv_disk_root *r);
uint32_t kv_disk_slot_crc(const struct kv_disk_slot *s, const struct kv_key *root);

static inline uint64_t kv_disk_sector_at(uint32_t sector)
{
    return KV_SECTOR + (uint64_t)sector * KV_SECTOR;
}

enum { KV_ROOT_SECTORS = KV_ROOT_SLOTS / KV_SLOTS_A_SECTOR };

#endif

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
 * segment and the device (requests.c).  Objects that follow each other in the file, and sectors of
 * the index that do, go in one request: a device does some ten thousand requests a second whatever
 * their size, so a million objects of 4 KiB take minutes one by one and seconds together.  Nothing
 * here waits: a device that has not answered for KV_DISK_STALL_US gets no more work until it does.
 * A failed write (no space, I/O error) closes the tier for writing for a while.
 *
 * One thread. */
#ifndef KVSTORE_TIER_DISK_H
#define KVSTORE_TIER_DISK_H

#include <liburing.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include "kvstore/index/index.h"
#include "kvstore/tier/pages.h"
#include "proto/error.h"

enum {
    KV_DISK_IOS = 64,               /* requests under way at a time */
    KV_DISK_STORES = 32,            /* of them, writes of objects: loads find room */
    KV_DISK_MERGED = 256,           /* objects of one request, at most */
    KV_DISK_MERGED_BYTES = 1 << 20, /* no object is added to so many bytes */
    KV_DISK_RUNS = 4,               /* writes of the index under way at a time */
    KV_DISK_RUN = 64,               /* sectors of one of them, at most */
    KV_SECTOR = 4096,
    KV_SLOT = 64,
    KV_SLOTS_A_SECTOR = KV_SECTOR / KV_SLOT,
    KV_DISK_MAX_PAGES = 1 << 22,
    KV_DISK_MIN = 16 << 20,
    KV_DISK_STALL_US = 2000000,
    KV_DISK_PAUSE_US = 5000000,
    KV_DISK_FLUSH_MS =
        50, /* a sector waits so long for others, for its neighbours may change too */
    KV_DISK_FLUSH_SECTORS = 64,
    KV_DISK_BURST_US = 100000, /* of its pace that may be used ahead of time */
    KV_DISK_GAP = 8,           /* sectors between two that have changed, written along with them */
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

enum kv_io_kind { KV_IO_LOAD, KV_IO_STORE, KV_IO_SECTORS, KV_IO_KINDS };

/* Of one object. */
struct kv_io {
    kv_ref node;
    uint32_t page; /* first of its extent on disk */
    uint32_t memory_page;
    uint32_t bytes; /* of the object */
    uint32_t era;   /* of the memory (exchange.h) */
    uint8_t part;
};

/* What the device is asked for in one go: objects that lie behind each other,
 * or sectors of the index. */
struct kv_request {
    enum kv_io_kind kind;
    bool busy, landed, well; /* landed: the device has answered; well: with every byte */
    int64_t began_us;
    uint64_t at, bytes; /* in the file; whole sectors */
    uint32_t n, n_vectors;
    struct kv_io objects[KV_DISK_MERGED];
    struct iovec vectors[KV_DISK_MERGED];
    uint32_t sector, run; /* KV_IO_SECTORS: the first of them, and which buffer */
};

struct kv_disk {
    char *path;
    int fd, event_fd; /* event_fd is readable when something has ended */
    uint32_t page_bytes;
    uint64_t file_bytes, data_at;
    struct kv_pages pages;
    uint32_t *owner; /* of every page: node << 1 | part of the object that begins there; 0 = none */
    uint64_t *stale, *writing; /* a bit for every sector of roots and slots */
    uint32_t sectors, next_sector, sweep_end, n_stale;
    int64_t flush_at_us;
    struct io_uring ring;
    struct kv_request *requests; /* KV_DISK_IOS */
    struct kv_request *open;     /* still grows: not handed to the ring yet; NULL = none */
    struct kv_request *ended;    /* its objects are being handed out */
    uint32_t handed_out;
    struct kv_request *stores[KV_DISK_STORES]; /* a ring, in the order in which they began */
    uint32_t first_store;
    uint8_t *run_buffers; /* KV_DISK_RUNS of KV_DISK_RUN sectors */
    bool run_busy[KV_DISK_RUNS];
    unsigned in_flight, of_kind[KV_IO_KINDS]; /* requests */
    int64_t paused_until_us;                  /* no writes before */
    uint64_t bytes_per_s;                     /* its pace; 0 = as fast as it goes */
    int64_t paced_us;                         /* when what has begun is over at that pace */
    bool recovered;                           /* the file was there and fits */
    bool stalled;
    uint64_t read_errors, write_errors, stalls, asked[KV_IO_KINDS]; /* asked: requests so far */
};

/* Opens the file, or makes it when it is not one of ours, has another size or is damaged.
 * RESOURCE_EXHAUSTED: no space for it.  UNAVAILABLE: another process has it. */
int kv_disk_open(struct kv_disk *d, const char *path, uint64_t bytes, struct lh_error *err);
void kv_disk_close(struct kv_disk *d);

/* True when another request of this kind may begin: not stalled, inside its pace, one is free, and
 * for writes not paused. */
bool kv_disk_ready(struct kv_disk *d, enum kv_io_kind kind, int64_t now_us);
/* Begins a load into or a store from `buffer`, which is aligned to KV_SECTOR and has room for the
 * object's bytes rounded up to sectors.  Only after kv_disk_ready(); handed to the device by
 * kv_disk_submit() at the latest. */
void kv_disk_begin(struct kv_disk *d, enum kv_io_kind kind, struct kv_io io, void *buffer,
                   int64_t now_us);
void kv_disk_submit(struct kv_disk *d);
/* The next object whose load or store has ended; false = none.  Stores end in the order in which
 * they began, whatever the device does: whoever stores parents before children need not wait for
 * a parent before its children begin, and still knows of it first. */
struct kv_done {
    struct kv_io io;
    enum kv_io_kind kind;
    bool well; /* every byte of it has moved */
};
bool kv_disk_ended(struct kv_disk *d, struct kv_done *out, int64_t now_us);
/* Finds out whether the device stalls or answers again; after all that has ended was taken. */
void kv_disk_watch(struct kv_disk *d, int64_t now_us);

/* The object's data is on the device: from now on its slot says so. */
void kv_disk_claim(struct kv_disk *d, uint32_t page, kv_ref node, enum kv_part part);
void kv_disk_forget(struct kv_disk *d, uint32_t page);
void kv_disk_root_changed(struct kv_disk *d, uint32_t slot);
/* Begins writing sectors that have changed, as many as may be (slots.c). */
void kv_disk_flush(struct kv_disk *d, const struct kv_index *ix, int64_t now_us);

/* Between the files of the disk tier. */
int kv_requests_init(struct kv_disk *d, struct lh_error *err);
void kv_requests_finish(struct kv_disk *d);
/* Begins writing `n` sectors from `sector` on; `buffer` is run_buffers[run]. */
void kv_disk_begin_run(struct kv_disk *d, uint32_t sector, uint32_t n, uint32_t run,
                       int64_t now_us);
/* The write of a run has ended. */
void kv_disk_run_ended(struct kv_disk *d, const struct kv_request *r);

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

#include "kvstore/tier/disk.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/crc.h"
#include "proto/log.h"

LH_LOG_COMPONENT("kvstored");

enum { FORMAT = 1, BYTE_ORDER_MARK = 0x01020304, WORD = 64, LOCK_MS = 5000, LOCK_POLL_US = 2000 };

static const uint8_t MAGIC[8] = "LHKVDISK";

_Static_assert(sizeof(struct kv_disk_super) == KV_SLOT, "the file's format");
_Static_assert(sizeof(struct kv_disk_root) == KV_SLOT, "the file's format");
_Static_assert(sizeof(struct kv_disk_slot) == KV_SLOT, "the file's format");

uint32_t kv_disk_root_crc(const struct kv_disk_root *r)
{
    return lh_crc32c(0, r, offsetof(struct kv_disk_root, crc32c));
}

uint32_t kv_disk_slot_crc(const struct kv_disk_slot *s, const struct kv_key *root)
{
    return lh_crc32c(lh_crc32c(0, s, offsetof(struct kv_disk_slot, crc32c)), root, sizeof *root);
}

static uint32_t super_crc(const struct kv_disk_super *s)
{
    return lh_crc32c(0, s, offsetof(struct kv_disk_super, crc32c));
}

/* ---- the file ---- */

/* Sets page size, number of pages and where they begin.  Index and data share `bytes`. */
static void lay_out(struct kv_disk *d, uint64_t bytes)
{
    uint64_t fixed = KV_SECTOR + (uint64_t)KV_ROOT_SECTORS * KV_SECTOR, page = KV_SECTOR, n;

    while ((n = (bytes - fixed - page) / (page + KV_SLOT)) > KV_DISK_MAX_PAGES)
        page *= 2;
    n -= n % KV_SLOTS_A_SECTOR;
    d->page_bytes = (uint32_t)page;
    d->pages.n = (uint32_t)n;
    d->sectors = KV_ROOT_SECTORS + (uint32_t)n / KV_SLOTS_A_SECTOR;
    d->data_at = (kv_disk_sector_at(d->sectors) + page - 1) / page * page;
    d->file_bytes = bytes;
}

static struct kv_disk_super super_of(const struct kv_disk *d)
{
    struct kv_disk_super s = {.format = FORMAT,
                              .page_bytes = d->page_bytes,
                              .pages = d->pages.n,
                              .byte_order = BYTE_ORDER_MARK,
                              .file_bytes = d->file_bytes};

    memcpy(s.magic, MAGIC, sizeof s.magic);
    s.crc32c = super_crc(&s);
    return s;
}

/* I/O of a kvstored that has been killed may hold the file for a moment longer. */
static bool lock_file(int fd)
{
    int64_t deadline = lh_now_ms() + LOCK_MS;

    while (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        if (!lh_ms_left(deadline))
            return false;
        usleep(LOCK_POLL_US);
    }
    return true;
}

/* O_DIRECT where the file system has it. */
static int open_file(const char *path, struct lh_error *err)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600);

    if (fd < 0 && errno == EINVAL)
        fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return lh_fail_errno(err, errno, "kvstore.disk_path %s", path);
    if (lock_file(fd))
        return fd;
    close(fd);
    return lh_fail(err, LH_UNAVAILABLE, "%s is in use by another kvstored", path);
}

static void *sectors_alloc(size_t n)
{
    void *p = aligned_alloc(KV_SECTOR, n * KV_SECTOR);

    if (p)
        memset(p, 0, n * KV_SECTOR);
    return p;
}

static bool fits(const struct kv_disk *d)
{
    struct kv_disk_super want = super_of(d);
    lh_autofree void *sector = sectors_alloc(1);
    struct stat st;

    return sector && fstat(d->fd, &st) == 0 && (uint64_t)st.st_size == d->file_bytes &&
           pread(d->fd, sector, KV_SECTOR, 0) == KV_SECTOR && !memcmp(sector, &want, sizeof want);
}

/* Empty of content but of full length: space that is missing is found out now. */
static int make_file(struct kv_disk *d, const char *path, struct lh_error *err)
{
    struct kv_disk_super super = super_of(d);
    lh_autofree void *sector = sectors_alloc(1);

    if (!sector)
        return lh_fail_errno(err, ENOMEM, "making %s", path);
    memcpy(sector, &super, sizeof super);
    if (ftruncate(d->fd, 0) < 0 || fallocate(d->fd, 0, 0, (off_t)d->file_bytes) < 0)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED,
                       "%s of %llu bytes: %s; lower kvstore.disk_bytes or make room", path,
                       (unsigned long long)d->file_bytes, strerror(errno));
    if (pwrite(d->fd, sector, KV_SECTOR, 0) != KV_SECTOR)
        return lh_fail_errno(err, errno, "writing %s", path);
    return 0;
}

static int make_tables(struct kv_disk *d, struct lh_error *err)
{
    uint32_t n = d->pages.n, words = d->sectors / WORD + 1;
    int r = kv_pages_init(&d->pages, n, err);

    if (r < 0)
        return r;
    d->owner = calloc(n, sizeof *d->owner);
    d->stale = calloc(words, sizeof *d->stale);
    d->writing = calloc(words, sizeof *d->writing);
    d->sector_buffers = sectors_alloc(KV_DISK_IOS);
    if (!d->owner || !d->stale || !d->writing || !d->sector_buffers)
        return lh_fail_errno(err, ENOMEM, "tables of a disk of %u pages", n);
    return 0;
}

static int make_ring(struct kv_disk *d, struct lh_error *err)
{
    int r = io_uring_queue_init(KV_DISK_IOS, &d->ring, 0);

    if (r < 0)
        return lh_fail_errno(err, -r, "io_uring");
    d->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    r = d->event_fd < 0 ? -errno : io_uring_register_eventfd(&d->ring, d->event_fd);
    return r < 0 ? lh_fail_errno(err, -r, "io_uring's eventfd") : 0;
}

int kv_disk_open(struct kv_disk *d, const char *path, uint64_t bytes, struct lh_error *err)
{
    *d = (struct kv_disk){.fd = -1, .event_fd = -1, .ring.ring_fd = -1};
    if (bytes < KV_DISK_MIN || bytes > INT64_MAX / 2)
        return lh_fail(err, LH_INVALID_ARGUMENT, "kvstore.disk_bytes is %llu; the least is %d",
                       (unsigned long long)bytes, KV_DISK_MIN);
    lay_out(d, bytes);
    d->path = strdup(path);
    if (!d->path)
        return lh_fail_errno(err, ENOMEM, "opening %s", path);
    d->fd = open_file(path, err);
    int r = d->fd < 0 ? d->fd : 0;
    if (r == 0) {
        d->recovered = fits(d);
        r = d->recovered ? 0 : make_file(d, path, err);
    }
    if (r == 0)
        r = make_tables(d, err);
    if (r == 0)
        r = make_ring(d, err);
    if (r < 0)
        kv_disk_close(d);
    return r;
}

void kv_disk_close(struct kv_disk *d)
{
    if (d->ring.ring_fd >= 0)
        io_uring_queue_exit(&d->ring);
    if (d->event_fd >= 0)
        close(d->event_fd);
    if (d->fd >= 0)
        close(d->fd);
    kv_pages_finish(&d->pages);
    free(d->path);
    free(d->sector_buffers);
    free(d->writing);
    free(d->stale);
    free(d->owner);
    *d = (struct kv_disk){.fd = -1, .event_fd = -1, .ring.ring_fd = -1};
}

/* ---- I/O ---- */

static void look_for_stall(struct kv_disk *d, int64_t now_us)
{
    bool stalled = false;

    for (int i = 0; i < KV_DISK_IOS; i++)
        stalled |= d->ios[i].busy && now_us - d->ios[i].began_us > KV_DISK_STALL_US;
    if (stalled == d->stalled)
        return;
    d->stalled = stalled;
    d->stalls += stalled;
    lh_warn(stalled ? "disk-stalled" : "disk-answers", "in_flight=%u", d->in_flight);
}

bool kv_disk_ready(struct kv_disk *d, bool write, int64_t now_us)
{
    if (d->in_flight || d->stalled)
        look_for_stall(d, now_us);
    return !d->stalled && d->in_flight < KV_DISK_IOS && !(write && now_us < d->paused_until_us);
}

static uint64_t file_offset(const struct kv_disk *d, const struct kv_io *io)
{
    return io->kind == KV_IO_SECTOR ? kv_disk_sector_at(io->page)
                                    : d->data_at + (uint64_t)io->page * d->page_bytes;
}

void kv_disk_begin(struct kv_disk *d, struct kv_io io, void *buffer, int64_t now_us)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&d->ring);
    int i = 0;

    while (d->ios[i].busy)
        i++;
    io.bytes = (io.bytes + KV_SECTOR - 1) / KV_SECTOR * KV_SECTOR;
    io.busy = true;
    io.began_us = now_us;
    d->ios[i] = io;
    if (io.kind == KV_IO_LOAD)
        io_uring_prep_read(sqe, d->fd, buffer, io.bytes, file_offset(d, &io));
    else
        io_uring_prep_write(sqe, d->fd, buffer, io.bytes, file_offset(d, &io));
    io_uring_sqe_set_data64(sqe, (uint64_t)i);
    d->in_flight++;
}

void kv_disk_submit(struct kv_disk *d)
{
    int r;

    if (!io_uring_sq_ready(&d->ring))
        return;
    do
        r = io_uring_submit(&d->ring);
    while (r == -EINTR);
    if (r < 0)
        lh_warn("disk-submit", "%s; tried again with the next request", strerror(-r));
}

static void note_result(struct kv_disk *d, const struct kv_io *io, int64_t now_us)
{
    if (io->result == (int)io->bytes)
        return;
    bool write = io->kind != KV_IO_LOAD;
    if (write) {
        d->write_errors++;
        d->paused_until_us = now_us + KV_DISK_PAUSE_US;
    } else {
        d->read_errors++;
    }
    lh_warn(write ? "disk-write" : "disk-read", "page=%u: %s", io->page,
            io->result < 0 ? strerror(-io->result) : "short");
}

static void set_bit(uint64_t *bits, uint32_t i, bool value)
{
    uint64_t bit = (uint64_t)1 << i % WORD;

    bits[i / WORD] = value ? bits[i / WORD] | bit : bits[i / WORD] & ~bit;
}

static bool get_bit(const uint64_t *bits, uint32_t i)
{
    return bits[i / WORD] >> i % WORD & 1;
}

static void mark_stale(struct kv_disk *d, uint32_t sector)
{
    d->n_stale += !get_bit(d->stale, sector);
    set_bit(d->stale, sector, true);
}

struct kv_io *kv_disk_ended(struct kv_disk *d, int64_t now_us)
{
    struct io_uring_cqe *cqe;

    while (io_uring_peek_cqe(&d->ring, &cqe) == 0) {
        struct kv_io *io = &d->ios[io_uring_cqe_get_data64(cqe)];
        io->result = cqe->res;
        io->busy = false;
        d->in_flight--;
        io_uring_cqe_seen(&d->ring, cqe);
        note_result(d, io, now_us);
        if (io->kind != KV_IO_SECTOR)
            return io;
        set_bit(d->writing, io->page, false);
        if (io->result != KV_SECTOR)
            mark_stale(d, io->page);
    }
    return NULL;
}

/* ---- the index in the file ---- */

static uint32_t sector_of(uint32_t page)
{
    return KV_ROOT_SECTORS + page / KV_SLOTS_A_SECTOR;
}

void kv_disk_claim(struct kv_disk *d, uint32_t page, kv_ref node, enum kv_part part)
{
    d->owner[page] = node << 1 | part;
    mark_stale(d, sector_of(page));
}

void kv_disk_forget(struct kv_disk *d, uint32_t page)
{
    if (!d->owner[page])
        return;
    d->owner[page] = 0;
    mark_stale(d, sector_of(page));
}

void kv_disk_root_changed(struct kv_disk *d, uint32_t slot)
{
    mark_stale(d, slot / KV_SLOTS_A_SECTOR);
}

static struct kv_disk_root describe_root(const struct kv_root *r)
{
    struct kv_disk_root out = {0};

    if (!r || r->retired)
        return out;
    out = (struct kv_disk_root){.key = r->key,
                                .used = 1,
                                .block_bytes = r->geometry.block_bytes,
                                .state_bytes = r->geometry.state_bytes,
                                .unit_tokens = r->geometry.unit_tokens,
                                .policy_step = r->policy_step};
    out.crc32c = kv_disk_root_crc(&out);
    return out;
}

static struct kv_disk_slot describe_page(const struct kv_disk *d, const struct kv_index *ix,
                                         uint32_t page)
{
    struct kv_disk_slot out = {0};
    const struct kv_node *n = kv_at(ix, d->owner[page] >> 1);

    if (!n || n->phase != KV_VISIBLE)
        return out;
    enum kv_part part = d->owner[page] & 1;
    const struct kv_root *root = kv_root_of(ix, n);
    const struct kv_geometry *g = &root->geometry;
    out = (struct kv_disk_slot){.hash = n->hash,
                                .bytes = part == KV_BLOCK ? g->block_bytes : g->state_bytes,
                                .data_crc32c = n->parts[part].crc32c,
                                .root = n->root,
                                .unit = n->unit,
                                .part = part};
    if (n->parent)
        out.parent = kv_parent(ix, n)->hash;
    out.crc32c = kv_disk_slot_crc(&out, &root->key);
    return out;
}

static void describe_sector(const struct kv_disk *d, const struct kv_index *ix, uint32_t sector,
                            uint8_t *to)
{
    for (uint32_t i = 0; i < KV_SLOTS_A_SECTOR; i++, to += KV_SLOT) {
        uint32_t at = sector * KV_SLOTS_A_SECTOR + i;
        if (sector < KV_ROOT_SECTORS)
            memcpy(to, &(struct kv_disk_root[]){describe_root(ix->roots[at])}, KV_SLOT);
        else
            memcpy(to, &(struct kv_disk_slot[]){describe_page(d, ix, at - KV_ROOT_SLOTS)}, KV_SLOT);
    }
}

static int free_io(const struct kv_disk *d)
{
    int i = 0;

    while (d->ios[i].busy)
        i++;
    return i;
}

/* Whether enough has changed, or the first change is old enough. */
static bool is_due(struct kv_disk *d, int64_t now_us)
{
    if (!d->n_stale)
        d->flush_at_us = 0;
    else if (!d->flush_at_us)
        d->flush_at_us = now_us + KV_DISK_FLUSH_MS * 1000;
    return d->n_stale >= KV_DISK_FLUSH_SECTORS || (d->n_stale && now_us >= d->flush_at_us);
}

/* One write of a sector at a time: two would have no order. */
void kv_disk_flush(struct kv_disk *d, const struct kv_index *ix, int64_t now_us)
{
    if (!is_due(d, now_us))
        return;
    for (uint32_t looked = 0; d->n_stale && looked < d->sectors; looked++) {
        uint32_t sector = d->next_sector;
        if (!get_bit(d->stale, sector) || get_bit(d->writing, sector)) {
            d->next_sector = (sector + 1) % d->sectors;
            continue;
        }
        if (!kv_disk_ready(d, true, now_us))
            return;
        uint8_t *buffer = d->sector_buffers + (size_t)free_io(d) * KV_SECTOR;
        describe_sector(d, ix, sector, buffer);
        set_bit(d->stale, sector, false);
        set_bit(d->writing, sector, true);
        d->n_stale--;
        kv_disk_begin(d, (struct kv_io){.kind = KV_IO_SECTOR, .page = sector, .bytes = KV_SECTOR},
                      buffer, now_us);
    }
}

/* Devices that are full or do not answer.  The file under an open tier is exchanged for /dev/full
 * (every write fails with ENOSPC) or for pipes that are empty or full (no read and no write ends
 * until their other ends close): real descriptors through the real ring.  A file system with room
 * for exactly n pages is a tmpfs. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

#include "direct.h"
#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "tests/must_work.h"

enum {
    PAGES = 256,
    BYTES = 16 << 20,
    UNITS = 16,
    SEQUENCES = 24,
    OTHERS = 8 /* that fill() leaves out */,
    PAGE = 4096,
    SOON_MS = 1000,
    SETTLE_MS = 30000
};

struct device {
    struct direct d;
    char path[40];
    struct kv_key root, chains[SEQUENCES + OTHERS][UNITS];
    unsigned corrupt;
};

/* On the file system of f->path. */
static void begin_at(struct device *f)
{
    int32_t tokens[UNITS * 16];

    setenv("LONGHAUL_LOG", "error", 1);
    f->corrupt = 0;
    direct_open_on_disk(&f->d, PAGES, f->path, BYTES);
    f->root = kv_root(&(struct kv_identity){.tenant = ""});
    cr_assert(eq(int, direct_root(&f->d, &f->root, PAGE, PAGE), 0));
    for (int s = 0; s < SEQUENCES + OTHERS; s++) {
        for (int i = 0; i < UNITS * 16; i++)
            tokens[i] = s * 1000 + i;
        kv_chain(&f->root, tokens, UNITS * 16, 16, f->chains[s]);
    }
}

static void begin(struct device *f)
{
    strcpy(f->path, "/tmp/kvstore-device-XXXXXX");
    close(mkstemp(f->path));
    begin_at(f);
}

static void end(struct device *f)
{
    direct_check(&f->d);
    direct_close(&f->d);
    unlink(f->path);
}

static size_t read_all(struct device *f, int s, uint32_t deadline_ms)
{
    return direct_read(&f->d, &f->root, f->chains[s], UNITS, 0, deadline_ms, &f->corrupt);
}

/* 24 x 17 pages into 256, with time to write: the first ones are on disk alone afterwards. */
static void fill(struct device *f)
{
    for (int s = 0; s < SEQUENCES; s++) {
        cr_assert(direct_store(&f->d, &f->root, f->chains[s], 0, UNITS));
        direct_settle(&f->d, SETTLE_MS);
    }
    cr_assert(gt(u64, f->d.service.index.left_memory, 0));
}

static void exchange_file(struct device *f, int fd)
{
    cr_assert(ge(int, dup2(fd, f->d.service.disk.fd), 0));
    close(fd);
}

Test(device, what_leaves_memory_comes_back, .timeout = 60)
{
    struct device f;

    begin(&f);
    fill(&f);
    for (int s = 0; s < SEQUENCES; s++)
        cr_assert(eq(sz, read_all(&f, s, SOON_MS), UNITS), "sequence %d", s);
    cr_assert(gt(u64, f.d.service.exchange.loaded, 0));
    cr_assert(eq(u32, f.corrupt, 0));
    end(&f);
}

/* The memory goes while they are read into it: they are on disk as before. */
Test(device, loads_that_outlive_the_memory_lose_nothing, .timeout = 60)
{
    struct device f;
    struct kv_service *s = &f.d.service;

    begin(&f);
    fill(&f);
    const struct kv_root *root = kv_root_find(&s->index, &f.root);
    struct kv_node *n = kv_node_find(&s->index, root, &f.chains[0][UNITS - 1]);
    cr_assert(eq(int, (int)kv_exchange_load(&s->exchange, n, 0, lh_now_us()), (int)KV_FETCHING));
    kv_disk_submit(&s->disk);
    cr_assert(s->disk.of_kind[KV_IO_LOAD]);
    kv_service_leave(s, false);
    kv_service_give_up(s);
    kv_service_return(s);
    direct_settle(&f.d, SETTLE_MS);
    cr_assert(eq(u64, s->exchange.loaded, 0), "into memory that is not there any more");
    cr_assert(eq(u64, s->disk.read_errors, 0));
    cr_assert(eq(u32, s->pages.used, 0));
    cr_assert(eq(sz, read_all(&f, 0, SETTLE_MS), UNITS));
    cr_assert(eq(u32, f.corrupt, 0));
    end(&f);
}

/* First touch passes through memory, second touch stays. */
Test(device, the_second_touch_promotes, .timeout = 60)
{
    struct device f;
    uint64_t loaded;

    begin(&f);
    fill(&f);
    cr_assert(eq(sz, read_all(&f, 0, SOON_MS), UNITS));
    const struct kv_root *root = kv_root_find(&f.d.service.index, &f.root);
    const struct kv_node *n = kv_node_find(&f.d.service.index, root, &f.chains[0][0]);
    cr_assert(n->probation, "read once");
    cr_assert(eq(sz, read_all(&f, 0, SOON_MS), UNITS));
    cr_assert(not(n->probation), "read again");
    loaded = f.d.service.exchange.loaded;
    for (int s = 1; s < 8; s++)
        read_all(&f, s, SOON_MS);
    cr_assert(gt(u64, f.d.service.exchange.loaded, loaded), "others were read meanwhile");
    loaded = f.d.service.exchange.loaded;
    cr_assert(eq(sz, read_all(&f, 0, SOON_MS), UNITS));
    cr_assert(eq(u64, f.d.service.exchange.loaded, loaded), "it has stayed in memory");
    end(&f);
}

Test(device, a_full_disk_is_a_state, .timeout = 60)
{
    struct device f;

    begin(&f);
    exchange_file(&f, open("/dev/full", O_RDWR));
    for (int round = 0; round < 3; round++)
        for (int s = 0; s < SEQUENCES; s++) {
            cr_assert(direct_store(&f.d, &f.root, f.chains[s], 0, UNITS), "memory goes on");
            direct_settle(&f.d, 20);
            cr_assert(eq(sz, read_all(&f, s, SOON_MS), UNITS));
        }
    struct kv_disk *d = &f.d.service.disk;
    cr_assert(gt(u64, d->write_errors, 0));
    cr_assert(lt(u64, d->write_errors, 100), "it does not try all the time");
    cr_assert(eq(u64, f.d.service.exchange.stored, 0));
    cr_assert(eq(u32, d->pages.used, 0), "nothing is held for what was not written");
    end(&f);
}

/* ---- a file system that has room for n pages more ---- */

struct little_fs {
    char dir[40];
    int ballast;
};

/* False when this process may not mount. */
static bool mount_fs(struct little_fs *fs, struct device *f)
{
    strcpy(fs->dir, "/tmp/kvstore-full-XXXXXX");
    cr_assert(mkdtemp(fs->dir) != NULL);
    if (mount("tmpfs", fs->dir, "tmpfs", 0, "size=20m") < 0) {
        rmdir(fs->dir);
        return false;
    }
    snprintf(f->path, sizeof f->path, "%s/d", fs->dir);
    lh_autofree char *ballast = lh_format("%s/ballast", fs->dir);
    fs->ballast = open(ballast, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    return true;
}

static void unmount_fs(struct little_fs *fs)
{
    close(fs->ballast);
    cr_assert(eq(int, umount2(fs->dir, MNT_DETACH), 0));
    rmdir(fs->dir);
}

/* The tier's file keeps its superblock and gives the rest back; what the ballast leaves are n
 * pages. */
static void leave_room(struct little_fs *fs, struct device *f, int n)
{
    static const char page[PAGE];
    int fd = f->d.service.disk.fd;
    off_t size = 0;

    cr_assert(eq(int, ftruncate(fs->ballast, 0), 0));
    cr_assert(
        eq(int, fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, PAGE, BYTES - PAGE), 0));
    while (pwrite(fs->ballast, page, PAGE, size) == PAGE)
        size += PAGE;
    cr_assert(eq(int, errno, ENOSPC));
    cr_assert(eq(int, ftruncate(fs->ballast, size - (off_t)n * PAGE), 0));
}

/* Some of what was stored is on disk and no byte of it is wrong. */
static void check_served(struct device *f)
{
    direct_check(&f->d);
    for (int s = 0; s < SEQUENCES; s++)
        read_all(f, s, SOON_MS);
    cr_assert(eq(u32, f->corrupt, 0));
    direct_check(&f->d);
}

static void fill_with_room_for(struct little_fs *fs, struct device *f, int n)
{
    struct kv_disk *d = &f->d.service.disk;

    begin_at(f);
    leave_room(fs, f, n);
    for (int s = 0; s < SEQUENCES; s++) {
        cr_assert(direct_store(&f->d, &f->root, f->chains[s], 0, UNITS), "memory goes on");
        direct_settle(&f->d, 5);
    }
    cr_assert(gt(u64, d->write_errors, 0), "room for %d pages", n);
    cr_assert(le(u64, f->d.service.exchange.stored, (uint64_t)n), "what did not fit");
    check_served(f);
    cr_assert(eq(int, ftruncate(fs->ballast, 0), 0));
    d->paused_until_us = 0;
    uint64_t stored = f->d.service.exchange.stored;
    for (int s = 0; s < SEQUENCES; s++)
        direct_store(&f->d, &f->root, f->chains[s], 0, UNITS);
    direct_settle(&f->d, SETTLE_MS);
    cr_assert(gt(u64, f->d.service.exchange.stored, stored), "with room again it writes again");
    check_served(f);
    direct_close(&f->d);
    direct_open_on_disk(&f->d, PAGES, f->path, BYTES);
    check_served(f);
    cr_assert(gt(u64, f->d.service.index.objects, 0), "and after a restart it is there");
    direct_close(&f->d);
    unlink(f->path);
}

/* Data and index alike: the write that fails is another one every time. */
Test(device, no_room_at_any_of_its_writes, .timeout = 240)
{
    struct little_fs fs;
    struct device f;

    memset(&f, 0, sizeof f);
    bool mounted = mount_fs(&fs, &f);
    NEEDS("mount", mounted, "a tmpfs of 20 MiB; run it as root");
    for (int n = 0; n < 40; n++)
        fill_with_room_for(&fs, &f, n);
    unmount_fs(&fs);
}

/* ---- one that does not answer ---- */

struct silence {
    int empty[2], full[2];
};

static void open_silence(struct silence *q)
{
    static const char bytes[PAGE];

    signal(SIGPIPE, SIG_IGN);
    cr_assert(eq(int, pipe2(q->empty, O_CLOEXEC), 0));
    cr_assert(eq(int, pipe2(q->full, O_CLOEXEC | O_NONBLOCK), 0));
    while (write(q->full[1], bytes, sizeof bytes) > 0)
        ;
    cr_assert(eq(int, fcntl(q->full[1], F_SETFL, 0), 0));
}

/* A minute in soak runs. */
static int silence_ms(void)
{
    return getenv("LONGHAUL_SOAK") ? 60000 : 4000;
}

/* Puts and lookups go on in memory; nothing of what they need grows. */
static void go_on_without_it(struct device *f)
{
    struct kv_disk *d = &f->d.service.disk;
    int64_t until = lh_now_ms() + silence_ms();
    unsigned in_flight = d->in_flight;

    for (int i = 0; lh_ms_left(until); i++) {
        int s = SEQUENCES + i % OTHERS;
        cr_assert(direct_store(&f->d, &f->root, f->chains[s], 0, UNITS), "puts are taken");
        cr_assert(eq(sz, read_all(f, s, 5000), UNITS), "and found");
        cr_assert(le(u32, d->in_flight, in_flight), "a stalled device is not asked again");
        usleep(10000);
    }
    cr_assert(eq(u64, d->stalls, 1));
    direct_check(&f->d);
}

Test(device, one_that_does_not_answer_delays_nobody_beyond_the_deadline, .timeout = 120)
{
    struct device f;
    struct kv_disk *d = &f.d.service.disk;
    struct silence silence;

    begin(&f);
    fill(&f);
    int real = dup(d->fd);
    open_silence(&silence);
    exchange_file(&f, silence.empty[0]);
    cr_assert(eq(sz, read_all(&f, 0, 300), 0), "a miss, at its deadline");
    cr_assert(eq(u64, f.d.service.count.late, 1));
    exchange_file(&f, silence.full[1]);
    for (int s = 0; s < OTHERS; s++) /* some of these begin to be written */
        direct_store(&f.d, &f.root, f.chains[SEQUENCES + s], 0, UNITS);
    kv_service_work(&f.d.service);
    cr_assert(d->of_kind[KV_IO_LOAD] && d->of_kind[KV_IO_STORE]);
    for (int i = 0; i < KV_DISK_IOS; i++) /* so long ago */
        d->requests[i].began_us -= KV_DISK_STALL_US + 1;
    kv_service_work(&f.d.service);
    go_on_without_it(&f);
    close(silence.empty[1]); /* what waits ends, short or in error */
    close(silence.full[0]);
    direct_settle(&f.d, 500);
    cr_assert(d->read_errors && d->write_errors);
    exchange_file(&f, real);
    d->paused_until_us = 0;
    direct_settle(&f.d, SETTLE_MS);
    cr_assert(not(d->stalled), "it answers again");
    uint64_t stored = f.d.service.exchange.stored;
    fill(&f);
    cr_assert(gt(u64, f.d.service.exchange.stored, stored));
    check_served(&f);
    end(&f);
}

/* Whatever the machine does: in the time that has passed, no more than the pace allows. */
Test(device, keeps_to_its_pace)
{
    const double pace = 4 << 20;
    struct device f;

    begin(&f);
    f.d.service.disk.bytes_per_s = (uint64_t)pace;
    int64_t began = lh_now_us();
    for (int s = 0; s < SEQUENCES; s++) {
        cr_assert(direct_store(&f.d, &f.root, f.chains[s], 0, UNITS));
        direct_settle(&f.d, 20);
    }
    double seconds = (double)(lh_now_us() - began + KV_DISK_BURST_US) / 1e6;
    cr_assert(gt(u64, f.d.service.exchange.stored_bytes, 0));
    cr_assert(le(dbl, (double)f.d.service.exchange.stored_bytes, seconds * pace + 2 * PAGE));
    end(&f);
}

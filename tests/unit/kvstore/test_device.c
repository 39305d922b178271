/* Devices that are full or do not answer.  The file under an open tier is exchanged for /dev/full
 * (every write fails with ENOSPC) or for a pipe (nothing is ever read from it, until its other end
 * closes): real descriptors through the real ring. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "direct.h"
#include "proto/clock.h"

enum { PAGES = 256, BYTES = 16 << 20, UNITS = 16, SEQUENCES = 24, PAGE = 4096, SOON_MS = 1000 };

struct device {
    struct direct d;
    char path[40];
    struct kv_key root, chains[SEQUENCES][UNITS];
    unsigned corrupt;
};

static void begin(struct device *f)
{
    int32_t tokens[UNITS * 16];

    memset(f, 0, sizeof *f);
    setenv("LONGHAUL_LOG", "error", 1);
    strcpy(f->path, "/tmp/kvstore-device-XXXXXX");
    close(mkstemp(f->path));
    direct_open_on_disk(&f->d, PAGES, f->path, BYTES);
    f->root = kv_root(&(struct kv_identity){.tenant = ""});
    cr_assert(eq(int, direct_root(&f->d, &f->root, PAGE, PAGE), 0));
    for (int s = 0; s < SEQUENCES; s++) {
        for (int i = 0; i < UNITS * 16; i++)
            tokens[i] = s * 1000 + i;
        kv_chain(&f->root, tokens, UNITS * 16, 16, f->chains[s]);
    }
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
        direct_settle(&f->d, 2000);
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

/* For a minute it is the same as for three seconds: nothing waits for it. */
Test(device, one_that_does_not_answer_delays_nobody_beyond_the_deadline, .timeout = 60)
{
    struct device f;
    int pipe_fds[2];

    begin(&f);
    fill(&f);
    cr_assert(eq(int, pipe(pipe_fds), 0));
    exchange_file(&f, pipe_fds[0]);
    int64_t start = lh_now_ms();
    cr_assert(eq(sz, read_all(&f, 0, 300), 0), "a miss");
    int took = (int)(lh_now_ms() - start);
    cr_assert(took >= 250 && took < 1500, "at its deadline: %d ms", took);
    cr_assert(eq(u64, f.d.service.count.late, 1));
    usleep(2100000);
    start = lh_now_ms();
    for (int s = 0; s < SEQUENCES; s++)
        read_all(&f, s, 5000);
    cr_assert(lt(int, (int)(lh_now_ms() - start), 1000), "a stalled device is not asked again");
    cr_assert(eq(u64, f.d.service.disk.stalls, 1));
    for (int s = 0; s < SEQUENCES; s++)
        cr_assert(direct_store(&f.d, &f.root, f.chains[s], 0, UNITS) || true);
    direct_check(&f.d);
    close(pipe_fds[1]); /* every read that waits ends, short */
    direct_settle(&f.d, 500);
    cr_assert(gt(u64, f.d.service.disk.read_errors, 0));
    read_all(&f, 0, 300);
    cr_assert(not(f.d.service.disk.stalled), "it answers again");
    cr_assert(eq(u32, f.corrupt, 0));
    end(&f);
}

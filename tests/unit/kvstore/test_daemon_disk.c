/* The disk tier of a real kvstored: restarts, kills at any moment, files that others had their
 * hands on, limits. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kit.h"
#include "kvstore/client/link.h"
#include "longhaul/kv/v1/kv.pb-c.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/parse.h"

extern char **environ;

enum { DISK = 16 << 20, UNITS = 20, SEQUENCES = 24 };

typedef Longhaul__Kv__V1__StatReply Stat;

/* 6 MiB of content through 1 MiB of memory, slowly enough for all of it to be written. */
static void fill(const struct daemon *d, struct kv_client *c)
{
    struct kv_key root = root_of(1), chain[UNITS];
    struct lh_error e = {0};

    for (unsigned s = 0; s < SEQUENCES; s++) {
        chain_of(&root, s, UNITS, chain);
        cr_assert(ge(i64, put_units(c, chain, 0, UNITS, &e), 0), "%s", e.message);
        int64_t deadline = lh_now_ms() + 2000;
        while (stat_of(d).used_bytes > MEMORY / 2 && stat_of(d).disk_waiting &&
               lh_ms_left(deadline))
            usleep(500);
    }
    usleep(200000); /* the last sectors of the index */
}

static unsigned count_whole(struct kv_client *c)
{
    struct kv_key root = root_of(1), chain[UNITS];
    unsigned n = 0;

    for (unsigned s = 0; s < SEQUENCES; s++) {
        chain_of(&root, s, UNITS, chain);
        n += try_units(c, chain, UNITS, 0) == UNITS;
    }
    return n;
}

Test(daemon_disk, content_and_accounts_survive_a_kill, .timeout = 60)
{
    struct daemon d;

    daemon_start_on_disk(&d, MEMORY, DISK);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    fill(&d, c);
    cr_assert(eq(u32, count_whole(c), SEQUENCES), "all of it, from memory or disk");
    Stat before = stat_of(&d);
    daemon_kill(&d);
    daemon_restart(&d);
    Stat after = stat_of(&d);
    cr_assert(eq(u64, after.disk_used_bytes, before.disk_used_bytes), "exact after a restart");
    cr_assert(eq(u64, after.disk_capacity_bytes, before.disk_capacity_bytes));
    cr_assert(gt(u32, count_whole(c), SEQUENCES / 2));
    cr_assert(eq(u64, stat_of(&d).corrupt, 0));
    struct stat st;
    lh_autofree char *path = lh_format("%s/kv.disk", d.dir);
    cr_assert(eq(int, stat(path, &st), 0));
    cr_assert(eq(u64, (uint64_t)st.st_size, DISK), "the file has its size and never another");
    daemon_stop(&d);
}

/* I4, across a restart. */
Test(daemon_disk, a_retired_version_stays_retired, .timeout = 60)
{
    struct daemon d;
    struct kv_key root = root_of(1), chain[UNITS];

    daemon_start_on_disk(&d, MEMORY, DISK);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    fill(&d, c);
    use_version(c, 2, true);
    usleep(300000);
    daemon_kill(&d);
    daemon_restart(&d);
    lh_auto(kv_client) again = client_of(&d, "again");
    use_version(again, 1, false);
    chain_of(&root, 0, UNITS, chain);
    cr_assert(eq(sz, try_units(again, chain, UNITS, 0), 0));
    cr_assert(eq(u64, stat_of(&d).disk_used_bytes, 0));
    daemon_stop(&d);
}

static int verify(const struct daemon *d)
{
    const char *argv[] = {KVSTORE, d->dir, "verify", NULL};
    int status;
    pid_t pid;

    cr_assert(eq(int, posix_spawn(&pid, KVSTORE, NULL, NULL, (char **)argv, environ), 0));
    cr_assert(eq(int, waitpid(pid, &status, 0), pid));
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int kills(void)
{
    return getenv("LONGHAUL_SOAK") ? 200 : 20;
}

Test(daemon_disk, killed_at_any_moment_it_never_serves_wrong_bytes, .timeout = 600)
{
    struct daemon d;
    struct kv_key root = root_of(1), chain[UNITS];
    struct lh_error e;
    unsigned found = 0;

    daemon_start_on_disk(&d, MEMORY, DISK);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    for (int round = 0; round < kills(); round++) {
        int64_t until = lh_now_us() + 5000 + rand() % 60000;
        for (unsigned i = 0; lh_now_us() < until; i++) {
            chain_of(&root, (unsigned)rand() % 200, UNITS, chain);
            put_units(c, chain, 0, 4 + (size_t)rand() % (UNITS - 4), &e);
        }
        daemon_kill(&d);
        daemon_restart(&d);
        for (unsigned s = 0; s < 200; s += 1 + (unsigned)rand() % 8) {
            chain_of(&root, s, UNITS, chain);
            found += try_units(c, chain, UNITS, 0) > 0;
        }
    }
    cr_assert(gt(u32, found, 0), "something survived");
    daemon_stop(&d);
}

static void spoil(const struct daemon *d, unsigned bytes)
{
    lh_autofree char *path = lh_format("%s/kv.disk", d->dir);
    int fd = open(path, O_RDWR | O_CLOEXEC);

    for (unsigned i = 0; i < bytes; i++) {
        off_t at = rand() % (i % 4 ? DISK : DISK / 32); /* the index more often than its size */
        uint8_t byte = (uint8_t)rand();
        cr_assert(eq(int, (int)pwrite(fd, &byte, 1, at), 1));
    }
    close(fd);
}

Test(daemon_disk, flipped_bytes_are_misses, .timeout = 60)
{
    struct daemon d;

    daemon_start_on_disk(&d, MEMORY, DISK);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    fill(&d, c);
    for (int round = 0; round < 4; round++) {
        daemon_kill(&d);
        spoil(&d, 50u << 2 * round);
        daemon_restart(&d);
        verify(&d);
        count_whole(c); /* fails on wrong bytes */
    }
    cr_assert(eq(int, verify(&d), 0), "what was read wrong has been dropped");
    fill(&d, c);
    cr_assert(eq(int, verify(&d), 0));
    cr_assert(gt(u32, count_whole(c), 0), "it is of use again");
    daemon_stop(&d);
}

Test(daemon_disk, truncated_and_exchanged_files_are_begun_anew_or_right, .timeout = 60)
{
    struct daemon d, other;

    daemon_start_on_disk(&d, MEMORY, DISK);
    daemon_start_on_disk(&other, MEMORY, DISK);
    lh_auto(kv_client) c = client_of(&d, "a");
    lh_auto(kv_client) c2 = client_of(&other, "b");
    use_version(c, 1, false);
    use_version(c2, 2, false);
    fill(&d, c);
    daemon_kill(&d);
    daemon_kill(&other);
    lh_autofree char *mine = lh_format("%s/kv.disk", d.dir);
    lh_autofree char *theirs = lh_format("%s/kv.disk", other.dir);
    cr_assert(eq(int, renameat2(AT_FDCWD, mine, AT_FDCWD, theirs, RENAME_EXCHANGE), 0));
    daemon_restart(&d);
    daemon_restart(&other);
    cr_assert(eq(u32, count_whole(c), 0), "the other's file knows nothing of ours");
    kv_client_destroy(c2);
    c2 = client_of(&other, "b");
    use_version(c2, 1, false);
    cr_assert(gt(u32, count_whole(c2), 0), "keys mean the same everywhere");
    daemon_kill(&other);
    cr_assert(eq(int, truncate(theirs, DISK / 2), 0));
    daemon_restart(&other);
    cr_assert(eq(u32, count_whole(c2), 0));
    cr_assert(eq(u64, stat_of(&other).disk_used_bytes, 0));
    fill(&other, c2);
    cr_assert(eq(u32, count_whole(c2), SEQUENCES));
    daemon_stop(&d);
    daemon_stop(&other);
}

Test(daemon_disk, without_room_for_its_file_it_serves_from_memory, .timeout = 60)
{
    struct rlimit old, little = {.rlim_cur = 4 << 20};
    struct kv_key root = root_of(1), chain[UNITS];
    struct lh_error e = {0};
    struct daemon d;

    cr_assert(eq(int, getrlimit(RLIMIT_FSIZE, &old), 0));
    little.rlim_max = old.rlim_max;
    setrlimit(RLIMIT_FSIZE, &little);
    daemon_start_on_disk(&d, MEMORY, DISK);
    setrlimit(RLIMIT_FSIZE, &old);
    lh_auto(kv_client) c = client_of(&d, "a");
    use_version(c, 1, false);
    chain_of(&root, 1, UNITS, chain);
    cr_assert(gt(i64, put_units(c, chain, 0, UNITS, &e), 0), "%s", e.message);
    cr_assert(eq(sz, get_units(c, chain, UNITS, 0), UNITS));
    cr_assert(eq(u64, stat_of(&d).disk_capacity_bytes, 0));
    daemon_stop(&d);
}

/* I6 for the memory tier: what arbiterd lends to the store in ROLLOUT is the host's again before
 * anything of TRAIN is granted.  Real arbiterd, real kvstored, a real client of it. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kit.h"
#include "longhaul/kv/v1/kv.pb-c.h"
#include "proto/arbiter.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/process.h"

extern char **environ;

enum { UNITS = 20, SEQUENCES = 24, LENT = 4 << 20, DISK = 16 << 20, SWITCH_MS = 20000 };

typedef Longhaul__Kv__V1__StatReply Stat;

static struct daemon d;
static pid_t arbiterd;
static struct arbiter *leader;
static struct kv_client *client;
static struct kv_key root, chains[SEQUENCES][UNITS];

static pid_t spawn(const char *program)
{
    char *argv[] = {(char *)program, d.dir, NULL};
    pid_t pid;

    cr_assert(eq(int, posix_spawn(&pid, program, NULL, NULL, argv, environ), 0));
    return pid;
}

static struct arbiter_switch go_to(enum arbiter_phase phase)
{
    struct arbiter_switch s = {0};
    struct lh_error e = {0};

    cr_assert(eq(int, arbiter_switch_phase(leader, phase, SWITCH_MS, &s, &e), 0), "%s", e.message);
    return s;
}

static void begin(uint64_t disk, bool carry)
{
    struct lh_error e = {0};

    daemon_prepare(&d, LENT, disk, carry);
    lh_autofree char *run = lh_format("%s/run", d.dir);
    lh_autofree char *socket = lh_format("%s/run/arbiter.sock", d.dir);
    cr_assert(eq(int, mkdir(run, 0700), 0));
    arbiterd = spawn(ARBITERD);
    struct arbiter_options o = {.path = socket, .client = "trainer", .leader = true};
    leader = arbiter_connect(&o, &e);
    cr_assert(leader != NULL, "%s", e.message);
    daemon_restart(&d);
    client = client_of(&d, "rollout-0");
    go_to(ARBITER_ROLLOUT);
    use_version(client, 1, true);
    root = root_of(1);
    for (unsigned s = 0; s < SEQUENCES; s++)
        chain_of(&root, s, UNITS, chains[s]);
}

static void stop(pid_t pid)
{
    int status;

    kill(pid, SIGTERM);
    cr_assert(eq(int, waitpid(pid, &status, 0), pid));
    cr_assert(eq(int, status, 0));
}

static void end(void)
{
    kv_client_destroy(client);
    stop(d.pid);
    arbiter_destroy(leader);
    stop(arbiterd);
    cr_assert(eq(int, lh_remove_tree(d.dir, NULL), 0));
}

static Stat stat_now(void)
{
    return stat_of(&d);
}

/* The grant of the phase reaches kvstored a moment after the leader. */
static void wait_until_back(void)
{
    int64_t deadline = lh_now_ms() + 30000;

    while (stat_now().away) {
        cr_assert(lh_ms_left(deadline) > 0, "the memory does not come back");
        usleep(1000);
    }
}

static void fill(void)
{
    struct lh_error e = {0};

    for (unsigned s = 0; s < SEQUENCES; s++)
        cr_assert(ge(i64, put_units(client, chains[s], 0, UNITS, &e), 0), "%s", e.message);
}

static unsigned sequences_found(void)
{
    unsigned n = 0;

    for (unsigned s = 0; s < SEQUENCES; s++)
        n += get_units(client, chains[s], UNITS, 0) == UNITS;
    return n;
}

Test(lent, I6_memory_lent_in_rollout_is_back_before_training, .timeout = 120)
{
    struct lh_error e = {0};

    begin(0, false);
    wait_until_back();
    fill();
    cr_assert(eq(u32, sequences_found(), SEQUENCES));
    cr_assert(ge(u64, stat_now().resident_bytes, SEQUENCES * (UNITS * BLOCK + STATE)));
    cr_assert(eq(u64, go_to(ARBITER_TRAIN).residual_bytes, 0));
    Stat away = stat_now();
    cr_assert(eq(u64, away.resident_bytes, 0));
    cr_assert(eq(u64, away.used_bytes, 0));
    cr_assert(eq(u64, away.objects, 0));
    cr_assert(eq(u32, sequences_found(), 0));
    cr_assert(lt(i64, put_units(client, chains[0], 0, UNITS, &e), 0));
    cr_assert(eq(u64, stat_now().resident_bytes, 0), "nothing comes back by being asked for");
    for (int i = 0; i < 3; i++) {
        go_to(ARBITER_ROLLOUT);
        wait_until_back();
        fill();
        cr_assert(eq(u32, sequences_found(), SEQUENCES));
        cr_assert(eq(u64, go_to(ARBITER_TRAIN).residual_bytes, 0));
        cr_assert(eq(u64, stat_now().resident_bytes, 0));
    }
    end();
}

Test(lent, with_carry_what_was_in_memory_alone_is_written_first, .timeout = 120)
{
    begin(DISK, true);
    wait_until_back();
    fill();
    cr_assert(eq(u64, go_to(ARBITER_TRAIN).residual_bytes, 0));
    Stat away = stat_now();
    cr_assert(eq(u64, away.resident_bytes, 0));
    cr_assert(eq(u64, away.objects, SEQUENCES * (UNITS + 1)));
    go_to(ARBITER_ROLLOUT);
    wait_until_back();
    cr_assert(eq(u32, sequences_found(), SEQUENCES));
    end();
}

Test(lent, a_reader_in_the_middle_of_its_hit_keeps_nothing_back, .timeout = 120)
{
    uint8_t block[BLOCK];
    struct lh_error e = {0};

    begin(0, false);
    wait_until_back();
    fill();
    struct kv_hit *hit = kv_lookup(client, chains[0], UNITS, 0, "trajectory", &e);
    cr_assert(hit != NULL, "%s", e.message);
    cr_assert(eq(int, kv_hit_block(hit, 0, block, &e), 0), "%s", e.message);
    struct arbiter_switch s = go_to(ARBITER_TRAIN);
    cr_assert(eq(u64, s.residual_bytes, 0));
    cr_assert(eq(int, kv_hit_block(hit, 1, block, &e), LH_DATA_LOSS), "zeros are no block");
    kv_hit_destroy(hit);
    cr_assert(eq(u64, stat_now().corrupt, 0), "it was not the memory's fault");
    end();
}

Test(lent, without_arbiterd_kvstored_ends_to_be_started_again, .timeout = 120)
{
    int status;

    begin(0, false);
    wait_until_back();
    kill(arbiterd, SIGKILL);
    cr_assert(eq(int, waitpid(arbiterd, &status, 0), arbiterd));
    cr_assert(eq(int, waitpid(d.pid, &status, 0), d.pid));
    cr_assert(eq(int, WEXITSTATUS(status), LH_EXIT_TRY_AGAIN));
    kv_client_destroy(client);
    arbiter_destroy(leader);
    cr_assert(eq(int, lh_remove_tree(d.dir, NULL), 0));
}

/* arbiterd as a process, its clients in this one and in children.  I6: memory lent to one phase is
 * unmapped before the other maps it. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/arbiter.h"
#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/ipc.h"
#include "proto/parse.h"
#include "tests/starve.h"

extern char **environ;

static char dir[] = "/tmp/lh-arbiter-XXXXXX", socket_path[64];
static pid_t daemon_pid;

static void start_daemon(void)
{
    char *argv[] = {(char *)ARBITERD, dir, NULL};

    cr_assert(eq(int, posix_spawn(&daemon_pid, ARBITERD, NULL, NULL, argv, environ), 0));
}

static void setup(void)
{
    char run[64];

    cr_assert(mkdtemp(dir) != NULL);
    snprintf(run, sizeof run, "%s/run", dir);
    snprintf(socket_path, sizeof socket_path, "%s/run/arbiter.sock", dir);
    cr_assert(eq(int, mkdir(run, 0700), 0));
    cr_assert(eq(int, chdir(dir), 0));
    start_daemon();
}

static void teardown(void)
{
    int status;

    kill(daemon_pid, SIGTERM);
    cr_assert(eq(int, waitpid(daemon_pid, &status, 0), daemon_pid));
    cr_assert(eq(int, status, 0), "clean exit");
    cr_assert(eq(int, access(socket_path, F_OK), -1), "the socket is gone");
    lh_remove_tree(dir, NULL);
}

TestSuite(arbiter, .init = setup, .fini = teardown, .timeout = 60);

static struct arbiter *connect_as(const char *name, bool leader)
{
    struct lh_error err = {0};
    struct arbiter_options o = {.path = socket_path, .client = name, .leader = leader};
    struct arbiter *a = arbiter_connect(&o, &err);

    cr_assert(a != NULL, "%s", err.message);
    return a;
}

static char *declare(struct arbiter *a, const char *name, int class, size_t bytes, unsigned phases,
                     int park)
{
    struct lh_error err = {0};
    void *p;

    cr_assert(eq(int,
                 arbiter_declare(a, name, (Longhaul__Arbiter__V1__Class) class, bytes, phases,
                                 (Longhaul__Arbiter__V1__Park)park, &p, &err),
                 0),
              "%s", err.message);
    return p;
}

static void switch_to(struct arbiter *a, enum arbiter_phase phase)
{
    struct lh_error err = {0};
    struct arbiter_switch s;

    cr_assert(eq(int, arbiter_switch_phase(a, phase, 3000, &s, &err), 0), "%s", err.message);
    cr_assert(eq(u64, s.residual_bytes, 0));
}

/* True when the byte can be read: asked of the kernel, not by touching it. */
static bool readable(const char *p)
{
    int null[2];

    cr_assert(eq(int, pipe(null), 0));
    bool ok = write(null[1], p, 1) == 1;
    close(null[0]);
    close(null[1]);
    return ok;
}

enum { MIB = 1 << 20 };

Test(arbiter, kv_and_activations_share_physical_memory)
{
    lh_auto(arbiter) trainer = connect_as("trainer-0", true);
    lh_auto(arbiter) worker = connect_as("rollout-0", false);
    char *act = declare(trainer, "act", LONGHAUL__ARBITER__V1__CLASS__CLASS_ACTIVATIONS, 24 * MIB,
                        ARBITER_IN(ARBITER_TRAIN), LONGHAUL__ARBITER__V1__PARK__PARK_DISCARD);
    char *kv = declare(worker, "kv", LONGHAUL__ARBITER__V1__CLASS__CLASS_KV, 24 * MIB,
                       ARBITER_IN(ARBITER_ROLLOUT), LONGHAUL__ARBITER__V1__PARK__PARK_DISCARD);

    cr_assert(not(readable(kv)), "SYNC grants neither");
    cr_assert(not(readable(act)));
    for (int cycle = 0; cycle < 50; cycle++) {
        switch_to(trainer, ARBITER_ROLLOUT);
        cr_assert(
            eq(int, arbiter_wait_phase(worker, ARBITER_ROLLOUT, lh_now_ms() + 2000, NULL), 0));
        cr_assert(readable(kv));
        cr_assert(not(readable(act)));
        kv[24 * MIB - 1] = (char)cycle;
        switch_to(trainer, ARBITER_TRAIN);
        cr_assert(readable(act));
        cr_assert(not(readable(kv)));
        memset(act, 0x5a, 24 * MIB);
    }
}

Test(arbiter, kept_and_parked_content_comes_back)
{
    lh_auto(arbiter) trainer = connect_as("trainer-0", true);

    switch_to(trainer, ARBITER_TRAIN);
    char *keep = declare(trainer, "opt", LONGHAUL__ARBITER__V1__CLASS__CLASS_OPTIMIZER, 5 * MIB,
                         ARBITER_IN(ARBITER_TRAIN), LONGHAUL__ARBITER__V1__PARK__PARK_KEEP);
    char *disk = declare(trainer, "opt2", LONGHAUL__ARBITER__V1__CLASS__CLASS_OPTIMIZER, 5 * MIB,
                         ARBITER_IN(ARBITER_TRAIN), LONGHAUL__ARBITER__V1__PARK__PARK_DISK);
    memset(keep, 1, 5 * MIB);
    memset(disk, 2, 5 * MIB);
    switch_to(trainer, ARBITER_ROLLOUT);
    cr_assert(readable(keep));
    cr_assert(not(readable(disk)));
    switch_to(trainer, ARBITER_TRAIN);
    cr_assert(eq(int, keep[5 * MIB - 1], 1));
    cr_assert(eq(int, disk[0], 2));
    cr_assert(eq(int, disk[5 * MIB - 1], 2));
}

Test(arbiter, weights_are_shared_read_only_and_outlive_the_writer)
{
    struct lh_error err = {0};
    const void *addr;
    uint8_t id[16] = {7}, seen[16];
    uint64_t step;
    size_t bytes;
    lh_auto(arbiter) worker = connect_as("rollout-0", false);

    cr_assert(eq(int, arbiter_attach(worker, "weights", &addr, &bytes, &err), LH_NOT_FOUND));
    struct arbiter *trainer = connect_as("trainer-0", true);
    struct arbiter_weights_header *h =
        (void *)declare(trainer, "weights", LONGHAUL__ARBITER__V1__CLASS__CLASS_WEIGHTS, MIB,
                        ARBITER_ALL_PHASES, LONGHAUL__ARBITER__V1__PARK__PARK_KEEP);
    cr_assert(eq(int, arbiter_attach(worker, "weights", &addr, &bytes, &err), 0), "%s",
              err.message);
    cr_assert(not(arbiter_weights_read(addr, &step, seen)), "nothing was published");
    arbiter_weights_begin(h);
    cr_assert(not(arbiter_weights_read(addr, &step, seen)), "being written");
    arbiter_weights_publish(h, 12, id);
    cr_assert(arbiter_weights_read(addr, &step, seen));
    cr_assert(eq(u64, step, 12));
    cr_assert(eq(int, memcmp(id, seen, 16), 0));
    cr_assert(lt(int, mprotect((void *)addr, 4096, PROT_READ | PROT_WRITE), 0), "read-only");
    arbiter_destroy(trainer);
    cr_assert(arbiter_weights_read(addr, &step, seen), "still there without its writer");
    trainer = connect_as("trainer-0", true);
    h = (void *)declare(trainer, "weights", LONGHAUL__ARBITER__V1__CLASS__CLASS_WEIGHTS, MIB,
                        ARBITER_ALL_PHASES, LONGHAUL__ARBITER__V1__PARK__PARK_KEEP);
    cr_assert(eq(u64, h->step, 12), "the restarted writer goes on in it");
    arbiter_destroy(trainer);
}

static int never_stops(void *ctx, enum arbiter_phase next, int64_t deadline_ms)
{
    sleep(30);
    return 0;
}

/* A process that holds KV and does not react to a revocation. */
static pid_t start_stalled_holder(void)
{
    pid_t pid = fork();

    if (pid == 0) {
        struct arbiter_options o = {
            .path = socket_path, .client = "stalled", .on_revoke = never_stops};
        struct arbiter *a = arbiter_connect(&o, NULL);
        void *p;
        if (!a || arbiter_declare(a, "kv", LONGHAUL__ARBITER__V1__CLASS__CLASS_KV, 8 * MIB,
                                  ARBITER_IN(ARBITER_ROLLOUT),
                                  LONGHAUL__ARBITER__V1__PARK__PARK_DISCARD, &p, NULL) < 0)
            _exit(1);
        for (;;)
            pause();
    }
    return pid;
}

Test(arbiter, a_holder_past_its_deadline_is_killed)
{
    struct lh_error err = {0};
    lh_auto(arbiter) trainer = connect_as("trainer-0", true);
    int status;

    switch_to(trainer, ARBITER_ROLLOUT);
    pid_t pid = start_stalled_holder();
    usleep(300000);
    int64_t start = lh_now_ms();
    cr_assert(eq(int, arbiter_switch_phase(trainer, ARBITER_TRAIN, 300, NULL, &err), 0), "%s",
              err.message);
    cr_assert(lt(i64, lh_now_ms() - start, 5000));
    cr_assert(eq(int, waitpid(pid, &status, 0), pid));
    cr_assert(eq(int, WTERMSIG(status), SIGKILL));
}

Test(arbiter, death_of_a_client_returns_its_memory)
{
    lh_auto(arbiter) trainer = connect_as("trainer-0", true);
    int status;

    switch_to(trainer, ARBITER_ROLLOUT);
    for (int i = 0; i < 5; i++) {
        pid_t pid = start_stalled_holder();
        usleep(150000);
        kill(pid, SIGKILL);
        waitpid(pid, &status, 0);
        usleep(50000);
        struct lh_error err = {0};
        struct arbiter *again = connect_as("stalled", false);
        void *p;
        cr_assert(eq(int,
                     arbiter_declare(again, "kv", LONGHAUL__ARBITER__V1__CLASS__CLASS_KV, 8 * MIB,
                                     ARBITER_IN(ARBITER_ROLLOUT),
                                     LONGHAUL__ARBITER__V1__PARK__PARK_DISCARD, &p, &err),
                     0));
        arbiter_destroy(again);
    }
}

Test(arbiter, daemon_death_is_noticed_and_epochs_go_on)
{
    struct arbiter *trainer = connect_as("trainer-0", true);
    struct arbiter_switch s;
    int status;

    cr_assert(eq(int, arbiter_switch_phase(trainer, ARBITER_ROLLOUT, 1000, &s, NULL), 0));
    uint64_t before = s.epoch;
    kill(daemon_pid, SIGKILL);
    waitpid(daemon_pid, &status, 0);
    for (int i = 0; i < 50 && !arbiter_lost(trainer); i++)
        usleep(100000);
    cr_assert(arbiter_lost(trainer));
    cr_assert(
        eq(int, arbiter_switch_phase(trainer, ARBITER_TRAIN, 1000, NULL, NULL), LH_UNAVAILABLE));
    arbiter_destroy(trainer);
    start_daemon();
    trainer = connect_as("trainer-0", true);
    cr_assert(eq(int, arbiter_switch_phase(trainer, ARBITER_ROLLOUT, 1000, &s, NULL), 0));
    cr_assert(gt(u64, s.epoch, before), "no epoch is used twice");
    arbiter_destroy(trainer);
}

Test(arbiter, refusals_name_the_reason)
{
    struct lh_error err = {0};
    lh_auto(arbiter) trainer = connect_as("trainer-0", true);
    lh_auto(arbiter) worker = connect_as("rollout-0", false);
    struct arbiter_options second = {.path = socket_path, .client = "trainer-1", .leader = true};
    void *p;

    cr_assert(eq(int, arbiter_switch_phase(worker, ARBITER_TRAIN, 1000, NULL, &err),
                 LH_PERMISSION_DENIED));
    cr_assert(arbiter_connect(&second, &err) == NULL);
    cr_assert(eq(int, err.code, LH_ALREADY_EXISTS), "%s", err.message);
    cr_assert(eq(int,
                 arbiter_declare(worker, "kv", LONGHAUL__ARBITER__V1__CLASS__CLASS_KV, 0,
                                 ARBITER_IN(ARBITER_ROLLOUT),
                                 LONGHAUL__ARBITER__V1__PARK__PARK_DISCARD, &p, &err),
                 LH_OUT_OF_RANGE));
    cr_assert(
        eq(int,
           arbiter_declare(worker, "w", LONGHAUL__ARBITER__V1__CLASS__CLASS_WEIGHTS, 4096,
                           ARBITER_ALL_PHASES, LONGHAUL__ARBITER__V1__PARK__PARK_KEEP, &p, &err),
           LH_PERMISSION_DENIED));
}

Test(arbiter, without_descriptors_it_serves_whom_it_has)
{
    struct lh_error err = {0};
    lh_auto(arbiter) trainer = connect_as("trainer-0", true);

    switch_to(trainer, ARBITER_ROLLOUT);
    struct rlimit before = starve(daemon_pid);
    lh_autoclose int fd = ipc_connect(socket_path, 1000, &err);
    cr_assert(ge(int, fd, 0), "it waits to be accepted");
    must_not_spin(daemon_pid);
    int r = arbiter_switch_phase(trainer, ARBITER_TRAIN, 1000, NULL, &err);
    cr_assert(eq(int, r, LH_RESOURCE_EXHAUSTED), "an answer, though it cannot be recorded: %s",
              err.message);
    feed(daemon_pid, before);
    switch_to(trainer, ARBITER_TRAIN);
    lh_auto(arbiter) late = connect_as("rollout-0", false);
    switch_to(trainer, ARBITER_ROLLOUT);
}

Test(arbiter, garbage_costs_only_the_connection)
{
    struct lh_error err = {0};
    lh_auto(arbiter) trainer = connect_as("trainer-0", true);

    for (int i = 0; i < 20; i++) {
        lh_autoclose int fd = ipc_connect(socket_path, 1000, &err);
        cr_assert(ge(int, fd, 0));
        cr_assert(eq(sz, (size_t)write(fd, "\xff\xff\xff\xff\x01", 5), 5));
    }
    switch_to(trainer, ARBITER_TRAIN);
}

/* With a GPU the region is granted; without one the refusal is one line, and costs nothing else. */
Test(arbiter, device_memory_or_a_reason)
{
    lh_auto(arbiter) a = connect_as("trainer-0", true);
    struct lh_error err = {0};
    uint64_t addr = 0;
    int rc = arbiter_declare_device(a, "gradients", LONGHAUL__ARBITER__V1__CLASS__CLASS_GRADIENTS,
                                    MIB, ARBITER_IN(ARBITER_SYNC),
                                    LONGHAUL__ARBITER__V1__PARK__PARK_DISCARD, &addr, &err);

    if (rc == 0) {
        cr_assert(ne(u64, addr, 0));
    } else {
        cr_assert(eq(int, rc, LH_UNAVAILABLE), "%s", err.message);
        cr_assert(strstr(err.message, "cuda: ") != NULL, "%s", err.message);
    }
    cr_assert(
        lt(int,
           arbiter_declare_device(a, "optimizer", LONGHAUL__ARBITER__V1__CLASS__CLASS_OPTIMIZER,
                                  MIB, ARBITER_IN(ARBITER_TRAIN),
                                  LONGHAUL__ARBITER__V1__PARK__PARK_DISK, &addr, &err),
           0),
        "device memory does not park on disk");
    cr_assert(
        readable(declare(a, "host", LONGHAUL__ARBITER__V1__CLASS__CLASS_WORKSPACE, MIB,
                         ARBITER_IN(ARBITER_SYNC), LONGHAUL__ARBITER__V1__PARK__PARK_DISCARD)));
    switch_to(a, ARBITER_ROLLOUT);
}

/* Processes killed at any moment: I1 and I2 up to the ledger. */
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "channel_kit.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/id.h"

TestSuite(channel_kill, .init = channel_enter, .fini = channel_leave, .timeout = 120);

enum { TOTAL = 4000 };

static char *ledger;

static pid_t start(bool as_worker)
{
    const char *program = getenv("CHANNEL_PEER");
    char instance[LH_ID_SIZE];
    char total[16];
    pid_t pid = 0;

    cr_assert(program != NULL, "CHANNEL_PEER is not set: run me through meson");
    lh_id_new_text(instance);
    snprintf(total, sizeof total, "%d", TOTAL);
    char *worker_argv[] = {
        (char *)program, (char *)"worker", channel_endpoint, instance, ledger, total, NULL};
    char *intake_argv[] = {
        (char *)program, (char *)"intake", channel_endpoint, ledger, total, NULL};
    cr_assert(eq(
        int, posix_spawn(&pid, program, NULL, NULL, as_worker ? worker_argv : intake_argv, environ),
        0));
    return pid;
}

static int recorded(void)
{
    lh_autofclose FILE *f = fopen(ledger, "r");
    int n = 0, line = 0;

    while (f && fscanf(f, "%d", &line) == 1)
        cr_assert(eq(int, line, ++n), "neither lost nor twice");
    return n;
}

/* Kills one side at random moments of its progress, the other one never notices. */
static void kill_and_restart(bool kill_worker)
{
    ledger = lh_format("%s/ledger", channel_dir);
    pid_t in = start(false), w = start(true);
    pid_t *victim = kill_worker ? &w : &in;
    int status;

    for (int round = 0; round < 8; round++) {
        int until = recorded() + 50 + (int)(lh_now_us() % 300);
        for (int i = 0; i < 3000 && recorded() < until; i++)
            usleep(2000);
        cr_assert(ge(int, recorded(), until), "no progress in round %d", round);
        kill(*victim, SIGKILL);
        waitpid(*victim, NULL, 0);
        *victim = start(kill_worker);
    }
    waitpid(w, &status, 0);
    cr_assert(eq(int, status, 0));
    waitpid(in, &status, 0);
    cr_assert(eq(int, status, 0));
    cr_assert(eq(int, recorded(), TOTAL));
    free(ledger);
}

Test(channel_kill, nothing_lost_or_twice_when_the_intake_is_killed)
{
    kill_and_restart(false);
}

Test(channel_kill, nothing_lost_or_twice_when_the_worker_is_killed)
{
    kill_and_restart(true);
}

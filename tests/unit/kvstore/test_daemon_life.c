/* kvstored as a process: many clients at once, kills, other protocols, bad job directories, its
 * end. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#include "kit.h"
#include "kvstore/client/link.h"
#include "longhaul/kv/v1/kv.pb-c.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/ipc.h"
#include "proto/parse.h"
#include "proto/process.h"
#include "tests/starve.h"

enum { AMPLE = 64 << 20 };

struct worker {
    const struct daemon *d;
    struct kv_client *shared;
    unsigned id, rounds, hits;
    bool outages; /* kvstored may be away at times */
};

static bool is_expected(const struct worker *w, int code)
{
    return code == LH_FAILED_PRECONDITION || code == LH_RESOURCE_EXHAUSTED || code == LH_ABORTED ||
           (w->outages && code == LH_UNAVAILABLE);
}

static void *work(void *arg)
{
    struct worker *w = arg;
    struct kv_key root = root_of(1), chain[24];
    struct lh_error e = {0};
    struct kv_client *c = w->shared ? w->shared : client_of(w->d, "worker");

    if (!w->shared)
        use_version(c, 1, false);
    for (unsigned i = 0; i < w->rounds; i++) {
        size_t from = i % 3 * 8;
        chain_of(&root, (i * 7 + w->id) % 20, 24, chain);
        int64_t r = put_units(c, chain, from, from + 8, &e);
        cr_assert(r >= 0 || is_expected(w, e.code), "%s", e.message);
        w->hits += get_units(c, chain, 24, from) > 0;
    }
    if (!w->shared)
        kv_client_destroy(c);
    return NULL;
}

enum { WORKERS = 4 };

static void start_workers(struct worker *workers, pthread_t *threads, struct worker like)
{
    for (unsigned i = 0; i < WORKERS; i++) {
        workers[i] = like;
        workers[i].id = i;
        cr_assert(eq(int, pthread_create(&threads[i], NULL, work, &workers[i]), 0));
    }
}

static void join_workers(struct worker *workers, pthread_t *threads)
{
    for (unsigned i = 0; i < WORKERS; i++) {
        pthread_join(threads[i], NULL);
        cr_assert(gt(u32, workers[i].hits, 0));
    }
}

Test(daemon, clients_and_threads_at_once, .timeout = 60)
{
    struct daemon d;
    struct worker workers[WORKERS];
    pthread_t threads[WORKERS];

    daemon_start(&d, 2 * MEMORY, AMPLE);
    start_workers(workers, threads, (struct worker){.d = &d, .rounds = 200});
    join_workers(workers, threads);
    lh_auto(kv_client) c = client_of(&d, "shared");
    use_version(c, 1, false);
    start_workers(workers, threads, (struct worker){.d = &d, .shared = c, .rounds = 200});
    join_workers(workers, threads);
    daemon_stop(&d);
}

/* Killed at random moments of running puts and gets: wrong bytes never, an error only while it is
 * away, and afterwards everything works again. */
Test(daemon, kill_9_under_running_clients, .timeout = 60)
{
    struct daemon d;
    struct worker workers[WORKERS];
    pthread_t threads[WORKERS];
    struct kv_key root = root_of(1), chain[8];
    struct lh_error e = {0};

    daemon_start(&d, 2 * MEMORY, AMPLE);
    lh_auto(kv_client) c = client_of(&d, "shared");
    use_version(c, 1, false);
    start_workers(workers, threads,
                  (struct worker){.d = &d, .shared = c, .rounds = 3000, .outages = true});
    for (unsigned i = 0; i < 8; i++) {
        usleep(20000 + (unsigned)rand() % 30000);
        daemon_kill(&d);
        usleep((unsigned)rand() % 20000);
        daemon_restart(&d);
    }
    join_workers(workers, threads);
    usleep(100000);
    chain_of(&root, 77, 8, chain);
    cr_assert(gt(i64, put_units(c, chain, 0, 8, &e), 0), "%s", e.message);
    cr_assert(eq(sz, get_units(c, chain, 8, 0), 8));
    daemon_stop(&d);
}

Test(daemon, another_protocol_is_refused_with_a_reason)
{
    struct daemon d;
    struct lh_error e = {0};
    Longhaul__Kv__V1__HelloRequest hello = LONGHAUL__KV__V1__HELLO_REQUEST__INIT;
    Longhaul__Kv__V1__Request q = LONGHAUL__KV__V1__REQUEST__INIT;

    daemon_start(&d, MEMORY, MEMORY);
    lh_autoclose int fd = ipc_connect(d.socket, 1000, &e);
    hello.protocol = 7;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_HELLO;
    q.hello = &hello;
    cr_assert(eq(int, ipc_send(fd, &q.base, NULL, 0, 1000, &e), 0));
    lh_automsg(Longhaul__Kv__V1__Reply) r =
        (void *)ipc_recv(fd, &longhaul__kv__v1__reply__descriptor, NULL, NULL, 1000, &e);
    cr_assert(r != NULL, "%s", e.message);
    cr_assert(eq(int, r->failure->code, LH_FAILED_PRECONDITION));
    cr_assert(strstr(r->failure->message, "protocol 1") != NULL, "%s", r->failure->message);
    daemon_stop(&d);
}

Test(daemon, one_store_a_job_directory)
{
    struct daemon d;
    struct kv_pressure p;
    char *argv[] = {(char *)KVSTORED, d.dir, NULL};
    pid_t second;
    int status;

    daemon_start(&d, MEMORY, MEMORY);
    second = fork();
    if (second == 0) {
        execv(KVSTORED, argv);
        _exit(127);
    }
    cr_assert(eq(int, waitpid(second, &status, 0), second));
    cr_assert(eq(int, WEXITSTATUS(status), 75));
    lh_auto(kv_client) c = client_of(&d, "a");
    cr_assert(eq(int, kv_pressure(c, &p, NULL), 0));
    cr_assert(eq(u64, p.capacity_bytes, MEMORY), "the first goes on");
    daemon_stop(&d);
}

Test(daemon, without_descriptors_it_serves_whom_it_has, .timeout = 60)
{
    struct daemon d;
    struct kv_pressure p;
    struct lh_error e = {0};

    daemon_start(&d, MEMORY, MEMORY);
    lh_auto(kv_client) c = client_of(&d, "a");
    cr_assert(eq(int, kv_pressure(c, &p, &e), 0), "%s", e.message);
    struct rlimit before = starve(d.pid);
    lh_autoclose int fd = ipc_connect(d.socket, 1000, &e);
    cr_assert(ge(int, fd, 0), "it waits to be accepted");
    must_not_spin(d.pid);
    cr_assert(eq(int, kv_pressure(c, &p, &e), 0), "%s", e.message);
    feed(d.pid, before);
    lh_auto(kv_client) late = client_of(&d, "b");
    cr_assert(eq(int, kv_pressure(late, &p, &e), 0), "%s", e.message);
    daemon_stop(&d);
}

static int run_daemon(const char *dir)
{
    pid_t pid = fork();
    int status = -1;

    if (pid == 0) {
        execl(KVSTORED, KVSTORED, dir, NULL);
        _exit(127);
    }
    cr_assert(eq(int, waitpid(pid, &status, 0), pid));
    return WEXITSTATUS(status);
}

Test(daemon, bad_job_directories_are_refused)
{
    struct daemon d;

    cr_assert(eq(int, run_daemon("/tmp/no-such-job"), 1));
    cr_assert(eq(int, run_daemon(NULL), 2));
    daemon_start(&d, MEMORY, MEMORY);
    daemon_kill(&d);
    lh_autofree char *job = lh_format("%s/job.pb", d.dir);
    cr_assert(eq(int, lh_write_file(job, "\xff\xff\xff", 3, 0600, NULL), 0));
    cr_assert(eq(int, run_daemon(d.dir), 1), "garbage");
    cr_assert(eq(int, lh_write_file(job, "\x08\x02", 2, 0600, NULL), 0));
    cr_assert(eq(int, run_daemon(d.dir), 1), "a format of the future");
    cr_assert(eq(int, lh_remove_tree(d.dir, NULL), 0));
}

/* A supervisor that starts kvstored and is killed. */
Test(daemon, it_dies_with_its_supervisor)
{
    struct daemon d;
    struct lh_error e = {0};
    int status;

    daemon_start(&d, MEMORY, MEMORY);
    daemon_kill(&d);
    pid_t supervisor = fork();
    if (supervisor == 0) {
        lh_autofree char *pid = lh_format("%d", getpid());
        setenv(LH_SUPERVISED, pid, 1);
        if (fork() == 0) {
            execl(KVSTORED, KVSTORED, d.dir, NULL);
            _exit(127);
        }
        pause();
        _exit(0);
    }
    lh_auto(kv_client) c = client_of(&d, "a");
    int64_t deadline = lh_now_ms() + 10000;
    struct kv_pressure p;
    while (kv_pressure(c, &p, &e) < 0 && lh_ms_left(deadline))
        usleep(10000);
    cr_assert(eq(u64, p.capacity_bytes, MEMORY));
    kill(supervisor, SIGKILL);
    cr_assert(eq(int, waitpid(supervisor, &status, 0), supervisor));
    while (access(d.socket, F_OK) == 0 && lh_ms_left(deadline))
        usleep(10000);
    cr_assert(lt(int, access(d.socket, F_OK), 0), "it still serves");
    cr_assert(eq(int, lh_remove_tree(d.dir, NULL), 0));
}

/* The server: health, its end, its socket, its descriptors, and kills. */
#include <spawn.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "grpc/health/v1/health.pb-c.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "rpc_kit.h"
#include "tests/starve.h"

TestSuite(rpc_server, .init = rpc_enter, .fini = rpc_leave, .timeout = 60);

static int health(struct rpc_channel *ch, const char *service, struct lh_error *e)
{
    Grpc__Health__V1__HealthCheckRequest rq = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    lh_automsg(Grpc__Health__V1__HealthCheckResponse) rp = NULL;

    rq.service = (char *)service;
    int r = rpc_unary(ch, "/grpc.health.v1.Health/Check", &rq.base,
                      &grpc__health__v1__health_check_response__descriptor, 3000,
                      (ProtobufCMessage **)&rp, e);
    return r ? r : (int)rp->status;
}

static int note_health(void *ctx, const ProtobufCMessage *m, struct lh_error *err)
{
    atomic_int *seen = ctx;

    *seen = *seen * 10 + (int)((const Grpc__Health__V1__HealthCheckResponse *)m)->status;
    return 0;
}

static atomic_int seen_health, watch_result;

static void *watch_health(void *arg)
{
    Grpc__Health__V1__HealthCheckRequest rq = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;

    watch_result = rpc_stream(arg, "/grpc.health.v1.Health/Watch", &rq.base,
                              &grpc__health__v1__health_check_response__descriptor, 30000,
                              note_health, &seen_health, NULL);
    return NULL;
}

Test(rpc_server, health_is_told_even_when_all_threads_are_busy)
{
    struct rpc_server *s = serve(1);
    lh_auto(rpc_channel) ch = channel();
    Longhaul__Test__V1__CountRequest rq = LONGHAUL__TEST__V1__COUNT_REQUEST__INIT;
    struct counter c = {.stop_at = 1};
    struct lh_error e = {0};
    pthread_t t;

    cr_assert(eq(int, pthread_create(&t, NULL, watch_health, ch), 0));
    rq.n = 2;
    cr_assert(eq(int, count(ch, &rq, 3000, &c, &e), LH_ABORTED));
    cr_assert(eq(int, health(ch, "", &e), 1), "SERVING: %s", e.message);
    cr_assert(eq(int, health(ch, "longhaul.test.v1.Echo", &e), 1));
    cr_assert(eq(int, health(ch, "longhaul.test.v1.Nope", &e), LH_NOT_FOUND));
    for (int i = 0; i < 200 && seen_health != 1; i++)
        usleep(10000);
    rpc_server_destroy(s, 1000);
    pthread_join(t, NULL);
    cr_assert(eq(int, seen_health, 12), "SERVING, then NOT_SERVING");
    cr_assert(eq(int, watch_result, LH_UNAVAILABLE));
}

static void *call_long(void *arg)
{
    Longhaul__Test__V1__EchoRequest rq = LONGHAUL__TEST__V1__ECHO_REQUEST__INIT;
    Longhaul__Test__V1__EchoReply *rp = NULL;

    rq.sleep_ms = 30000;
    return (void *)(intptr_t)echo(arg, &rq, 60000, &rp, NULL);
}

Test(rpc_server, destroy_cancels_after_the_grace)
{
    struct rpc_server *s = serve(1);
    lh_auto(rpc_channel) ch = channel();
    struct lh_error e = {0};
    pthread_t t[3]; /* one running, two waiting for the thread */
    void *r;

    cr_assert(gt(int, ping(ch, 3000, &e), 0));
    for (size_t i = 0; i < LH_ARRAY_SIZE(t); i++)
        cr_assert(eq(int, pthread_create(&t[i], NULL, call_long, ch), 0));
    usleep(200000);
    int64_t start = lh_now_ms();
    rpc_server_destroy(s, 300);
    int took = (int)(lh_now_ms() - start);
    cr_assert(took >= 300 && took < 3000, "%d ms", took);
    for (size_t i = 0; i < LH_ARRAY_SIZE(t); i++) {
        pthread_join(t[i], &r);
        cr_assert(lt(i64, (intptr_t)r, 0));
    }
}

Test(rpc_server, one_live_server_a_path)
{
    struct rpc_server *s = serve(0);
    struct lh_error e = {0};

    cr_assert(echo_server_create(rpc_path, 1, &e) == NULL);
    cr_assert(eq(int, e.code, LH_ALREADY_EXISTS));
    cr_assert(strstr(e.message, "socket in use") != NULL, "%s", e.message);
    rpc_server_destroy(s, 1000);
    cr_assert(eq(int, lh_write_file(rpc_path, "precious", 8, 0600, &e), 0));
    cr_assert(echo_server_create(rpc_path, 1, &e) == NULL);
    cr_assert(eq(int, e.code, LH_ALREADY_EXISTS), "%s", e.message);
    cr_assert(eq(int, access(rpc_path, F_OK), 0), "a file is not a stale socket");
}

Test(rpc_server, bad_paths_and_no_server)
{
    char longest[200];
    struct lh_error e = {0};
    int64_t start = lh_now_ms();

    memset(longest, 'x', sizeof longest);
    longest[sizeof longest - 1] = 0;
    cr_assert(rpc_channel_create(longest, &e) == NULL);
    cr_assert(eq(int, e.code, LH_INVALID_ARGUMENT));
    cr_assert(echo_server_create(longest, 1, &e) == NULL);
    cr_assert(eq(int, e.code, LH_INVALID_ARGUMENT));
    cr_assert(echo_server_create("/nonexistent/s", 1, &e) == NULL);
    cr_assert(eq(int, e.code, LH_NOT_FOUND));
    lh_auto(rpc_channel) ch = channel();
    cr_assert(eq(int, ping(ch, 200, &e), LH_UNAVAILABLE));
    cr_assert(strstr(e.message, "nobody served") && strstr(e.message, rpc_path), "%s", e.message);
    cr_assert(lt(i64, lh_now_ms() - start, 2000));
}

static pid_t spawn_server(void)
{
    const char *program = getenv("ECHO_SERVER");
    char *argv[] = {(char *)program, rpc_path, NULL};
    pid_t pid = 0;

    cr_assert(program != NULL, "ECHO_SERVER is not set: run me through meson");
    cr_assert(eq(int, posix_spawn(&pid, program, NULL, NULL, argv, environ), 0));
    return pid;
}

Test(rpc_server, without_descriptors_it_serves_whom_it_has)
{
    struct lh_error e = {0};
    pid_t server = spawn_server();
    lh_auto(rpc_channel) first = channel();

    cr_assert(eq(int, ping(first, 5000, &e), server), "%s", e.message);
    struct rlimit before = starve(server);
    lh_auto(rpc_channel) second = channel();
    cr_assert(lt(int, ping(second, 300, &e), 0));
    must_not_spin(server);
    cr_assert(eq(int, ping(first, 5000, &e), server), "%s", e.message);
    feed(server, before);
    cr_assert(eq(int, ping(second, 5000, &e), server), "%s", e.message);
    kill(server, SIGTERM);
    cr_assert(eq(int, waitpid(server, NULL, 0), server));
}

Test(rpc_server, channel_survives_kill_and_restart)
{
    lh_auto(rpc_channel) ch = channel();
    struct lh_error e = {0};

    for (int round = 0; round < 3; round++) {
        pid_t pid = spawn_server();
        int64_t start = lh_now_ms();
        int r = ping(ch, 10000, &e);
        if (r == LH_UNAVAILABLE) /* the end of the old connection may be noticed by this call */
            r = ping(ch, 10000, &e);
        cr_assert(eq(int, r, pid), "round %d: %s", round, e.message);
        cr_assert(lt(i64, lh_now_ms() - start, 3000), "took %d ms", (int)(lh_now_ms() - start));
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        cr_assert(eq(int, ping(ch, 200, &e), LH_UNAVAILABLE), "%s", e.message);
        cr_assert(eq(int, access(rpc_path, F_OK), 0), "a stale file is left");
    }
}

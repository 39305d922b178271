/* Our client against our server over a unix socket; a foreign client is
 * tests/integration/rpc_client.py. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "echo.h"
#include "grpc/health/v1/health.pb-c.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/parse.h"
#include "test.pb-c.h"
#include "tests/starve.h"

#define ECHO  "/longhaul.test.v1.Echo/Echo"
#define COUNT "/longhaul.test.v1.Echo/Count"

static char dir[] = "/tmp/lh-rpc-XXXXXX", *path;

static void enter(void)
{
    cr_assert(mkdtemp(dir) != NULL);
    path = lh_format("%s/s", dir);
}

static void leave(void)
{
    lh_remove_tree(dir, NULL);
    free(path);
}

TestSuite(rpc, .init = enter, .fini = leave, .timeout = 60);

static struct rpc_server *serve(unsigned threads)
{
    struct lh_error e = {0};
    struct rpc_server *s = echo_server_create(path, threads, &e);

    cr_assert(s != NULL, "%s", e.message);
    return s;
}

static struct rpc_channel *channel(void)
{
    struct lh_error e = {0};
    struct rpc_channel *ch = rpc_channel_create(path, &e);

    cr_assert(ch != NULL, "%s", e.message);
    return ch;
}

static int echo(struct rpc_channel *ch, const Longhaul__Test__V1__EchoRequest *rq, int timeout_ms,
                Longhaul__Test__V1__EchoReply **rp, struct lh_error *e)
{
    return rpc_unary(ch, ECHO, &rq->base, &longhaul__test__v1__echo_reply__descriptor, timeout_ms,
                     (ProtobufCMessage **)rp, e);
}

/* Pid of the server that answered, or the failure. */
static int ping(struct rpc_channel *ch, int timeout_ms, struct lh_error *e)
{
    Longhaul__Test__V1__EchoRequest rq = LONGHAUL__TEST__V1__ECHO_REQUEST__INIT;
    lh_automsg(Longhaul__Test__V1__EchoReply) rp = NULL;
    int r = echo(ch, &rq, timeout_ms, &rp, e);

    return r ? r : rp->server_pid;
}

static Longhaul__Test__V1__StatsReply stats(struct rpc_channel *ch)
{
    Longhaul__Test__V1__StatsRequest rq = LONGHAUL__TEST__V1__STATS_REQUEST__INIT;
    lh_automsg(Longhaul__Test__V1__StatsReply) rp = NULL;
    struct lh_error e = {0};

    cr_assert(eq(int,
                 rpc_unary(ch, "/longhaul.test.v1.Echo/Stats", &rq.base,
                           &longhaul__test__v1__stats_reply__descriptor, 5000,
                           (ProtobufCMessage **)&rp, &e),
                 0),
              "%s", e.message);
    return *rp;
}

struct counter {
    unsigned got, stop_at;
    bool in_order;
    unsigned delay_us;
};

static int count_one(void *ctx, const ProtobufCMessage *m, struct lh_error *err)
{
    struct counter *c = ctx;

    c->in_order &= ((const Longhaul__Test__V1__CountReply *)m)->i == c->got++;
    if (c->delay_us)
        usleep(c->delay_us);
    return c->got == c->stop_at ? lh_fail(err, LH_ABORTED, "seen enough") : 0;
}

static int count(struct rpc_channel *ch, const Longhaul__Test__V1__CountRequest *rq, int timeout_ms,
                 struct counter *c, struct lh_error *e)
{
    c->in_order = true;
    return rpc_stream(ch, COUNT, &rq->base, &longhaul__test__v1__count_reply__descriptor,
                      timeout_ms, count_one, c, e);
}

Test(rpc, unary_round_trip)
{
    struct rpc_server *s = serve(0);
    lh_auto(rpc_channel) ch = channel();
    Longhaul__Test__V1__EchoRequest rq = LONGHAUL__TEST__V1__ECHO_REQUEST__INIT;
    lh_automsg(Longhaul__Test__V1__EchoReply) rp = NULL;
    struct lh_error e = {0};
    struct stat st;

    rq.text = (char *)"h\xc3\xa9llo";
    rq.payload = (ProtobufCBinaryData){3, (uint8_t *)"\0\xff\0"};
    cr_assert(eq(int, echo(ch, &rq, 5000, &rp, &e), 0), "%s", e.message);
    cr_assert(eq(str, rp->text, rq.text));
    cr_assert(eq(sz, rp->payload.len, 3));
    cr_assert(eq(u32, rp->peer_uid, geteuid()));
    cr_assert(rp->left_ms > 4000 && rp->left_ms <= 5100, "rounded up on the wire");
    cr_assert(stat(path, &st) == 0 && (st.st_mode & 07777) == 0600);
    rpc_server_destroy(s, 1000);
    cr_assert(access(path, F_OK) < 0, "the socket file goes with its server");
}

Test(rpc, errors_pass_through_unchanged)
{
    struct rpc_server *s = serve(0);
    lh_auto(rpc_channel) ch = channel();

    for (int code = 1; code <= 16; code++) {
        Longhaul__Test__V1__EchoRequest rq = LONGHAUL__TEST__V1__ECHO_REQUEST__INIT;
        Longhaul__Test__V1__EchoReply *rp = NULL;
        struct lh_error e = {0};
        rq.text = (char *)"x";
        rq.fail = code;
        cr_assert(eq(int, echo(ch, &rq, 5000, &rp, &e), -code));
        cr_assert(eq(int, e.code, -code));
        cr_assert(strstr(e.message, "asked to fail: \xe2\x82\xac \"x\"") != NULL, "%s", e.message);
    }
    rpc_server_destroy(s, 1000);
}

Test(rpc, what_is_not_served_says_so)
{
    struct rpc_server *s = serve(0);
    lh_auto(rpc_channel) ch = channel();
    static const char *const unknown[] = {"/longhaul.test.v1.Echo/Nope", "/no.Such/Echo", "/",
                                          "/longhaul.test.v1.Echo", "/longhaul.test.v1.Echo/"};

    for (size_t i = 0; i < LH_ARRAY_SIZE(unknown); i++) {
        Longhaul__Test__V1__EchoRequest rq = LONGHAUL__TEST__V1__ECHO_REQUEST__INIT;
        ProtobufCMessage *rp = NULL;
        struct lh_error e = {0};
        cr_assert(eq(int,
                     rpc_unary(ch, unknown[i], &rq.base,
                               &longhaul__test__v1__echo_reply__descriptor, 3000, &rp, &e),
                     LH_UNIMPLEMENTED),
                  "%s: %s", unknown[i], e.message);
    }
    rpc_server_destroy(s, 1000);
}

Test(rpc, garbage_and_too_much)
{
    struct rpc_server *s = serve(0);
    lh_auto(rpc_channel) ch = channel();
    Longhaul__Test__V1__Everything bad = LONGHAUL__TEST__V1__EVERYTHING__INIT;
    Longhaul__Test__V1__EchoRequest big = LONGHAUL__TEST__V1__ECHO_REQUEST__INIT;
    lh_autofree uint8_t *bytes = calloc(1, 2 << 20);
    ProtobufCMessage *rp = NULL;
    struct lh_error e = {0};

    bad.text = (char *)"not \xff UTF-8"; /* field 1 of EchoRequest is text as well */
    cr_assert(eq(
        int,
        rpc_unary(ch, ECHO, &bad.base, &longhaul__test__v1__echo_reply__descriptor, 3000, &rp, &e),
        LH_INVALID_ARGUMENT));
    cr_assert(strstr(e.message, "longhaul.test.v1.EchoRequest, byte") != NULL, "%s", e.message);
    big.payload = (ProtobufCBinaryData){2 << 20, bytes};
    cr_assert(eq(int,
                 rpc_unary(ch, ECHO, &big.base, &longhaul__test__v1__echo_reply__descriptor, 3000,
                           &rp, &e),
                 LH_RESOURCE_EXHAUSTED),
              "%s", e.message);
    cr_assert(gt(int, ping(ch, 3000, &e), 0), "it still serves: %s", e.message);
    rpc_server_destroy(s, 1000);
}

Test(rpc, deadline_ends_the_call_on_both_ends)
{
    struct rpc_server *s = serve(0);
    lh_auto(rpc_channel) ch = channel();
    Longhaul__Test__V1__EchoRequest rq = LONGHAUL__TEST__V1__ECHO_REQUEST__INIT;
    Longhaul__Test__V1__EchoReply *rp = NULL;
    struct lh_error e = {0};
    int64_t start = lh_now_ms();

    rq.sleep_ms = 20000;
    cr_assert(eq(int, echo(ch, &rq, 300, &rp, &e), LH_DEADLINE_EXCEEDED), "%s", e.message);
    cr_assert(lt(i64, lh_now_ms() - start, 2000));
    for (int i = 0; i < 100 && !stats(ch).cancelled; i++)
        usleep(10000);
    cr_assert(eq(u32, stats(ch).cancelled, 1), "the handler saw it");
    rpc_server_destroy(s, 1000);
}

Test(rpc, stream_in_order_with_status)
{
    struct rpc_server *s = serve(0);
    lh_auto(rpc_channel) ch = channel();
    Longhaul__Test__V1__CountRequest rq = LONGHAUL__TEST__V1__COUNT_REQUEST__INIT;
    struct counter c = {0};
    struct lh_error e = {0};

    cr_assert(eq(int, count(ch, &rq, 5000, &c, &e), 0), "an empty stream: %s", e.message);
    rq.n = 5000;
    cr_assert(eq(int, count(ch, &rq, 20000, &c, &e), 0), "%s", e.message);
    cr_assert(c.in_order);
    cr_assert(eq(u32, c.got, 5000));
    rq.n = 3;
    rq.fail = 5;
    c.got = 0;
    cr_assert(eq(int, count(ch, &rq, 5000, &c, &e), LH_NOT_FOUND));
    cr_assert(eq(u32, c.got, 3));
    cr_assert(eq(str, e.message, (char *)"after 3 messages"));
    rpc_server_destroy(s, 1000);
}

Test(rpc, client_cancels_a_stream)
{
    struct rpc_server *s = serve(0);
    lh_auto(rpc_channel) ch = channel();
    Longhaul__Test__V1__CountRequest rq = LONGHAUL__TEST__V1__COUNT_REQUEST__INIT;
    struct counter c = {.stop_at = 3};
    struct lh_error e = {0};

    rq.n = 100000;
    rq.interval_ms = 5;
    cr_assert(eq(int, count(ch, &rq, 60000, &c, &e), LH_ABORTED), "what `each` returned");
    cr_assert(eq(str, e.message, (char *)"seen enough"));
    for (int i = 0; i < 100 && !stats(ch).cancelled; i++)
        usleep(10000);
    cr_assert(eq(u32, stats(ch).cancelled, 1));
    cr_assert(lt(u32, stats(ch).sent, 100));
    rpc_server_destroy(s, 1000);
}

/* A reader that takes nothing for a while: the server's sends must wait, not pile up. */
Test(rpc, slow_reader_holds_the_sender_back)
{
    struct rpc_server *s = serve(0);
    lh_auto(rpc_channel) ch = channel();
    lh_auto(rpc_channel) other = channel();
    Longhaul__Test__V1__CountRequest rq = LONGHAUL__TEST__V1__COUNT_REQUEST__INIT;
    struct counter c = {.stop_at = 2, .delay_us = 500000};
    struct lh_error e = {0};

    rq.n = 1000;
    rq.payload_bytes = 1 << 20;
    cr_assert(eq(int, count(ch, &rq, 20000, &c, &e), LH_ABORTED), "%s", e.message);
    cr_assert(lt(u32, stats(other).sent, 40), "%u MiB were sent to a reader of 2",
              stats(other).sent);
    rpc_server_destroy(s, 1000);
}

struct load {
    struct rpc_channel *ch;
    atomic_int failures;
};

static void *call_often(void *arg)
{
    struct load *l = arg;

    for (int i = 0; i < 200; i++) {
        Longhaul__Test__V1__EchoRequest rq = LONGHAUL__TEST__V1__ECHO_REQUEST__INIT;
        lh_automsg(Longhaul__Test__V1__EchoReply) rp = NULL;
        lh_autofree char *text = lh_format("%p-%d", (void *)&rq, i);
        rq.text = text;
        if (echo(l->ch, &rq, 10000, &rp, NULL) || strcmp(rp->text, text) != 0)
            atomic_fetch_add(&l->failures, 1);
    }
    return NULL;
}

Test(rpc, eight_clients_on_two_threads)
{
    struct rpc_server *s = serve(2);
    lh_auto(rpc_channel) shared = channel();
    struct load load[8];
    pthread_t t[8];

    for (int i = 0; i < 8; i++) {
        load[i] = (struct load){.ch = i % 2 ? shared : channel()};
        cr_assert(eq(int, pthread_create(&t[i], NULL, call_often, &load[i]), 0));
    }
    for (int i = 0; i < 8; i++) {
        pthread_join(t[i], NULL);
        cr_assert(eq(int, load[i].failures, 0));
        if (i % 2 == 0)
            rpc_channel_destroy(load[i].ch);
    }
    rpc_server_destroy(s, 1000);
}

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

Test(rpc, health_is_told_even_when_all_threads_are_busy)
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

Test(rpc, destroy_cancels_after_the_grace)
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

Test(rpc, one_live_server_a_path)
{
    struct rpc_server *s = serve(0);
    struct lh_error e = {0};

    cr_assert(echo_server_create(path, 1, &e) == NULL);
    cr_assert(eq(int, e.code, LH_ALREADY_EXISTS));
    cr_assert(strstr(e.message, "socket in use") != NULL, "%s", e.message);
    rpc_server_destroy(s, 1000);
    cr_assert(eq(int, lh_write_file(path, "precious", 8, 0600, &e), 0));
    cr_assert(echo_server_create(path, 1, &e) == NULL);
    cr_assert(eq(int, e.code, LH_ALREADY_EXISTS), "%s", e.message);
    cr_assert(eq(int, access(path, F_OK), 0), "a file is not a stale socket");
}

Test(rpc, bad_paths_and_no_server)
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
    cr_assert(strstr(e.message, "nobody served") && strstr(e.message, path), "%s", e.message);
    cr_assert(lt(i64, lh_now_ms() - start, 2000));
}

static pid_t spawn_server(void)
{
    const char *program = getenv("ECHO_SERVER");
    char *argv[] = {(char *)program, path, NULL};
    pid_t pid = 0;

    cr_assert(program != NULL, "ECHO_SERVER is not set: run me through meson");
    cr_assert(eq(int, posix_spawn(&pid, program, NULL, NULL, argv, environ), 0));
    return pid;
}

Test(rpc, without_descriptors_it_serves_whom_it_has)
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

Test(rpc, channel_survives_kill_and_restart)
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
        cr_assert(eq(int, access(path, F_OK), 0), "a stale file is left");
    }
}

/* Our client against our server over a unix socket; a foreign client is
 * tests/integration/rpc_client.py. */
#include <stdatomic.h>
#include <sys/stat.h>

#include "proto/clock.h"
#include "proto/file.h"
#include "rpc_kit.h"

#define ECHO "/longhaul.test.v1.Echo/Echo"

TestSuite(rpc, .init = rpc_enter, .fini = rpc_leave, .timeout = 60);

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
    cr_assert(stat(rpc_path, &st) == 0 && (st.st_mode & 07777) == 0600);
    rpc_server_destroy(s, 1000);
    cr_assert(access(rpc_path, F_OK) < 0, "the socket file goes with its server");
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

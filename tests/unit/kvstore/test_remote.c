/* The remote tier without a store around it: names and headers, slots of a cluster, credentials,
 * and what a peer can do to us.  The hostile peers are threads that say what they were told to. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvstore/tier/remote.h"
#include "kvstore/tier/remote_secrets.h"
#include "kvstore/tier/remote_slots.h"
#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/crc.h"
#include "proto/file.h"

enum { BYTES = 1000, WAIT_MS = 30000 };

/* ---- names, headers, slots ---- */

static struct kv_remote_object an_object(void)
{
    struct kv_remote_object o = {
        .unit = 7, .unit_tokens = 16, .bytes = BYTES, .crc32c = 0x12345678, .part = KV_STATE};

    for (int i = 0; i < 16; i++) {
        o.root.bytes[i] = (uint8_t)i;
        o.hash.bytes[i] = (uint8_t)(0xf0 + i);
    }
    return o;
}

Test(kv_remote, an_object_has_one_name)
{
    struct kv_remote_object o = an_object();
    char name[KV_REMOTE_NAME];

    kv_remote_name(&o, name);
    cr_assert(eq(str, name,
                 (char *)"000102030405060708090a0b0c0d0e0f/f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff.s"));
    o.part = KV_BLOCK;
    kv_remote_name(&o, name);
    cr_assert(eq(chr, name[strlen(name) - 1], 'b'));
}

Test(kv_remote, a_header_is_refused_with_any_bit_flipped)
{
    struct kv_remote_object o = an_object(), want = o;
    uint8_t h[KV_REMOTE_HEADER];

    kv_remote_header(&o, h);
    want.crc32c = 0;
    cr_assert(kv_remote_header_is(h, &want));
    cr_assert(eq(u32, want.crc32c, o.crc32c));
    for (size_t bit = 0; bit < sizeof h * 8; bit++) {
        h[bit / 8] ^= (uint8_t)(1 << bit % 8);
        cr_assert(not(kv_remote_header_is(h, &want)), "bit %zu", bit);
        h[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
}

Test(kv_remote, a_header_of_another_object_is_refused)
{
    struct kv_remote_object o = an_object();
    uint8_t h[KV_REMOTE_HEADER];

    kv_remote_header(&o, h);
    struct kv_remote_object others[] = {o, o, o, o, o, o};
    others[0].root.bytes[15]++;
    others[1].hash.bytes[0]++;
    others[2].unit++;
    others[3].unit_tokens++;
    others[4].bytes--;
    others[5].part = KV_BLOCK;
    for (size_t i = 0; i < LH_ARRAY_SIZE(others); i++)
        cr_assert(not(kv_remote_header_is(h, &others[i])), "%zu", i);
}

Test(kv_remote, slots_are_those_of_the_specification)
{
    cr_assert(eq(u16, kv_redis_slot("123456789", 9), 0x31c3));
    cr_assert(eq(u16, kv_redis_slot("foo", 3), 12182));
    cr_assert(eq(u16, kv_redis_slot("", 0), 0));
}

Test(kv_remote, redirections_are_understood)
{
    static const struct {
        const char *text;
        enum kv_redis_error meaning;
        const char *host;
        int port;
    } cases[] = {{"MOVED 3999 127.0.0.1:6381", KV_REDIS_MOVED, "127.0.0.1", 6381},
                 {"ASK 1 ::1:7000", KV_REDIS_ASK, "::1", 7000},
                 {"MOVED 1 :7000", KV_REDIS_MOVED, "", 7000},
                 {"MOVED 1 host:0", KV_REDIS_FAILED, NULL, 0},
                 {"MOVED 1 host:65536", KV_REDIS_FAILED, NULL, 0},
                 {"MOVED 1 host:70x", KV_REDIS_FAILED, NULL, 0},
                 {"MOVED 1 host", KV_REDIS_FAILED, NULL, 0},
                 {"MOVED ", KV_REDIS_FAILED, NULL, 0},
                 {"CLUSTERDOWN Hash slot not served", KV_REDIS_AWAY, NULL, 0},
                 {"OOM command not allowed", KV_REDIS_FULL, NULL, 0},
                 {"NOAUTH Authentication required.", KV_REDIS_DENIED, NULL, 0},
                 {"", KV_REDIS_FAILED, NULL, 0}};

    for (size_t i = 0; i < LH_ARRAY_SIZE(cases); i++) {
        struct kv_redis_place to = {.port = -1};
        enum kv_redis_error e = kv_redis_explain(cases[i].text, strlen(cases[i].text), &to);
        cr_assert(eq(int, (int)e, (int)cases[i].meaning), "%s", cases[i].text);
        if (!cases[i].host)
            continue;
        cr_assert(eq(str, to.host, (char *)cases[i].host));
        cr_assert(eq(int, to.port, cases[i].port));
    }
}

/* ---- credentials ---- */

static char *write_secrets(const char *text, mode_t mode)
{
    char *path = lh_format("/tmp/kv-secrets-%d", getpid());
    struct lh_error e = {0};

    cr_assert(eq(int, lh_write_file(path, text, strlen(text), 0600, &e), 0), "%s", e.message);
    cr_assert(eq(int, chmod(path, mode), 0));
    return path;
}

Test(kv_remote, credentials_are_read_in_the_format_of_aws)
{
    lh_autofree char *path = write_secrets("[default]\n# mine\n aws_access_key_id = A B \n"
                                           "password=p=w\n\nendpoint_url = http://x:1\n",
                                           0600);
    struct kv_secrets s;
    struct lh_error e = {0};

    cr_assert(eq(int, kv_secrets_read(&s, path, &e), 0), "%s", e.message);
    cr_assert(eq(str, (char *)s.value[KV_S3_KEY], (char *)"A B"));
    cr_assert(eq(str, (char *)s.value[KV_REDIS_PASSWORD], (char *)"p=w"));
    cr_assert(eq(str, (char *)s.value[KV_S3_ENDPOINT], (char *)"http://x:1"));
    cr_assert(eq(ptr, (void *)s.value[KV_S3_SECRET], NULL));
    kv_secrets_wipe(&s);
    unlink(path);
}

Test(kv_remote, credentials_that_others_may_read_are_refused)
{
    lh_autofree char *path = write_secrets("password = hush\n", 0640);
    struct kv_secrets s;
    struct lh_error e = {0};

    cr_assert(eq(int, kv_secrets_read(&s, path, &e), LH_FAILED_PRECONDITION));
    unlink(path);
}

Test(kv_remote, what_is_wrong_in_a_file_of_credentials_is_not_repeated)
{
    lh_autofree char *path = write_secrets("# first\nhush\n", 0600);
    struct kv_secrets s;
    struct lh_error e = {0};

    cr_assert(eq(int, kv_secrets_read(&s, path, &e), LH_INVALID_ARGUMENT));
    cr_assert(strstr(e.message, "line 2") != NULL);
    cr_assert(eq(ptr, strstr(e.message, "hush"), NULL));
    unlink(path);
}

/* ---- peers ---- */

static const char HANGS_UP[] = "";

struct peer {
    int listen_fd, port;
    const char *const *says; /* to each request of a connection in turn; the last for ever */
    const char *tail;        /* sent again and again behind the last, until the other hangs up */
    pthread_t thread;
};

static bool heard_something(int fd)
{
    char buffer[65536];
    struct pollfd p = {.fd = fd, .events = POLLIN};

    return poll(&p, 1, WAIT_MS) > 0 && recv(fd, buffer, sizeof buffer, 0) > 0;
}

static bool say(int fd, const char *text)
{
    return send(fd, text, strlen(text), MSG_NOSIGNAL) == (ssize_t)strlen(text);
}

static void converse(const struct peer *p, int fd)
{
    for (size_t i = 0; heard_something(fd); i += p->says[i] && p->says[i + 1]) {
        if (p->says[i] == HANGS_UP || !say(fd, p->says[i]))
            return;
        while (p->tail && !p->says[i + 1])
            if (!say(fd, p->tail))
                return;
    }
}

static void *play(void *arg)
{
    const struct peer *p = arg;

    for (int fd; (fd = accept(p->listen_fd, NULL, NULL)) >= 0; close(fd))
        converse(p, fd);
    return NULL;
}

static void listen_on(struct peer *p)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;

    p->listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    cr_assert(eq(int, bind(p->listen_fd, (struct sockaddr *)&at, sizeof at), 0));
    cr_assert(eq(int, getsockname(p->listen_fd, (struct sockaddr *)&at, &len), 0));
    p->port = ntohs(at.sin_port);
}

static void peer_start(struct peer *p, const char *const *says, const char *tail)
{
    p->says = says;
    p->tail = tail;
    listen_on(p);
    cr_assert(eq(int, listen(p->listen_fd, 16), 0));
    cr_assert(eq(int, pthread_create(&p->thread, NULL, play, p), 0));
}

static void peer_stop(struct peer *p)
{
    shutdown(p->listen_fd, SHUT_RDWR);
    pthread_join(p->thread, NULL);
    close(p->listen_fd);
}

static void open_redis(struct kv_remote *r, int port)
{
    lh_autofree char *location = lh_format("redis://127.0.0.1:%d", port);
    struct kv_remote_options o = {.location = location};
    struct lh_error e = {0};

    cr_assert(eq(int, kv_remote_open(r, &o, &e), 0), "%s", e.message);
}

static void open_s3(struct kv_remote *r, int port)
{
    lh_autofree char *text = lh_format("aws_access_key_id = K\naws_secret_access_key = S\n"
                                       "endpoint_url = http://127.0.0.1:%d\n",
                                       port);
    lh_autofree char *path = write_secrets(text, 0600);
    struct kv_remote_options o = {.location = "s3://bucket/prefix", .credentials = path};
    struct lh_error e = {0};

    cr_assert(eq(int, kv_remote_open(r, &o, &e), 0), "%s", e.message);
    unlink(path);
}

static struct kv_remote_op wait_for(struct kv_remote *r)
{
    struct pollfd p = {.fd = r->event_fd, .events = POLLIN};
    struct kv_remote_op op;

    cr_assert(eq(int, poll(&p, 1, WAIT_MS), 1), "it hangs");
    uint64_t n;
    cr_assert(eq(sz, (size_t)read(r->event_fd, &n, sizeof n), sizeof n));
    cr_assert(kv_remote_ended(r, &op));
    return op;
}

/* What an object's load from it ends with. */
static int load_from(struct kv_remote *r)
{
    uint8_t bytes[BYTES];
    struct kv_remote_op op = {.kind = KV_REMOTE_LOAD, .object = an_object(), .bytes = bytes};

    cr_assert(kv_remote_ready(r, KV_GATE_IN, lh_now_us()));
    kv_remote_begin(r, &op);
    return wait_for(r).status;
}

#define SIXTEEN    "0123456789abcdef"
#define SIXTY_FOUR SIXTEEN SIXTEEN SIXTEEN SIXTEEN
#define ALONE      "-ERR This instance has cluster support disabled\r\n"

static int load_from_redis(const char *const *says, const char *tail)
{
    struct kv_remote r;
    struct peer p;

    peer_start(&p, says, tail);
    open_redis(&r, p.port);
    int status = load_from(&r);
    kv_remote_close(&r);
    peer_stop(&p);
    return status;
}

Test(kv_remote, a_redis_that_says_anything_else_is_a_miss, .timeout = 60)
{
    static const struct {
        const char *says[3];
        const char *tail;
        int status;
    } cases[] = {
        {{ALONE, "$-1\r\n"}, NULL, LH_NOT_FOUND},
        {{ALONE, "$5\r\nhello\r\n"}, NULL, LH_DATA_LOSS},
        {{ALONE, ":1\r\n"}, NULL, LH_DATA_LOSS},
        {{ALONE, "*1\r\n$1\r\nx\r\n"}, NULL, LH_DATA_LOSS},
        {{ALONE, "-WRONGTYPE of another program\r\n"}, NULL, LH_DATA_LOSS},
        {{ALONE, "-ERR unknown\r\n"}, NULL, LH_INTERNAL},
        {{ALONE, "-NOAUTH Authentication required.\r\n"}, NULL, LH_PERMISSION_DENIED},
        {{ALONE, "-LOADING it reads its file\r\n"}, NULL, LH_UNAVAILABLE},
        {{ALONE, "HTTP/1.1 200 OK\r\n\r\n"}, NULL, LH_INTERNAL},
        {{ALONE, "*1000000000\r\n"}, NULL, LH_INTERNAL},
        {{ALONE, "$536870912\r\n"}, "0123456789abcdef", LH_DATA_LOSS},
        {{ALONE, "$99999999999999999999\r\n"}, NULL, LH_INTERNAL},
        {{ALONE, "*9\r\n*9\r\n*9\r\n*9\r\n*9\r\n*9\r\n*9\r\n*9\r\n*9\r\n*9\r\n"},
         NULL,
         LH_INTERNAL},
        {{ALONE, HANGS_UP}, NULL, LH_UNAVAILABLE},
        {{"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\nlocalhost\r\n:99999\r\n"}, NULL, LH_INTERNAL},
        {{"*1\r\n:5\r\n"}, NULL, LH_INTERNAL},
        {{"*16384\r\n"}, "$64\r\n" SIXTY_FOUR "\r\n", LH_INTERNAL},
    };

    for (size_t i = 0; i < LH_ARRAY_SIZE(cases); i++)
        cr_assert(eq(int, load_from_redis(cases[i].says, cases[i].tail), cases[i].status),
                  "case %zu", i);
}

Test(kv_remote, a_redis_that_sends_us_round_in_circles_is_left, .timeout = 60)
{
    struct kv_remote r;
    struct peer p;

    listen_on(&p); /* its port has to be known first */
    close(p.listen_fd);
    lh_autofree char *moved = lh_format("-MOVED 1 127.0.0.1:%d\r\n", p.port);
    const char *says[] = {ALONE, moved, NULL};
    int port = p.port;
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                             .sin_port = htons((uint16_t)port)};
    int on = 1;
    p = (struct peer){.port = port, .says = says, .listen_fd = socket(AF_INET, SOCK_STREAM, 0)};
    setsockopt(p.listen_fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    cr_assert(eq(int, bind(p.listen_fd, (struct sockaddr *)&at, sizeof at), 0));
    cr_assert(eq(int, listen(p.listen_fd, 16), 0));
    cr_assert(eq(int, pthread_create(&p.thread, NULL, play, &p), 0));
    open_redis(&r, port);
    cr_assert(eq(int, load_from(&r), LH_UNAVAILABLE));
    kv_remote_close(&r);
    peer_stop(&p);
}

static int load_from_s3(const char *const *says, const char *tail)
{
    struct kv_remote r;
    struct peer p;

    peer_start(&p, says, tail);
    open_s3(&r, p.port);
    int status = load_from(&r);
    kv_remote_close(&r);
    peer_stop(&p);
    return status;
}

Test(kv_remote, a_bucket_that_says_anything_else_is_a_miss, .timeout = 60)
{
    static const struct {
        const char *says[2];
        const char *tail;
        int status;
    } cases[] = {
        {{"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"}, NULL, LH_NOT_FOUND},
        {{"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"}, NULL, LH_DATA_LOSS},
        {{"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"}, "0123456789", LH_DATA_LOSS},
        {{"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"}, "3\r\nabc\r\n", LH_DATA_LOSS},
        {{"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops"}, NULL, LH_UNAVAILABLE},
        {{"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n"}, NULL, LH_UNAVAILABLE},
        {{"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"}, NULL, LH_PERMISSION_DENIED},
        {{"HTTP/1.1 404 Not Found\r\nContent-Length: 99999\r\n\r\n"}, "longer ", LH_NOT_FOUND},
        {{"HTTP/1.1 403 Forbidden\r\nContent-Length: 99999\r\n\r\n"},
         "longer ",
         LH_PERMISSION_DENIED},
        {{"HTTP/1.1 301 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"},
         NULL,
         LH_INTERNAL},
        {{"+OK\r\n"}, NULL, LH_UNAVAILABLE},
        {{HANGS_UP}, NULL, LH_UNAVAILABLE},
    };

    for (size_t i = 0; i < LH_ARRAY_SIZE(cases); i++)
        cr_assert(eq(int, load_from_s3(cases[i].says, cases[i].tail), cases[i].status), "case %zu",
                  i);
}

Test(kv_remote, a_peer_that_never_answers_costs_the_deadline_once, .timeout = 60)
{
    static const char *const says[] = {ALONE, "$1096\r\n", "0", NULL};
    struct kv_remote r;
    struct peer p;
    uint8_t bytes[BYTES];
    struct kv_remote_op op = {.kind = KV_REMOTE_LOAD, .object = an_object(), .bytes = bytes};
    enum { MANY = KV_REMOTE_OPS - KV_REMOTE_STORES };

    peer_start(&p, says, NULL);
    open_redis(&r, p.port);
    for (int i = 0; i < MANY; i++)
        kv_remote_begin(&r, &op);
    for (unsigned ended = 0; ended < MANY;) {
        struct pollfd wait = {.fd = r.event_fd, .events = POLLIN};
        cr_assert(eq(int, poll(&wait, 1, WAIT_MS), 1), "it hangs");
        uint64_t n;
        cr_assert(eq(sz, (size_t)read(r.event_fd, &n, sizeof n), sizeof n));
        for (struct kv_remote_op done; kv_remote_ended(&r, &done); ended++)
            cr_assert(lt(int, done.status, 0));
    }
    cr_assert(eq(u64, r.count.errors, MANY));
    cr_assert(kv_remote_is_paused(&r, KV_GATE_IN));
    cr_assert(not(kv_remote_is_paused(&r, KV_GATE_OUT)));
    cr_assert(not(kv_remote_ready(&r, KV_GATE_IN, lh_now_us() - KV_REMOTE_PAUSE_MAX_US)));
    kv_remote_close(&r);
    peer_stop(&p);
}

Test(kv_remote, a_peer_that_is_not_there_is_tried_again_one_at_a_time, .timeout = 60)
{
    struct kv_remote r;
    struct peer nobody;

    listen_on(&nobody); /* bound, but nobody listens */
    open_redis(&r, nobody.port);
    cr_assert(eq(int, load_from(&r), LH_UNAVAILABLE));
    cr_assert(not(kv_remote_ready(&r, KV_GATE_IN, lh_now_us())));
    cr_assert(kv_remote_ready(&r, KV_GATE_OUT, lh_now_us()));
    int64_t later = lh_now_us() + KV_REMOTE_PAUSE_MAX_US;
    cr_assert(kv_remote_ready(&r, KV_GATE_IN, later));
    r.in_flight[KV_GATE_IN] = 1;
    cr_assert(not(kv_remote_ready(&r, KV_GATE_IN, later)));
    r.in_flight[KV_GATE_IN] = 0;
    cr_assert(ne(chr, r.trouble[0], 0));
    kv_remote_close(&r);
    close(nobody.listen_fd);
}

Test(kv_remote, a_location_that_is_none_is_refused)
{
    static const char *const wrong[] = {
        "",           "rediss://h:1", "redis://",      "redis://host",
        "redis://:1", "redis://h:0",  "redis://h:1,x", "s3://a/../b",
        "http://x"};

    lh_autofree char *path =
        write_secrets("aws_access_key_id = K\naws_secret_access_key = S\n", 0600);
    for (size_t i = 0; i < LH_ARRAY_SIZE(wrong); i++) {
        struct kv_remote_options o = {.location = wrong[i], .credentials = path};
        struct lh_error e = {0};
        struct kv_remote r;
        cr_assert(eq(int, kv_remote_open(&r, &o, &e), LH_INVALID_ARGUMENT), "%s", wrong[i]);
    }
    unlink(path);
}

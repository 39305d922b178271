#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "longhaul/kv/v1/kv.pb-c.h"
#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/ipc.h"
#include "proto/parse.h"
#include "tests/starve.h"

/* A listener with one connected pair, in a directory of its own. */
struct pair {
    char dir[32];
    char path[64];
    int listener, client, server;
};

static void pair_open(struct pair *p)
{
    struct lh_error e = {0};
    struct pollfd wait = {.events = POLLIN};

    strcpy(p->dir, "/tmp/lh-ipc-XXXXXX");
    cr_assert(mkdtemp(p->dir) != NULL);
    snprintf(p->path, sizeof p->path, "%s/s", p->dir);
    p->listener = ipc_listen(p->path, &e);
    cr_assert(ge(int, p->listener, 0), "%s", e.message);
    p->client = ipc_connect(p->path, 1000, &e);
    cr_assert(ge(int, p->client, 0), "%s", e.message);
    wait.fd = p->listener;
    cr_assert(eq(int, poll(&wait, 1, 1000), 1));
    pid_t pid = 0;
    p->server = ipc_accept(p->listener, &pid, &e);
    cr_assert(ge(int, p->server, 0), "%s", e.message);
    cr_assert(eq(int, pid, getpid()));
}

static void pair_close(struct pair *p)
{
    close(p->listener);
    close(p->client);
    if (p->server >= 0)
        close(p->server);
    cr_assert(eq(int, lh_remove_tree(p->dir, NULL), 0));
}

/* A Request with one PUT whose trajectory is `n` bytes: any size of message. */
static int send_sized(int fd, size_t n, int timeout_ms, struct lh_error *e)
{
    Longhaul__Kv__V1__PutRequest put = LONGHAUL__KV__V1__PUT_REQUEST__INIT;
    Longhaul__Kv__V1__Request r = LONGHAUL__KV__V1__REQUEST__INIT;
    lh_autofree char *text = malloc(n + 1);

    memset(text, 'x', n);
    text[n] = 0;
    put.trajectory = text;
    r.body_case = LONGHAUL__KV__V1__REQUEST__BODY_PUT;
    r.put = &put;
    return ipc_send(fd, &r.base, NULL, 0, timeout_ms, e);
}

static Longhaul__Kv__V1__Request *receive(int fd, int timeout_ms, struct lh_error *e)
{
    return (void *)ipc_recv(fd, &longhaul__kv__v1__request__descriptor, NULL, NULL, timeout_ms, e);
}

Test(ipc, messages_of_every_size_arrive_whole)
{
    struct lh_error e = {0};
    struct pair p;
    static const size_t sizes[] = {0, 1, 4096, 100000, 1 << 20, IPC_MAX - 64};

    pair_open(&p);
    for (size_t i = 0; i < LH_ARRAY_SIZE(sizes); i++) {
        cr_assert(eq(int, send_sized(p.client, sizes[i], 1000, &e), 0), "%s", e.message);
        lh_automsg(Longhaul__Kv__V1__Request) r = receive(p.server, 1000, &e);
        cr_assert(r != NULL, "%s", e.message);
        cr_assert(eq(sz, strlen(r->put->trajectory), sizes[i]));
    }
    cr_assert(eq(int, send_sized(p.client, IPC_MAX, 1000, &e), LH_INVALID_ARGUMENT));
    pair_close(&p);
}

Test(ipc, descriptors_travel_with_the_message)
{
    struct lh_error e = {0};
    struct pair p;
    int sent[2], got[4] = {-1, -1, -1, -1};
    size_t n = LH_ARRAY_SIZE(got);
    Longhaul__Kv__V1__HelloReply hello = LONGHAUL__KV__V1__HELLO_REPLY__INIT;

    pair_open(&p);
    cr_assert(eq(int, pipe(sent), 0));
    hello.protocol = 1;
    cr_assert(eq(int, ipc_send(p.server, &hello.base, sent, 2, 1000, &e), 0), "%s", e.message);
    lh_automsg(Longhaul__Kv__V1__HelloReply) r =
        (void *)ipc_recv(p.client, &longhaul__kv__v1__hello_reply__descriptor, got, &n, 1000, &e);
    cr_assert(r != NULL, "%s", e.message);
    cr_assert(eq(sz, n, 2));
    cr_assert(fcntl(got[0], F_GETFD) & FD_CLOEXEC);
    cr_assert(eq(int, (int)write(got[1], "k", 1), 1));
    char c = 0;
    cr_assert(eq(int, (int)read(sent[0], &c, 1), 1));
    cr_assert(eq(chr, c, 'k'));
    for (int i = 0; i < 2; i++)
        close(sent[i]), close(got[i]);
    pair_close(&p);
}

Test(ipc, unwanted_descriptors_are_closed)
{
    struct lh_error e = {0};
    struct pair p;
    int fds[2], before = dup(0);
    Longhaul__Kv__V1__HelloReply hello = LONGHAUL__KV__V1__HELLO_REPLY__INIT;

    close(before);
    pair_open(&p);
    cr_assert(eq(int, pipe(fds), 0));
    hello.protocol = 1;
    cr_assert(eq(int, ipc_send(p.server, &hello.base, fds, 2, 1000, &e), 0));
    close(fds[0]);
    close(fds[1]);
    cr_assert(receive(p.client, 1000, &e) == NULL);
    cr_assert(eq(int, e.code, LH_INVALID_ARGUMENT));
    pair_close(&p);
    int after = dup(0);
    cr_assert(eq(int, after, before), "a descriptor was left open");
    close(after);
}

Test(ipc, every_wait_ends)
{
    struct lh_error e = {0};
    struct pair p;

    pair_open(&p);
    int64_t start = lh_now_ms();
    cr_assert(receive(p.server, 50, &e) == NULL);
    cr_assert(eq(int, e.code, LH_DEADLINE_EXCEEDED));
    cr_assert(receive(p.server, 0, &e) == NULL);
    cr_assert(eq(int, e.code, LH_DEADLINE_EXCEEDED));
    cr_assert(receive(p.server, -1, &e) == NULL);
    cr_assert(eq(int, e.code, LH_INVALID_ARGUMENT));
    int r = 0;
    for (int i = 0; i < 100000 && r == 0; i++)
        r = send_sized(p.client, 1000, 20, &e);
    cr_assert(eq(int, r, LH_DEADLINE_EXCEEDED), "a peer that does not read stops the sender");
    cr_assert(eq(int, ipc_connect("/tmp/lh-ipc-nobody/s", 50, &e), LH_UNAVAILABLE));
    cr_assert(lt(long, (long)(lh_now_ms() - start), 5000));
    pair_close(&p);
}

Test(ipc, the_end_of_a_peer_is_seen)
{
    struct lh_error e = {0};
    struct pair p;

    pair_open(&p);
    cr_assert(eq(int, send_sized(p.client, 10, 100, &e), 0));
    close(p.client);
    p.client = -1;
    lh_automsg(Longhaul__Kv__V1__Request) last = receive(p.server, 100, &e);
    cr_assert(last != NULL, "what was sent before the end arrives");
    cr_assert(receive(p.server, 100, &e) == NULL);
    cr_assert(eq(int, e.code, LH_UNAVAILABLE));
    cr_assert(eq(int, send_sized(p.server, 10, 100, &e), LH_UNAVAILABLE));
    pair_close(&p);
}

Test(ipc, garbage_and_empty_messages_are_refused)
{
    struct lh_error e = {0};
    struct pair p;
    Longhaul__Kv__V1__Request empty = LONGHAUL__KV__V1__REQUEST__INIT;

    pair_open(&p);
    cr_assert(eq(int, ipc_send(p.client, &empty.base, NULL, 0, 100, &e), LH_INVALID_ARGUMENT));
    cr_assert(eq(int, (int)send(p.client, "\xff\xff\xff", 3, 0), 3));
    cr_assert(receive(p.server, 100, &e) == NULL);
    cr_assert(eq(int, e.code, LH_INVALID_ARGUMENT), "%s", e.message);
    pair_close(&p);
}

Test(ipc, one_server_a_socket)
{
    struct lh_error e = {0};
    struct pair p;
    struct stat st;

    pair_open(&p);
    cr_assert(eq(int, stat(p.path, &st), 0));
    cr_assert(eq(u32, st.st_mode & 0777, 0600));
    cr_assert(eq(int, ipc_listen(p.path, &e), LH_ALREADY_EXISTS));
    close(p.listener);
    p.listener = ipc_listen(p.path, &e);
    cr_assert(ge(int, p.listener, 0), "a dead server's file is replaced: %s", e.message);
    pid_t pid;
    cr_assert(eq(int, ipc_accept(p.listener, &pid, &e), LH_UNAVAILABLE), "accept never waits");
    pair_close(&p);
}

Test(ipc, other_files_and_long_paths_are_left_alone)
{
    struct lh_error e = {0};
    char dir[] = "/tmp/lh-ipc-XXXXXX", longer[200];

    cr_assert(mkdtemp(dir) != NULL);
    lh_autofree char *file = lh_format("%s/notes", dir);
    cr_assert(eq(int, lh_write_file(file, "keep", 4, 0600, &e), 0));
    cr_assert(lt(int, ipc_listen(file, &e), 0));
    lh_autofree char *kept = lh_read_file(file, 10, NULL, &e);
    cr_assert(eq(str, kept, (char *)"keep"));
    memset(longer, 'x', sizeof longer - 1);
    longer[0] = '/';
    longer[sizeof longer - 1] = 0;
    cr_assert(eq(int, ipc_listen(longer, &e), LH_INVALID_ARGUMENT));
    cr_assert(eq(int, ipc_connect(longer, 10, &e), LH_INVALID_ARGUMENT));
    cr_assert(eq(int, lh_remove_tree(dir, &e), 0));
}

Test(ipc, a_listener_rests_when_descriptors_have_run_out)
{
    struct lh_error e = {0};
    struct pair p;
    pid_t pid = 0;

    pair_open(&p);
    lh_autoclose int second = ipc_connect(p.path, 1000, &e);
    struct ipc_listener l = {.fd = p.listener};
    struct rlimit before = starve(0);
    int r = ipc_listener_accept(&l, &pid, &e);
    feed(0, before);
    cr_assert(eq(int, r, LH_RESOURCE_EXHAUSTED), "%s", e.message);
    cr_assert(lt(int, ipc_listener_poll(&l).fd, 0), "out of the loop");
    cr_assert(le(int, ipc_listener_timeout(&l, -1), IPC_REST_MS));
    cr_assert(eq(int, ipc_listener_timeout(&l, 3), 3));
    usleep(IPC_REST_MS * 1000 + 1000);
    cr_assert(eq(int, ipc_listener_poll(&l).fd, p.listener));
    cr_assert(eq(int, ipc_listener_timeout(&l, -1), -1));
    lh_autoclose int fd = ipc_listener_accept(&l, &pid, &e);
    cr_assert(ge(int, fd, 0), "who waited is served: %s", e.message);
    pair_close(&p);
}

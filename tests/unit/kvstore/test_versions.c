/* Ends of two versions come to terms, or say why not.  The other end is forged here, over the real
 * socket. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kit.h"
#include "kvstore/client/link.h"
#include "kvstore/protocol.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/ipc.h"
#include "proto/parse.h"

typedef Longhaul__Kv__V1__Request Request;
typedef Longhaul__Kv__V1__Reply Reply;

/* ---- a client of another version ---- */

static Reply *ask(int fd, const Request *q)
{
    struct lh_error e = {0};
    int segment = -1;
    size_t n = 1;

    cr_assert(eq(int, ipc_send(fd, &q->base, NULL, 0, 5000, &e), 0), "%s", e.message);
    Reply *r = (void *)ipc_recv(fd, &longhaul__kv__v1__reply__descriptor, &segment, &n, 5000, &e);
    cr_assert(r != NULL, "%s", e.message);
    if (n)
        close(segment);
    return r;
}

static Reply *hello_of(int fd, uint32_t oldest, uint32_t newest, const char *version)
{
    Longhaul__Kv__V1__HelloRequest hello = LONGHAUL__KV__V1__HELLO_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;

    hello.protocol = newest;
    hello.oldest = oldest;
    hello.version = (char *)version;
    hello.features = UINT64_MAX; /* of which most are of the future */
    hello.client = (char *)"other";
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_HELLO;
    q.hello = &hello;
    return ask(fd, &q);
}

static Reply *open_a_root(int fd)
{
    Longhaul__Kv__V1__OpenRootRequest open = LONGHAUL__KV__V1__OPEN_ROOT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct kv_key root = root_of(1);

    open.root = (ProtobufCBinaryData){sizeof root.bytes, root.bytes};
    open.block_bytes = BLOCK;
    open.unit_tokens = UNIT;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_OPEN_ROOT;
    q.open_root = &open;
    return ask(fd, &q);
}

Test(versions, kvstored_speaks_the_newest_that_both_know)
{
    static const struct {
        uint32_t oldest, newest, spoken;       /* 0 = none */
    } rows[] = {{0, KV_PROTOCOL, KV_PROTOCOL}, /* as a client from before ranges says it */
                {KV_PROTOCOL, KV_PROTOCOL + 8, KV_PROTOCOL},
                {KV_PROTOCOL + 1, KV_PROTOCOL + 8, 0},
                {0, KV_PROTOCOL + 8, 0},
                {0, 0, 0}};
    struct daemon d;

    daemon_start(&d, MEMORY, MEMORY);
    for (size_t i = 0; i < LH_ARRAY_SIZE(rows); i++) {
        lh_autoclose int fd = ipc_connect(d.socket, 5000, NULL);
        lh_automsg(Reply) r = hello_of(fd, rows[i].oldest, rows[i].newest, "9.8.7");
        if (rows[i].spoken) {
            cr_assert(eq(int, r->body_case, LONGHAUL__KV__V1__REPLY__BODY_HELLO), "row %zu", i);
            cr_assert(eq(u32, r->hello->protocol, rows[i].spoken), "row %zu", i);
            cr_assert(eq(u64, r->hello->features, KV_FEATURES));
            lh_automsg(Reply) done = open_a_root(fd);
            cr_assert(eq(int, done->body_case, LONGHAUL__KV__V1__REPLY__BODY_DONE));
            continue;
        }
        cr_assert(eq(int, r->body_case, LONGHAUL__KV__V1__REPLY__BODY_FAILURE), "row %zu", i);
        cr_assert(eq(int, r->failure->code, LH_FAILED_PRECONDITION));
        cr_assert(strstr(r->failure->message, "9.8.7") != NULL, "%s", r->failure->message);
        cr_assert(strstr(r->failure->message, LONGHAUL_VERSION) != NULL, "%s", r->failure->message);
        lh_automsg(Reply) refused = open_a_root(fd);
        cr_assert(eq(int, refused->body_case, LONGHAUL__KV__V1__REPLY__BODY_FAILURE));
    }
    daemon_stop(&d);
}

/* ---- a kvstored of another version ---- */

enum { SEGMENT = 1 << 20 };

struct forged {
    char dir[40], socket[64];
    uint32_t protocol;
    uint64_t features;
    const char *version;
    int listen_fd, requests;
    char tenant[64]; /* as the client gave it */
    pthread_t thread;
};

static void answer(struct forged *f, int fd, const Request *q)
{
    Longhaul__Kv__V1__HelloReply hello = LONGHAUL__KV__V1__HELLO_REPLY__INIT;
    Longhaul__Kv__V1__Done done = LONGHAUL__KV__V1__DONE__INIT;
    Reply r = LONGHAUL__KV__V1__REPLY__INIT;
    lh_autoclose int segment = -1;

    r.body_case = LONGHAUL__KV__V1__REPLY__BODY_DONE;
    r.done = &done;
    if (q->body_case == LONGHAUL__KV__V1__REQUEST__BODY_OPEN_ROOT)
        snprintf(f->tenant, sizeof f->tenant, "%s", q->open_root->tenant);
    if (q->body_case == LONGHAUL__KV__V1__REQUEST__BODY_HELLO) {
        segment = memfd_create("segment", MFD_CLOEXEC);
        cr_assert(eq(int, ftruncate(segment, SEGMENT), 0));
        hello.protocol = f->protocol;
        hello.features = f->features;
        hello.version = (char *)f->version;
        hello.segment_bytes = SEGMENT;
        hello.page_bytes = 4096;
        r.body_case = LONGHAUL__KV__V1__REPLY__BODY_HELLO;
        r.hello = &hello;
    }
    ipc_send(fd, &r.base, &segment, segment >= 0, 5000, NULL);
    f->requests++;
}

/* One connection, until it ends. */
static void *serve(void *arg)
{
    struct forged *f = arg;
    struct pollfd p = {.fd = f->listen_fd, .events = POLLIN};
    pid_t pid;

    if (poll(&p, 1, 30000) <= 0)
        return NULL;
    lh_autoclose int fd = ipc_accept(f->listen_fd, &pid, NULL);
    for (;;) {
        lh_automsg(Request) q =
            (void *)ipc_recv(fd, &longhaul__kv__v1__request__descriptor, NULL, NULL, 30000, NULL);
        if (!q)
            return NULL;
        answer(f, fd, q);
    }
}

static void forge(struct forged *f, uint32_t protocol, uint64_t features, const char *version)
{
    *f = (struct forged){.protocol = protocol, .features = features, .version = version};
    strcpy(f->dir, "/tmp/kvstore-test-XXXXXX");
    cr_assert(mkdtemp(f->dir) != NULL);
    snprintf(f->socket, sizeof f->socket, "%s/kv.sock", f->dir);
    f->listen_fd = ipc_listen(f->socket, NULL);
    cr_assert(ge(int, f->listen_fd, 0));
    cr_assert(eq(int, pthread_create(&f->thread, NULL, serve, f), 0));
}

static void end(struct forged *f)
{
    pthread_join(f->thread, NULL);
    close(f->listen_fd);
    cr_assert(eq(int, lh_remove_tree(f->dir, NULL), 0));
}

static int use_root(const struct forged *f, struct lh_error *e)
{
    struct kv_options o = {.path = f->socket,
                           .name = "a",
                           .tenant = "acme",
                           .unit_tokens = UNIT,
                           .block_bytes = BLOCK,
                           .timeout_ms = 5000};
    lh_auto(kv_client) c = kv_client_create(&o, e);
    struct kv_key root = root_of(1);

    return kv_use_root(c, &root, 1, 0, e);
}

Test(versions, a_client_uses_of_an_older_kvstored_what_that_knows)
{
    struct lh_error e = {0};
    struct forged old, present;

    forge(&old, KV_PROTOCOL, 0, "");
    cr_assert(eq(int, use_root(&old, &e), 0), "%s", e.message);
    end(&old);
    cr_assert(eq(int, old.requests, 2));
    cr_assert(eq(str, old.tenant, (char *)""), "it would not know what a tenant is");

    forge(&present, KV_PROTOCOL, KV_FEATURES | UINT64_C(1) << 60, "8.0.0");
    cr_assert(eq(int, use_root(&present, &e), 0), "%s", e.message);
    end(&present);
    cr_assert(eq(str, present.tenant, (char *)"acme"));
}

Test(versions, a_kvstored_of_another_protocol_is_a_clear_error)
{
    struct lh_error e = {0};
    struct forged f;

    forge(&f, KV_PROTOCOL + 1, KV_FEATURES, "8.0.0");
    cr_assert(eq(int, use_root(&f, &e), LH_FAILED_PRECONDITION), "%s", e.message);
    cr_assert(strstr(e.message, "8.0.0") != NULL, "%s", e.message);
    cr_assert(strstr(e.message, LONGHAUL_VERSION) != NULL, "%s", e.message);
    end(&f);
}

Test(versions, a_command_that_an_older_kvstored_lacks_says_so)
{
    struct lh_error e = {0};
    struct kv_link l;
    struct forged f;

    forge(&f, KV_PROTOCOL, 0, "");
    cr_assert(eq(int, kv_link_open(&l, f.socket, "cli", lh_now_ms() + 5000, &e), 0), "%s",
              e.message);
    cr_assert(eq(int, kv_link_needs(&l, KV_FEATURE_SHOW, "`show`", &e), LH_UNIMPLEMENTED));
    cr_assert(strstr(e.message, LONGHAUL_VERSION) != NULL, "%s", e.message);
    kv_link_close(&l);
    end(&f);
}

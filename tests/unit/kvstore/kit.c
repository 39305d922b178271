#include "kit.h"

#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "kvstore/client/link.h"
#include "longhaul/job/v1/job.pb-c.h"
#include "longhaul/kv/v1/kv.pb-c.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/ipc.h"
#include "proto/parse.h"

extern char **environ;

typedef Longhaul__Job__V1__KvStore KvStore;
static const KvStore NOTHING = LONGHAUL__JOB__V1__KV_STORE__INIT;

static void write_job(const char *dir, KvStore *kv, bool carry)
{
    Longhaul__Job__V1__Job job = LONGHAUL__JOB__V1__JOB__INIT;
    Longhaul__Job__V1__Rollout rollout = LONGHAUL__JOB__V1__ROLLOUT__INIT;
    lh_autofree char *path = lh_format("%s/job.pb", dir);
    size_t len;

    job.format = 1;
    job.kvstore = kv;
    job.rollout = &rollout;
    rollout.carry = carry;
    lh_autofree uint8_t *data = lh_pack(&job.base, &len, NULL);
    cr_assert(eq(int, lh_write_file(path, data, len, 0600, NULL), 0));
}

void daemon_restart(struct daemon *d)
{
    char *argv[] = {(char *)KVSTORED, d->dir, NULL};
    posix_spawn_file_actions_t actions;
    struct lh_error e = {0};

    posix_spawn_file_actions_init(&actions);
    if (*d->log)
        posix_spawn_file_actions_addopen(&actions, 2, d->log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    cr_assert(eq(int, posix_spawn(&d->pid, KVSTORED, &actions, NULL, argv, environ), 0));
    posix_spawn_file_actions_destroy(&actions);
    int fd = ipc_connect(d->socket, 10000, &e);
    cr_assert(ge(int, fd, 0), "%s", e.message);
    close(fd);
}

static void prepare(struct daemon *d, KvStore kv, bool carry)
{
    strcpy(d->dir, "/tmp/kvstore-test-XXXXXX");
    cr_assert(mkdtemp(d->dir) != NULL);
    snprintf(d->socket, sizeof d->socket, "%s/run/kv.sock", d->dir);
    snprintf(d->log, sizeof d->log, "%s%s", *kv.metrics ? d->dir : "", *kv.metrics ? "/log" : "");
    write_job(d->dir, &kv, carry);
}

void daemon_prepare(struct daemon *d, uint64_t memory, uint64_t disk, bool carry)
{
    KvStore kv = NOTHING;

    kv.memory_bytes = memory;
    kv.max_inflight_bytes = 64 << 20;
    kv.disk_bytes = disk;
    prepare(d, kv, carry);
}

static void start(struct daemon *d, KvStore kv)
{
    prepare(d, kv, false);
    daemon_restart(d);
}

void daemon_start(struct daemon *d, uint64_t memory, uint64_t inflight)
{
    KvStore kv = NOTHING;

    kv.memory_bytes = memory;
    kv.max_inflight_bytes = inflight;
    start(d, kv);
}

void daemon_start_on_disk(struct daemon *d, uint64_t memory, uint64_t disk)
{
    daemon_start_remote(d, memory, disk, "", "");
}

void daemon_start_remote(struct daemon *d, uint64_t memory, uint64_t disk, const char *remote,
                         const char *credentials)
{
    KvStore kv = NOTHING;

    kv.memory_bytes = memory;
    kv.max_inflight_bytes = 64 << 20;
    kv.disk_bytes = disk;
    kv.remote = (char *)remote;
    kv.remote_credentials = (char *)credentials;
    start(d, kv);
}

Longhaul__Kv__V1__StatReply stat_of(const struct daemon *d)
{
    Longhaul__Kv__V1__StatRequest stat = LONGHAUL__KV__V1__STAT_REQUEST__INIT;
    Longhaul__Kv__V1__Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    struct lh_error e = {0};
    struct kv_link l;

    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_STAT;
    q.stat = &stat;
    cr_assert(eq(int, kv_link_open(&l, d->socket, "stat", lh_now_ms() + 5000, &e), 0), "%s",
              e.message);
    lh_automsg(Longhaul__Kv__V1__Reply) r = kv_link_call(&l, &q, lh_now_ms() + 5000, &e);
    cr_assert(r != NULL, "%s", e.message);
    kv_link_close(&l);
    Longhaul__Kv__V1__StatReply s = *r->stat;
    s.disk_path = s.remote = s.remote_trouble = NULL; /* they go with the message */
    s.tenants = NULL;
    s.n_tenants = 0;
    return s;
}

void daemon_start_watched(struct daemon *d, uint64_t memory, const char *quotas)
{
    KvStore kv = NOTHING;

    kv.memory_bytes = kv.max_inflight_bytes = memory;
    kv.quotas = (char *)quotas;
    kv.metrics = (char *)"127.0.0.1:0";
    start(d, kv);
}

static int reap(struct daemon *d)
{
    int status = -1;

    while (waitpid(d->pid, &status, 0) < 0 && errno == EINTR)
        ;
    d->pid = -1;
    return status;
}

void daemon_kill(struct daemon *d)
{
    kill(d->pid, SIGKILL);
    int status = reap(d);
    bool killed = WIFSIGNALED(status);
    cr_assert(killed);
}

void daemon_stop(struct daemon *d)
{
    int64_t start = lh_now_ms();

    kill(d->pid, SIGTERM);
    int status = reap(d);
    cr_assert(eq(int, status, 0), "it did not exit with 0");
    cr_assert(lt(long, (long)(lh_now_ms() - start), 5000));
    cr_assert(access(d->socket, F_OK) < 0, "the socket is left behind");
    cr_assert(eq(int, lh_remove_tree(d->dir, NULL), 0));
}

struct kv_client *client_of(const struct daemon *d, const char *name)
{
    struct kv_options o = {.path = d->socket,
                           .name = name,
                           .unit_tokens = UNIT,
                           .block_bytes = BLOCK,
                           .state_bytes = STATE,
                           .timeout_ms = 5000};
    struct lh_error e = {0};
    struct kv_client *c = kv_client_create(&o, &e);

    cr_assert(c != NULL, "%s", e.message);
    return c;
}

struct kv_key root_of(unsigned version)
{
    struct kv_identity id = {.tenant = ""};

    memcpy(id.policy_version, &version, sizeof version);
    return kv_root(&id);
}

void chain_of(const struct kv_key *root, unsigned seed, size_t n, struct kv_key *chain)
{
    lh_autofree int32_t *tokens = calloc(n * UNIT, sizeof *tokens);

    for (size_t i = 0; i < n * UNIT; i++)
        tokens[i] = (int32_t)(seed * 1000003 + i);
    cr_assert(eq(sz, kv_chain(root, tokens, n * UNIT, UNIT, chain), n));
}

void use_version(struct kv_client *c, unsigned version, bool retire)
{
    struct kv_key root = root_of(version);
    struct lh_error e = {0};

    cr_assert(eq(int, kv_use_root(c, &root, version, retire, &e), 0), "%s", e.message);
}

void fill_content(const struct kv_key *hash, char part, void *to, size_t bytes)
{
    uint8_t *p = to;

    for (size_t i = 0; i < bytes; i++)
        p[i] = (uint8_t)(hash->bytes[i % 16] + i / 16 + (size_t)part);
}

int64_t put_units(struct kv_client *c, const struct kv_key *chain, size_t first, size_t n,
                  struct lh_error *err)
{
    size_t units = n - first;
    lh_autofree uint8_t *bytes = malloc(units * BLOCK);
    lh_autofree const void **blocks = calloc(units, sizeof(void *));
    uint8_t state[STATE];

    for (size_t i = 0; i < units; i++) {
        blocks[i] = bytes + i * BLOCK;
        fill_content(&chain[first + i], 'B', bytes + i * BLOCK, BLOCK);
    }
    fill_content(&chain[n - 1], 'S', state, STATE);
    return kv_put(c, chain, first, n, blocks, state, "trajectory", err);
}

static void check(const struct kv_key *hash, char part, const uint8_t *got, size_t bytes)
{
    lh_autofree uint8_t *want = malloc(bytes);

    fill_content(hash, part, want, bytes);
    cr_assert(memcmp(got, want, bytes) == 0, "wrong bytes of part %c", part);
}

/* 0 when something was refused, which `strict` forbids. */
static size_t read_hit(struct kv_hit *h, const struct kv_key *chain, size_t at_least, bool strict)
{
    uint8_t block[BLOCK], state[STATE];
    struct lh_error e = {0};
    size_t units = h ? kv_hit_units(h) : 0;
    int r = 0;

    for (size_t i = at_least; r == 0 && i < units; i++)
        if ((r = kv_hit_block(h, i, block, &e)) == 0)
            check(&chain[i], 'B', block, BLOCK);
    if (r == 0 && units && (r = kv_hit_state(h, state, &e)) == 0)
        check(&chain[units - 1], 'S', state, STATE);
    cr_assert(r == 0 || !strict, "%s", e.message);
    return r == 0 ? units : 0;
}

size_t try_units(struct kv_client *c, const struct kv_key *chain, size_t n, size_t at_least)
{
    lh_auto(kv_hit) h = kv_lookup(c, chain, n, at_least, "trajectory", NULL);

    return read_hit(h, chain, at_least, false);
}

size_t get_units(struct kv_client *c, const struct kv_key *chain, size_t n, size_t at_least)
{
    lh_auto(kv_hit) h = kv_lookup(c, chain, n, at_least, "trajectory", NULL);

    return read_hit(h, chain, at_least, true);
}

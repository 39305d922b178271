/* Which engines this machine offers.  `fsonly` always; `criu` when it has shown that it works.
 *
 * Its version proves nothing (`criu check` says "Looks good" where the first socket makes a dump
 * fail), so a sandbox is started in which agentenv-witness holds one of everything, checkpointed,
 * ended, restored and asked.  That takes a quarter of a second, in the background, once a boot: the
 * result is kept in the registry with what it depends on.  Whoever asks for the engine waits. */
#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/daemon/internal.h"
#include "agentenv/sandbox/facts.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"
#include "proto/wait.h"

LH_LOG_COMPONENT("agentenvd");

enum { TEST_EXEC_MS = 20000 };

struct engines {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t known;
    bool done, have_criu;
    char problem[1100]; /* why not */
};

/* ---- the test ---- */

static int say(void *ctx, enum box_stream stream, uint64_t offset, const void *data, size_t len)
{
    char *answer = ctx;
    size_t n = strlen(answer);

    (void)stream;
    (void)offset;
    snprintf(answer + n, 200 - n, "%.*s", (int)len, (const char *)data);
    return 0;
}

static int run_witness(struct box *box, const char *verb, struct lh_error *err)
{
    const char *const argv[] = {"/witness", verb, NULL};
    char answer[200] = "";
    struct box_exec_spec spec = {
        .exec_id = verb, .argv = argv, .timeout_ms = TEST_EXEC_MS, .output = say, .ctx = answer};
    struct box_exec_result result;
    int r = box_exec(box, &spec, &result, err);

    if (r == 0 && result.status != 0)
        r = lh_fail(err, LH_FAILED_PRECONDITION, "after a checkpoint, %s", answer);
    return r;
}

static int there_and_back(struct box *box, const char *dir, struct lh_error *err)
{
    lh_autofree char *images = lh_format("%s/images", dir), *sealed = lh_format("%s/sealed", dir),
                     *root = lh_format("%s/root", dir), *upper = lh_format("%s/box", dir);
    int r;

    if (!images || !sealed || !root || !upper || mkdir(images, 0700) < 0)
        return lh_fail_errno(err, errno, "self-test");
    const struct box_layer layers[] = {{sealed, false}, {root, true}};
    if ((r = run_witness(box, "start", err)) < 0 || (r = box_checkpoint(box, images, err)) < 0 ||
        (r = box_put_away(box, err)) < 0 || (r = box_take_upper(upper, sealed, err)) < 0 ||
        (r = box_set_layers(box, layers, 2, err)) < 0 || (r = box_restore(box, images, err)) < 0)
        return r;
    return run_witness(box, "ask", err);
}

static int copy_witness(const char *to, struct lh_error *err)
{
    lh_autofree char *from = box_find_program("agentenv-witness", err);
    size_t len;
    lh_autofree char *bytes = from ? lh_read_file(from, 16 << 20, &len, err) : NULL;

    return bytes ? lh_write_file(to, bytes, len, 0755, err) : LH_FAILED_PRECONDITION;
}

static int test_in(struct daemon *d, const char *dir, struct lh_error *err)
{
    lh_autofree char *root = lh_format("%s/root", dir), *tmp = lh_format("%s/root/tmp", dir),
                     *box_dir = lh_format("%s/box", dir), *witness = lh_format("%s/witness", root);
    int r;

    if (!root || !tmp || !box_dir || !witness)
        return lh_fail_errno(err, ENOMEM, "self-test");
    if ((r = lh_make_dirs(tmp, 0755, err)) < 0 || (r = lh_make_dirs(box_dir, 0755, err)) < 0 ||
        (r = copy_witness(witness, err)) < 0)
        return r;
    const struct box_layer layer = {root, true};
    const struct box_spec spec = {.id = "selftest",
                                  .dir = box_dir,
                                  .layers = &layer,
                                  .n_layers = 1,
                                  .limits = {.cpu_millis = 1000,
                                             .memory_bytes = 64 << 20,
                                             .pids = 16,
                                             .open_files = 128,
                                             .disk_bytes = 16 << 20,
                                             .output_bytes = 4096},
                                  .network = BOX_NET_LOOPBACK};
    struct box *box = box_start(d->host, &spec, err);
    if (!box)
        return err->code;
    r = there_and_back(box, dir, err);
    struct lh_error end = {0};
    if (box_destroy(box, &end) < 0)
        lh_warn("the self-test left something", "why=%s", end.message);
    return r;
}

/* What an earlier one left when it was killed is under the same names: the cgroup was swept. */
static int test_criu(struct daemon *d, struct lh_error *err)
{
    lh_autofree char *dir = lh_format("%s/selftest", d->state_dir);
    if (box_facts()->rootless)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "it needs root: run agentenvd as root to keep processes; engine fsonly "
                       "keeps files");
    int version, r = box_host_criu(d->host, &version, err);

    if (r == 0 && version < 40000)
        return lh_fail(err, LH_FAILED_PRECONDITION, "criu %d.%d is too old: run deploy/criu",
                       version / 10000, version / 100 % 100);
    if (r == 0)
        r = dir ? lh_remove_tree(dir, err) : lh_fail_errno(err, ENOMEM, "self-test");
    if (r == 0)
        r = test_in(d, dir, err);
    if (dir && lh_remove_tree(dir, NULL) < 0)
        lh_warn("a directory stays", "path=%s", dir);
    return r;
}

/* ---- its result ---- */

/* What the result depends on, besides what the tables of box.h hide. */
static char *fingerprint(struct daemon *d)
{
    lh_autofree char *programs = box_host_fingerprint(d->host);

    return programs ? lh_format("%s %s", d->boot, programs) : NULL;
}

static bool known_to_work(struct daemon *d, const char *print)
{
    int64_t n = 0;

    return db_int(d->db, NULL, &n, "SELECT count(*) FROM selftests WHERE fingerprint=?", "s",
                  print) == 0 &&
           n > 0;
}

static void remember(struct daemon *d, const char *print)
{
    if (db_run(d->db, NULL, "DELETE FROM selftests", "") < 0 ||
        db_run(d->db, NULL, "INSERT INTO selftests VALUES(?)", "s", print) < 0)
        lh_warn("result of the self-test not recorded", "fingerprint=%s", print);
}

static void *engines_main(void *arg)
{
    struct daemon *d = arg;
    struct engines *e = d->engines;
    struct lh_error err = {0};
    lh_autofree char *print = fingerprint(d);
    int64_t start_ms = lh_now_ms();
    int r = print && known_to_work(d, print) ? 0 : test_criu(d, &err);

    if (r == 0 && print)
        remember(d, print);
    pthread_mutex_lock(&e->lock);
    e->done = true;
    e->have_criu = r == 0;
    snprintf(e->problem, sizeof e->problem, "criu: %s", err.message);
    pthread_cond_broadcast(&e->known);
    pthread_mutex_unlock(&e->lock);
    if (r == 0)
        lh_info("engine criu is offered", "test_ms=%lld", (long long)(lh_now_ms() - start_ms));
    else
        lh_warn("engine criu is not offered", "why=%s", err.message);
    return NULL;
}

int engines_start(struct daemon *d, struct lh_error *err)
{
    struct engines *e = calloc(1, sizeof *e);

    if (!e)
        return lh_fail_errno(err, ENOMEM, "engines");
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->known, NULL);
    d->engines = e;
    int failed = pthread_create(&e->thread, NULL, engines_main, d);
    if (failed) {
        free(e);
        d->engines = NULL;
        return lh_fail_errno(err, failed, "the self-test of engines");
    }
    return 0;
}

void engines_stop(struct daemon *d)
{
    struct engines *e = d->engines;

    if (!e)
        return;
    pthread_join(e->thread, NULL);
    pthread_cond_destroy(&e->known);
    pthread_mutex_destroy(&e->lock);
    free(e);
    d->engines = NULL;
}

int engines_need_criu(struct daemon *d, int64_t deadline_ms, struct lh_error *err)
{
    struct engines *e = d->engines;

    LH_LOCKED(&e->lock);
    while (!e->done)
        if (!lh_wait_until(&e->known, &e->lock, deadline_ms))
            return lh_fail(err, LH_DEADLINE_EXCEEDED, "the self-test of criu is not over yet");
    return e->have_criu ? 0 : lh_fail(err, LH_FAILED_PRECONDITION, "%s", e->problem);
}

bool engines_have_criu(struct daemon *d)
{
    LH_LOCKED(&d->engines->lock);
    return d->engines->have_criu;
}

static int append(char ***list, size_t *n, const char *text, struct lh_error *err)
{
    char **more = realloc(*list, (*n + 1) * sizeof *more), *copy = strdup(text);

    if (more)
        *list = more;
    if (!more || !copy) {
        free(copy);
        return lh_fail_errno(err, ENOMEM, "engines");
    }
    (*list)[(*n)++] = copy;
    return 0;
}

static int append_offer(V1(EnginesReply) * reply, const struct box_offer *o, struct lh_error *err)
{
    lh_autofree char *text = lh_format("%s: %s", o->what, o->cost);

    return text ? append(&reply->problems, &reply->n_problems, text, err)
                : lh_fail_errno(err, ENOMEM, "engines");
}

int engines_reply(struct daemon *d, V1(EnginesReply) * reply, struct lh_error *err)
{
    struct lh_error why = {0};
    bool criu = engines_need_criu(d, lh_now_ms() + WAIT_DEFAULT_MS, &why) == 0;
    reply->hibernate_us = d->hibernate_us;
    reply->resume_us = d->resume_us;
    int r = criu ? append(&reply->engines, &reply->n_engines, "criu", err)
                 : append(&reply->problems, &reply->n_problems, why.message, err);

    struct box_offer offer;
    for (size_t i = 0; r == 0 && box_offer(i, &offer); i++)
        if (!offer.there)
            r = append_offer(reply, &offer, err);
    return r < 0 ? r : append(&reply->engines, &reply->n_engines, "fsonly", err);
}

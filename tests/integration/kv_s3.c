/* The remote tier against a real S3-compatible server, s3rver: it knows its users but does not
 * compute their signatures. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../must_work.h"
#include "kv_lab.h"
#include "proto/clock.h"
#include "proto/file.h"

enum { ANSWER_MS = 60000 };

struct bucket {
    char dir[40];
    char *program, *secrets;
    int port;
    pid_t pid;
};

/* LONGHAUL_S3RVER names where npm has put it; else npm does so now. */
static bool find_program(struct bucket *b)
{
    const char *there = getenv("LONGHAUL_S3RVER");
    lh_autofree char *install = lh_format(
        "npm install --no-audit --no-fund --silent --prefix %s s3rver@3.7.1 >%s/npm.log 2>&1",
        b->dir, b->dir);

    b->program = lh_format("%s/node_modules/.bin/s3rver", there ? there : b->dir);
    return access(b->program, X_OK) == 0 || (!there && system(install) == 0);
}

static void serve(struct bucket *b)
{
    lh_autofree char *data = lh_format("%s/data", b->dir), *log = lh_format("%s/log", b->dir);
    char port[16];

    snprintf(port, sizeof port, "%d", b->port);
    const char *argv[] = {b->program,           "-d",       data, "-a",
                          "127.0.0.1",          "-p",       port, "--silent",
                          "--configure-bucket", "longhaul", NULL};
    b->pid = lab_spawn(argv, log);
    cr_assert(lab_listens(b->port, ANSWER_MS));
}

static void write_secrets(struct bucket *b, const char *key)
{
    lh_autofree char *text = lh_format("aws_access_key_id = %s\naws_secret_access_key = S3RVER\n"
                                       "endpoint_url = http://127.0.0.1:%d\n",
                                       key, b->port);

    cr_assert(eq(int, lh_write_file(b->secrets, text, strlen(text), 0600, NULL), 0));
}

static void bucket_stop(struct bucket *b)
{
    if (b->pid)
        lab_end(b->pid, SIGKILL);
    cr_assert(eq(int, lh_remove_tree(b->dir, NULL), 0));
    free(b->program);
    free(b->secrets);
}

static bool bucket_start(struct bucket *b)
{
    *b = (struct bucket){.dir = "/tmp/kv-s3-XXXXXX"};
    cr_assert(mkdtemp(b->dir) != NULL);
    b->secrets = lh_format("%s/secrets", b->dir);
    if (!find_program(b)) {
        bucket_stop(b);
        return false;
    }
    b->port = lab_port();
    write_secrets(b, "S3RVER");
    serve(b);
    return true;
}

#define NEEDS_S3(b)                                                                                \
    NEEDS("s3", bucket_start(b),                                                                   \
          "no npm to install s3rver with; or set LONGHAUL_S3RVER to where it is")

/* One server for all of it: starting node takes a second. */
Test(kv_s3, what_was_evicted_comes_back_and_trouble_is_a_miss, .timeout = 280)
{
    struct bucket b;
    struct daemon d;

    NEEDS_S3(&b);
    daemon_start_remote(&d, MEMORY, 0, "s3://longhaul/some/prefix", b.secrets);
    lab_store(&d, true);
    cr_assert(gt(u64, stat_of(&d).remote_stored, 0));
    unsigned whole = lab_read_anew(&d);
    cr_assert(gt(uint, whole, 0));
    Longhaul__Kv__V1__StatReply s = stat_of(&d);
    cr_assert(gt(u64, s.remote_hits, 0));
    cr_assert(eq(u64, s.remote_corrupt, 0));

    kill(b.pid, SIGSTOP); /* slow beyond all deadlines */
    cr_assert(eq(uint, lab_read_anew(&d), 0));
    s = stat_of(&d);
    cr_assert(gt(u64, s.remote_errors, 0));
    cr_assert(lt(u64, s.remote_lookups, LAB_SEQUENCES), "every lookup has asked");
    kill(b.pid, SIGCONT);
    lab_wait(&d, whole);

    lab_end(b.pid, SIGKILL); /* not there */
    cr_assert(eq(uint, lab_read_anew(&d), 0));
    serve(&b);
    lab_wait(&d, whole);

    write_secrets(&b, "NOBODY"); /* answers with errors: 403 */
    cr_assert(eq(uint, lab_read_anew(&d), 0));
    cr_assert(gt(u64, stat_of(&d).remote_errors, 0));
    lab_store(&d, false); /* as if there were none */
    daemon_stop(&d);
    bucket_stop(&b);
}

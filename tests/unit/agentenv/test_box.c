/* Boxes from start to end: exec in all its outcomes, freezing, adoption after kill -9, removal. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/file.h"
#include "tests/unit/agentenv/lab.h"

TestSuite(box, .init = lab_init, .fini = lab_fini, .timeout = 120);

static void destroy(struct box *b)
{
    struct lh_error err = {0};

    cr_assert(box_destroy(b, &err) == 0, "%s", err.message);
}

Test(box, a_command_gets_what_it_was_given)
{
    struct box *b = lab_start(&lab, "one");
    const char *argv[] = {"sh", "-c",
                          "read line; echo \"$line\" >&2; pwd; id -u; id -g; id -G; "
                          "echo $HOME $USER $X; exit 7",
                          NULL};
    const char *env[] = {"X=y z", NULL};
    struct box_exec_spec s = {.exec_id = "a",
                              .argv = argv,
                              .env = env,
                              .cwd = "/etc",
                              .user = "user",
                              .stdin_data = "from stdin\n",
                              .stdin_len = 11,
                              .timeout_ms = LAB_PATIENCE_MS};
    struct lab_result *r = lab_exec(b, &s);

    cr_assert(r->rc == 0, "%s", r->error.message);
    cr_assert(eq(str, r->out, (char *)"/etc\n1000\n1000\n1000 77\n/home user y z\n"));
    cr_assert(eq(str, r->err, (char *)"from stdin\n"));
    cr_assert(eq(int, r->exec.status, 7));
    cr_assert(not(r->exec.truncated));
    cr_assert(eq(u64, r->exec.output_bytes, r->out_len + r->err_len));
    s.user = "12:34";
    r = lab_exec(b, &s);
    cr_assert(eq(str, r->out, (char *)"/etc\n12\n34\n34\n/ user y z\n"));
    destroy(b);
}

Test(box, what_cannot_start_is_an_error_that_says_why)
{
    static const struct {
        const char *argv0, *user, *cwd;
        int code;
    } cases[] = {{"no-such-program", "", "", LH_NOT_FOUND},
                 {"/etc/base", "", "", LH_PERMISSION_DENIED},
                 {"true", "nobody-here", "", LH_INVALID_ARGUMENT},
                 {"true", "65536", "", LH_INVALID_ARGUMENT},
                 {"true", "", "/no/such/dir", LH_NOT_FOUND}};
    struct box *b = lab_start(&lab, "one");

    for (size_t i = 0; i < LH_ARRAY_SIZE(cases); i++) {
        const char *argv[] = {cases[i].argv0, NULL};
        struct lab_result *r = lab_exec(b, &(struct box_exec_spec){.exec_id = "x",
                                                                   .argv = argv,
                                                                   .user = cases[i].user,
                                                                   .cwd = cases[i].cwd,
                                                                   .timeout_ms = LAB_PATIENCE_MS});
        cr_expect(eq(int, r->rc, cases[i].code), "case %zu: %s", i, r->error.message);
    }
    cr_assert(eq(int, lab_sh(b, "kill -TERM $$", LAB_PATIENCE_MS)->exec.signal, SIGTERM));
    destroy(b);
}

Test(box, a_timeout_kills_the_whole_tree_and_keeps_the_output)
{
    struct box *b = lab_start(&lab, "one");
    int64_t start = lh_now_ms();
    struct lab_result *r =
        lab_sh(b, "echo begun; setsid sh -c 'sleep 99 & sleep 98' & (sleep 97 &) ; sleep 96", 3000);

    cr_assert(r->rc == 0, "%s", r->error.message);
    cr_assert(r->exec.timed_out);
    cr_assert(eq(int, r->exec.signal, SIGKILL));
    cr_assert(eq(str, r->out, (char *)"begun\n"));
    cr_assert(lt(i64, lh_now_ms() - start, 90000), "not when the sleeps end");
    cr_assert(eq(str, (char *)lab_out(b, "ps | grep -c [s]leep || true"), (char *)"0"));
    destroy(b);
}

Test(box, background_processes_outlive_their_exec_but_not_the_timeout_of_another)
{
    struct box *b = lab_start(&lab, "one");

    lab_out(b, "(while :; do echo noise; sleep 0.01; done) & sleep 77 & echo $! > /tmp/pid");
    cr_assert(lab_sh(b, "sleep 66", 200)->exec.timed_out);
    lab_out(b, "kill -0 $(cat /tmp/pid) && ps | grep [n]oise"); /* no SIGPIPE either */
    destroy(b);
}

Test(box, output_is_cut_at_its_limit_and_says_so)
{
    struct box *b = lab_start(&lab, "one");
    struct lab_result *r = lab_sh(b, "yes | head -c 1000000; echo end >&2", 20000);

    cr_assert(r->rc == 0, "%s", r->error.message);
    cr_assert(eq(int, r->exec.status, 0));
    cr_assert(r->exec.truncated);
    cr_assert(eq(u64, r->exec.output_bytes, 1000004));
    cr_assert(eq(sz, r->out_len, 32 << 10));
    destroy(b);
}

static bool cancel_at_once(void *ctx)
{
    return true;
}

Test(box, a_cancelled_exec_is_killed)
{
    struct box *b = lab_start(&lab, "one");
    const char *argv[] = {"sleep", "50", NULL};
    struct box_exec_spec s = {
        .exec_id = "x", .argv = argv, .timeout_ms = 60000, .cancelled = cancel_at_once};
    struct lab_result *r = lab_exec(b, &s);

    cr_assert(r->rc == 0, "%s", r->error.message);
    cr_assert(r->exec.cancelled);
    cr_assert(eq(int, r->exec.signal, SIGKILL));
    destroy(b);
}

static void wait_for_processes(struct box *b, unsigned n)
{
    int64_t deadline_ms = lh_now_ms() + LAB_PATIENCE_MS;
    struct box_usage u = {0};

    while (box_usage(b, &u, NULL) == 0 && u.processes < n && lh_ms_left(deadline_ms) > 0)
        usleep(10000);
    cr_assert(ge(u32, u.processes, n));
}

static void *sleep_in_box(void *box)
{
    struct lab_result *r = lab_sh(box, "sleep 40", 60000);

    return (void *)(intptr_t)r->rc;
}

Test(box, killing_the_box_ends_its_execs)
{
    struct box *b = lab_start(&lab, "one");
    pthread_t t;
    void *rc;

    cr_assert(pthread_create(&t, NULL, sleep_in_box, b) == 0);
    wait_for_processes(b, 2);
    cr_assert(box_kill(b, NULL) == 0);
    pthread_join(t, &rc);
    cr_assert(eq(int, (int)(intptr_t)rc, LH_UNAVAILABLE));
    cr_assert(box_kill(b, NULL) == 0, "idempotent");
    destroy(b);
}

Test(box, frozen_stands_still_and_thawed_goes_on)
{
    struct box *b = lab_start(&lab, "one");
    char before[64], frozen[64];

    lab_out(b, "(i=0; while :; do i=$((i+1)); echo $i > /tmp/n.new; mv /tmp/n.new /tmp/n; done) "
               "> /dev/null 2>&1 & until test -e /tmp/n; do sleep 0.02; done");
    cr_assert(box_freeze(b, NULL) == 0);
    cr_assert(box_freeze(b, NULL) == 0, "idempotent");
    for (int i = 0; i < 2; i++) {
        lh_autoclose int root = box_root_fd(b, NULL);
        lh_autoclose int fd = box_open_in(root, "/tmp/n", O_RDONLY, 0, NULL);
        char *to = i ? frozen : before;
        ssize_t n = fd < 0 ? 0 : read(fd, to, 63);
        to[n > 0 ? n : 0] = 0;
        usleep(200000);
    }
    cr_assert(before[0] && strcmp(before, frozen) == 0, "%s and %s", before, frozen);
    cr_assert(box_thaw(b, NULL) == 0);
    frozen[strcspn(frozen, "\n")] = 0;
    lh_autofree char *goes_on = /* or the script's time is over */
        lh_format("while [ \"$(cat /tmp/n)\" = %s ]; do sleep 0.02; done", frozen);
    lab_out(b, goes_on);
    destroy(b);
}

/* ---- adoption ------------------------------------------------------------------------------ */

struct lived {
    struct box_identity identity;
    bool ok;
};

static int tell_first(void *ctx, enum box_stream stream, uint64_t offset, const void *data,
                      size_t len)
{
    const int *fd = ctx;
    char c = 'x';

    return write(*fd, &c, 1) == 1 ? 0 : 1;
}

/* A daemon: starts a box and an exec in it, says so, and waits for kill -9. */
_Noreturn static void live(const struct lab *l, int out, bool freeze)
{
    struct lived me = {.ok = false};
    struct box_host *h =
        box_host_create(&(struct box_host_options){.cgroup_parent = l->parent}, NULL);
    struct box_layer layer;
    struct box_spec spec = lab_spec((struct lab *)l, "adopted", &layer);
    struct box *b = h ? box_start(h, &spec, NULL) : NULL;
    const char *argv[] = {"sh", "-c", "echo begin; sleep 1; echo end; exit 3", NULL};
    struct box_exec_result r;

    if (b) {
        me = (struct lived){box_identity(b), true};
        if (write(out, &me, sizeof me) != sizeof me)
            _exit(1);
        if (freeze)
            box_freeze(b, NULL);
        box_exec(b,
                 &(struct box_exec_spec){.exec_id = "long",
                                         .argv = argv,
                                         .timeout_ms = 30000,
                                         .output = tell_first,
                                         .ctx = &out},
                 &r, NULL);
    }
    pause();
    _exit(1);
}

/* Forked before lab.host exists would be cleaner, but fork in a process with a host is what a test
 * may do: the child makes its own. */
static struct lived live_and_die(const struct lab *l)
{
    struct lived who = {0};
    int p[2];
    char c;

    cr_assert(pipe(p) == 0);
    pid_t pid = fork();
    if (pid == 0)
        live(l, p[1], false);
    close(p[1]);
    cr_assert(read(p[0], &who, sizeof who) == sizeof who);
    cr_assert(read(p[0], &c, 1) == 1, "the first output");
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    close(p[0]);
    return who;
}

static int collect_adopted(void *ctx, enum box_stream stream, uint64_t offset, const void *data,
                           size_t len)
{
    strncat(ctx, data, len);
    return 0;
}

Test(box, I1_a_new_daemon_adopts_a_running_box_and_its_exec)
{
    struct lived who = live_and_die(&lab);
    struct box_layer layer;
    struct box_spec spec = lab_spec(&lab, "adopted", &layer);
    struct lh_error err = {0};
    struct box_exec_result r;
    char out[64] = "";

    struct box *b = box_adopt(lab.host, &spec, &who.identity, &err);
    cr_assert(b != NULL, "%s", err.message);
    struct box_exec_spec s = {.exec_id = "long", .output = collect_adopted, .ctx = out};
    cr_assert(box_exec_attach(b, &s, &r, &err) == 0, "%s", err.message);
    cr_assert(eq(str, out, (char *)"begin\nend\n"));
    cr_assert(eq(int, r.status, 3));
    cr_assert(eq(int, box_exec_attach(b, &s, &r, NULL), LH_NOT_FOUND), "delivered once");
    cr_assert(eq(str, (char *)lab_out(b, "echo alive"), (char *)"alive"));

    /* And again, within one process. */
    box_close(b);
    b = box_adopt(lab.host, &spec, &who.identity, &err);
    cr_assert(b != NULL, "%s", err.message);
    cr_assert(eq(str, (char *)lab_out(b, "echo still"), (char *)"still"));
    destroy(b);
}

Test(box, adoption_refuses_what_is_not_the_recorded_init)
{
    struct box *b = lab_start(&lab, "one");
    struct box_layer layer;
    struct box_spec spec = lab_spec(&lab, "one", &layer);
    struct box_identity who = box_identity(b), wrong = who;
    struct lh_error err = {0};

    wrong.start_ticks++;
    cr_assert(box_adopt(lab.host, &spec, &wrong, &err) == NULL);
    cr_assert(eq(int, err.code, LH_NOT_FOUND));
    wrong = (struct box_identity){getpid(), 0};
    cr_assert(box_adopt(lab.host, &spec, &wrong, NULL) == NULL);
    spec.id = "other";
    cr_assert(box_adopt(lab.host, &spec, &who, NULL) == NULL);
    destroy(b);
    spec.id = "one";
    cr_assert(box_adopt(lab.host, &spec, &who, &err) == NULL);
}

Test(box, I7_orphans_are_found_by_their_label)
{
    struct lived who = live_and_die(&lab);
    struct box *kept = lab_start(&lab, "kept");
    const char *const keep[] = {"kept"};
    lh_autofree char *dir = lh_format("%s/adopted", lab.dir);

    cr_assert(who.ok);
    cr_assert(eq(int, box_host_sweep(lab.host, keep, 1, NULL), 1));
    for (int i = 0; i < 600 && kill(who.identity.init_pid, 0) == 0; i++)
        usleep(50000); /* dead, but its new parent has to reap it */
    cr_assert(kill(who.identity.init_pid, 0) < 0);
    cr_assert(box_destroy_named(lab.host, "adopted", dir, NULL) == 0);
    cr_assert(box_destroy_named(lab.host, "adopted", dir, NULL) == 0, "idempotent");
    cr_assert(access(dir, F_OK) < 0);
    cr_assert(eq(str, (char *)lab_out(kept, "echo here"), (char *)"here"));
    destroy(kept);
}

/* ---- bad specs ----------------------------------------------------------------------------- */

Test(box, a_failed_start_leaves_an_empty_directory)
{
    struct box_layer layer;
    struct box_spec spec = lab_spec(&lab, "bad", &layer);
    struct lh_error err = {0};

    layer.path = "/no/such/layer";
    cr_assert(box_start(lab.host, &spec, &err) == NULL);
    cr_assert(eq(int, err.code, LH_NOT_FOUND));
    cr_assert(strstr(err.message, "/no/such/layer") != NULL, "%s", err.message);
    cr_assert(rmdir(spec.dir) == 0);

    spec.id = "../escape";
    cr_assert(box_start(lab.host, &spec, &err) == NULL);
    cr_assert(eq(int, err.code, LH_INVALID_ARGUMENT));
    spec.id = "bad";
    spec.limits.pids = 0;
    cr_assert(box_start(lab.host, &spec, &err) == NULL);
    cr_assert(eq(int, err.code, LH_INVALID_ARGUMENT));
}

Test(box, an_id_in_use_is_refused_and_its_box_unharmed)
{
    struct box *b = lab_start(&lab, "one");
    struct box_layer layer;
    struct box_spec spec = lab_spec(&lab, "other", &layer);
    struct lh_error err = {0};

    spec.id = "one";
    cr_assert(box_start(lab.host, &spec, &err) == NULL);
    cr_assert(eq(int, err.code, LH_ALREADY_EXISTS));
    cr_assert(eq(str, (char *)lab_out(b, "echo unharmed"), (char *)"unharmed"));
    destroy(b);
}

static bool cancel_when_asked(void *ctx)
{
    return lh_now_ms() > *(int64_t *)ctx;
}

Test(box, an_exec_in_a_frozen_box_can_be_cancelled)
{
    struct box *b = lab_start(&lab, "one");
    const char *argv[] = {"true", NULL};
    int64_t when = lh_now_ms() + 300;
    struct box_exec_result r;

    cr_assert(box_freeze(b, NULL) == 0);
    int rc = box_exec(b,
                      &(struct box_exec_spec){.exec_id = "x",
                                              .argv = argv,
                                              .timeout_ms = 60000,
                                              .cancelled = cancel_when_asked,
                                              .ctx = &when},
                      &r, NULL);
    cr_assert(eq(int, rc, LH_DEADLINE_EXCEEDED));
    cr_assert(r.cancelled);
    destroy(b);
}

Test(box, a_missing_init_program_is_named)
{
    struct lh_error err = {0};
    struct box_host_options o = {.cgroup_parent = "lab-missing-init", .init_path = "/no/init"};

    cr_assert(box_host_create(&o, &err) == NULL);
    cr_assert(strstr(err.message, "/no/init") != NULL, "%s", err.message);
}

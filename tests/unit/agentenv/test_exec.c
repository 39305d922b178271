/* Commands that are talked to while they run: terminals, input, signals, leaving and coming back.
 */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "proto/clock.h"
#include "tests/unit/agentenv/lab.h"
#include "tests/unit/agentenv/talk.h"

TestSuite(exec, .init = lab_init, .fini = lab_fini, .timeout = 120);

static void destroy(struct box *b)
{
    struct lh_error err = {0};

    cr_assert(box_destroy(b, &err) == 0, "%s", err.message);
}

/* ---- terminals ---- */

Test(exec, a_terminal_has_a_size_a_session_and_an_owner)
{
    struct box *b = lab_start(&lab, "one");
    struct box_exec_spec s = {.exec_id = "t",
                              .argv =
                                  talk_sh("stty size; tty; stat -c %u $(tty); read x; echo got $x; "
                                          "stty size; exit 5"),
                              .user = "user",
                              .terminal = true,
                              .rows = 33,
                              .cols = 99};
    struct talk *t = talk_begin(b, &s, false);

    talk_wait_output(t, "1000\r\n");
    talk_tell(t, (struct box_exec_input){.rows = 40, .cols = 120});
    talk_type(t, "hello\n", 0);
    talk_finish(t);
    cr_assert(t->rc == 0, "%s", t->error.message);
    cr_assert(eq(int, t->result.status, 5));
    cr_assert(
        eq(str, t->out, (char *)"33 99\r\n/dev/pts/0\r\n1000\r\nhello\r\ngot hello\r\n40 120\r\n"));
    free(t);
    destroy(b);
}

Test(exec, keys_of_a_terminal_interrupt_and_end)
{
    struct box *b = lab_start(&lab, "one");
    struct box_exec_spec s = {
        .exec_id = "t",
        .argv = talk_sh("trap 'hit=1; echo interrupted' INT; echo ready; "
                        "while [ -z \"$hit\" ]; do sleep 0.05; done; cat; echo done"),
        .terminal = true};
    struct talk *t = talk_begin(b, &s, false);

    talk_wait_output(t, "ready");
    talk_type(t, "\003", 0);
    talk_wait_output(t, "interrupted");
    talk_tell(t, (struct box_exec_input){.end = true});
    talk_finish(t);
    cr_assert(eq(int, t->result.status, 0), "%s", t->out);
    cr_assert(strstr(t->out, "done") != NULL, "%s", t->out);
    free(t);
    destroy(b);
}

Test(exec, a_false_terminal_device_is_not_believed)
{
    struct box *b = lab_start(&lab, "one");
    struct box_exec_spec s = {.exec_id = "t", .argv = talk_sh("echo no"), .terminal = true};
    const char *script = "mv /dev /old && mkdir -p /dev/pts && mkfifo /dev/pts/ptmx && echo moved";

    cr_assert(eq(str, (char *)lab_out(b, script), (char *)"moved"));
    struct talk *t = talk_finish(talk_begin(b, &s, false));
    cr_assert(t->rc < 0);
    free(t);
    cr_assert(eq(str, (char *)lab_out(b, "echo alive"), (char *)"alive"));
    destroy(b);
}

/* ---- input ---- */

Test(exec, input_comes_once_in_order_and_ends)
{
    struct box *b = lab_start(&lab, "one");
    struct box_exec_spec s = {
        .exec_id = "cat", .argv = talk_sh("cat; echo end"), .stdin_open = true};
    struct talk *t = talk_begin(b, &s, false);

    talk_wait_joined(t);
    talk_type(t, "one ", 0);
    talk_wait_output(t, "one ");
    talk_type(t, "one two ", 0); /* after a reply that was lost */
    talk_type(t, "two", 4);
    talk_wait_output(t, "two ");
    talk_type(t, "later", 100); /* nobody knows what belongs between */
    talk_type(t, "three", 8);
    talk_tell(t, (struct box_exec_input){.end = true});
    talk_finish(t);
    cr_assert(eq(str, t->out, (char *)"one two threeend\n"));
    free(t);
    destroy(b);
}

Test(exec, much_input_waits_for_its_reader)
{
    enum { SIZE = 3 << 20 };
    struct box *b = lab_start(&lab, "one");
    struct box_exec_spec s = {
        .exec_id = "wc", .argv = talk_sh("sleep 0.5; md5sum; wc -c"), .stdin_open = true};
    struct talk *t = talk_begin(b, &s, false);
    char *data = malloc(SIZE);

    memset(data, 'x', SIZE);
    talk_wait_joined(t);
    talk_tell(t, (struct box_exec_input){.data = data, .len = SIZE, .end = true});
    talk_finish(t);
    cr_assert(eq(str, t->out, (char *)"c1887f0c970afa48194adf7f5c504696  -\n0\n"), "%s", t->out);
    free(data);
    free(t);
    destroy(b);
}

Test(exec, a_command_that_does_not_read_can_still_be_ended)
{
    enum { SIZE = 2 << 20 };
    struct box *b = lab_start(&lab, "one");
    struct box_exec_spec s = {.exec_id = "deaf",
                              .argv = talk_sh("trap 'echo term; exit 9' TERM; echo ready; "
                                              "while :; do sleep 0.05; done"),
                              .stdin_open = true};
    struct talk *t = talk_begin(b, &s, false);
    struct box_exec_input in = {.data = calloc(1, SIZE), .len = SIZE};

    talk_wait_output(t, "ready");
    cr_assert(
        eq(int, box_exec_input(b, "deaf", &in, lh_now_ms() + 300, NULL), LH_DEADLINE_EXCEEDED));
    talk_tell(t, (struct box_exec_input){.signal = SIGTERM});
    talk_finish(t);
    cr_assert(eq(int, t->result.status, 9));
    cr_assert(strstr(t->out, "term\n") != NULL, "%s", t->out);
    cr_assert(
        eq(int, box_exec_input(b, "deaf", &in, lh_now_ms() + 300, NULL), LH_FAILED_PRECONDITION));
    free((void *)in.data);
    free(t);
    destroy(b);
}

Test(exec, the_last_signal_ends_the_whole_tree)
{
    struct box *b = lab_start(&lab, "one");
    struct box_exec_spec s = {.exec_id = "tree",
                              .argv = talk_sh("setsid sleep 987 & echo ready; sleep 99"),
                              .outlives = true};
    struct talk *t = talk_begin(b, &s, false);

    talk_wait_output(t, "ready");
    talk_tell(t, (struct box_exec_input){.signal = SIGKILL});
    talk_finish(t);
    cr_assert(eq(int, t->result.signal, SIGKILL));
    lab_out(b,
            "for i in $(seq 50); do ps | grep -q '[s]leep 987' || exit 0; sleep 0.1; done; exit 1");
    free(t);
    destroy(b);
}

/* ---- leaving and coming back ---- */

Test(exec, a_command_outlives_its_caller_and_goes_on_where_he_was)
{
    struct box *b = lab_start(&lab, "one");
    struct box_exec_spec s = {.exec_id = "long",
                              .argv = talk_sh("echo one; read x; echo $x >&2; exit 4"),
                              .stdin_open = true,
                              .outlives = true};
    struct talk *t = talk_begin(b, &s, false);

    talk_wait_output(t, "one\n");
    talk_type(t, "tw", 0);
    talk_leave(t);
    s.offset = t->next;
    free(t);
    t = talk_begin(b, &s, true);
    talk_wait_joined(t);
    cr_assert(eq(u64, t->stdin_bytes, 2));
    talk_type(t, "two\n", 0);
    talk_finish(t);
    cr_assert(t->rc == 0, "%s", t->error.message);
    cr_assert(eq(u64, t->first, 4));
    cr_assert(eq(str, t->out, (char *)"two\n"));
    cr_assert(eq(int, t->result.status, 4));
    cr_assert(not(t->result.truncated));
    free(t);

    s.offset = 0; /* the result stays */
    t = talk_finish(talk_begin(b, &s, true));
    cr_assert(eq(str, t->out, (char *)"one\ntwo\n"));
    cr_assert(eq(int, t->result.status, 4));
    free(t);
    t = talk_finish(talk_begin(b, &s, false));
    cr_assert(eq(int, t->rc, LH_ALREADY_EXISTS));
    free(t);
    destroy(b);
}

Test(exec, results_that_stay_are_bounded)
{
    enum { RUNS = 12, KEPT = 8 };
    struct box *b = lab_start(&lab, "one");
    char id[16];

    for (int i = 0; i < RUNS; i++) {
        snprintf(id, sizeof id, "r%d", i);
        struct box_exec_spec s = {.exec_id = id, .argv = talk_sh("echo x"), .outlives = true};
        struct talk *t = talk_finish(talk_begin(b, &s, false));
        cr_assert(t->rc == 0, "%s", t->error.message);
        free(t);
    }
    for (int i = 0; i < RUNS; i++) {
        snprintf(id, sizeof id, "r%d", i);
        struct box_exec_spec s = {.exec_id = id};
        struct talk *t = talk_finish(talk_begin(b, &s, true));
        cr_assert(eq(int, t->rc, i < RUNS - KEPT ? LH_NOT_FOUND : 0), "%d: %s", i,
                  t->error.message);
        free(t);
    }
    destroy(b);
}

Test(exec, who_attaches_takes_over)
{
    struct box *b = lab_start(&lab, "one");
    struct box_exec_spec s = {.exec_id = "x",
                              .argv = talk_sh("echo one; read x; echo $x"),
                              .stdin_open = true,
                              .outlives = true};
    struct talk *first = talk_begin(b, &s, false);

    talk_wait_output(first, "one");
    struct talk *second = talk_begin(b, &s, true);
    talk_wait_output(second, "one");
    talk_finish(first);
    cr_assert(eq(int, first->rc, LH_ABORTED), "%s", first->error.message);
    talk_type(second, "two\n", 0);
    talk_finish(second);
    cr_assert(eq(str, second->out, (char *)"one\ntwo\n"));
    free(first);
    free(second);
    destroy(b);
}

Test(exec, a_tail_loses_nothing_while_somebody_reads_and_keeps_the_end_otherwise)
{
    struct box *b = lab_start(&lab, "one");
    const char *script = "seq 100000; read x; seq 200000 300000; echo end; read x";
    struct box_exec_spec s = {.exec_id = "seq",
                              .argv = talk_sh(script),
                              .stdin_open = true,
                              .keep_tail = true,
                              .output_bytes = 100000,
                              .outlives = true};
    struct talk *t = talk_begin(b, &s, false);

    talk_wait_output(t, "\n100000\n");
    cr_assert(not(t->gap));
    cr_assert(eq(u64, t->next, 588895), "all of it"); /* 9·2 + 90·3 + 900·4 + ... + 7 */
    talk_type(t, "\n", 0);
    talk_leave(t);
    free(t);
    int64_t until = lh_now_ms() + TALK_PATIENCE_MS;
    do { /* nobody reads: the command is not held up */
        s.offset = 588895;
        t = talk_begin(b, &s, true);
        talk_wait_joined(t);
        usleep(50000);
        t->leave = true;
        talk_finish(t);
        if (strstr(t->out, "end\n"))
            break;
        free(t);
    } while (lh_now_ms() < until);
    cr_assert(strstr(t->out, "\n300000\nend\n") != NULL);
    cr_assert(not(t->gap));
    free(t);
    s.offset = 0;
    t = talk_begin(b, &s, true);
    talk_wait_output(t, "end\n");
    talk_type(t, "\n", 1);
    talk_finish(t);
    cr_assert(t->first > 588895, "the beginning is gone");
    cr_assert(t->len >= 60000 && t->len <= 200000, "%zu", t->len);
    cr_assert(t->result.truncated, "and that is said");
    free(t);
    destroy(b);
}

/* ---- limits ---- */

Test(exec, limits_of_one_command_are_not_those_of_the_next)
{
    struct box *b = lab_start(&lab, "one");
    static const struct {
        struct box_exec_limits limits;
        const char *script;
        int status;
    } cases[] = {
        {{.open_files = 10}, "ulimit -n | grep -qx 10", 0},
        {{.open_files = 1000000}, "ulimit -n | grep -qx 128", 0},
        {{.file_bytes = 1 << 20}, "dd if=/dev/zero of=/work/f bs=4096 count=512", 1},
        {{.cpu_seconds = 1}, "while :; do :; done", 128 + SIGKILL},
        {{.memory_bytes = 8 << 20}, "head -c 33554432 /dev/zero | tail -c 16777216 >/dev/null", 1},
    };

    for (size_t i = 0; i < LH_ARRAY_SIZE(cases); i++) {
        struct box_exec_spec s = {.exec_id = "l",
                                  .argv = talk_sh(cases[i].script),
                                  .limits = cases[i].limits,
                                  .timeout_ms = 10000};
        struct lab_result *r = lab_exec(b, &s);
        cr_assert(r->rc == 0, "%s", r->error.message);
        cr_assert(eq(int, r->exec.status != 0, cases[i].status != 0), "%s: %d %s", cases[i].script,
                  r->exec.status, r->err);
        cr_assert(not(r->exec.timed_out), "%s", cases[i].script);
    }
    cr_assert(eq(str, (char *)lab_out(b, "ulimit -n; ulimit -t"), (char *)"128\nunlimited"));
    destroy(b);
}

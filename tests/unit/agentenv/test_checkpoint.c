/* Checkpoint and restore of a whole sandbox, at the level of box.h: I7, and that nothing of what a
 * sandbox holds is lost. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/file.h"
#include "tests/must_work.h"
#include "tests/unit/agentenv/lab.h"

static char images[128];

static void open_lab(void)
{
    int version = 0;
    struct lh_error err = {0};

    lab_init();
    if (!lab.host)
        return;
    bool there = box_host_criu(lab.host, &version, &err) == 0 && version >= 40200;
    if (!there)
        lab_fini();
    NEEDS("criu", there, err.message[0] ? err.message : "older than 4.2");
    lab_install(&lab, WITNESS, "witness");
}

TestSuite(checkpoint, .init = open_lab, .fini = lab_fini, .timeout = 120);

static const char *fresh_images(const char *name)
{
    snprintf(images, sizeof images, "%s/images-%s", lab.dir, name);
    cr_assert(mkdir(images, 0700) == 0);
    return images;
}

static struct box *start(const char *id, struct box_spec *spec, struct box_layer layers[2])
{
    struct lh_error err = {0};

    *spec = lab_spec(&lab, id, layers);
    spec->network = BOX_NET_LOOPBACK;
    struct box *b = box_start(lab.host, spec, &err);
    cr_assert(b != NULL, "%s", err.message);
    return b;
}

static void hold(struct box *b)
{
    lab_out(b, "witness hold 4 > /tmp/log 2>&1 & "
               "for i in 1 2 3 4 5 6 7 8 9 10; do grep -q holding /tmp/log && exit 0; sleep 0.1; "
               "done; cat /tmp/log >&2; exit 1");
}

static void ask(struct box *b, const char *want)
{
    const char *answer = lab_out(b, "witness ask");

    cr_assert(strcmp(answer, want) == 0, "%s instead of %s", answer, want);
}

/* What the sandbox held becomes the layer below. */
static void put_away(struct box *b, struct box_spec *spec, struct box_layer layers[2],
                     char sealed[128])
{
    struct lh_error err = {0};

    cr_assert(box_put_away(b, &err) == 0, "%s", err.message);
    snprintf(sealed, 128, "%s/sealed-%s-%d", lab.dir, spec->id, rand());
    cr_assert(box_take_upper(spec->dir, sealed, &err) == 0, "%s", err.message);
    layers[1] = layers[0];
    layers[0] = (struct box_layer){sealed, false};
}

static void destroy(struct box *b)
{
    struct lh_error err = {0};

    cr_assert(box_destroy(b, &err) == 0, "%s", err.message);
}

Test(checkpoint, everything_survives_being_put_away)
{
    struct box_layer layers[3];
    struct box_spec spec;
    struct lh_error err = {0};
    char sealed[128];
    struct box *b = start("away", &spec, layers);

    hold(b);
    ask(b, "ok 1");
    cr_assert(box_checkpoint(b, fresh_images("away"), &err) == 0, "%s", err.message);
    put_away(b, &spec, layers, sealed);
    cr_assert(eq(int, box_pidfd(b), -1));
    cr_assert(box_set_layers(b, layers, 2, &err) == 0);
    cr_assert(box_restore(b, images, &err) == 0, "%s", err.message);
    ask(b, "ok 2");
    ask(b, "ok 3");
    destroy(b);
}

Test(checkpoint, a_sandbox_goes_on_after_one)
{
    struct box_layer layers[3];
    struct box_spec spec;
    struct lh_error err = {0};
    struct box *b = start("on", &spec, layers);

    hold(b);
    cr_assert(box_checkpoint(b, fresh_images("on"), &err) == 0, "%s", err.message);
    cr_assert(box_go_on(b, &err) == 0, "%s", err.message);
    ask(b, "ok 1");
    destroy(b);
}

struct exec_thread {
    struct box *box;
    struct lab_result result;
    pthread_t thread;
};

static void *run_exec(void *arg)
{
    struct exec_thread *t = arg;

    t->result = *lab_sh(
        t->box, "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo line $i; sleep 0.1; done; exit 7",
        20000);
    return NULL;
}

Test(checkpoint, a_running_exec_keeps_its_output_and_its_caller)
{
    struct box_layer layers[3];
    struct box_spec spec;
    struct lh_error err = {0};
    char sealed[128];
    struct exec_thread t = {.box = start("exec", &spec, layers)};

    pthread_create(&t.thread, NULL, run_exec, &t);
    usleep(400000);
    cr_assert(box_checkpoint(t.box, fresh_images("exec"), &err) == 0, "%s", err.message);
    put_away(t.box, &spec, layers, sealed);
    usleep(300000);
    cr_assert(box_set_layers(t.box, layers, 2, &err) == 0);
    cr_assert(box_restore(t.box, images, &err) == 0, "%s", err.message);
    pthread_join(t.thread, NULL);
    cr_assert(t.result.rc == 0, "%s", t.result.error.message);
    cr_assert(eq(int, t.result.exec.status, 7));
    cr_assert(strcmp(t.result.out,
                     "line 1\nline 2\nline 3\nline 4\nline 5\nline 6\nline 7\nline 8\nline 9\n"
                     "line 10\nline 11\nline 12\n") == 0,
              "%s", t.result.out);
    destroy(t.box);
}

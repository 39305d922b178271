/* Boxes from start to end: exec in all its outcomes, adoption, limits. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <string.h>

#include "tests/must_work.h"
#include "tests/unit/agentenv/lab.h"

static struct lab lab;

static void open_lab(void)
{
    const char *missing = lab_missing();

    NEEDS("sandbox", !missing, missing);
    lab_open(&lab);
}

static void close_lab(void)
{
    if (lab.host)
        lab_close(&lab);
}

TestSuite(box, .init = open_lab, .fini = close_lab, .timeout = 60);

Test(box, runs_a_command_and_leaves_nothing)
{
    struct box *b = lab_start(&lab, "one");

    cr_assert(eq(str, (char *)lab_out(b, "echo hello; id -u"), (char *)"hello\n0"));
    cr_assert(box_destroy(b, NULL) == 0);
}

/* How long a sandbox is expected to wait, and that nobody is asked who need not be.  Whether what
 * is put away comes back the same is test_worker.c's. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>

#include "rollout/harness/rest.h"

static double wait_of(struct rest *r)
{
    return rest_counts(r).wait_ms;
}

Test(rest, expects_what_turns_took_and_more_in_a_longer_queue)
{
    struct lh_error e = {0};
    lh_auto(rest) r = rest_create(NULL, "never", &e);

    cr_assert(r != NULL, "%s", e.message);
    cr_expect(eq(dbl, wait_of(r), 0));
    rest_note_turn(r, 100, 3);
    cr_expect(eq(dbl, wait_of(r), 100), "the first is believed");
    rest_note_turn(r, 200, 3);
    cr_expect(eq(dbl, wait_of(r), 125), "the others move it by a quarter");
    rest_note_queue(r, 7);
    cr_expect(eq(dbl, wait_of(r), 250), "twice as many wait as did then");
    rest_note_queue(r, 0);
    cr_expect(eq(dbl, wait_of(r), 125), "a shorter queue promises nothing");
}

Test(rest, never_is_never)
{
    struct lh_error e = {0};
    lh_auto(rest) r = rest_create(NULL, "never", &e);

    cr_assert(r != NULL, "%s", e.message);
    rest_note_turn(r, 1000000, 0);
    cr_expect(eq(int, (int)rest_judge(r, 0), (int)REST_NO));
    rest_count(r, REST_FAILED);
    cr_expect(eq(u64, rest_counts(r).n[REST_FAILED], 1));
    cr_expect(eq(u64, rest_counts(r).n[REST_PUT_AWAY], 0));
}

Test(rest, a_mode_that_is_none_is_refused)
{
    struct lh_error e = {0};

    cr_expect(rest_create(NULL, "sometimes", &e) == NULL);
    cr_expect(eq(int, e.code, LH_INVALID_ARGUMENT));
    lh_auto(rest) r = rest_create(NULL, "", &e);
    cr_expect(r != NULL, "empty is auto");
}

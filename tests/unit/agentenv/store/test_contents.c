/* Layers of real snapshots get addresses, equal ones become one, and a changed one is found. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <string.h>

#include "agentenv/snapshot/contents.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/file.h"
#include "proto/parse.h"
#include "tests/unit/agentenv/store/kit.h"

static struct house h;

static void setup(void)
{
    NEEDS_SANDBOX();
    house_open(&h);
}

static void teardown(void)
{
    if (h.d)
        house_close(&h);
}

TestSuite(contents, .init = setup, .fini = teardown, .timeout = 120);

static char *layer_of(const char *snapshot)
{
    struct lh_error e = {0};
    char *layer =
        db_string(daemon_db(h.d), &e,
                  "SELECT layer FROM snapshot_layers WHERE snapshot=? ORDER BY pos", "s", snapshot);

    cr_assert(layer != NULL, "%s", e.message);
    return layer;
}

static const char same[] = "echo same > /work/f; touch -d @1000 /work/f /work /";

Test(contents, equal_layers_become_one)
{
    char a[LH_ID_SIZE], b[LH_ID_SIZE], first[LH_ID_SIZE], second[LH_ID_SIZE];
    struct lh_error e = {0};

    kit_start(&h, a);
    kit_start(&h, b);
    house_act(&h, a, same);
    house_act(&h, b, same);
    kit_snapshot(&h, a, first);
    kit_snapshot(&h, b, second);
    lh_autofree char *one = layer_of(first), *two = layer_of(second);
    cr_assert(ne(str, one, two));
    cr_assert(eq(int, contents_round(h.d, 0, &e), 2), "%s", e.message);
    lh_autofree char *shared = layer_of(second);
    cr_expect(eq(str, shared, one), "the younger snapshot names the older layer");
    cr_expect(eq(i64, house_count(&h, "layers"), 2), "the sandbox still stands on its own");
    kit_remove(&h, b);
    cr_expect(eq(i64, house_count(&h, "layers"), 1));
    kit_remove(&h, a);
    kit_start_from(&h, second, b);
    house_act(&h, b, "test \"$(cat /work/f)\" = same && touch /work/right");
    cr_expect(eq(int, kit_has(&h, b, "/work/right"), 1));
    kit_remove(&h, b);
    cr_assert(eq(int, snapshot_drop(h.d, first, true, &e), 0), "%s", e.message);
    cr_expect(eq(i64, house_count(&h, "layers"), 1));
    cr_assert(eq(int, snapshot_drop(h.d, second, true, &e), 0), "%s", e.message);
    cr_expect(eq(i64, house_count(&h, "layers"), 0));
    cr_expect(eq(i64, house_count(&h, "layer_contents"), 0));
}

Test(contents, young_layers_and_those_of_no_snapshot_cost_nothing)
{
    char a[LH_ID_SIZE], snapshot[LH_ID_SIZE];
    struct lh_error e = {0};

    kit_start(&h, a);
    kit_snapshot(&h, a, snapshot);
    cr_expect(eq(int, contents_round(h.d, 60000, &e), 0), "%s", e.message);
    cr_assert(eq(int, snapshot_drop(h.d, snapshot, true, &e), 0), "%s", e.message);
    cr_expect(eq(int, contents_round(h.d, 0, &e), 0), "%s", e.message);
    kit_remove(&h, a);
}

static int audit_problems(void)
{
    V1(AuditReply) *reply = calloc(1, sizeof *reply);
    struct lh_error e = {0};

    longhaul__sandbox__v1__audit_reply__init(reply);
    cr_assert(eq(int, daemon_audit(h.d, true, reply, &e), 0), "%s", e.message);
    int n = (int)reply->n_problems;
    lh_message_free(&reply->base);
    return n;
}

Test(contents, audit_finds_what_was_changed_and_what_nobody_names)
{
    char a[LH_ID_SIZE], snapshot[LH_ID_SIZE];
    struct lh_error e = {0};

    kit_start(&h, a);
    house_act(&h, a, same);
    kit_snapshot(&h, a, snapshot);
    kit_remove(&h, a);
    cr_assert(eq(int, contents_round(h.d, 0, &e), 1), "%s", e.message);
    cr_expect(eq(int, audit_problems(), 0));
    lh_autofree char *layer = layer_of(snapshot);
    lh_autofree char *file = lh_format("%s/layers/%s/work/f", daemon_state_dir(h.d), layer);
    cr_assert(eq(int, lh_write_file(file, "sane\n", 5, 0644, &e), 0), "%s", e.message);
    cr_expect(eq(int, audit_problems(), 1));
    cr_assert(eq(
        int,
        db_run(daemon_db(h.d), &e, "DELETE FROM snapshot_layers WHERE snapshot=?", "s", snapshot),
        0));
    cr_expect(eq(int, audit_problems(), 2));
    cr_assert(eq(int, snapshot_drop(h.d, snapshot, true, &e), 0), "%s", e.message);
    cr_assert(eq(int, layers_sweep(h.d, NULL), 0));
    cr_expect(eq(int, audit_problems(), 0));
}

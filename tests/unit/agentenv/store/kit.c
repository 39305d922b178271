#include "tests/unit/agentenv/store/kit.h"

#include <criterion/criterion.h>
#include <criterion/new/assert.h>

#include "agentenv/snapshot/snapshot.h"
#include "proto/clock.h"

static void create(struct house *h, V1(CreateRequest) * req, char id[LH_ID_SIZE])
{
    struct lh_error e = {0};
    char key[LH_ID_SIZE];

    lh_id_new_text(key);
    req->idempotency_key = key;
    cr_assert(eq(int, daemon_create(h->d, req, NULL, lh_now_ms() + 20000, id, &e), 0), "%s",
              e.message);
}

void kit_start(struct house *h, char id[LH_ID_SIZE])
{
    V1(CreateRequest) req = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__INIT;

    req.source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_IMAGE;
    req.image = (char *)"quickstart";
    create(h, &req, id);
}

void kit_start_from(struct house *h, const char *snapshot, char id[LH_ID_SIZE])
{
    V1(CreateRequest) req = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__INIT;

    req.source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_SNAPSHOT;
    req.snapshot = (char *)snapshot;
    create(h, &req, id);
}

void kit_remove(struct house *h, const char *id)
{
    struct lh_error e = {0};

    cr_assert(eq(int, daemon_remove(h->d, id, ANY_ATTEMPT, &e), 0), "%s", e.message);
}

void kit_snapshot(struct house *h, const char *sandbox, char id[LH_ID_SIZE])
{
    const struct snapshot_options o = {
        .key_kind = "snapshot", .owner = "test", .durable = true, .state = SB_SNAPSHOTTING};
    struct lh_error e = {0};
    struct sandbox *s;

    cr_assert(eq(int,
                 sandbox_begin(h->d, sandbox, ANY_ATTEMPT, SB_IN(SB_RUNNING), HOLD_ALONE,
                               lh_now_ms() + 20000, &s, &e),
                 0),
              "%s", e.message);
    cr_assert(eq(int, snapshot_take(h->d, s, &o, id, &e), 0), "%s", e.message);
    sandbox_end(h->d, s, HOLD_ALONE);
}

bool kit_has(struct house *h, const char *sandbox, const char *path)
{
    struct lh_error none = {0};
    size_t len;
    lh_autofree char *text = daemon_get_file(h->d, sandbox, path, 1 << 20, &len, &none);

    return text != NULL;
}

#include "tests/unit/agentenv/task/house.h"

#include <criterion/new/assert.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agentenv/task/image.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/parse.h"
#include "tests/unit/agentenv/missing.h"

const char *house_missing(void)
{
    return missing_for_sandboxes();
}

static void import_image(struct house *h)
{
    Longhaul__Sandbox__V1__ImportImageRequest req =
        LONGHAUL__SANDBOX__V1__IMPORT_IMAGE_REQUEST__INIT;
    lh_autofree char *path = lh_format("%s/image", h->dir);
    lh_autofree char *make =
        lh_format("%s/deploy/jobs/quickstart-image.sh '%s'", SOURCE_ROOT, path);
    lh_automsg(ProtobufCMessage) reply = NULL;
    struct lh_error e = {0};

    cr_assert(eq(int, system(make), 0));
    req.name = (char *)"quickstart";
    req.path = path;
    cr_assert(eq(int, image_import_rpc(h->d, NULL, &req.base, &reply, &e), 0), "%s", e.message);
}

void house_open(struct house *h)
{
    struct lh_error e = {0};

    strcpy(h->dir, "/tmp/longhaul-task-XXXXXX");
    cr_assert(mkdtemp(h->dir) != NULL);
    h->host = box_host_create(&(struct box_host_options){.cgroup_parent = h->dir + strlen("/tmp/"),
                                                         .init_path = AGENTENV_INIT},
                              &e);
    cr_assert(h->host != NULL, "%s", e.message);
    lh_autofree char *state = lh_format("%s/state", h->dir);
    h->d = daemon_open(state, &task_hooks, h->host, &e);
    cr_assert(h->d != NULL, "%s", e.message);
    import_image(h);
}

void house_close(struct house *h)
{
    struct lh_error e = {0};

    cr_expect(eq(i64, house_count(h, "sandboxes"), 0), "sandboxes are left");
    cr_expect(eq(int, daemon_remove_all(h->d, &e), 0), "%s", e.message);
    daemon_close(h->d);
    cr_expect(eq(int, box_host_sweep(h->host, NULL, 0, NULL), 0));
    box_host_destroy(h->host);
    cr_expect(eq(int, lh_remove_tree(h->dir, &e), 0), "%s", e.message);
}

void house_start(struct house *h, const struct candidate *c, char id[LH_ID_SIZE])
{
    Longhaul__Sandbox__V1__CreateRequest req = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__INIT;
    struct lh_error e = {0};
    char key[LH_ID_SIZE];

    lh_id_new_text(key);
    req.idempotency_key = key;
    req.source_case = LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_TASK;
    req.task = (char *)c->key;
    cr_assert(eq(int, daemon_create(h->d, &req, NULL, lh_now_ms() + 20000, id, &e), 0), "%s",
              e.message);
}

void house_act(struct house *h, const char *id, const char *command)
{
    Longhaul__Sandbox__V1__ExecRequest req = LONGHAUL__SANDBOX__V1__EXEC_REQUEST__INIT;
    Longhaul__Sandbox__V1__ExecExit exit = LONGHAUL__SANDBOX__V1__EXEC_EXIT__INIT;
    char *argv[] = {(char *)"/bin/sh", (char *)"-c", (char *)command};
    struct lh_error e = {0};

    req.id = (char *)id;
    req.n_argv = 3;
    req.argv = argv;
    req.cwd = (char *)"/work";
    cr_assert(eq(int, daemon_exec(h->d, &req, NULL, NULL, NULL, &exit, &e), 0), "%s", e.message);
}

void house_kill(struct house *h, const char *id)
{
    struct lh_error e = {0};
    bool dead = false;

    for (int tries = 0; tries < 500 && !dead; tries++) {
        lh_automsg(Longhaul__Sandbox__V1__Sandbox) s = daemon_show(h->d, id, &e);

        cr_assert(s != NULL, "%s", e.message);
        dead = s->state == LONGHAUL__SANDBOX__V1__STATE__STATE_DEAD;
        if (!dead && tries == 0)
            cr_assert(eq(int, kill(s->init_pid, SIGKILL), 0));
        usleep(20000);
    }
    cr_assert(dead, "sandbox %s does not die", id);
}

int64_t house_count(struct house *h, const char *table)
{
    lh_autofree char *sql = lh_format("SELECT count(*) FROM %s", table);
    int64_t n = -1;

    cr_assert(eq(int, db_int(daemon_db(h->d), NULL, &n, sql, ""), 0));
    return n;
}

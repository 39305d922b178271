/* show KEY | TRAJECTORY, and metrics. */
#include <errno.h>
#include <string.h>

#include "kvstore/cli/cli.h"
#include "kvstore/daemon/metrics.h"
#include "proto/cleanup.h"
#include "proto/hex.h"
#include "proto/parse.h"

typedef Longhaul__Kv__V1__ShowReply ShowReply;

static void add_root(json_t *o, const ShowReply *r)
{
    json_object_set_new(o, "root", cli_hex(&r->root->root));
    json_object_set_new(o, "tenant", json_string(r->tenant));
    json_object_set_new(o, "policy_step", json_integer((json_int_t)r->root->policy_step));
    json_object_set_new(o, "unit_tokens", json_integer(r->unit_tokens));
    json_object_set_new(o, "block_bytes", json_integer(r->block_bytes));
    json_object_set_new(o, "state_bytes", json_integer(r->state_bytes));
    if (r->path || r->trajectory)
        return;
    json_object_set_new(o, "objects", json_integer((json_int_t)r->root->objects));
    json_object_set_new(o, "bytes", json_integer((json_int_t)r->root->bytes));
    json_object_set_new(o, "idle_s", json_real(r->root->idle_s));
}

static json_t *places_of(const Longhaul__Kv__V1__Entry *e)
{
    const char *where = e->extent && e->disk ? "memory, disk" : e->extent ? "memory" : "disk";

    return json_string(where);
}

static void add_path(json_t *o, const ShowReply *r)
{
    json_object_update_new(o, cli_fields(&r->path->base));
    for (size_t i = 0; i < r->n_objects; i++) {
        const Longhaul__Kv__V1__Entry *e = r->objects[i];
        bool state = e->part == LONGHAUL__KV__V1__PART__PART_STATE;
        json_object_set_new(o, "hash", cli_hex(&e->hash));
        json_object_set_new(o, state ? "state_in" : "block_in", places_of(e));
        json_object_set_new(o, "unit_idle_s", json_real(e->idle_s));
    }
}

static int print(struct cli *c, const ShowReply *r, struct lh_error *err)
{
    json_t *o = r->trajectory ? cli_fields(&r->trajectory->base) : json_object();

    if (r->root)
        add_root(o, r);
    if (r->path)
        add_path(o, r);
    return cli_print_object(c, o, err);
}

/* 32 hexadecimal digits are a key; a trajectory of such a name is unheard of. */
int cli_show(struct cli *c, struct lh_error *err)
{
    Longhaul__Kv__V1__ShowRequest show = LONGHAUL__KV__V1__SHOW_REQUEST__INIT;
    Longhaul__Kv__V1__Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    uint8_t key[16];

    if (!c->argument)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "show needs a key, as `ls` prints them, or a trajectory");
    if (kv_link_needs(&c->link, KV_FEATURE_SHOW, "`show`", err) < 0)
        return err->code;
    if (lh_hex_parse(c->argument, key, sizeof key))
        show.key = (ProtobufCBinaryData){sizeof key, key};
    else
        show.trajectory = (char *)c->argument;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_SHOW;
    q.show = &show;
    lh_automsg(Longhaul__Kv__V1__Reply) r = cli_call(c, &q, err);
    if (!r)
        return err->code;
    if (r->body_case != LONGHAUL__KV__V1__REPLY__BODY_SHOW)
        return lh_fail(err, LH_INTERNAL, "kvstored did not answer SHOW");
    return print(c, r->show, err);
}

int cli_metrics(struct cli *c, struct lh_error *err)
{
    lh_automsg(Longhaul__Kv__V1__Reply) r = cli_ask_stat(c, err);
    lh_autofree char *text = r ? kv_metrics_text(r->stat, err) : NULL;

    if (!text)
        return err->code;
    return fputs(text, stdout) < 0 || fflush(stdout) ? lh_fail_errno(err, errno, "writing") : 0;
}

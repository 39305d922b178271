#include <errno.h>
#include <string.h>

#include "kvstore/cli/cli.h"
#include "kvstore/protocol.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/hex.h"
#include "proto/parse.h"

typedef Longhaul__Kv__V1__Request Request;
typedef Longhaul__Kv__V1__Entry Entry;

enum { CALL_MS = 5000 };

Longhaul__Kv__V1__Reply *cli_call(struct cli *c, const Request *q, struct lh_error *err)
{
    return kv_link_call(&c->link, q, lh_now_ms() + CALL_MS, err);
}

json_t *cli_fields(const ProtobufCMessage *m)
{
    json_t *o = json_object();

    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &m->descriptor->fields[i];
        const char *at = (const char *)m + f->offset;
        if (f->type == PROTOBUF_C_TYPE_UINT64)
            json_object_set_new(o, f->name, json_integer((json_int_t) * (const uint64_t *)at));
        else if (f->type == PROTOBUF_C_TYPE_UINT32)
            json_object_set_new(o, f->name, json_integer(*(const uint32_t *)at));
        else if (f->type == PROTOBUF_C_TYPE_DOUBLE)
            json_object_set_new(o, f->name, json_real(*(const double *)at));
        else if (f->type == PROTOBUF_C_TYPE_STRING && **(char *const *)at)
            json_object_set_new(o, f->name, json_string(*(char *const *)at));
    }
    return o;
}

Longhaul__Kv__V1__Reply *cli_ask_stat(struct cli *c, struct lh_error *err)
{
    Longhaul__Kv__V1__StatRequest stat = LONGHAUL__KV__V1__STAT_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;

    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_STAT;
    q.stat = &stat;
    lh_automsg(Longhaul__Kv__V1__Reply) r = cli_call(c, &q, err);
    if (r && r->body_case != LONGHAUL__KV__V1__REPLY__BODY_STAT)
        return lh_fail(err, LH_INTERNAL, "kvstored did not answer STAT"), NULL;
    return r ? lh_steal(&r) : NULL;
}

static json_t *rows_of_tenants(const Longhaul__Kv__V1__StatReply *s)
{
    json_t *rows = json_array();

    for (size_t i = 0; rows && i < s->n_tenants; i++) {
        json_t *row = cli_fields(&s->tenants[i]->base);
        json_object_del(row, "name"); /* which is left out where it is empty */
        json_object_set_new(row, "tenant", json_string(s->tenants[i]->name));
        json_array_append_new(rows, row);
    }
    return rows;
}

/* Tenants are worth a table when there is more than the one without a name, or a quota. */
static int print_stat(const struct cli *c, const Longhaul__Kv__V1__StatReply *s,
                      struct lh_error *err)
{
    static const char *const columns[] = {
        "tenant",           "used_bytes", "quota_bytes", "disk_used_bytes",
        "disk_quota_bytes", "refused",    "evicted",     NULL};
    json_t *fields = cli_fields(&s->base), *tenants = rows_of_tenants(s);
    bool table = s->n_tenants > 1 || (s->n_tenants && s->tenants[0]->quota_bytes);

    if (c->json)
        json_object_set(fields, "tenants", tenants);
    int r = cli_print_object(c, fields, err);
    if (r == 0 && !c->json && table)
        return cli_print_rows(c, tenants, columns, err);
    json_decref(tenants);
    return r;
}

int cli_stat(struct cli *c, struct lh_error *err)
{
    lh_automsg(Longhaul__Kv__V1__Reply) r = cli_ask_stat(c, err);

    return r ? print_stat(c, r->stat, err) : err->code;
}

static int list_page(struct cli *c, const ProtobufCBinaryData *root, uint64_t *after,
                     cli_each *each, void *ctx, struct lh_error *err)
{
    Longhaul__Kv__V1__ListRequest list = LONGHAUL__KV__V1__LIST_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    int status = 0;

    if (root)
        list.root = *root;
    list.limit = KV_LIST_MAX;
    list.after = *after;
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_LIST;
    q.list = &list;
    lh_automsg(Longhaul__Kv__V1__Reply) r = cli_call(c, &q, err);
    if (!r)
        return err->code;
    if (r->body_case != LONGHAUL__KV__V1__REPLY__BODY_LIST)
        return lh_fail(err, LH_INTERNAL, "kvstored did not answer LIST");
    for (size_t i = 0; status == 0 && i < r->list->n_entries; i++)
        status = each(ctx, r->list->entries[i], err);
    *after = r->list->next;
    return status;
}

int cli_list(struct cli *c, const ProtobufCBinaryData *root, cli_each *each, void *ctx,
             struct lh_error *err)
{
    uint64_t after = 0;
    int r;

    do
        r = list_page(c, root, &after, each, ctx, err);
    while (r == 0 && after);
    return r;
}

static int add_row(json_t *rows, json_t *row, struct lh_error *err)
{
    return json_array_append_new(rows, row) ? lh_fail_errno(err, ENOMEM, "listing") : 0;
}

static int add_root(void *rows, const Entry *e, struct lh_error *err)
{
    return add_row(rows,
                   json_pack("{so sI sI sI sb sf}", "root", cli_hex(&e->root), "policy_step",
                             (json_int_t)e->policy_step, "objects", (json_int_t)e->objects, "bytes",
                             (json_int_t)e->bytes, "retired", e->retired, "idle_s", e->idle_s),
                   err);
}

static int add_object(void *rows, const Entry *e, struct lh_error *err)
{
    const char *part = e->part == LONGHAUL__KV__V1__PART__PART_STATE ? "state" : "block";

    return add_row(rows,
                   json_pack("{so ss sI sI sf}", "hash", cli_hex(&e->hash), "part", part, "unit",
                             (json_int_t)e->unit, "bytes", (json_int_t)e->bytes, "idle_s",
                             e->idle_s),
                   err);
}

static int parse_root(const char *text, uint8_t bytes[16], struct lh_error *err)
{
    if (lh_hex_parse(text, bytes, 16))
        return 0;
    return lh_fail(err, LH_INVALID_ARGUMENT,
                   "\"%s\" is not a root: 32 hexadecimal digits, as `ls` prints them", text);
}

int cli_ls(struct cli *c, struct lh_error *err)
{
    static const char *const roots[] = {"root",    "policy_step", "objects", "bytes",
                                        "retired", "idle_s",      NULL};
    static const char *const objects[] = {"hash", "part", "unit", "bytes", "idle_s", NULL};
    uint8_t bytes[16];
    ProtobufCBinaryData root = {sizeof bytes, bytes};

    if (c->argument && parse_root(c->argument, bytes, err) < 0)
        return err->code;
    json_t *rows = json_array();
    int r = cli_list(c, c->argument ? &root : NULL, c->argument ? add_object : add_root, rows, err);
    if (r == 0)
        return cli_print_rows(c, rows, c->argument ? objects : roots, err);
    json_decref(rows);
    return r;
}

int cli_drop(struct cli *c, struct lh_error *err)
{
    Longhaul__Kv__V1__DropRequest drop = LONGHAUL__KV__V1__DROP_REQUEST__INIT;
    Request q = LONGHAUL__KV__V1__REQUEST__INIT;
    uint8_t bytes[16];

    if (!c->argument)
        return lh_fail(err, LH_INVALID_ARGUMENT, "drop needs a root, as `ls` prints them");
    if (parse_root(c->argument, bytes, err) < 0)
        return err->code;
    drop.root = (ProtobufCBinaryData){sizeof bytes, bytes};
    q.body_case = LONGHAUL__KV__V1__REQUEST__BODY_DROP;
    q.drop = &drop;
    lh_automsg(Longhaul__Kv__V1__Reply) r = cli_call(c, &q, err);
    return r ? 0 : err->code;
}

#include "agentenv/daemon/access.h"

#include <errno.h>
#include <string.h>

#include "agentenv/daemon/audit_log.h"
#include "agentenv/daemon/internal.h"
#include "agentenv/daemon/metrics.h"
#include "agentenv/daemon/token.h"

#define SCOPE(name) LONGHAUL__SANDBOX__V1__SCOPE__SCOPE_##name

static const struct {
    const char *method;
    int scope;
} needs[] = {
    {"Sandboxes/Show", SCOPE(READ)},
    {"Sandboxes/List", SCOPE(READ)},
    {"Sandboxes/Watch", SCOPE(READ)},
    {"Sandboxes/ListFiles", SCOPE(READ)},
    {"Sandboxes/StatFile", SCOPE(READ)},
    {"Sandboxes/WatchFiles", SCOPE(READ)},
    {"Sandboxes/Download", SCOPE(READ)},
    {"Sandboxes/ListImages", SCOPE(READ)},
    {"Sandboxes/Engines", SCOPE(READ)},
    {"Sandboxes/ListSnapshots", SCOPE(READ)},
    {"Tasks/List", SCOPE(READ)},
    {"Tasks/Show", SCOPE(READ)},
    {"Sandboxes/Create", SCOPE(USE)},
    {"Sandboxes/Remove", SCOPE(USE)},
    {"Sandboxes/Exec", SCOPE(USE)},
    {"Sandboxes/ExecInput", SCOPE(USE)},
    {"Sandboxes/Freeze", SCOPE(USE)},
    {"Sandboxes/Thaw", SCOPE(USE)},
    {"Sandboxes/Hibernate", SCOPE(USE)},
    {"Sandboxes/Resume", SCOPE(USE)},
    {"Sandboxes/Rollback", SCOPE(USE)},
    {"Sandboxes/Fork", SCOPE(USE)},
    {"Sandboxes/Verify", SCOPE(USE)},
    {"Sandboxes/Upload", SCOPE(USE)},
    {"Sandboxes/TakeSnapshot", SCOPE(USE)},
    {"Sandboxes/Retain", SCOPE(USE)},
    {"Sandboxes/Release", SCOPE(USE)},
    {"Sandboxes/SetPolicy", SCOPE(USE)},
    {"Sandboxes/Reconcile", SCOPE(USE)},
};

/* A token makes no tokens. */
static const char *const local_only[] = {"Sandboxes/CreateToken", "Sandboxes/ListTokens",
                                         "Sandboxes/RevokeToken"};

enum { MAX_RESERVING = 256 };

struct access {
    struct daemon *d;
    struct rpc_guard guard;
    struct audit_log *log;
    pthread_mutex_t lock;
    /* Creates under way, by token: no number of them at the same time gets past a limit.  One
     * whose sandbox is listed already counts twice until it returns, to the safe side. */
    struct {
        char token[TOKEN_NAME_SIZE];
        uint32_t n;
    } reserving[MAX_RESERVING];
};

static int needed_scope(const char *method)
{
    for (size_t i = 0; i < LH_ARRAY_SIZE(needs); i++)
        if (!strcmp(needs[i].method, method))
            return needs[i].scope;
    return SCOPE(ADMIN);
}

/* A string field by name, NULL when the message has none or it is not the chosen one. */
static const char *string_field(const ProtobufCMessage *m, const char *name)
{
    const ProtobufCFieldDescriptor *f =
        protobuf_c_message_descriptor_get_field_by_name(m->descriptor, name);

    if (!f || f->type != PROTOBUF_C_TYPE_STRING || f->label == PROTOBUF_C_LABEL_REPEATED)
        return NULL;
    if (f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF &&
        *(const uint32_t *)((const char *)m + f->quantifier_offset) != f->id)
        return NULL;
    return *(char *const *)((const char *)m + f->offset);
}

static int not_yours(struct lh_error *err, const struct token *t, const char *what,
                     const char *value)
{
    return lh_fail(err, LH_PERMISSION_DENIED,
                   "%s \"%.100s\": token %s is for owners that begin with \"%s\"", what, value,
                   t->name, t->owner_prefix);
}

static int check_sandbox(struct access *a, const struct token *t, const char *id,
                         struct lh_error *err)
{
    struct sandbox *s;

    if (sandbox_find(a->d, id, &s, NULL) < 0)
        return 0; /* the handler says so */
    bool ours = !strncmp(s->owner, t->owner_prefix, strlen(t->owner_prefix));
    sandbox_unref(a->d, s);
    return ours ? 0 : not_yours(err, t, "sandbox", id);
}

static int check_snapshot(struct access *a, const struct token *t, const char *id,
                          struct lh_error *err)
{
    int64_t n = 0;
    int r = db_int(a->d->db, err, &n,
                   "SELECT count(*) FROM snapshot_owners WHERE snapshot=? AND"
                   " substr(owner, 1, ?)=?",
                   "sis", id, (int)strlen(t->owner_prefix), t->owner_prefix);

    return r < 0 ? r : n ? 0 : not_yours(err, t, "snapshot", id);
}

/* Every request says in fields of the same names whose things it is about. */
static int check_owner(struct access *a, const struct token *t, const char *method,
                       const ProtobufCMessage *m, struct lh_error *err)
{
    static const char *const owners[] = {"owner", "owner_prefix", "retain_owner"};
    const char *id = string_field(m, "id"), *snapshot = string_field(m, "snapshot");
    int r = 0;

    if (!strcmp(method, "Sandboxes/Watch"))
        return not_yours(err, t, "events of", "everybody");
    for (size_t i = 0; i < LH_ARRAY_SIZE(owners); i++) {
        const char *owner = string_field(m, owners[i]);
        bool instead = !strcmp(owners[i], "owner_prefix") && id && *id; /* Remove by id */
        if (owner && !instead && strncmp(owner, t->owner_prefix, strlen(t->owner_prefix)))
            return not_yours(err, t, owners[i], owner);
    }
    if (id && *id)
        r = check_sandbox(a, t, id, err);
    if (r == 0 && snapshot && *snapshot)
        r = check_snapshot(a, t, snapshot, err);
    return r;
}

/* ---- the number of sandboxes ---- */

static uint32_t makes(const char *method, const ProtobufCMessage *m)
{
    if (!strcmp(method, "Sandboxes/Create"))
        return 1;
    return strcmp(method, "Sandboxes/Fork") ? 0 : ((const V1(ForkRequest) *)m)->count;
}

static uint32_t count_living(struct access *a, const char *prefix)
{
    struct sandbox **list;
    size_t n = sandbox_list(a->d, prefix, false, &list, NULL);

    for (size_t i = 0; i < n; i++)
        sandbox_unref(a->d, list[i]);
    free(list);
    return (uint32_t)n;
}

/* The place of a token's reservations; NULL when all are taken. */
static uint32_t *reserved(struct access *a, const char *token)
{
    uint32_t *unused = NULL;

    for (size_t i = 0; i < MAX_RESERVING; i++) {
        if (a->reserving[i].n && !strcmp(a->reserving[i].token, token))
            return &a->reserving[i].n;
        if (!a->reserving[i].n && !unused) {
            unused = &a->reserving[i].n;
            snprintf(a->reserving[i].token, TOKEN_NAME_SIZE, "%s", token);
        }
    }
    return unused;
}

static int reserve(struct access *a, const struct token *t, uint32_t n, struct lh_error *err)
{
    uint64_t living = count_living(a, t->owner_prefix);

    LH_LOCKED(&a->lock);
    uint32_t *under_way = reserved(a, t->name);
    if (!under_way || living + *under_way + n > t->max_sandboxes)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED,
                       "token %s may have %u sandboxes at a time; remove some first", t->name,
                       t->max_sandboxes);
    *under_way += n;
    return 0;
}

static void release(struct access *a, const struct token *t, uint32_t n)
{
    LH_LOCKED(&a->lock);
    uint32_t *under_way = reserved(a, t->name);

    if (under_way && *under_way >= n)
        *under_way -= n;
}

/* ---- the guard ---- */

static bool is_local_only(const char *method)
{
    for (size_t i = 0; i < LH_ARRAY_SIZE(local_only); i++)
        if (!strcmp(local_only[i], method))
            return true;
    return false;
}

/* Holes in the wall between a sandbox and this machine's networks are the administrator's. */
static int scope_for(const char *method, const ProtobufCMessage *m)
{
    const V1(CreateRequest) *create = (const void *)m;

    if (!strcmp(method, "Sandboxes/Create") && create->rules &&
        (create->rules->n_egress || create->rules->n_ports))
        return SCOPE(ADMIN);
    return needed_scope(method);
}

static int check_token(struct access *a, const struct token *t, const char *method,
                       const ProtobufCMessage *request, struct lh_error *err)
{
    if (is_local_only(method) || t->scope < scope_for(method, request))
        return lh_fail(err, LH_PERMISSION_DENIED, "token %s does not allow this %s", t->name,
                       method);
    int r = t->owner_prefix[0] ? check_owner(a, t, method, request, err) : 0;
    uint32_t n = makes(method, request);
    return r == 0 && n && t->max_sandboxes ? reserve(a, t, n, err) : r;
}

static int enter(void *ctx, struct rpc_call *call, const char *method,
                 const ProtobufCMessage *request, struct lh_error *err)
{
    struct access *a = ctx;
    struct token t;

    if (rpc_is_local(call))
        return 0;
    int r = token_find(a->d->db, rpc_bearer(call), &t, err);
    return r < 0 ? r : check_token(a, &t, method, request, err);
}

static void leave(void *ctx, struct rpc_call *call, const char *method,
                  const ProtobufCMessage *request, bool entered, int status, int64_t took_us)
{
    struct access *a = ctx;
    struct token t = {.name = ""};

    metrics_call(a->d->metrics, method, status, took_us);
    uint32_t n = makes(method, request);

    if (!rpc_is_local(call) && token_find(a->d->db, rpc_bearer(call), &t, NULL) == 0 && entered &&
        n && t.max_sandboxes)
        release(a, &t, n);
    if (entered && needed_scope(method) == SCOPE(READ))
        return;
    const char *id = string_field(request, "id"), *owner = string_field(request, "owner");
    audit_log_write(a->log, &(struct audit_entry){.local = rpc_is_local(call),
                                                  .uid = rpc_peer_uid(call),
                                                  .token = t.name,
                                                  .method = method,
                                                  .sandbox = id ? id : "",
                                                  .owner = owner ? owner : "",
                                                  .status = status});
}

struct access *access_create(struct daemon *d, struct lh_error *err)
{
    struct access *a = calloc(1, sizeof *a);

    if (!a)
        return lh_fail_errno(err, ENOMEM, "access"), NULL;
    a->d = d;
    a->guard = (struct rpc_guard){enter, leave, a};
    pthread_mutex_init(&a->lock, NULL);
    a->log = audit_log_open(d->state_dir, err);
    if (a->log && token_tables(d->db, err) == 0)
        return a;
    access_destroy(a);
    return NULL;
}

void access_destroy(struct access *a)
{
    if (!a)
        return;
    audit_log_close(a->log);
    pthread_mutex_destroy(&a->lock);
    free(a);
}

const struct rpc_guard *access_guard(struct access *a)
{
    return &a->guard;
}

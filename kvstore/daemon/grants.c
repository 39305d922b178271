#include <errno.h>
#include <stdlib.h>

#include "kvstore/daemon/request.h"
#include "proto/clock.h"
#include "proto/log.h"

LH_LOG_COMPONENT("kvstored");

enum { GRANTS_MAX = 60000 }; /* a node counts to 65535; the rest is for I/O and waiting lookups */

struct kv_grant *kv_grant_new(struct kv_call *c, enum kv_direction d, struct kv_root *root,
                              struct kv_node *at, uint32_t from, uint64_t bytes, int deadline_ms,
                              struct lh_error *err)
{
    struct kv_service *s = c->service;
    struct kv_peer *p = c->peer;

    if (p->n_grants >= KV_MAX_GRANTS)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%s has %u open leases and tickets", p->name,
                       p->n_grants),
               NULL;
    if (s->grants >= GRANTS_MAX)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%u leases and tickets are open", s->grants),
               NULL;
    struct kv_grant *g = calloc(1, sizeof *g);
    if (!g)
        return lh_fail_errno(err, ENOMEM, "grant"), NULL;
    *g = (struct kv_grant){.id = ++s->next_id,
                           .direction = d,
                           .root = root,
                           .at = at,
                           .from = from,
                           .bytes = bytes,
                           .began_us = c->now_us,
                           .deadline_us = c->now_us + (int64_t)deadline_ms * 1000,
                           .next = p->grants};
    s->grants++;
    if (d == KV_LOAD)
        kv_path_take(&s->index, at, from);
    else if (at)
        kv_node_pin(&s->index, at);
    g->wait_ms = kv_flow_begin(&s->flow, &p->share, d, bytes, c->now_us);
    p->grants = g;
    p->n_grants++;
    return g;
}

struct kv_grant *kv_grant_find(struct kv_peer *p, uint64_t id)
{
    struct kv_grant *g = p->grants;

    while (g && g->id != id)
        g = g->next;
    return g;
}

void kv_grant_give_pages(struct kv_service *s, struct kv_grant *g)
{
    while (g->pending) {
        struct kv_node *n = g->pending;
        g->pending = kv_at(&s->index, n->next);
        kv_node_discard(&s->index, n);
    }
    kv_object_free(&s->index, g->root, KV_STATE, &g->state, KV_MEMORY);
}

void kv_grant_end(struct kv_service *s, struct kv_peer *p, struct kv_grant *g, bool done)
{
    struct kv_grant **link = &p->grants;

    while (*link != g)
        link = &(*link)->next;
    *link = g->next;
    p->n_grants--;
    kv_grant_give_pages(s, g);
    s->grants--;
    if (g->direction == KV_LOAD)
        kv_path_give(&s->index, g->at, g->from);
    else if (g->at)
        kv_node_unpin(&s->index, g->at);
    kv_flow_end(&s->flow, &p->share, g->direction, g->bytes, g->began_us, lh_now_us(), done);
    free(g);
}

void kv_service_forget(struct kv_service *s, struct kv_peer *peer)
{
    kv_wait_end(s, peer);
    while (peer->grants)
        kv_grant_end(s, peer, peer->grants, false);
}

void kv_service_expire(struct kv_service *s, struct kv_peer *peer, int64_t now_us)
{
    for (struct kv_grant *g = peer->grants, *next; g; g = next) {
        next = g->next;
        if (g->deadline_us > now_us)
            continue;
        lh_warn(g->direction == KV_LOAD ? "lease-expired" : "ticket-expired",
                "client=%s pid=%d bytes=%llu", peer->name, peer->pid, (unsigned long long)g->bytes);
        s->count.expired++;
        kv_grant_end(s, peer, g, false);
    }
}

int kv_refuse(struct kv_call *c, enum kv_refusal why, uint64_t bytes, struct lh_error *err)
{
    static const struct {
        int code;
        const char *text;
    } reasons[KV_REFUSALS] = {
        [KV_FULL] = {LH_RESOURCE_EXHAUSTED, "the store has no room for it that may be evicted"},
        [KV_INFLIGHT] = {LH_RESOURCE_EXHAUSTED,
                         "the client has kvstore.max_inflight_bytes in flight already"},
        [KV_QUOTA] = {LH_RESOURCE_EXHAUSTED,
                      "its tenant is at its quota (kvstore.quotas), and what it has is in use"},
        [KV_AWAY] = {LH_RESOURCE_EXHAUSTED, "the store's memory is lent to another phase"},
        [KV_PARENT] = {LH_FAILED_PRECONDITION, "the prefix it continues is not stored"},
    };

    c->service->flow.refused[why]++;
    return lh_fail(err, reasons[why].code, "%llu bytes refused: %s", (unsigned long long)bytes,
                   reasons[why].text);
}

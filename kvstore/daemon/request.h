/* Between the files that handle requests: handlers, checks of fields, grants. */
#ifndef KVSTORE_DAEMON_REQUEST_H
#define KVSTORE_DAEMON_REQUEST_H

#include "kvstore/daemon/service.h"

/* One request being handled. */
struct kv_call {
    struct kv_service *service;
    struct kv_peer *peer;
    const Longhaul__Kv__V1__Request *request;
    struct kv_reply *reply;
    int64_t now_us;
    bool later; /* no reply yet */
};

typedef int kv_handler(struct kv_call *c, struct lh_error *err);
kv_handler kv_handle_put, kv_handle_commit;     /* put.c */
kv_handler kv_handle_lookup, kv_handle_release; /* lookup.c */
kv_handler kv_handle_stat, kv_handle_list;      /* report.c */
kv_handler kv_handle_show;                      /* show.c */

/* Zeroed and freed with the reply; NULL when memory is out. */
void *kv_reply_alloc(struct kv_reply *r, size_t n, size_t size);

/* Quotas of tenants (quotas.c); NULL and "" = none. */
int kv_quotas_parse(struct kv_service *s, const char *text, struct lh_error *err);

void kv_service_page_bytes(const struct kv_service *s, uint32_t page_bytes[KV_TIERS]);

int kv_check_key(const ProtobufCBinaryData *field, const char *what, struct kv_key *key,
                 struct lh_error *err);
int kv_check_chain(const ProtobufCBinaryData *field, const struct kv_key **chain, size_t *n,
                   struct lh_error *err);
int kv_check_text(const char *text, size_t max, const char *what, struct lh_error *err);

/* ---- entries (report.c) ---- */
/* An entry with its extents. */
struct kv_entry {
    Longhaul__Kv__V1__Entry entry;
    Longhaul__Kv__V1__Extent memory, disk;
};
void kv_entry_of_root(struct kv_entry *e, const struct kv_root *r, int64_t now_us);
/* False: the node has no such part. */
bool kv_entry_of_object(struct kv_entry *e, const struct kv_service *s, const struct kv_node *n,
                        enum kv_part part, int64_t now_us);

/* ---- grants (grants.c) ---- */
/* Pins `at` (a lease: units from..at, bytes and all) and counts `bytes` as in flight; the ticket's
 * pages are the caller's to add. */
struct kv_grant *kv_grant_new(struct kv_call *c, enum kv_direction d, struct kv_root *root,
                              struct kv_node *at, uint32_t from, uint64_t bytes, int deadline_ms,
                              struct lh_error *err);
/* NULL when the peer has no such grant (any more). */
struct kv_grant *kv_grant_find(struct kv_peer *p, uint64_t id);
/* Gives back pages and pins.  `done`: the bytes were copied and the time counts. */
void kv_grant_end(struct kv_service *s, struct kv_peer *p, struct kv_grant *g, bool done);
/* Takes pages for units first..first+n-1 behind g->at, g->bytes in all, and for the state at their
 * end; false when there is no room, with what was taken left in *g. */
bool kv_grant_pages(struct kv_service *s, struct kv_grant *g, const struct kv_key *chain, size_t n,
                    uint32_t first, bool state);
/* Makes what it holds visible, all at once; crc: of the blocks, NULL when the nodes have them.
 * Returns the last node, which the caller touches or settles; NULL: nothing is visible, for the
 * root is retired or what it continues has gone. */
struct kv_node *kv_grant_publish(struct kv_service *s, struct kv_grant *g, const uint32_t *crc);
/* Gives back pages that are not visible. */
void kv_grant_give_pages(struct kv_service *s, struct kv_grant *g);
/* A visible node may have something that the tiers below memory have not. */
void kv_service_offer(struct kv_service *s, struct kv_node *n);
/* Ends a lookup that waits, if one does. */
void kv_wait_end(struct kv_service *s, struct kv_peer *p);
/* Counts a refusal and says why. */
int kv_refuse(struct kv_call *c, enum kv_refusal why, uint64_t bytes, struct lh_error *err);

#endif

#include "kvstore/daemon/metrics.h"

#include <inttypes.h>
#include <string.h>

#include "proto/metrics.h"

typedef Longhaul__Kv__V1__StatReply StatReply;
typedef Longhaul__Kv__V1__TenantStat TenantStat;

static const char prefix[] = "kvstored_", counter_suffix[] = "_total";

/* A family is called by its field, between what Prometheus wants before and behind it. */
static const ProtobufCFieldDescriptor *field_of(const char *name)
{
    char field[64] = {0};
    size_t len = strlen(name) - strlen(prefix);

    if (len > strlen(counter_suffix) &&
        !strcmp(name + strlen(name) - strlen(counter_suffix), counter_suffix))
        len -= strlen(counter_suffix);
    if (len >= sizeof field)
        return NULL;
    memcpy(field, name + strlen(prefix), len);
    return protobuf_c_message_descriptor_get_field_by_name(
        &longhaul__kv__v1__stat_reply__descriptor, field);
}

static void write_field(void *ctx, FILE *f, const char *name)
{
    const ProtobufCFieldDescriptor *d = field_of(name);
    const char *at = d ? (const char *)ctx + d->offset : NULL;

    if (d && d->type == PROTOBUF_C_TYPE_UINT64)
        fprintf(f, "%s %" PRIu64 "\n", name, *(const uint64_t *)at);
    else if (d && d->type == PROTOBUF_C_TYPE_UINT32)
        fprintf(f, "%s %" PRIu32 "\n", name, *(const uint32_t *)at);
    else if (d && d->type == PROTOBUF_C_TYPE_DOUBLE)
        fprintf(f, "%s %.6f\n", name, *(const double *)at);
}

/* A label's value: any text, as Prometheus quotes it. */
static void write_quoted(FILE *f, const char *text)
{
    for (; *text; text++)
        if (*text == '\n')
            fputs("\\n", f);
        else
            fprintf(f, *text == '"' || *text == '\\' ? "\\%c" : "%c", *text);
}

static void write_tenants(void *ctx, FILE *f, const char *name, size_t offset)
{
    const StatReply *r = ctx;

    for (size_t i = 0; i < r->n_tenants; i++) {
        fprintf(f, "%s{tenant=\"", name);
        write_quoted(f, r->tenants[i]->name);
        fprintf(f, "\"} %" PRIu64 "\n", *(const uint64_t *)((const char *)r->tenants[i] + offset));
    }
}

static void write_tenant_bytes(void *ctx, FILE *f, const char *name)
{
    write_tenants(ctx, f, name, offsetof(TenantStat, used_bytes));
}

static void write_tenant_quotas(void *ctx, FILE *f, const char *name)
{
    write_tenants(ctx, f, name, offsetof(TenantStat, quota_bytes));
}

static void write_tenant_refusals(void *ctx, FILE *f, const char *name)
{
    write_tenants(ctx, f, name, offsetof(TenantStat, refused));
}

static void write_refusals(void *ctx, FILE *f, const char *name)
{
    const StatReply *r = ctx;
    const struct {
        const char *reason;
        uint64_t n;
    } rows[] = {{"full", r->refused_full},
                {"inflight", r->refused_inflight},
                {"parent", r->refused_parent},
                {"quota", r->refused_quota},
                {"away", r->refused_away}};

    for (size_t i = 0; i < LH_ARRAY_SIZE(rows); i++)
        fprintf(f, "%s{reason=\"%s\"} %" PRIu64 "\n", name, rows[i].reason, rows[i].n);
}

#define GAUGE(field, help)                                                                         \
    {                                                                                              \
        "kvstored_" #field, "gauge", help, write_field                                             \
    }
#define COUNTER(field, help)                                                                       \
    {                                                                                              \
        "kvstored_" #field "_total", "counter", help, write_field                                  \
    }

/* clang-format off */
static const struct metrics_family families[] = {
    GAUGE(capacity_bytes, "Size of the memory tier"),
    GAUGE(used_bytes, "Bytes of it that are granted"),
    GAUGE(resident_bytes, "Memory that the host has given so far"),
    GAUGE(away, "1 = the memory is lent to another phase"),
    GAUGE(objects, "Blocks and states that a lookup can find"),
    GAUGE(roots, "Policy versions that can be found"),
    GAUGE(clients, "Connections"),
    GAUGE(pinned, "Objects that a lease or ticket keeps"),
    COUNTER(puts, "Puts that were committed"),
    COUNTER(put_bytes, "Bytes of them"),
    COUNTER(lookups, "Lookups"),
    COUNTER(hits, "Lookups that found something"),
    COUNTER(hit_units, "Units that they found"),
    COUNTER(loaded_bytes, "Bytes of hits"),
    COUNTER(evicted, "Objects dropped for room"),
    COUNTER(superseded, "Of them states that a later one had replaced"),
    {"kvstored_refused_total", "counter", "Requests refused, by reason", write_refusals},
    COUNTER(corrupt, "Leases given back for a wrong checksum"),
    COUNTER(expired, "Leases and tickets that met their deadline"),
    COUNTER(retired, "Policy versions retired"),
    GAUGE(reclaiming, "Of them those whose space is not free yet"),
    GAUGE(load_queue_wait_ms, "Smoothed wait of loads"),
    GAUGE(store_queue_wait_ms, "Smoothed wait of spills"),
    GAUGE(load_bytes_in_flight, "Bytes of open leases"),
    GAUGE(store_bytes_in_flight, "Bytes of open tickets"),
    GAUGE(disk_capacity_bytes, "Size of the disk tier"),
    GAUGE(disk_used_bytes, "Bytes of it in use"),
    COUNTER(disk_stored, "Objects written to disk"),
    COUNTER(disk_stored_bytes, "Bytes of them"),
    COUNTER(disk_loaded, "Objects read back from disk"),
    COUNTER(disk_loaded_bytes, "Bytes of them"),
    COUNTER(disk_read_errors, "Reads that failed"),
    COUNTER(disk_write_errors, "Writes that failed"),
    COUNTER(disk_stalls, "Times the disk did not answer"),
    GAUGE(disk_waiting, "Objects not written yet"),
    COUNTER(left_memory, "Objects that went on on disk alone"),
    COUNTER(late, "Lookups answered before all had been read"),
    COUNTER(remote_stored, "Objects written to the remote tier"),
    COUNTER(remote_stored_bytes, "Bytes of them"),
    COUNTER(remote_loaded, "Objects read from it"),
    COUNTER(remote_loaded_bytes, "Bytes of them"),
    COUNTER(remote_lookups, "Chains that it was asked for"),
    COUNTER(remote_hits, "Of them those brought into memory as a whole"),
    COUNTER(remote_errors, "Operations that its peer failed"),
    COUNTER(remote_corrupt, "Objects of it that were something else"),
    COUNTER(remote_late, "Objects not read for their deadline"),
    GAUGE(remote_waiting, "Objects not written to it yet"),
    GAUGE(remote_paused, "1 no loads, 2 no stores, 3 neither, until it answers"),
    {"kvstored_tenant_used_bytes", "gauge", "Memory that a tenant has", write_tenant_bytes},
    {"kvstored_tenant_quota_bytes", "gauge", "What it may have, 0 = no bound", write_tenant_quotas},
    {"kvstored_tenant_refused_total", "counter", "Puts its quota had no room for",
     write_tenant_refusals},
};
/* clang-format on */

char *kv_metrics_text(const StatReply *stat, struct lh_error *err)
{
    return metrics_format(families, LH_ARRAY_SIZE(families), (void *)stat, err);
}

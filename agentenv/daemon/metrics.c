#include "agentenv/daemon/metrics.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "agentenv/daemon/internal.h"
#include "agentenv/network/gate.h"
#include "agentenv/snapshot/snapshot.h"
#include "proto/file.h"
#include "proto/metrics.h"

enum { METHODS = 96, STATUSES = 17 };

struct calls {
    char method[96];
    uint64_t by_status[STATUSES];
    uint64_t took_us;
};

struct metrics {
    struct daemon *d;
    struct metrics_http *http;
    pthread_mutex_t lock; /* calls */
    struct calls calls[METHODS];
    size_t n_calls;
};

/* ---- counting ---- */

static struct calls *calls_of(struct metrics *m, const char *method)
{
    for (size_t i = 0; i < m->n_calls; i++)
        if (!strcmp(m->calls[i].method, method))
            return &m->calls[i];
    if (m->n_calls == METHODS)
        return NULL;
    snprintf(m->calls[m->n_calls].method, sizeof m->calls->method, "%s", method);
    return &m->calls[m->n_calls++];
}

void metrics_call(struct metrics *m, const char *method, int status, int64_t took_us)
{
    LH_LOCKED(&m->lock);
    struct calls *c = calls_of(m, method);
    unsigned code = status <= 0 ? (unsigned)-status : 0;

    if (!c)
        return;
    c->by_status[code < STATUSES ? code : (unsigned)-LH_UNKNOWN]++;
    c->took_us += (uint64_t)took_us;
}

/* ---- the table ---- */

static void write_calls(void *ctx, FILE *f, const char *name)
{
    struct metrics *m = ctx;
    LH_LOCKED(&m->lock);
    for (size_t i = 0; i < m->n_calls; i++)
        for (int s = 0; s < STATUSES; s++)
            if (m->calls[i].by_status[s])
                fprintf(f, "%s{method=\"%s\",code=\"%s\"} %" PRIu64 "\n", name, m->calls[i].method,
                        lh_status_name(-s), m->calls[i].by_status[s]);
}

static void write_seconds(void *ctx, FILE *f, const char *name)
{
    struct metrics *m = ctx;
    LH_LOCKED(&m->lock);
    for (size_t i = 0; i < m->n_calls; i++)
        fprintf(f, "%s{method=\"%s\"} %.6f\n", name, m->calls[i].method,
                (double)m->calls[i].took_us / 1e6);
}

static void write_states(void *ctx, FILE *f, const char *name)
{
    struct metrics *m = ctx;
    unsigned n[SB_DELETED + 1] = {0};

    pthread_mutex_lock(&m->d->lock);
    for (size_t i = 0; i < BUCKETS; i++)
        for (const struct sandbox *s = m->d->buckets[i]; s; s = s->next)
            n[s->state]++;
    pthread_mutex_unlock(&m->d->lock);
    for (int s = SB_CREATING; s < SB_DELETED; s++)
        fprintf(f, "%s{state=\"%s\"} %u\n", name, sandbox_state_name(s), n[s]);
}

static void write_deaths(void *ctx, FILE *f, const char *name)
{
    struct metrics *m = ctx;
    static const char *const causes[DEATH_CAUSES] = {
        "unspecified", "exited", "oom", "killed", "ttl", "host_restart", "error"};

    for (int i = 1; i < DEATH_CAUSES; i++)
        fprintf(f, "%s{cause=\"%s\"} %llu\n", name, causes[i], (unsigned long long)m->d->deaths[i]);
}

static void write_warm_starts(void *ctx, FILE *f, const char *name)
{
    struct metrics *m = ctx;
    static const char *const results[WARM_STARTS] = {"restored", "cold_no_engine", "cold_not_made",
                                                     "cold_restore_failed"};

    for (int i = 0; i < WARM_STARTS; i++)
        fprintf(f, "%s{result=\"%s\"} %llu\n", name, results[i],
                (unsigned long long)m->d->warm_starts[i]);
}

static void write_costs(void *ctx, FILE *f, const char *name)
{
    const struct metrics *m = ctx;

    fprintf(f, "%s{of=\"hibernate\"} %.6f\n%s{of=\"resume\"} %.6f\n", name,
            (double)m->d->hibernate_us / 1e6, name, (double)m->d->resume_us / 1e6);
}

static void write_rows(struct metrics *m, FILE *f, const char *name, const char *sql)
{
    int64_t n = 0;

    if (db_int(m->d->db, NULL, &n, sql, "") == 0)
        fprintf(f, "%s %lld\n", name, (long long)n);
}

static void write_snapshots(void *ctx, FILE *f, const char *name)
{
    struct metrics *m = ctx;
    write_rows(m, f, name, "SELECT count(*) FROM snapshots WHERE ready=1");
}

static void write_layers(void *ctx, FILE *f, const char *name)
{
    struct metrics *m = ctx;
    write_rows(m, f, name, "SELECT count(*) FROM layers");
}

static void write_layer_bytes(void *ctx, FILE *f, const char *name)
{
    struct metrics *m = ctx;
    write_rows(m, f, name, "SELECT coalesce(sum(bytes), 0) FROM layers");
}

static void write_store_bytes(void *ctx, FILE *f, const char *name)
{
    struct metrics *m = ctx;
    uint64_t bytes;

    if (quota_used(m->d, &bytes, NULL) == 0)
        fprintf(f, "%s %" PRIu64 "\n", name, bytes);
}

static void write_store_limit(void *ctx, FILE *f, const char *name)
{
    struct metrics *m = ctx;
    fprintf(f, "%s %" PRIu64 "\n", name, m->d->store_limit);
}

static void write_connections(void *ctx, FILE *f, const char *name)
{
    struct metrics *m = ctx;
    struct gate_counts c = gate_counts(m->d->gate);

    fprintf(f, "%s{result=\"accepted\"} %llu\n%s{result=\"refused\"} %llu\n", name,
            (unsigned long long)c.accepted, name, (unsigned long long)c.refused);
}

static void write_gate_bytes(void *ctx, FILE *f, const char *name)
{
    struct metrics *m = ctx;
    struct gate_counts c = gate_counts(m->d->gate);

    fprintf(f, "%s{direction=\"out\"} %llu\n%s{direction=\"in\"} %llu\n", name,
            (unsigned long long)c.bytes_out, name, (unsigned long long)c.bytes_in);
}

static const struct metrics_family families[] = {
    {"agentenv_calls_total", "counter", "Calls that have ended", write_calls},
    {"agentenv_call_seconds_total", "counter", "Time that calls took", write_seconds},
    {"agentenv_sandboxes", "gauge", "Sandboxes by state", write_states},
    {"agentenv_deaths_total", "counter", "Sandboxes that died", write_deaths},
    {"agentenv_warm_starts_total", "counter", "Starts of images with a warm-up", write_warm_starts},
    {"agentenv_hibernation_seconds", "gauge", "What it takes lately; 0 = not known", write_costs},
    {"agentenv_snapshots", "gauge", "Snapshots kept", write_snapshots},
    {"agentenv_layers", "gauge", "Layers on disk", write_layers},
    {"agentenv_layer_bytes", "gauge", "Bytes of all layers", write_layer_bytes},
    {"agentenv_store_bytes", "gauge", "What snapshots hold on disk", write_store_bytes},
    {"agentenv_store_limit_bytes", "gauge", "Its limit; 0 = none", write_store_limit},
    {"agentenv_connections_total", "counter", "Connections at the gate", write_connections},
    {"agentenv_connection_bytes_total", "counter", "Bytes carried", write_gate_bytes},
    {"process_resident_memory_bytes", "gauge", "Of agentenvd", metrics_write_memory},
    {"process_open_fds", "gauge", "Of agentenvd", metrics_write_descriptors},
};

char *metrics_text(struct metrics *m, struct lh_error *err)
{
    return metrics_format(families, LH_ARRAY_SIZE(families), m, err);
}

int service_metrics(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                    ProtobufCMessage **reply, struct lh_error *err)
{
    V1(MetricsReply) *out = calloc(1, sizeof *out);
    struct daemon *d = ctx;

    (void)call;
    (void)request;
    if (!out)
        return lh_fail_errno(err, ENOMEM, "metrics");
    longhaul__sandbox__v1__metrics_reply__init(out);
    *reply = &out->base;
    out->text = metrics_text(d->metrics, err);
    return out->text ? 0 : err->code;
}

static char *text_for_http(void *m)
{
    return metrics_text(m, NULL);
}

struct metrics *metrics_create(struct daemon *d, const char *address, struct lh_error *err)
{
    struct metrics *m = calloc(1, sizeof *m);

    if (!m)
        return lh_fail_errno(err, ENOMEM, "metrics"), NULL;
    m->d = d;
    d->metrics = m;
    pthread_mutex_init(&m->lock, NULL);
    if (!address || (m->http = metrics_serve(address, METRICS_BY_THREAD, text_for_http, m, err)))
        return m;
    metrics_destroy(m);
    return NULL;
}

void metrics_destroy(struct metrics *m)
{
    if (!m)
        return;
    metrics_stop(m->http);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

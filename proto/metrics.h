/* Metrics in Prometheus' text format, and their HTTP: GET /metrics on one address.  That port knows
 * no access control: it belongs on loopback or behind a firewall. */
#ifndef PROTO_METRICS_H
#define PROTO_METRICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "proto/cleanup.h"
#include "proto/error.h"

/* A family: `write` prints its samples, each a line that begins with `name`. */
struct metrics_family {
    const char *name, *type, *help; /* type: "counter" or "gauge" */
    void (*write)(void *ctx, FILE *f, const char *name);
};
/* All of them as one text, to be freed. */
char *metrics_format(const struct metrics_family *families, size_t n, void *ctx,
                     struct lh_error *err);
/* Of this process: bytes of memory, open descriptors. */
void metrics_write_memory(void *ctx, FILE *f, const char *name);
void metrics_write_descriptors(void *ctx, FILE *f, const char *name);

/* Whoever answers: a thread of the server's, or the owner's poll loop. */
enum metrics_by { METRICS_BY_THREAD, METRICS_BY_OWNER };
struct metrics_http;
/* `text` makes what is served (metrics_format(), or NULL on failure).  `address` is "IPV4:PORT";
 * port 0 is any, and logged. */
struct metrics_http *metrics_serve(const char *address, enum metrics_by by,
                                   char *(*text)(void *ctx), void *ctx, struct lh_error *err);
/* METRICS_BY_OWNER: when this is readable, and about once a second besides, call metrics_step(). */
int metrics_fd(const struct metrics_http *h);
void metrics_step(struct metrics_http *h);
void metrics_stop(struct metrics_http *h); /* NULL is fine */
LH_DEFINE_AUTO(metrics_http, metrics_stop)

#endif

#include "proto/metrics.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <microhttpd.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/log.h"

LH_LOG_COMPONENT("metrics");

enum { CONNECTIONS = 16, HTTP_TIMEOUT_S = 10 };

/* ---- the text ---- */

char *metrics_format(const struct metrics_family *families, size_t n, void *ctx,
                     struct lh_error *err)
{
    char *text = NULL;
    size_t len;
    FILE *f = open_memstream(&text, &len);

    if (!f)
        return lh_fail_errno(err, errno, "metrics"), NULL;
    for (size_t i = 0; i < n; i++) {
        const struct metrics_family *a = &families[i];
        fprintf(f, "# HELP %s %s\n# TYPE %s %s\n", a->name, a->help, a->name, a->type);
        a->write(ctx, f, a->name);
    }
    if (fclose(f) != 0)
        return free(text), lh_fail_errno(err, ENOMEM, "metrics"), NULL;
    return text;
}

void metrics_write_memory(void *ctx, FILE *f, const char *name)
{
    lh_autofclose FILE *statm = fopen("/proc/self/statm", "re");
    unsigned long pages;

    (void)ctx;
    if (statm && fscanf(statm, "%*u %lu", &pages) == 1)
        fprintf(f, "%s %lu\n", name, pages * (unsigned long)sysconf(_SC_PAGESIZE));
}

void metrics_write_descriptors(void *ctx, FILE *f, const char *name)
{
    lh_autoclosedir DIR *dir = opendir("/proc/self/fd");
    int n = -3; /* "." and ".." and this one */

    (void)ctx;
    while (dir && readdir(dir))
        n++;
    fprintf(f, "%s %d\n", name, n);
}

/* ---- HTTP ---- */

struct metrics_http {
    struct MHD_Daemon *daemon;
    char *(*text)(void *ctx);
    void *ctx;
};

static enum MHD_Result answer(struct MHD_Connection *c, unsigned status, char *text)
{
    static char nothing[] = "only GET /metrics\n";
    struct MHD_Response *r =
        MHD_create_response_from_buffer(strlen(text ? text : nothing), text ? text : nothing,
                                        text ? MHD_RESPMEM_MUST_FREE : MHD_RESPMEM_PERSISTENT);

    if (!r)
        return free(text), MHD_NO;
    MHD_add_response_header(r, "Content-Type", "text/plain; version=0.0.4");
    enum MHD_Result sent = MHD_queue_response(c, status, r);
    MHD_destroy_response(r);
    return sent;
}

static enum MHD_Result on_request(void *ctx, struct MHD_Connection *c, const char *url,
                                  const char *method, const char *version, const char *data,
                                  size_t *len, void **state)
{
    struct metrics_http *h = ctx;
    bool ours = !strcmp(url, "/metrics") && !strcmp(method, "GET");

    (void)version;
    (void)data;
    (void)len;
    (void)state;
    return ours ? answer(c, MHD_HTTP_OK, h->text(h->ctx)) : answer(c, MHD_HTTP_NOT_FOUND, NULL);
}

static int parse_address(const char *text, struct sockaddr_in *a, struct lh_error *err)
{
    char host[INET_ADDRSTRLEN];
    unsigned port;
    int end = 0;

    *a = (struct sockaddr_in){.sin_family = AF_INET};
    if (sscanf(text, "%15[0-9.]:%u%n", host, &port, &end) != 2 || text[end] || port > UINT16_MAX ||
        inet_pton(AF_INET, host, &a->sin_addr) != 1)
        return lh_fail(err, LH_INVALID_ARGUMENT, "metrics: \"%s\" is not IPV4:PORT", text);
    a->sin_port = htons((uint16_t)port);
    return 0;
}

static int start(struct metrics_http *h, const char *address, enum metrics_by by,
                 struct lh_error *err)
{
    unsigned flags =
        by == METRICS_BY_THREAD ? MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_AUTO : MHD_USE_EPOLL;
    struct sockaddr_in a;
    int r = parse_address(address, &a, err);

    if (r < 0)
        return r;
    h->daemon =
        MHD_start_daemon(flags, ntohs(a.sin_port), NULL, NULL, on_request, h, MHD_OPTION_SOCK_ADDR,
                         &a, MHD_OPTION_CONNECTION_LIMIT, (unsigned)CONNECTIONS,
                         MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)HTTP_TIMEOUT_S, MHD_OPTION_END);
    if (!h->daemon)
        return lh_fail_errno(err, errno, "serving metrics at %s", address);
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(h->daemon, MHD_DAEMON_INFO_BIND_PORT);
    lh_info("serving metrics", "address=%s port=%u", address,
            info ? info->port : ntohs(a.sin_port));
    return 0;
}

struct metrics_http *metrics_serve(const char *address, enum metrics_by by,
                                   char *(*text)(void *ctx), void *ctx, struct lh_error *err)
{
    struct metrics_http *h = calloc(1, sizeof *h);

    if (!h)
        return lh_fail_errno(err, ENOMEM, "metrics"), NULL;
    h->text = text;
    h->ctx = ctx;
    if (start(h, address, by, err) == 0)
        return h;
    free(h);
    return NULL;
}

int metrics_fd(const struct metrics_http *h)
{
    return MHD_get_daemon_info(h->daemon, MHD_DAEMON_INFO_EPOLL_FD)->epoll_fd;
}

void metrics_step(struct metrics_http *h)
{
    MHD_run(h->daemon);
}

void metrics_stop(struct metrics_http *h)
{
    if (!h)
        return;
    MHD_stop_daemon(h->daemon);
    free(h);
}

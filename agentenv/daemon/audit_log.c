#include "agentenv/daemon/audit_log.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/log.h"

LH_LOG_COMPONENT("audit");

static const off_t ROTATE_BYTES = 64 << 20;

struct audit_log {
    char *path;
    pthread_mutex_t lock; /* the descriptor, against rotation */
    int fd;
};

static int open_file(struct audit_log *l)
{
    l->fd = open(l->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    return l->fd;
}

struct audit_log *audit_log_open(const char *state_dir, struct lh_error *err)
{
    struct audit_log *l = calloc(1, sizeof *l);

    if (!l)
        return lh_fail_errno(err, ENOMEM, "the audit log"), NULL;
    l->fd = -1;
    pthread_mutex_init(&l->lock, NULL);
    l->path = lh_format("%s/audit.log", state_dir);
    if (l->path && open_file(l) >= 0)
        return l;
    lh_fail_errno(err, errno, "the audit log in %s", state_dir);
    audit_log_close(l);
    return NULL;
}

void audit_log_close(struct audit_log *l)
{
    if (!l)
        return;
    if (l->fd >= 0)
        close(l->fd);
    free(l->path);
    pthread_mutex_destroy(&l->lock);
    free(l);
}

static void rotate(struct audit_log *l)
{
    lh_autofree char *old = lh_format("%s.1", l->path);
    struct stat st;

    if (!old || fstat(l->fd, &st) < 0 || st.st_size < ROTATE_BYTES || rename(l->path, old) < 0)
        return;
    int before = l->fd;
    if (open_file(l) < 0)
        l->fd = before;
    else
        close(before);
}

static char *line_of(const struct audit_entry *e)
{
    char who[32];

    snprintf(who, sizeof who, "uid:%u", (unsigned)e->uid);
    lh_autofree char *token = lh_format("token:%s", e->token);
    json_t *o =
        json_pack("{s:I, s:s, s:s, s:s, s:s, s:s}", "at_ms", (json_int_t)lh_unix_ms(), "who",
                  e->local ? who
                  : token  ? token
                           : "",
                  "method", e->method, "sandbox", e->sandbox, "owner", e->owner, "result",
                  lh_status_name(e->status));
    char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
    json_decref(o);
    char *line = text ? lh_format("%s\n", text) : NULL;
    free(text);
    return line;
}

void audit_log_write(struct audit_log *l, const struct audit_entry *e)
{
    lh_autofree char *line = line_of(e);

    LH_LOCKED(&l->lock);
    rotate(l);
    if (!line || write(l->fd, line, strlen(line)) < 0)
        lh_warn("audit entry lost", "method=%s why=%s", e->method, strerror(errno));
}

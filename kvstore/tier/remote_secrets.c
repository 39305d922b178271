#include "kvstore/tier/remote_secrets.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "proto/cleanup.h"
#include "proto/file.h"

enum { FILE_MAX = 16384 };

static const char *const names[KV_SECRETS] = {
    [KV_S3_KEY] = "aws_access_key_id",   [KV_S3_SECRET] = "aws_secret_access_key",
    [KV_S3_TOKEN] = "aws_session_token", [KV_S3_REGION] = "region",
    [KV_S3_ENDPOINT] = "endpoint_url",   [KV_REDIS_USER] = "user",
    [KV_REDIS_PASSWORD] = "password",
};

static char *trim(char *s)
{
    char *end;

    while (isspace((unsigned char)*s))
        s++;
    for (end = s + strlen(s); end > s && isspace((unsigned char)end[-1]);)
        *--end = 0;
    return s;
}

/* The line's number instead of its text: it may be a secret. */
static int take_line(struct kv_secrets *s, char *line, unsigned number, const char *path,
                     struct lh_error *err)
{
    char *equals = strchr(line, '=');

    line = trim(line);
    if (!*line || *line == '#' || *line == '[')
        return 0;
    if (equals) {
        *equals = 0;
        line = trim(line);
        for (int i = 0; i < KV_SECRETS; i++)
            if (!strcmp(line, names[i])) {
                s->value[i] = trim(equals + 1);
                return 0;
            }
    }
    return lh_fail(err, LH_INVALID_ARGUMENT,
                   "%s line %u: not NAME = VALUE with a name of docs/KVSTORE.md", path, number);
}

int kv_secrets_read(struct kv_secrets *s, const char *path, struct lh_error *err)
{
    struct stat st;
    unsigned number = 0;
    int r = 0;

    *s = (struct kv_secrets){0};
    if (!path || !*path)
        return 0;
    if (stat(path, &st) < 0)
        return lh_fail_errno(err, errno, "kvstore.remote_credentials %s", path);
    if (st.st_mode & 077)
        return lh_fail(err, LH_FAILED_PRECONDITION, "others may read %s: chmod 600 it", path);
    s->text = lh_read_file(path, FILE_MAX, &s->len, err);
    if (!s->text)
        return lh_wrap(err, "kvstore.remote_credentials");
    char *rest = s->text;
    for (char *line; r == 0 && (line = strsep(&rest, "\n"));)
        r = take_line(s, line, ++number, path, err);
    if (r < 0)
        kv_secrets_wipe(s);
    return r;
}

void kv_secrets_wipe(struct kv_secrets *s)
{
    if (s->text)
        explicit_bzero(s->text, s->len);
    free(s->text);
    *s = (struct kv_secrets){0};
}

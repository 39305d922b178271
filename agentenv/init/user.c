/* Names of the sandbox's users.  A static program cannot use the C library's lookup (it loads
 * plug-ins, from the image at that), and must not trust the files: they are read once, bounded,
 * without blocking on a FIFO put in their place. */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agentenv/init/init.h"

enum { FILE_MAX_BYTES = 256 * 1024, FIELDS = 7 };

static char *read_regular(const char *path)
{
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    struct stat st;
    char *text = NULL;

    if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
        text = calloc(1, FILE_MAX_BYTES + 1);
        if (text && read(fd, text, FILE_MAX_BYTES) < 0)
            text[0] = 0;
    }
    if (fd >= 0)
        close(fd);
    return text;
}

/* Cuts a line of passwd(5) or group(5) into its fields; absent ones are "". */
static void split(char *line, char *field[FIELDS])
{
    static char empty[1];

    for (int i = 0; i < FIELDS; i++)
        field[i] = line ? strsep(&line, ":") : empty;
}

static bool parse_id(const char *text, uint32_t *id)
{
    char *end;

    errno = 0;
    unsigned long v = strtoul(text, &end, 10);
    *id = (uint32_t)v;
    return isdigit((unsigned char)text[0]) && *end == 0 && errno == 0 && v < 65536;
}

static int find_passwd(const char *name, bool by_uid, struct user *u)
{
    char *text = read_regular("/etc/passwd"), *rest = text, *line, *f[FIELDS];
    int r = ENOENT;

    while (r != 0 && rest && (line = strsep(&rest, "\n"))) {
        uint32_t uid, gid;
        split(line, f);
        if (!parse_id(f[2], &uid) || !parse_id(f[3], &gid) ||
            (by_uid ? uid != u->uid : strcmp(f[0], name) != 0))
            continue;
        u->uid = uid;
        u->gid = gid;
        snprintf(u->name, sizeof u->name, "%s", f[0]);
        snprintf(u->home, sizeof u->home, "%s", f[5]);
        r = 0;
    }
    free(text);
    return r;
}

static bool listed(char *members, const char *name)
{
    for (char *m; (m = strsep(&members, ","));)
        if (strcmp(m, name) == 0)
            return true;
    return false;
}

static void find_groups(struct user *u)
{
    char *text = read_regular("/etc/group"), *rest = text, *line, *f[FIELDS];
    uint32_t gid;

    u->groups[u->n_groups++] = u->gid;
    while (u->name[0] && rest && u->n_groups < USER_MAX_GROUPS && (line = strsep(&rest, "\n"))) {
        split(line, f);
        if (parse_id(f[2], &gid) && gid != u->gid && listed(f[3], u->name))
            u->groups[u->n_groups++] = gid;
    }
    free(text);
}

int user_find(const char *text, struct user *u)
{
    char copy[128], *gid = copy;
    uint32_t id;

    *u = (struct user){.home = "/"};
    if ((size_t)snprintf(copy, sizeof copy, "%s", *text ? text : "0") >= sizeof copy)
        return ENOENT;
    const char *name = strsep(&gid, ":");
    if (parse_id(name, &id)) {
        u->uid = u->gid = id;
        if (find_passwd(NULL, true, u) != 0 && id == 0) /* an image without users still has root */
            snprintf(u->home, sizeof u->home, "/root");
    } else if (find_passwd(name, false, u) != 0) {
        return ENOENT;
    }
    if (gid && !parse_id(gid, &u->gid))
        return ENOENT;
    find_groups(u);
    if (u->uid == 0 && !u->name[0])
        snprintf(u->name, sizeof u->name, "root");
    return 0;
}

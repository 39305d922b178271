#include "deploy/jobdir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "deploy/job.h"
#include "proto/cleanup.h"
#include "proto/file.h"
#include "proto/id.h"
#include "proto/process.h"

static const char *const directories[] = {"run", "logs", "ledger", "checkpoints", "agentenv"};

static bool is_empty(const char *dir)
{
    lh_autoclosedir DIR *d = opendir(dir);
    int entries = 0;

    while (d && readdir(d))
        entries++;
    return !d || entries <= 2;
}

char *jobdir_resolve(const char *dir, struct lh_error *err)
{
    size_t longest = sizeof((struct sockaddr_un *)0)->sun_path - sizeof "/run/experience.sock";
    lh_autofree char *path = realpath(dir, NULL);

    if (!path) {
        lh_fail_errno(err, errno, "job directory %s", dir);
        return NULL;
    }
    if (strlen(path) > longest) {
        lh_fail(
            err, LH_INVALID_ARGUMENT,
            "job directory %s: the path has %zu bytes, sockets in it allow %zu; use a shorter one",
            path, strlen(path), longest);
        return NULL;
    }
    return lh_steal(&path);
}

static int copy_job_file(const char *dir, const char *yaml_path, struct lh_error *err)
{
    lh_autofree char *to = lh_format("%s/job.yaml", dir);
    size_t len;
    lh_autofree char *text = lh_read_file(yaml_path, 1 << 20, &len, err);

    if (!to || !text)
        return err ? err->code : LH_UNKNOWN;
    return lh_write_file(to, text, len, 0644, err);
}

/* job.pb comes last: a directory without it was never a job. */
int jobdir_create(const char *dir, const char *yaml_path, Longhaul__Job__V1__Job *job,
                  struct lh_error *err)
{
    char id[LH_ID_SIZE];
    int r = is_empty(dir)
                ? 0
                : lh_fail(err, LH_ALREADY_EXISTS,
                          "%s is not empty; `longhaul resume %s` goes on with a job, a new "
                          "one needs another --dir",
                          dir, dir);

    for (size_t i = 0; r == 0 && i < LH_ARRAY_SIZE(directories); i++) {
        lh_autofree char *sub = lh_format("%s/%s", dir, directories[i]);
        r = sub ? lh_make_dirs(sub, 0700, err) : lh_fail_errno(err, ENOMEM, "%s", dir);
    }
    lh_autofree char *real = r == 0 ? jobdir_resolve(dir, err) : NULL;
    if (!real)
        return r < 0 ? r : err ? err->code : LH_UNKNOWN;
    lh_id_new_text(id);
    job->format = 1;
    job->id = strdup(id);
    job->version = strdup(LONGHAUL_VERSION);
    if (!job->id || !job->version)
        return lh_fail_errno(err, ENOMEM, "%s", dir);
    r = copy_job_file(dir, yaml_path, err);
    return r < 0 ? r : job_write(job, dir, err);
}

static int read_pid(int fd)
{
    char text[32] = "";

    return pread(fd, text, sizeof text - 1, 0) > 0 ? atoi(text) : 0;
}

int jobdir_lock(const char *dir, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/lock", dir);
    lh_autoclose int fd = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644) : -1;
    char text[32];

    if (fd < 0)
        return lh_fail_errno(err, errno, "cannot open the lock of %s", dir);
    if (flock(fd, LOCK_EX | LOCK_NB) < 0)
        return lh_fail(
            err, LH_FAILED_PRECONDITION,
            "%s is running already (supervisor is process %d); `longhaul stop %s` ends it", dir,
            read_pid(fd), dir);
    int n = snprintf(text, sizeof text, "%d\n", getpid());
    if (ftruncate(fd, 0) < 0 || pwrite(fd, text, (size_t)n, 0) != n)
        return lh_fail_errno(err, errno, "writing %s", path);
    return lh_steal_fd(&fd);
}

pid_t jobdir_supervisor(const char *dir)
{
    lh_autofree char *path = lh_format("%s/lock", dir);
    lh_autoclose int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;

    if (fd < 0 || flock(fd, LOCK_SH | LOCK_NB) == 0)
        return 0; /* the probe's own lock goes with its fd */
    return read_pid(fd);
}

char *program_path(const char *name, struct lh_error *err)
{
    lh_autofree char *self = lh_program_dir();
    const char *more = getenv("LONGHAUL_PATH");
    lh_autofree char *dirs = lh_format("%s:%s", self ? self : "", more ? more : "");
    char *save = NULL;
    for (char *d = dirs ? strtok_r(dirs, ":", &save) : NULL; d; d = strtok_r(NULL, ":", &save)) {
        lh_autofree char *path = lh_format("%s/%s", d, name);
        if (path && access(path, X_OK) == 0)
            return lh_steal(&path);
    }
    lh_fail(err, LH_NOT_FOUND, "the program %s is neither beside longhaul nor in $LONGHAUL_PATH",
            name);
    return NULL;
}

error_t jobdir_argument(int key, char *arg, struct argp_state *state, const char **dir)
{
    switch (key) {
    case ARGP_KEY_ARG:
        if (*dir)
            argp_usage(state);
        *dir = arg;
        return 0;
    case ARGP_KEY_END:
        if (!*dir)
            argp_usage(state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

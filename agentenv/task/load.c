/* From a file to a TaskSet.
 *
 * Binary protobuf goes through lh_parse(), proto3 JSON through lh_json_parse().  Text format goes
 * through `protoc --encode`, a child process: its parser is the reference, and its errors carry
 * line and column.  Rejected: a parser of our own over protobuf-c's descriptors, five hundred lines
 * for what a Debian package does. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/pidfd.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "agentenv/task/task.h"
#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/json.h"
#include "proto/parse.h"
#include "proto/process.h"

enum { PROTOC_MS = 120000, HEAP_MAX = 1 << 30 };

#define SCHEMA "longhaul/task/v1/task.proto"

extern char **environ;

/* ---- where the schema is ---- */

static bool holds_schema(const char *dir)
{
    lh_autofree char *path = lh_format("%s/" SCHEMA, dir);

    return path && access(path, R_OK) == 0;
}

/* $LONGHAUL_PROTO_PATH, or beside the installed program, or where it was built. */
static char *find_schema_dir(struct lh_error *err)
{
    const char *given = getenv("LONGHAUL_PROTO_PATH");
    lh_autofree char *self = lh_program_dir();

    if (given && holds_schema(given))
        return lh_format("%s", given);
    if (given)
        return lh_fail(err, LH_NOT_FOUND, "LONGHAUL_PROTO_PATH=%s has no " SCHEMA, given), NULL;
    lh_autofree char *installed = lh_format("%s/../share/longhaul/proto", self ? self : "");
    if (installed && holds_schema(installed))
        return lh_steal(&installed);
    if (holds_schema(LONGHAUL_SCHEMA_DIR))
        return lh_format("%s", LONGHAUL_SCHEMA_DIR);
    lh_fail(err, LH_NOT_FOUND,
            SCHEMA " is neither in %s/../share/longhaul/proto nor in " LONGHAUL_SCHEMA_DIR
                   "; set LONGHAUL_PROTO_PATH",
            self ? self : "");
    return NULL;
}

/* ---- protoc ---- */

static int start_protoc(const char *dir, int in, int out, int messages, pid_t *pid)
{
    lh_autofree char *path = lh_format("--proto_path=%s", dir);
    char encode[] = "--encode=longhaul.task.v1.TaskSet", schema[] = SCHEMA, name[] = "protoc";
    char *argv[] = {name, path, encode, schema, NULL};
    posix_spawn_file_actions_t files;

    if (!path || posix_spawn_file_actions_init(&files))
        return ENOMEM;
    int r = posix_spawn_file_actions_adddup2(&files, in, 0);
    if (!r)
        r = posix_spawn_file_actions_adddup2(&files, out, 1);
    if (!r)
        r = posix_spawn_file_actions_adddup2(&files, messages, 2);
    if (!r)
        r = posix_spawnp(pid, name, &files, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&files);
    return r;
}

/* Exit status of the child, which is gone when this returns; -1 when it had to be killed. */
static int end_child(pid_t pid, int timeout_ms)
{
    lh_autoclose int fd = pidfd_open(pid, 0);
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    int64_t deadline = lh_now_ms() + timeout_ms;
    int ready, status;

    do
        ready = fd < 0 ? 0 : poll(&wait, 1, lh_ms_left(deadline));
    while (ready < 0 && errno == EINTR);
    if (ready <= 0)
        kill(pid, SIGKILL);
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return -1;
    return ready > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* What was written to a memory file, with a NUL behind it. */
static char *read_back(int fd, size_t max, size_t *len, struct lh_error *err)
{
    lh_autofree char *path = lh_format("/proc/self/fd/%d", fd);

    return path ? lh_read_file(path, max, len, err) : NULL;
}

/* protoc writes "input:3:9: message"; the file's name says more. */
static int report(const char *path, int status, int messages, struct lh_error *err)
{
    lh_autofree char *text = read_back(messages, 64 << 10, NULL, err);
    const char *line = text ? text : "";

    if (status < 0)
        return lh_fail(err, LH_DEADLINE_EXCEEDED, "%s: protoc did not end within %d s", path,
                       PROTOC_MS / 1000);
    if (!strncmp(line, "input:", 6))
        line += 6;
    size_t first = strcspn(line, "\n");
    return lh_fail(err, LH_INVALID_ARGUMENT, "%s:%.*s", path, (int)(first > 700 ? 700 : first),
                   *line ? line : " protoc refused it without a message");
}

static char *encode_text(const char *path, size_t *len, struct lh_error *err)
{
    lh_autofree char *dir = find_schema_dir(err);
    lh_autoclose int in = open(path, O_RDONLY | O_CLOEXEC);
    lh_autoclose int out = memfd_create("tasks", MFD_CLOEXEC);
    lh_autoclose int messages = memfd_create("messages", MFD_CLOEXEC);
    pid_t pid;

    if (!dir)
        return NULL;
    if (in < 0 || out < 0 || messages < 0)
        return lh_fail_errno(err, errno, "reading %s", path), NULL;
    int r = start_protoc(dir, in, out, messages, &pid);
    if (r == ENOENT)
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "%s is text format, and protoc is missing; apt-get install "
                       "protobuf-compiler",
                       path),
               NULL;
    if (r)
        return lh_fail_errno(err, r, "starting protoc"), NULL;
    int status = end_child(pid, PROTOC_MS);
    if (status)
        return report(path, status, messages, err), NULL;
    return read_back(out, TASK_SOURCE_MAX, len, err);
}

/* ---- either form ---- */

static bool is_text(const char *data, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)data[i] < ' ' && !strchr("\n\t\r\f\v", data[i] ? data[i] : 1))
            return false;
    return true;
}

/* No message of the text format begins so, and no binary set: its first byte is 10. */
static bool is_json(const char *data, size_t len)
{
    size_t i = 0;

    while (i < len && strchr(" \n\r\t", data[i] ? data[i] : 1))
        i++;
    return i < len && data[i] == '{' && is_text(data, len);
}

TaskSet *task_load(const char *path, struct lh_error *err)
{
    size_t len;
    lh_autofree char *data = lh_read_file(path, TASK_SOURCE_MAX, &len, err);

    if (!data)
        return NULL;
    struct lh_parse_limits limits = {.heap = HEAP_MAX};
    ProtobufCMessage *set;
    if (is_json(data, len)) {
        set = lh_json_parse(TASK_SET_DESCRIPTOR, data, len, limits, err);
        if (!set)
            lh_wrap(err, "%s", path);
        return (TaskSet *)set;
    }
    if (is_text(data, len)) {
        free(lh_steal(&data));
        data = encode_text(path, &len, err);
        if (!data)
            return NULL;
    }
    set = lh_parse(TASK_SET_DESCRIPTOR, data, len, limits, err);
    if (!set)
        lh_wrap(err, "%s", path);
    return (TaskSet *)set;
}

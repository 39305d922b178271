/* Harbor's tests and solution as our verifier and oracle. */
#include <errno.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>

#include "agentenv/task/files.h"
#include "agentenv/task/harbor_private.h"
#include "proto/cleanup.h"
#include "proto/file.h"
#include "proto/parse.h"

enum { SOLUTION_MAX = 700 << 10 };

#define TESTS_KEPT TASK_VERIFIER_DIR "/tests"

/* ---- the verifier ---- */

static void print_quoted(FILE *to, const char *text)
{
    putc('\'', to);
    for (; *text; text++)
        if (*text == '\'')
            fputs("'\\''", to);
        else
            putc(*text, to);
    putc('\'', to);
}

static int print_exports(struct reading *r, FILE *to, const char *path)
{
    const char *name;
    json_t *v;

    json_object_foreach((json_t *)harbor_find(r, path), name, v)
    {
        const char *text = json_string_value(v);
        if (!text || strstr(text, "${") ||
            name[strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
                              "abcdefghijklmnopqrstuvwxyz"
                              "0123456789_")])
            return harbor_refuse(r, LH_UNIMPLEMENTED, path,
                                 "must hold plain texts under plain names");
        fprintf(to, "export %s=", name);
        print_quoted(to, text);
        putc('\n', to);
    }
    return 0;
}

/* Harbor's contract: what the agent may have left where tests and reward go is cleared, the tests
 * come, and bash of the image runs them in the image's working directory. */
static char *verifier_command(struct reading *r)
{
    static const char path[] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    char *text = NULL;
    size_t len;
    FILE *to = open_memstream(&text, &len);

    if (!to)
        return lh_fail_errno(r->err, ENOMEM, "%s", r->dir), NULL;
    fputs("rm -rf /tests /logs/verifier\n"
          "[ -d /logs ] && [ ! -L /logs ] || rm -rf /logs\n"
          "mkdir -p /logs/verifier /logs/agent /logs/artifacts /tests || exit 1\n"
          "cp -R " TESTS_KEPT "/. /tests/ || exit 1\n",
          to);
    int rc = print_exports(r, to, "verifier.env");
    fprintf(to, "PATH=%s exec bash /tests/test.sh\n", path);
    if (fclose(to) || rc < 0) {
        free(text);
        return rc < 0 ? NULL : (lh_fail_errno(r->err, ENOMEM, "%s", r->dir), NULL);
    }
    return text;
}

static int add_carried(struct reading *r, TASK(Verifier) * v)
{
    const json_t *list = harbor_find(r, "artifacts");
    size_t n = json_array_size(list);
    int rc = 0;

    if (!n)
        return harbor_refuse(r, LH_INVALID_ARGUMENT, "verifier.environment_mode",
                             "is \"separate\", and no artifacts are carried over");
    v->isolation = LONGHAUL__TASK__V1__ISOLATION__ISOLATION_FRESH;
    v->carry = calloc(n, sizeof *v->carry);
    for (size_t i = 0; rc == 0 && v->carry && i < n; i++) {
        const json_t *item = json_array_get(list, i);
        const char *from = json_is_object(item) ? json_string_value(json_object_get(item, "source"))
                                                : json_string_value(item);
        rc = from ? harbor_set(r, &v->carry[i], from)
                  : harbor_refuse(r, LH_INVALID_ARGUMENT, "artifacts", "must be paths");
        v->n_carry += rc == 0;
    }
    return v->carry ? rc : lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
}

int harbor_add_verifier(struct reading *r, Task *t)
{
    static const char *const rewards[] = {"/logs/verifier/reward.json",
                                          "/logs/verifier/reward.txt"};
    struct file_list tests = {0};
    lh_autofree char *from = lh_format("%s/tests", r->dir);
    int rc = NEW(r, t->verifier, longhaul__task__v1__verifier__init);

    if (rc < 0)
        return rc;
    TASK(Verifier) *v = t->verifier;
    if (!harbor_has(r, "tests/test.sh"))
        return lh_fail(r->err, LH_INVALID_ARGUMENT, "%s/tests/test.sh is missing", r->dir);
    rc = from ? files_add(&tests, from, TESTS_KEPT, r->err)
              : lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
    v->files = tests.items;
    v->n_files = tests.n;
    char *command = rc == 0 ? verifier_command(r) : NULL;
    if (!command)
        return rc < 0 ? rc : r->err->code;
    v->command = command;
    v->reward_files = calloc(LH_ARRAY_SIZE(rewards), sizeof *v->reward_files);
    if (!v->reward_files)
        return lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
    for (; rc == 0 && v->n_reward_files < LH_ARRAY_SIZE(rewards); v->n_reward_files++)
        rc = harbor_set(r, &v->reward_files[v->n_reward_files], rewards[v->n_reward_files]);
    return rc == 0 && r->s.mode && !strcmp(r->s.mode, "separate") ? add_carried(r, v) : rc;
}

/* ---- the oracle ---- */

/* The agent's own shell puts a file where Harbor would have uploaded it. */
static char *write_action(struct reading *r, const TASK(File) * f)
{
    size_t size = sodium_base64_encoded_len(f->content.len, sodium_base64_VARIANT_ORIGINAL);
    lh_autofree char *text = f->content.len <= SOLUTION_MAX ? malloc(size) : NULL;
    char *action = NULL;
    size_t len;

    if (!text)
        return lh_fail(r->err, LH_RESOURCE_EXHAUSTED, "%s is larger than %d bytes", f->path,
                       SOLUTION_MAX),
               NULL;
    sodium_bin2base64(text, size, f->content.data, f->content.len, sodium_base64_VARIANT_ORIGINAL);
    FILE *to = open_memstream(&action, &len);
    if (!to)
        return lh_fail_errno(r->err, ENOMEM, "%s", r->dir), NULL;
    fputs("f=", to);
    print_quoted(to, f->path);
    fprintf(to, "; mkdir -p \"${f%%/*}\" && echo %s | base64 -d > \"$f\" && chmod %o \"$f\"", text,
            f->mode);
    return fclose(to) == 0 ? action : NULL;
}

static int add_action(struct reading *r, TASK(Oracle) * o, char *action)
{
    char **more = action ? reallocarray(o->actions, o->n_actions + 1, sizeof *more) : NULL;

    if (!more) {
        free(action);
        return r->err->code ? r->err->code : lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
    }
    o->actions = more;
    o->actions[o->n_actions++] = action;
    return 0;
}

static char *solve_action(struct reading *r)
{
    char *text = NULL;
    size_t len;
    FILE *to = open_memstream(&text, &len);
    int rc = to ? print_exports(r, to, "solution.env") : LH_RESOURCE_EXHAUSTED;

    if (to) {
        fputs("bash /solution/solve.sh", to);
        fclose(to);
    }
    if (rc < 0) {
        free(text);
        return NULL;
    }
    return text;
}

int harbor_add_oracle(struct reading *r, Task *t)
{
    struct file_list files = {0};
    lh_autofree char *from = lh_format("%s/solution", r->dir);
    int rc = harbor_has(r, "solution/solve.sh")
                 ? NEW(r, t->oracle, longhaul__task__v1__oracle__init)
                 : lh_fail(r->err, LH_INVALID_ARGUMENT,
                           "%s/solution/solve.sh is missing: without an oracle a task is taken "
                           "with --no-verify only",
                           r->dir);

    if (rc == 0)
        rc = from ? files_add(&files, from, "/solution", r->err)
                  : lh_fail_errno(r->err, ENOMEM, "%s", r->dir);
    for (size_t i = 0; rc == 0 && i < files.n; i++)
        rc = add_action(r, t->oracle, write_action(r, files.items[i]));
    files_finish(&files);
    return rc == 0 ? add_action(r, t->oracle, solve_action(r)) : rc;
}

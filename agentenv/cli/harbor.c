#include "agentenv/cli/harbor.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/task/harbor.h"
#include "proto/cleanup.h"
#include "proto/file.h"
#include "proto/parse.h"

enum { BUILD_MS = 3600000 };

bool is_directory(const char *path)
{
    struct stat st;

    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

static int build_image(struct cli *cli, const struct harbor *h, struct lh_error *err)
{
    lh_automsg(Longhaul__Sandbox__V1__ImageInfo) info = NULL;

    if (!h->build)
        return 0;
    return cli_call(cli, "BuildImage", &h->build->base,
                    &longhaul__sandbox__v1__image_info__descriptor, BUILD_MS,
                    (ProtobufCMessage **)&info, err);
}

static int add(struct cli *cli, TaskSet *set, const char *dir, int split, struct lh_error *err)
{
    struct harbor h = {0};
    int r = harbor_load(dir, (Longhaul__Task__V1__Split)split, &h, err);

    if (r == 0 && (r = build_image(cli, &h, err)) < 0)
        lh_wrap(err, "%s", dir);
    Task **more = r == 0 ? reallocarray(set->tasks, set->n_tasks + 1, sizeof *more) : NULL;
    if (more) {
        set->tasks = more;
        set->tasks[set->n_tasks++] = lh_steal(&h.task);
    } else if (r == 0) {
        r = lh_fail_errno(err, ENOMEM, "%s", dir);
    }
    harbor_finish(&h);
    return r;
}

static int is_named(const struct dirent *e)
{
    return e->d_name[0] != '.';
}

static int add_each(struct cli *cli, TaskSet *set, const char *dir, int split, struct lh_error *err)
{
    struct dirent **names;
    int n = scandir(dir, &names, is_named, alphasort), r = 0;

    if (n < 0)
        return lh_fail_errno(err, errno, "%s", dir);
    for (int i = 0; i < n; i++) {
        lh_autofree char *path = lh_format("%s/%s", dir, names[i]->d_name);
        if (r == 0 && path && harbor_is_task(path))
            r = add(cli, set, path, split, err);
        free(names[i]);
    }
    free(names);
    return r == 0 && !set->n_tasks ? lh_fail(err, LH_INVALID_ARGUMENT,
                                             "%s has no task.toml, nor a directory with one", dir)
                                   : r;
}

TaskSet *harbor_load_all(struct cli *cli, const char *dir, int split, struct lh_error *err)
{
    lh_automsg(TaskSet) set = malloc(sizeof *set);

    if (!set)
        return lh_fail_errno(err, ENOMEM, "%s", dir), NULL;
    longhaul__task__v1__task_set__init(set);
    int r =
        harbor_is_task(dir) ? add(cli, set, dir, split, err) : add_each(cli, set, dir, split, err);
    return r < 0 ? NULL : lh_steal(&set);
}

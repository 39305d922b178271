/* metrics.jsonl when there is no room for a line. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <jansson.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "proto/file.h"
#include "trainer/learn/metrics.h"

static void write_line(struct metrics *m, int step)
{
    metrics_write(m, json_pack("{ss si}", "kind", "step", "step", step));
}

/* A limit on the size of files cuts a write like a full disk does, in the middle. */
static void limit_files(rlim_t bytes)
{
    struct rlimit r = {bytes, RLIM_INFINITY};

    signal(SIGXFSZ, SIG_IGN);
    cr_assert(eq(int, setrlimit(RLIMIT_FSIZE, &r), 0));
}

Test(metrics, a_line_without_room_leaves_the_others_whole)
{
    char dir[] = "/tmp/trainer-metrics-XXXXXX";
    struct lh_error err = {0};
    struct stat st;

    cr_assert(mkdtemp(dir) != NULL);
    lh_autofree char *path = lh_format("%s/metrics.jsonl", dir);
    struct metrics *m = metrics_open(dir, 0, 0, &err);
    cr_assert(m != NULL, "%s", err.message);
    write_line(m, 1);
    cr_assert(eq(int, stat(path, &st), 0));
    limit_files((rlim_t)st.st_size + 10);
    write_line(m, 2);
    limit_files(RLIM_INFINITY);
    write_line(m, 3);
    metrics_close(m);
    lh_autofree char *text = lh_read_file(path, 1 << 20, NULL, &err);
    int steps[4] = {0}, n = 0;
    char *saved = NULL;
    for (char *line = strtok_r(text, "\n", &saved); line; line = strtok_r(NULL, "\n", &saved)) {
        json_t *o = json_loads(line, 0, NULL);
        cr_assert(o != NULL, "\"%s\" is no JSON", line);
        cr_assert(lt(int, n, 4));
        steps[n++] = (int)json_integer_value(json_object_get(o, "step"));
        json_decref(o);
    }
    cr_assert(eq(int, n, 2));
    cr_assert(steps[0] == 1 && steps[1] == 3);
    cr_assert(eq(int, lh_remove_tree(dir, NULL), 0));
}

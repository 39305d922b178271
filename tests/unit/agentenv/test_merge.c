/* A merged layer has the effect of the layers it was made from: random changes in real overlays,
 * the chain and its merge mounted over the same image and compared name by name. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "agentenv/snapshot/snapshot.h"
#include "proto/file.h"
#include "tests/must_work.h"

enum { LAYERS = 10, CHANGES = 40, NAMES = 6 };

static char dir[64];

static const char *at(const char *name)
{
    static char paths[8][256];
    static int next;
    char *p = paths[next++ % 8];

    snprintf(p, sizeof paths[0], "%s/%s", dir, name);
    return p;
}

static void setup(void)
{
    NEEDS("sandbox", getuid() == 0, "mounting needs root");
    strcpy(dir, "/tmp/agentenvd-merge-XXXXXX");
    cr_assert(mkdtemp(dir) != NULL);
    cr_assert(mkdir(at("image"), 0755) == 0 && mkdir(at("mnt"), 0755) == 0);
}

static void teardown(void)
{
    umount2(at("mnt"), MNT_DETACH);
    cr_assert(eq(int, lh_remove_tree(dir, NULL), 0));
}

TestSuite(merge, .init = setup, .fini = teardown, .timeout = 60);

static void mount_chain(const char *const *layers, int n, const char *upper)
{
    char options[4000];
    int len = snprintf(options, sizeof options, "lowerdir=");

    for (int i = n; i-- > 0;)
        len += snprintf(options + len, sizeof options - (size_t)len, "%s:", layers[i]);
    len += snprintf(options + len, sizeof options - (size_t)len, "%s", at("image"));
    if (upper)
        snprintf(options + len, sizeof options - (size_t)len, ",upperdir=%s,workdir=%s", upper,
                 at("work"));
    cr_assert(mount("overlay", at("mnt"), "overlay", upper ? 0 : MS_RDONLY, options) == 0, "%m: %s",
              options);
}

/* "a/b/c", one to three deep, of few names, so that changes meet. */
static void random_path(char *out, size_t room)
{
    int depth = 1 + rand() % 3, len = snprintf(out, room, "%s/mnt", dir);

    for (int i = 0; i < depth; i++)
        len += snprintf(out + len, room - (size_t)len, "/%c", 'a' + rand() % NAMES);
}

static void append_line(const char *path, int serial)
{
    lh_autofclose FILE *f = fopen(path, "a");

    if (f) /* its directory may be missing, or it may be one */
        fprintf(f, "%d\n", serial);
}

static void change_something(int serial)
{
    char path[512], other[512];

    random_path(path, sizeof path);
    random_path(other, sizeof other);
    switch (rand() % 7) {
    case 0:
        mkdir(path, 0700 + (unsigned)(rand() % 64));
        break;
    case 1:
        lh_remove_tree(path, NULL);
        break;
    case 2: /* a directory where one was removed: opaque */
        lh_remove_tree(path, NULL);
        mkdir(path, 0755);
        break;
    case 3:
        if (symlink(other, path) == 0 && lchown(path, (uid_t)(rand() % 9), 0) < 0)
            cr_fatal("lchown: %m");
        break;
    case 4:
        if (rename(path, other) <
            0) /* refused for directories of the image, as usual on overlays */
            chmod(other, 0711);
        break;
    case 5:
        chmod(path, (mode_t)(rand() % 0777));
        break;
    default:
        append_line(path, serial);
    }
}

static FILE *listing;

static int list_one(const char *path, const struct stat *st, int type, struct FTW *f)
{
    char target[512] = "", content[512] = "";

    (void)f;
    if (type == FTW_SL && readlink(path, target, sizeof target - 1) < 0)
        return -1;
    if (S_ISREG(st->st_mode)) {
        FILE *in = fopen(path, "r");
        size_t n = in ? fread(content, 1, sizeof content - 1, in) : 0;
        content[n] = 0;
        if (in)
            fclose(in);
    }
    fprintf(listing, "%s %o %u %s %s\n", path, st->st_mode, st->st_uid, target, content);
    return 0;
}

static int by_line(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The tree as sorted text; readdir order of an overlay depends on its layers. */
static char *list_tree(void)
{
    char *text = NULL, *sorted, *lines[4096];
    size_t len, n = 0;

    listing = open_memstream(&text, &len);
    cr_assert(nftw(at("mnt"), list_one, 16, FTW_PHYS) == 0);
    fclose(listing);
    for (char *p = strtok(text, "\n"); p && n < 4096; p = strtok(NULL, "\n"))
        lines[n++] = p;
    qsort(lines, n, sizeof *lines, by_line);
    FILE *out = open_memstream(&sorted, &len);
    for (size_t i = 0; i < n; i++)
        fprintf(out, "%s\n", lines[i]);
    fclose(out);
    free(text);
    return sorted;
}

static void check_seed(unsigned seed)
{
    static char paths[LAYERS][128];
    const char *layers[LAYERS], *merged = at("merged");
    char *top_first[LAYERS];
    struct lh_error e = {0};

    srand(seed);
    for (int i = 0; i < LAYERS; i++) {
        snprintf(paths[i], sizeof paths[i], "%s/layer%d", dir, i);
        layers[i] = top_first[LAYERS - 1 - i] = paths[i];
        lh_remove_tree(paths[i], NULL);
        lh_remove_tree(at("work"), NULL);
        cr_assert(mkdir(paths[i], 0755) == 0 && mkdir(at("work"), 0755) == 0);
        mount_chain(layers, i, paths[i]);
        for (int j = 0; j < CHANGES; j++)
            change_something(i * CHANGES + j);
        cr_assert(umount(at("mnt")) == 0);
    }
    mount_chain(layers, LAYERS, NULL);
    lh_autofree char *chain = list_tree();
    cr_assert(umount(at("mnt")) == 0);
    lh_remove_tree(merged, NULL);
    cr_assert(layers_merge(top_first, LAYERS, merged, &e) == 0, "seed %u: %s", seed, e.message);
    mount_chain(&merged, 1, NULL);
    lh_autofree char *one = list_tree();
    cr_assert(umount(at("mnt")) == 0);
    cr_assert(strcmp(chain, one) == 0, "seed %u\nchain:\n%s\nmerged:\n%s", seed, chain, one);
}

Test(merge, has_the_effect_of_its_layers)
{
    char command[512];

    snprintf(command, sizeof command,
             "cd %s/image && for x in a b c; do for y in a b c d; do mkdir -p $x/$y && echo $x$y > "
             "$x/$y/a; echo f > $x/e; done; done; ln -s a f",
             dir);
    cr_assert(system(command) == 0);
    for (unsigned seed = 1; seed <= 12; seed++)
        check_seed(seed);
}

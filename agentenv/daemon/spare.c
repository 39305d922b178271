/* Directories of sandboxes are used again.
 *
 * To make and remove the three directories of a sandbox takes 1 to 2 ms of ext4 without a journal,
 * which passes over recently deleted inodes and, with `discard`, tells the disk of each block; to
 * rename one takes 0.02 ms.  So that of an ended sandbox is emptied, looked at (box_reset_dir) and
 * kept under STATE/spare, at most SPARE_MAX of them, the oldest of which is taken first: they lie
 * in different block groups, and so do the few inodes that overlay makes and removes in each.
 *
 * A crash loses nothing: a spare directory is clean before it is renamed to here, and one that is
 * taken belongs to a row of the registry. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/daemon/internal.h"
#include "proto/file.h"

enum { SPARE_MAX = 128 };

int spare_open(struct daemon *d, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/spare", d->state_dir);
    lh_autoclosedir DIR *dir = path ? opendir(path) : NULL;
    unsigned long n;
    char *end;

    if (!dir)
        return lh_fail_errno(err, path ? errno : ENOMEM, "%s/spare", d->state_dir);
    for (const struct dirent *e; (e = readdir(dir));) {
        n = strtoul(e->d_name, &end, 10);
        if (*end || end == e->d_name)
            continue;
        if (d->end_spare == 0 || n < d->first_spare)
            d->first_spare = (unsigned)n;
        if (n >= d->end_spare)
            d->end_spare = (unsigned)n + 1;
    }
    return 0;
}

static void spare_path(const struct daemon *d, unsigned n, char path[4200])
{
    snprintf(path, 4200, "%s/spare/%u", d->state_dir, n);
}

static bool take(struct daemon *d, const char *dir)
{
    char path[4200];

    LH_LOCKED(&d->spare_lock);
    while (d->first_spare != d->end_spare) {
        spare_path(d, d->first_spare++, path);
        if (rename(path, dir) == 0)
            return true;
    }
    return false;
}

int spare_take(struct daemon *d, const char *dir, struct lh_error *err)
{
    if (take(d, dir) || mkdir(dir, 0700) == 0)
        return 0;
    return lh_fail_errno(err, errno, "directory %s", dir);
}

bool spare_give(struct daemon *d, const char *dir)
{
    char path[4200];

    if (!box_reset_dir(dir))
        return false;
    LH_LOCKED(&d->spare_lock);
    if (d->end_spare - d->first_spare >= SPARE_MAX)
        return false;
    spare_path(d, d->end_spare, path);
    if (rename(dir, path) < 0)
        return false;
    d->end_spare++;
    return true;
}

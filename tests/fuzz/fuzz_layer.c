/* Whatever an archive says, unpacking it as a layer changes nothing outside the layer, makes no
 * device but whiteouts in it, and leaks no descriptor. */
#include <fcntl.h>
#include <ftw.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agentenv/sandbox/box.h"
#include "agentenv/snapshot/layertar.h"
#include "proto/file.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static char base[] = "/dev/shm/fuzz-layer-XXXXXX";

static void remove_base(void)
{
    lh_remove_tree(base, NULL);
}

static void must(bool ok)
{
    if (!ok)
        abort();
}

static int lowest_free_fd(void)
{
    int fd = dup(0);

    close(fd);
    return fd;
}

static void prepare(char in[64], char canary[64])
{
    if (!*in) {
        must(mkdtemp(base) != NULL);
        atexit(remove_base);
        snprintf(in, 64, "%s/in", base);
        snprintf(canary, 64, "%s/canary", base);
    }
    must(lh_remove_tree(in, NULL) == 0 && mkdir(in, 0700) == 0);
    must(lh_write_file(canary, "sings", 5, 0644, NULL) == 0);
}

static int check_entry(const char *path, const struct stat *st, int type, struct FTW *f)
{
    (void)path;
    (void)type;
    must(!S_ISBLK(st->st_mode) && (!S_ISCHR(st->st_mode) || st->st_rdev == 0));
    must(S_ISCHR(st->st_mode) || f->level == 0 ||
         (st->st_uid >= BOX_UID_BASE && st->st_uid <= BOX_UID_BASE + BOX_INIT_UID) ||
         st->st_uid == 0); /* half made when an entry is refused */
    return 0;
}

static void unpack(struct archive *a, const char *in)
{
    struct layer_unpack *u = layer_unpack_create(in, NULL);
    struct archive_entry *e;
    struct lh_error err = {0};
    int r = 0;

    while (u && r == 0 && archive_read_next_header(a, &e) == ARCHIVE_OK)
        r = layer_unpack_entry(u, a, e, "l", &err);
    if (u && r == 0)
        layer_unpack_finish(u, &err);
    layer_unpack_destroy(u);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    static char in[64], canary[64];
    int free_fd = lowest_free_fd();
    size_t len = 0;

    prepare(in, canary);
    struct archive *a = archive_read_new();
    archive_read_support_format_tar(a);
    if (archive_read_open_memory(a, p, n) == ARCHIVE_OK)
        unpack(a, in);
    archive_read_free(a);
    must(nftw(in, check_entry, 16, FTW_PHYS) == 0);
    lh_autofree char *text = lh_read_file(canary, 16, &len, NULL);
    must(text && len == 5 && !memcmp(text, "sings", 5));
    must(lowest_free_fd() == free_fd);
    return 0;
}

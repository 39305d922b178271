/* Whatever an upload's tar stream says, unpacking it changes nothing outside its destination and
 * leaks no descriptor.  The destination lies in a directory with a canary and with symbolic links
 * that lead out of it. */
#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agentenv/daemon/tar.h"
#include "proto/cleanup.h"
#include "proto/file.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static char base[] = "/dev/shm/fuzz-tar-XXXXXX";

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

/* Names directly in `fd`. */
static int count_names(int fd)
{
    int n = 0;
    DIR *d = fdopendir(openat(fd, ".", O_RDONLY | O_DIRECTORY));

    must(d != NULL);
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

struct rest {
    const uint8_t *data;
    size_t len;
};

static ssize_t next_piece(void *ctx, const void **data, struct lh_error *err)
{
    struct rest *r = ctx;
    size_t n = r->len < 1000 ? r->len : 1000;

    *data = r->data;
    r->data += n;
    r->len -= n;
    return (ssize_t)n;
}

static int prepare(void)
{
    static int root = -1;

    if (root < 0) {
        must(mkdtemp(base) != NULL);
        atexit(remove_base);
        root = open(base, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        must(root >= 0 && mkdirat(root, "outside", 0755) == 0);
        lh_autoclose int canary = openat(root, "outside/canary", O_WRONLY | O_CREAT, 0644);
        must(write(canary, "sings", 5) == 5);
    }
    lh_autofree char *in = lh_format("%s/in", base);
    must(in && lh_remove_tree(in, NULL) == 0 && mkdirat(root, "in", 0755) == 0);
    must(symlinkat("../outside", root, "in/out") == 0);
    must(symlinkat("../outside/canary", root, "in/file") == 0);
    return root;
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    int root = prepare(), free_fd = lowest_free_fd();
    struct inroot r = {.fd = root, .uid_base = getuid(), .uid_count = 1};
    uint64_t bytes = 0;
    char canary[16] = "";
    struct stat st;

    lh_autoclose int in = openat(root, "in", O_PATH | O_DIRECTORY | O_CLOEXEC);
    struct rest rest = {p, n};
    tar_unpack(&r, in, next_piece, &rest, &bytes, NULL);
    lh_autoclose int fd = openat(root, "outside/canary", O_RDONLY);
    must(read(fd, canary, sizeof canary) == 5 && !memcmp(canary, "sings", 5));
    must(fstat(fd, &st) == 0 && st.st_nlink == 1);
    close(lh_steal_fd(&fd));
    lh_autoclose int outside = openat(root, "outside", O_RDONLY | O_DIRECTORY);
    must(count_names(outside) == 3 && count_names(root) == 4);
    close(lh_steal_fd(&outside));
    close(lh_steal_fd(&in));
    must(lowest_free_fd() == free_fd);
    return 0;
}

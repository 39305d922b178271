#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agentenv/daemon/tar.h"
#include "proto/cleanup.h"
#include "proto/file.h"

/* A directory on tmpfs plays the sandbox's root: what matters is that nothing leaves it. */
static char base[64];
static struct inroot root;

static void setup(void)
{
    strcpy(base, "/dev/shm/agentenvd-tar-XXXXXX");
    cr_assert(mkdtemp(base) != NULL);
    root = (struct inroot){
        .fd = open(base, O_PATH | O_DIRECTORY | O_CLOEXEC), .uid_base = getuid(), .uid_count = 1};
    cr_assert(root.fd >= 0);
}

static void teardown(void)
{
    close(root.fd);
    lh_remove_tree(base, NULL);
}

TestSuite(tar, .init = setup, .fini = teardown);

struct stream {
    char *data;
    size_t len;
};

static int collect(void *ctx, const void *data, size_t len, struct lh_error *err)
{
    struct stream *s = ctx;
    char *more = realloc(s->data, s->len + len);

    if (!more)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "no memory");
    s->data = more;
    memcpy(s->data + s->len, data, len);
    s->len += len;
    return 0;
}

/* Hands out what is left, a few bytes at a time. */
static ssize_t next_piece(void *ctx, const void **data, struct lh_error *err)
{
    struct stream *s = ctx;
    size_t n = s->len < 700 ? s->len : 700;

    *data = s->data;
    s->data += n;
    s->len -= n;
    return (ssize_t)n;
}

static void write_file(const char *path, const void *data, size_t len, mode_t mode)
{
    const char *name;
    struct lh_error e = {0};

    lh_autoclose int dir = inroot_find_parent(&root, path, true, &name, &e);
    cr_assert(dir >= 0, "%s", e.message);
    lh_autoclose int fd = inroot_create(&root, dir, name, mode, &e);
    cr_assert(fd >= 0 && lh_write_all(fd, data, len, &e) == 0, "%s", e.message);
}

static int unpack_at(const char *path, const struct stream *s, struct lh_error *e)
{
    uint64_t bytes;

    lh_autoclose int dir = inroot_find_dir(&root, path, true, e);
    return dir < 0
               ? dir
               : tar_unpack(&root, dir, next_piece, &(struct stream){s->data, s->len}, &bytes, e);
}

Test(tar, what_was_packed_unpacks_the_same)
{
    static char blob[300000];
    struct stream s = {0};
    struct lh_error e = {0};
    struct stat a, b;

    for (size_t i = 0; i < sizeof blob; i++)
        blob[i] = (char)(i * 31 >> 3);
    write_file("/src/deep/blob", blob, sizeof blob, 0741);
    write_file("/src/empty", "", 0, 0600);
    cr_assert(symlinkat("../away", root.fd, "src/link") == 0);
    cr_assert(linkat(root.fd, "src/deep/blob", root.fd, "src/twin", 0) == 0);
    cr_assert(mkfifoat(root.fd, "src/fifo", 0600) == 0);
    cr_assert(tar_pack(&root, "/src", collect, &s, &e) == 0, "%s", e.message);
    cr_assert(unpack_at("/dst", &s, &e) == 0, "%s", e.message);
    cr_assert(fstatat(root.fd, "dst/src/deep/blob", &a, 0) == 0);
    cr_assert(fstatat(root.fd, "dst/src/twin", &b, 0) == 0);
    cr_assert(eq(u64, a.st_ino, b.st_ino), "still one file");
    cr_assert(eq(u32, a.st_mode & 07777u, 0741));
    lh_autofree char *path = lh_format("%s/dst/src/deep/blob", base);
    size_t len;
    lh_autofree char *back = lh_read_file(path, 1 << 20, &len, &e);
    cr_assert(back && len == sizeof blob && !memcmp(back, blob, len));
    cr_assert(lt(int, fstatat(root.fd, "dst/src/fifo", &a, 0), 0), "FIFOs are left out");
    free(s.data);
}

Test(tar, holes_and_names_of_any_bytes_come_through)
{
    enum { SIZE = 1 << 30, AT = 700 << 20 };
    static const char odd[] = "src/\xff\xfe new\nline \\x41";
    struct stream s = {0};
    struct lh_error e = {0};
    struct stat st;
    char data[4];

    write_file("/src/holes", "", 0, 0644);
    write_file("/src/all-hole", "", 0, 0644);
    lh_autoclose int fd = openat(root.fd, "src/holes", O_RDWR | O_CLOEXEC);
    lh_autoclose int empty = openat(root.fd, "src/all-hole", O_RDWR | O_CLOEXEC);
    cr_assert(fd >= 0 && pwrite(fd, "data", 4, AT) == 4 && ftruncate(fd, SIZE) == 0);
    cr_assert(empty >= 0 && ftruncate(empty, SIZE) == 0);
    cr_assert(symlinkat("x", root.fd, odd) == 0);
    cr_assert(tar_pack(&root, "/src", collect, &s, &e) == 0, "%s", e.message);
    cr_assert(lt(sz, s.len, 1 << 20), "holes take no space in the stream");
    cr_assert(unpack_at("/dst", &s, &e) == 0, "%s", e.message);
    lh_autofree char *there = lh_format("dst/%s", odd);
    cr_assert(fstatat(root.fd, there, &st, AT_SYMLINK_NOFOLLOW) == 0, "the name");
    cr_assert(fstatat(root.fd, "dst/src/all-hole", &st, 0) == 0);
    cr_assert(eq(i64, st.st_size, SIZE));
    cr_assert(fstatat(root.fd, "dst/src/holes", &st, 0) == 0);
    cr_assert(eq(i64, st.st_size, SIZE));
    cr_assert(lt(i64, st.st_blocks, 4096), "nor on the disk");
    lh_autoclose int back = openat(root.fd, "dst/src/holes", O_RDONLY | O_CLOEXEC);
    cr_assert(pread(back, data, 4, AT) == 4 && !memcmp(data, "data", 4));
    free(s.data);
}

Test(tar, every_cut_of_a_stream_is_refused_or_harmless)
{
    struct stream s = {0};
    struct lh_error e = {0};

    write_file("/src/a", "some bytes", 10, 0644);
    write_file("/src/b", "more", 4, 0644);
    cr_assert(tar_pack(&root, "/src", collect, &s, &e) == 0);
    for (size_t cut = 1; cut < s.len && cut < 2600; cut += 37) {
        struct stream part = {s.data, cut};
        int r = unpack_at("/dst", &part, &e);
        cr_assert(r == 0 || r == LH_INVALID_ARGUMENT, "cut %zu: %s", cut, e.message);
    }
    free(s.data);
}

static int refuse(void *ctx, const void *data, size_t len, struct lh_error *err)
{
    (void)ctx;
    (void)data;
    (void)len;
    return lh_fail(err, LH_CANCELLED, "enough");
}

Test(tar, what_cannot_be_packed_says_why)
{
    struct lh_error e = {0};

    write_file("/src/a", "x", 1, 0644);
    cr_assert(eq(int, tar_pack(&root, "/src", refuse, NULL, &e), LH_CANCELLED));
    cr_assert(eq(str, e.message, (char *)"enough"));
    cr_assert(eq(int, tar_pack(&root, "/none", refuse, NULL, &e), LH_NOT_FOUND));
    cr_assert(eq(int, tar_pack(&root, "relative", refuse, NULL, &e), LH_INVALID_ARGUMENT));
    cr_assert(mkfifoat(root.fd, "fifo", 0600) == 0);
    cr_assert(eq(int, tar_pack(&root, "/fifo", refuse, NULL, &e), LH_INVALID_ARGUMENT));
}

Test(tar, no_path_leaves_the_root)
{
    struct lh_error e = {0};

    cr_assert(symlinkat("/", root.fd, "up") == 0);
    cr_assert(symlinkat("../../../..", root.fd, "above") == 0);
    write_file("/up/../../up/above/etc/name", "x", 1, 0644);
    cr_assert(eq(int, faccessat(root.fd, "etc/name", F_OK, 0), 0));
    cr_assert(symlinkat("/proc/self/root", root.fd, "magic") == 0);
    cr_assert(lt(int, inroot_find(&root, "/magic/etc", &e), 0));
    cr_assert(lt(int, inroot_step(&root, root.fd, "..", true, &e), 0));
    cr_assert(lt(int, inroot_step(&root, root.fd, "up", false, &e), 0), "a link is no directory");
}

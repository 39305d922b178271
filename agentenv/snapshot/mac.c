#include "agentenv/snapshot/mac.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sodium.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/file.h"
#include "proto/hex.h"

enum { PIECE = 256 << 10, DIGITS = 2 * MAC_KEY };

static int check_mode(int fd, const char *path, struct lh_error *err)
{
    struct stat st;

    if (fstat(fd, &st) < 0)
        return lh_fail_errno(err, errno, "%s", path);
    if (!S_ISREG(st.st_mode) || (st.st_mode & 077) || (st.st_uid && st.st_uid != geteuid()))
        return lh_fail(err, LH_PERMISSION_DENIED,
                       "key file %s must be a file that its owner alone may read; chmod 600 it",
                       path);
    return 0;
}

int mac_key_load(const char *path, struct mac_key *key, struct lh_error *err)
{
    lh_autoclose int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    char text[DIGITS + 3];

    if (fd < 0)
        return lh_fail_errno(err, errno, "key file %s", path);
    int r = check_mode(fd, path, err);
    if (r < 0)
        return r;
    ssize_t n = read(fd, text, sizeof text - 1);
    if (n < 0)
        return lh_fail_errno(err, errno, "key file %s", path);
    bool binary = n == MAC_KEY;
    if (binary)
        memcpy(key->bytes, text, MAC_KEY);
    text[n == DIGITS + 1 && text[DIGITS] == '\n' ? DIGITS : n] = 0;
    bool fine = binary || lh_hex_parse(text, key->bytes, MAC_KEY);
    sodium_memzero(text, sizeof text);
    return fine ? 0
                : lh_fail(err, LH_INVALID_ARGUMENT,
                          "key file %s has neither %d bytes nor %d hexadecimal digits", path,
                          MAC_KEY, DIGITS);
}

int mac_key_create(const char *path, struct lh_error *err)
{
    lh_autoclose int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    struct mac_key key;
    char text[DIGITS + 2];

    if (fd < 0)
        return lh_fail_errno(err, errno, "key file %s", path);
    if (sodium_init() < 0)
        return lh_fail(err, LH_INTERNAL, "libsodium cannot start");
    randombytes_buf(key.bytes, sizeof key.bytes);
    lh_hex_print(key.bytes, MAC_KEY, text);
    memcpy(text + DIGITS, "\n", 2);
    int r = lh_write_all(fd, text, DIGITS + 1, err);
    if (r == 0 && fsync(fd) < 0)
        r = lh_fail_errno(err, errno, "key file %s", path);
    sodium_memzero(text, sizeof text);
    mac_key_forget(&key);
    return r;
}

void mac_key_forget(struct mac_key *key)
{
    sodium_memzero(key, sizeof *key);
}

/* ---- a directory ---- */

static void feed(crypto_auth_hmacsha512256_state *h, const void *data, uint64_t len)
{
    crypto_auth_hmacsha512256_update(h, (const uint8_t *)&len, sizeof len);
    crypto_auth_hmacsha512256_update(h, data, len);
}

static int feed_content(crypto_auth_hmacsha512256_state *h, int fd, uint64_t size, uint8_t *piece,
                        const char *name, struct lh_error *err)
{
    uint64_t left = size;
    ssize_t n;

    crypto_auth_hmacsha512256_update(h, (const uint8_t *)&size, sizeof size);
    while (left && (n = read(fd, piece, left < PIECE ? left : PIECE)) != 0) {
        if (n < 0)
            return lh_fail_errno(err, errno, "reading %s", name);
        crypto_auth_hmacsha512256_update(h, piece, (size_t)n);
        left -= (uint64_t)n;
    }
    return left ? lh_fail(err, LH_ABORTED, "%s changed while it was read", name) : 0;
}

static int feed_file(crypto_auth_hmacsha512256_state *h, int dir, const char *name, uint8_t *piece,
                     struct lh_error *err)
{
    lh_autoclose int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    struct stat st;

    if (fd < 0 || fstat(fd, &st) < 0)
        return lh_fail_errno(err, errno, "%s", name);
    if (!S_ISREG(st.st_mode))
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s among process images is no file", name);
    feed(h, name, strlen(name));
    return feed_content(h, fd, (uint64_t)st.st_size, piece, name, err);
}

static int is_named(const struct dirent *e)
{
    return strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
}

static int by_bytes(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

int mac_of_dir(const struct mac_key *key, const char *dir, uint8_t mac[MAC_BYTES],
               struct lh_error *err)
{
    lh_autoclose int at = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    lh_autofree uint8_t *piece = malloc(PIECE);
    crypto_auth_hmacsha512256_state h;
    struct dirent **names;
    int n = at < 0 || !piece ? -1 : scandirat(at, ".", &names, is_named, by_bytes), r = 0;

    if (n < 0)
        return lh_fail_errno(err, errno, "process images in %s", dir);
    crypto_auth_hmacsha512256_init(&h, key->bytes, MAC_KEY);
    for (int i = 0; i < n; i++) {
        if (r == 0)
            r = feed_file(&h, at, names[i]->d_name, piece, err);
        free(names[i]);
    }
    free(names);
    crypto_auth_hmacsha512256_final(&h, mac);
    return r < 0 ? lh_wrap(err, "%s", dir) : 0;
}

bool mac_equal(const uint8_t a[MAC_BYTES], const uint8_t b[MAC_BYTES])
{
    return sodium_memcmp(a, b, MAC_BYTES) == 0;
}

#include "agentenv/snapshot/mac.h"

#include <errno.h>
#include <fcntl.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/file.h"
#include "proto/hex.h"

enum { DIGITS = 2 * MAC_KEY };

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

static int write_key(int fd, const char *path, struct lh_error *err)
{
    struct mac_key key;
    char text[DIGITS + 2];

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

/* Under its name only when it is whole, and never instead of another. */
int mac_key_create(const char *path, struct lh_error *err)
{
    lh_autofree char *made = lh_format("%s.XXXXXX", path);

    if (!made)
        return lh_fail_errno(err, ENOMEM, "key file %s", path);
    lh_autoclose int fd = mkostemp(made, O_CLOEXEC); /* mode 0600 */
    if (fd < 0)
        return lh_fail_errno(err, errno, "key file %s", path);
    int r = write_key(fd, path, err);
    if (r == 0 && renameat2(AT_FDCWD, made, AT_FDCWD, path, RENAME_NOREPLACE) < 0)
        r = lh_fail_errno(err, errno, "key file %s", path);
    if (r < 0) {
        unlink(made);
        return r;
    }
    return lh_sync_dir_of(path, err);
}

void mac_key_forget(struct mac_key *key)
{
    sodium_memzero(key, sizeof *key);
}

int mac_of_text(const struct mac_key *key, const char *text, uint8_t mac[MAC_BYTES],
                struct lh_error *err)
{
    crypto_auth_hmacsha512256_state h;

    if (sodium_init() < 0)
        return lh_fail(err, LH_INTERNAL, "libsodium cannot start");
    crypto_auth_hmacsha512256_init(&h, key->bytes, MAC_KEY);
    crypto_auth_hmacsha512256_update(&h, (const uint8_t *)text, strlen(text));
    crypto_auth_hmacsha512256_final(&h, mac);
    return 0;
}

bool mac_equal(const uint8_t a[MAC_BYTES], const uint8_t b[MAC_BYTES])
{
    return sodium_memcmp(a, b, MAC_BYTES) == 0;
}

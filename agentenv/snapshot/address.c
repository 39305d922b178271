/* Every entry is fed field by field, each with its length in front, so that no two different trees
 * give the same stream.
 *
 * The hash is a cryptographic one, since there is an adversary: an address is what an imported
 * layer is checked by, and what lets a layer stand for another.  BLAKE2b comes with libsodium,
 * which the project has anyway, at about the speed of the disk (1 GB/s; SHA-256 without
 * instructions for it is a third of that).  Rejected: xxHash, fast and no match for an agent that
 * makes two files of one value; a tree of hashes, which would let single files be checked, at the
 * price of a second format. */
#include "agentenv/snapshot/address.h"

#include <errno.h>
#include <sodium.h>
#include <string.h>
#include <unistd.h>

#include "agentenv/snapshot/layerwalk.h"
#include "proto/cleanup.h"
#include "proto/hex.h"

enum { PIECE = 256 << 10 };

struct hashing {
    crypto_generichash_state state;
    uint64_t bytes;
    uint8_t *piece;
};

static void feed(struct hashing *h, const void *data, uint64_t len)
{
    crypto_generichash_update(&h->state, (const uint8_t *)&len, sizeof len);
    crypto_generichash_update(&h->state, data, len);
}

static void feed_text(struct hashing *h, const char *text)
{
    feed(h, text, strlen(text));
}

static void feed_head(struct hashing *h, const struct layer_entry *e)
{
    const struct stat *st = &e->st;
    int64_t numbers[] = {st->st_mode,         st->st_uid,
                         st->st_gid,          st->st_mtim.tv_sec,
                         st->st_mtim.tv_nsec, S_ISREG(st->st_mode) ? st->st_size : 0,
                         (int64_t)e->n_xattrs};

    feed_text(h, e->path);
    feed_text(h, e->target);
    feed_text(h, e->link);
    feed(h, numbers, sizeof numbers);
    for (size_t i = 0; i < e->n_xattrs; i++) {
        feed_text(h, e->xattrs[i].name);
        feed(h, e->xattrs[i].value, e->xattrs[i].len);
    }
}

static int feed_content(struct hashing *h, const struct layer_entry *e, struct lh_error *err)
{
    ssize_t n;

    while ((n = read(e->fd, h->piece, PIECE)) > 0) {
        crypto_generichash_update(&h->state, h->piece, (size_t)n);
        h->bytes += (uint64_t)n;
    }
    return n < 0 ? lh_fail_errno(err, errno, "reading %s of a layer", e->path) : 0;
}

static int feed_entry(void *ctx, const struct layer_entry *e, struct lh_error *err)
{
    struct hashing *h = ctx;

    feed_head(h, e);
    return e->fd >= 0 ? feed_content(h, e, err) : 0;
}

int layer_address(const char *path, char address[LAYER_ADDRESS_SIZE], uint64_t *bytes,
                  struct lh_error *err)
{
    struct hashing h = {.bytes = 0};
    lh_autofree uint8_t *piece = malloc(PIECE);
    uint8_t digest[LAYER_ADDRESS];

    if (!piece)
        return lh_fail_errno(err, ENOMEM, "the address of a layer");
    if (sodium_init() < 0)
        return lh_fail(err, LH_INTERNAL, "libsodium cannot start");
    h.piece = piece;
    crypto_generichash_init(&h.state, NULL, 0, LAYER_ADDRESS);
    int r = layer_walk(path, feed_entry, &h, err);
    if (r < 0)
        return r;
    crypto_generichash_final(&h.state, digest, sizeof digest);
    lh_hex_print(digest, sizeof digest, address);
    if (bytes)
        *bytes = h.bytes;
    return 0;
}

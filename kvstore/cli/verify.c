/* verify: reads every visible object and checks its CRC32C.
 *
 * Nothing is pinned, so an object may be evicted and its pages written anew between its listing and
 * its reading; that looks like corruption once.  So whatever fails is listed and read again, and is
 * corrupt only if it is still there, in the same place, and fails PASSES times. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvstore/cli/cli.h"
#include "proto/cleanup.h"
#include "proto/crc.h"
#include "proto/parse.h"

typedef Longhaul__Kv__V1__Entry Entry;
typedef Longhaul__Kv__V1__Extent Extent;

enum { PASSES = 3, MAX_SUSPECTS = 1000, PROGRESS_BYTES = 256 << 20 };

struct suspect {
    uint8_t hash[16];
    uint64_t offset;
    uint32_t unit, crc32c;
    int part, failed;
    const char *tier;
};

struct verify {
    struct cli *cli;
    uint8_t (*roots)[16];
    size_t n_roots;
    struct suspect *suspects;
    size_t n_suspects;
    int pass, disk_fd; /* -1 = no disk tier */
    uint64_t objects, bytes, shown;
};

static int keep_root(void *ctx, const Entry *e, struct lh_error *err)
{
    struct verify *v = ctx;

    if (e->retired || e->root.len != sizeof *v->roots)
        return 0;
    void *more = realloc(v->roots, (v->n_roots + 1) * sizeof *v->roots);
    if (!more)
        return lh_fail_errno(err, ENOMEM, "verify");
    v->roots = more;
    memcpy(v->roots[v->n_roots++], e->root.data, sizeof *v->roots);
    return 0;
}

static const Extent *place_of(const Entry *e)
{
    return e->extent ? e->extent : e->disk;
}

static struct suspect *suspect_of(struct verify *v, const Entry *e)
{
    for (size_t i = 0; i < v->n_suspects; i++) {
        struct suspect *s = &v->suspects[i];
        if (s->part == (int)e->part && s->crc32c == place_of(e)->crc32c &&
            !memcmp(s->hash, e->hash.data, sizeof s->hash))
            return s;
    }
    return NULL;
}

static void suspect(struct verify *v, const Entry *e, const Extent *where)
{
    struct suspect *s = suspect_of(v, e);

    if (!s && v->pass == 0 && v->n_suspects < MAX_SUSPECTS) {
        s = &v->suspects[v->n_suspects++];
        *s = (struct suspect){.offset = where->offset,
                              .tier = where == e->disk ? "disk" : "memory",
                              .unit = e->unit,
                              .crc32c = where->crc32c,
                              .part = (int)e->part};
        memcpy(s->hash, e->hash.data, sizeof s->hash);
    }
    if (s)
        s->failed++;
}

static void show_progress(struct verify *v)
{
    if (v->bytes - v->shown < PROGRESS_BYTES || !isatty(STDERR_FILENO))
        return;
    v->shown = v->bytes;
    fprintf(stderr, "\rverified %.1f GiB in %llu objects", (double)v->bytes / (1 << 30),
            (unsigned long long)v->objects);
}

static bool memory_is_right(const struct verify *v, const Extent *x)
{
    const uint8_t *at = kv_map_at(v->cli->link.map, x->offset, x->bytes);

    return at && lh_crc32c(0, at, x->bytes) == x->crc32c;
}

/* Through the page cache: kvstored itself goes past it. */
static bool disk_is_right(const struct verify *v, const Extent *x)
{
    lh_autofree uint8_t *bytes = malloc(x->bytes);

    return bytes && pread(v->disk_fd, bytes, x->bytes, (off_t)x->offset) == (ssize_t)x->bytes &&
           lh_crc32c(0, bytes, x->bytes) == x->crc32c;
}

static int check_object(void *ctx, const Entry *e, struct lh_error *err)
{
    struct verify *v = ctx;

    if (!(e->extent || e->disk) || e->hash.len != 16)
        return lh_fail(err, LH_INTERNAL, "kvstored listed an object without its place");
    if (v->pass && !suspect_of(v, e))
        return 0;
    if (e->extent && !memory_is_right(v, e->extent))
        suspect(v, e, e->extent);
    else if (e->disk && !disk_is_right(v, e->disk))
        suspect(v, e, e->disk);
    if (v->pass == 0) {
        v->objects++;
        v->bytes += place_of(e)->bytes * (uint64_t)((e->extent != NULL) + (e->disk != NULL));
        show_progress(v);
    }
    return 0;
}

/* A root may be retired under our eyes: then it has nothing left to verify. */
static int run_pass(struct verify *v, struct lh_error *err)
{
    for (size_t i = 0; i < v->n_roots; i++) {
        ProtobufCBinaryData root = {sizeof *v->roots, v->roots[i]};
        int r = cli_list(v->cli, &root, check_object, v, err);
        if (r < 0 && r != LH_NOT_FOUND)
            return r;
    }
    return 0;
}

static json_t *corrupt_objects(const struct verify *v)
{
    json_t *list = json_array();

    for (size_t i = 0; i < v->n_suspects; i++) {
        struct suspect *s = &v->suspects[i];
        ProtobufCBinaryData hash = {sizeof s->hash, s->hash};
        if (s->failed == PASSES)
            json_array_append_new(
                list,
                json_pack("{so ss ss sI sI}", "hash", cli_hex(&hash), "part",
                          s->part == LONGHAUL__KV__V1__PART__PART_STATE ? "state" : "block", "tier",
                          s->tier, "unit", (json_int_t)s->unit, "offset", (json_int_t)s->offset));
    }
    return list;
}

static int report(const struct verify *v, struct lh_error *err)
{
    static const char *const columns[] = {"hash", "part", "tier", "unit", "offset", NULL};
    json_t *corrupt = corrupt_objects(v);
    size_t n = json_array_size(corrupt);

    json_t *o = json_pack("{sI sI sI}", "objects", (json_int_t)v->objects, "bytes",
                          (json_int_t)v->bytes, "corrupt", (json_int_t)n);
    if (v->cli->json)
        json_object_set_new(o, "corrupt_objects", json_incref(corrupt));
    int r = cli_print_object(v->cli, o, err);
    if (r == 0 && n && !v->cli->json)
        r = cli_print_rows(v->cli, json_incref(corrupt), columns, err);
    json_decref(corrupt);
    if (r == 0 && n)
        return lh_fail(err, LH_DATA_LOSS,
                       "%zu objects have a wrong checksum; the next client to read one drops it",
                       n);
    return r;
}

static int open_disk(struct cli *c, int *fd, struct lh_error *err)
{
    lh_automsg(Longhaul__Kv__V1__Reply) r = cli_ask_stat(c, err);

    if (!r)
        return err->code;
    *fd = *r->stat->disk_path ? open(r->stat->disk_path, O_RDONLY | O_CLOEXEC) : -1;
    if (*fd < 0 && *r->stat->disk_path)
        return lh_fail_errno(err, errno, "%s", r->stat->disk_path);
    return 0;
}

int cli_verify(struct cli *c, struct lh_error *err)
{
    lh_autofree struct suspect *suspects = calloc(MAX_SUSPECTS, sizeof *suspects);
    lh_autoclose int disk_fd = -1;
    struct verify v = {.cli = c, .suspects = suspects};

    if (!suspects)
        return lh_fail_errno(err, ENOMEM, "verify");
    int r = open_disk(c, &disk_fd, err);
    v.disk_fd = disk_fd;
    if (r == 0)
        r = cli_list(c, NULL, keep_root, &v, err);
    for (; r == 0 && v.pass < PASSES && (v.pass == 0 || v.n_suspects); v.pass++)
        r = run_pass(&v, err);
    if (v.shown)
        fputc('\n', stderr);
    free(v.roots);
    return r == 0 ? report(&v, err) : r;
}

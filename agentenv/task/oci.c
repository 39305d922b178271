/* An image's files are read where they are: in a directory by their names, in an archive by passing
 * over it from the start for each one, which in a plain tar is seeking.  So nothing is unpacked but
 * the layers themselves, into their final place.  skopeo and umoci would need a second copy on disk
 * and a program more; the formats are a few fields of JSON around tars. */
#include "agentenv/task/oci.h"

#include <archive_entry.h>
#include <errno.h>
#include <fcntl.h>
#include <sodium.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/utsname.h>

#include "proto/file.h"
#include "proto/hex.h"

enum { BLOCK = 256 << 10, LINKS_MAX = 4 };

struct oci {
    char *path;
    bool directory;
    struct oci_layers layers;
    struct oci_config config;
};

void oci_close(struct oci *o)
{
    if (!o)
        return;
    oci_layers_finish(&o->layers);
    oci_config_finish(&o->config);
    free(o->path);
    free(o);
}

const struct oci_config *oci_config(const struct oci *o)
{
    return &o->config;
}

/* ---- one file of the image ---- */

struct member {
    int fd;                /* in a directory; else -1 */
    struct archive *outer; /* in an archive, standing at the file */
    crypto_hash_sha256_state hash;
    uint8_t block[BLOCK];
};

static void close_member(struct member *m)
{
    if (!m)
        return;
    if (m->fd >= 0)
        close(m->fd);
    archive_read_free(m->outer);
    free(m);
}

static void lh_cleanup_member(struct member **m)
{
    close_member(*m);
}
#define auto_member __attribute__((cleanup(lh_cleanup_member))) struct member *

static int fail_archive(struct archive *a, const char *name, struct lh_error *err)
{
    const char *why = archive_error_string(a);

    return lh_fail(err, LH_INVALID_ARGUMENT, "%s: %s", name, why ? why : "unreadable");
}

static bool same_name(const char *a, const char *b)
{
    while (!strncmp(a, "./", 2))
        a += 2;
    return !strcmp(a, b);
}

/* Stands at the entry `name`.  A symbolic link, which old dockers used for equal layers, leaves
 * what it points to in `link`. */
static int seek_entry(struct member *m, const char *path, const char *name, char link[OCI_NAME],
                      struct lh_error *err)
{
    struct archive_entry *e;
    int r;

    m->outer = archive_read_new();
    if (!m->outer)
        return lh_fail_errno(err, ENOMEM, "%s", path);
    archive_read_support_filter_all(m->outer);
    archive_read_support_format_tar(m->outer);
    if (archive_read_open_filename(m->outer, path, BLOCK) != ARCHIVE_OK)
        return fail_archive(m->outer, path, err);
    while ((r = archive_read_next_header(m->outer, &e)) == ARCHIVE_OK) {
        const char *found = archive_entry_pathname(e);
        if (!found || !same_name(found, name))
            continue;
        link[0] = 0;
        if (archive_entry_filetype(e) == AE_IFLNK)
            snprintf(link, OCI_NAME, "%s",
                     archive_entry_symlink(e) ? archive_entry_symlink(e) : "");
        return 0;
    }
    return r == ARCHIVE_EOF ? lh_fail(err, LH_NOT_FOUND, "%s has no %s", path, name)
                            : fail_archive(m->outer, path, err);
}

/* "ID/layer.tar" pointing to "../OTHER/layer.tar": the one form there is. */
static int follow(char name[OCI_NAME], const char *link, struct lh_error *err)
{
    if (strncmp(link, "../", 3) != 0 || strstr(link + 3, "..") || !strchr(name, '/'))
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s points to \"%.100s\", outside the image", name,
                       link);
    snprintf(name, OCI_NAME, "%s", link + 3);
    return 0;
}

static int open_in_archive(struct member *m, const char *path, const char *wanted,
                           struct lh_error *err)
{
    char name[OCI_NAME], link[OCI_NAME];

    snprintf(name, sizeof name, "%s", wanted);
    for (int i = 0; i < LINKS_MAX; i++) {
        int r = seek_entry(m, path, name, link, err);
        if (r < 0 || !*link)
            return r;
        if ((r = follow(name, link, err)) < 0)
            return r;
        archive_read_free(lh_steal(&m->outer));
    }
    return lh_fail(err, LH_INVALID_ARGUMENT, "%s is a circle of links", wanted);
}

static int open_in_directory(struct member *m, const char *path, const char *name,
                             struct lh_error *err)
{
    lh_autofree char *full = lh_format("%s/%s", path, name);
    struct stat st;

    m->fd = full ? open(full, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    if (m->fd < 0 || fstat(m->fd, &st) < 0)
        return lh_fail_errno(err, full ? errno : ENOMEM, "%s/%s", path, name);
    return S_ISREG(st.st_mode) ? 0
                               : lh_fail(err, LH_INVALID_ARGUMENT, "%s/%s is no file", path, name);
}

static struct member *open_member(const struct oci *o, const char *name, struct lh_error *err)
{
    auto_member m = calloc(1, sizeof *m);

    if (!m || sodium_init() < 0)
        return lh_fail_errno(err, ENOMEM, "%s", name), NULL;
    m->fd = -1;
    crypto_hash_sha256_init(&m->hash);
    int r = o->directory ? open_in_directory(m, o->path, name, err)
                         : open_in_archive(m, o->path, name, err);
    return r < 0 ? NULL : lh_steal(&m);
}

static la_ssize_t read_member(struct archive *a, void *ctx, const void **data)
{
    struct member *m = ctx;
    la_ssize_t n =
        m->fd >= 0 ? read(m->fd, m->block, BLOCK) : archive_read_data(m->outer, m->block, BLOCK);

    if (n < 0)
        archive_set_error(a, EINVAL, "%s",
                          m->fd >= 0 ? strerror(errno) : archive_error_string(m->outer));
    else
        crypto_hash_sha256_update(&m->hash, m->block, (size_t)n);
    *data = m->block;
    return n;
}

/* What the reader of the layer left over, then the digest of all. */
static int check_digest(struct member *m, struct archive *a, const struct oci_blob *blob,
                        struct lh_error *err)
{
    uint8_t digest[crypto_hash_sha256_BYTES];
    char text[2 * crypto_hash_sha256_BYTES + 1];
    const void *data;
    la_ssize_t n;

    while ((n = read_member(a, m, &data)) > 0)
        ;
    if (n < 0)
        return fail_archive(a, blob->name, err);
    crypto_hash_sha256_final(&m->hash, digest);
    lh_hex_print(digest, sizeof digest, text);
    return !*blob->sha256 || !strcmp(blob->sha256, text)
               ? 0
               : lh_fail(err, LH_DATA_LOSS, "%s is not what its digest says", blob->name);
}

/* ---- texts ---- */

static char *read_text(const struct oci *o, const struct oci_blob *blob, size_t *len,
                       struct lh_error *err)
{
    auto_member m = open_member(o, blob->name, err);
    struct archive *a = archive_read_new(); /* carries read_member()'s message */
    lh_autofree char *text = m && a ? malloc(OCI_JSON_MAX + BLOCK) : NULL;
    const void *data;
    la_ssize_t n = 0;
    int r = text ? 0 : err->code ? err->code : lh_fail_errno(err, ENOMEM, "%s", blob->name);

    *len = 0;
    while (r == 0 && *len <= OCI_JSON_MAX && (n = read_member(a, m, &data)) > 0) {
        memcpy(text + *len, data, (size_t)n);
        *len += (size_t)n;
    }
    if (r == 0 && *len > OCI_JSON_MAX)
        r = lh_fail(err, LH_INVALID_ARGUMENT, "%s has more than %d bytes", blob->name,
                    OCI_JSON_MAX);
    if (r == 0)
        r = n < 0 ? fail_archive(a, blob->name, err) : check_digest(m, a, blob, err);
    archive_read_free(a);
    return r < 0 ? NULL : lh_steal(&text);
}

static const char *architecture(void)
{
    static const char *const names[][2] = {
        {"x86_64", "amd64"}, {"aarch64", "arm64"}, {"riscv64", "riscv64"}};
    static struct utsname u;

    uname(&u);
    for (size_t i = 0; i < LH_ARRAY_SIZE(names); i++)
        if (!strcmp(u.machine, names[i][0]))
            return names[i][1];
    return u.machine;
}

static int load_index(struct oci *o, struct lh_error *err)
{
    struct oci_blob at = {.name = "index.json"};
    bool index = true;
    size_t len;

    for (int depth = 0; index; depth++) {
        lh_autofree char *text = read_text(o, &at, &len, err);
        if (!text)
            return err->code;
        if (depth == LINKS_MAX)
            return lh_fail(err, LH_INVALID_ARGUMENT, "indices within indices");
        int r = oci_parse_index(text, len, architecture(), &at, &index, err);
        if (r < 0)
            return r;
    }
    lh_autofree char *text = read_text(o, &at, &len, err);
    return text ? oci_parse_manifest(text, len, &o->layers, err) : err->code;
}

static int load_docker(struct oci *o, struct lh_error *err)
{
    const struct oci_blob manifest = {.name = "manifest.json"};
    size_t len;
    lh_autofree char *text = read_text(o, &manifest, &len, err);

    return text ? oci_parse_docker(text, len, &o->layers, err) : err->code;
}

static int load_config(struct oci *o, struct lh_error *err)
{
    size_t len;
    lh_autofree char *text = read_text(o, &o->layers.config, &len, err);

    return text ? oci_parse_config(text, len, &o->config, err) : err->code;
}

/* ---- what it is ---- */

static bool has(const struct oci *o, const char *name)
{
    struct lh_error none = {0};
    auto_member m = open_member(o, name, &none);

    return m;
}

/* An archive that is no tar at all is left to the reader of root file systems, which says so. */
static int load(struct oci *o, bool *is_image, struct lh_error *err)
{
    int r;

    *is_image = true;
    if (has(o, "oci-layout"))
        r = load_index(o, err);
    else if (!o->directory && has(o, "manifest.json"))
        r = load_docker(o, err);
    else
        return *is_image = false, 0;
    return r < 0 ? r : load_config(o, err);
}

int oci_open(const char *path, struct oci **out, struct lh_error *err)
{
    struct lh_error local = {0};
    lh_auto(oci) o = calloc(1, sizeof *o);
    struct stat st;
    bool is_image;

    *out = NULL;
    err = err ? err : &local;
    if (!o || !(o->path = strdup(path)))
        return lh_fail_errno(err, ENOMEM, "%s", path);
    if (stat(path, &st) < 0)
        return lh_fail_errno(err, errno, "cannot read %s", path);
    o->directory = S_ISDIR(st.st_mode);
    int r = load(o, &is_image, err);
    if (r == 0 && is_image)
        *out = lh_steal(&o);
    return r < 0 ? lh_wrap(err, "%s", path) : 0;
}

/* ---- layers ---- */

static int read_layer(const struct oci *o, const struct oci_blob *blob, oci_layer_fn *fn, void *ctx,
                      struct lh_error *err)
{
    auto_member m = open_member(o, blob->name, err);
    struct archive *a = m ? archive_read_new() : NULL;

    if (!a)
        return m ? lh_fail_errno(err, ENOMEM, "%s", blob->name) : err->code;
    archive_read_support_filter_all(a);
    archive_read_support_format_tar(a);
    archive_read_support_format_empty(a);
    int r = archive_read_open(a, m, NULL, read_member, NULL) == ARCHIVE_OK
                ? fn(ctx, a, err)
                : fail_archive(a, blob->name, err);
    if (r == 0)
        r = check_digest(m, a, blob, err);
    archive_read_free(a);
    return r;
}

int oci_each_layer(struct oci *o, oci_layer_fn *removals, oci_layer_fn *additions, void *ctx,
                   struct lh_error *err)
{
    int r = 0;

    for (size_t i = 0; r == 0 && i < o->layers.n; i++) {
        r = i ? read_layer(o, &o->layers.items[i], removals, ctx, err) : 0;
        if (r == 0)
            r = read_layer(o, &o->layers.items[i], additions, ctx, err);
    }
    return r;
}

#include "agentenv/snapshot/processes.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "agentenv/criu/memory.h"
#include "agentenv/snapshot/mac.h"
#include "proto/file.h"
#include "proto/hex.h"
#include "proto/json.h"
#include "proto/parse.h"

typedef V1(ProcessImages) Processes;
typedef V1(ProcessFile) ProcessFile;

enum { PIECE = 256 << 10, CPUINFO_MAX = 64 << 20, DEPTH_MAX = 16 };

int process_digest(int fd, char digest[LAYER_ADDRESS_SIZE], uint64_t *bytes, struct lh_error *err)
{
    lh_autofree uint8_t *piece = malloc(PIECE);
    uint8_t hash[LAYER_ADDRESS];
    crypto_generichash_state h;
    ssize_t n;

    if (!piece || sodium_init() < 0)
        return lh_fail_errno(err, ENOMEM, "a digest");
    crypto_generichash_init(&h, NULL, 0, sizeof hash);
    *bytes = 0;
    for (; (n = pread(fd, piece, PIECE, (off_t)*bytes)) > 0; *bytes += (uint64_t)n)
        crypto_generichash_update(&h, piece, (size_t)n);
    if (n < 0)
        return lh_fail_errno(err, errno, "reading process images");
    crypto_generichash_final(&h, hash, sizeof hash);
    lh_hex_print(hash, sizeof hash, digest);
    return 0;
}

/* ---- the files ---- */

static int add_file(Processes *p, int dir, const char *base, const char *prefix,
                    struct lh_error *err)
{
    lh_autoclose int fd = openat(dir, base, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    lh_automsg(ProcessFile) f = calloc(1, sizeof *f);
    void *more = reallocarray(p->files, p->n_files + 1, sizeof *p->files);

    if (more)
        p->files = more;
    if (fd < 0 || !f || !more)
        return lh_fail_errno(err, fd < 0 ? errno : ENOMEM, "process image %s%s", prefix, base);
    longhaul__sandbox__v1__process_file__init(f);
    f->name = lh_format("%s%s", prefix, base);
    f->digest = malloc(LAYER_ADDRESS_SIZE);
    if (!f->name || !f->digest)
        return lh_fail_errno(err, ENOMEM, "process image %s", base);
    int r = process_digest(fd, f->digest, &f->bytes, err);
    if (r == 0)
        p->files[p->n_files++] = lh_steal(&f);
    return r;
}

/* A directory and the stack of those below it (criu/share.c). */
static int add_files(Processes *p, int dir, const char *prefix, unsigned depth,
                     struct lh_error *err)
{
    int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), r = 0;
    lh_autoclosedir DIR *d = fd < 0 ? NULL : fdopendir(fd);
    bool below = false;

    if (!d || depth > DEPTH_MAX)
        return lh_fail_errno(err, d ? ELOOP : errno, "process images");
    for (struct dirent *e; r == 0 && (e = readdir(d));)
        if (!strcmp(e->d_name, MEMORY_PARENT))
            below = true;
        else if (e->d_name[0] != '.')
            r = add_file(p, dir, e->d_name, prefix, err);
    if (r < 0 || !below)
        return r;
    lh_autofree char *deeper = lh_format("%s" MEMORY_PARENT "/", prefix);
    lh_autoclose int parent =
        openat(dir, MEMORY_PARENT, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (parent < 0 || !deeper)
        return lh_fail_errno(err, deeper ? errno : ENOMEM, "process images");
    return add_files(p, parent, deeper, depth + 1, err);
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(ProcessFile *const *)a)->name, (*(ProcessFile *const *)b)->name);
}

int processes_address(const SnapshotManifest *m, char address[LAYER_ADDRESS_SIZE],
                      struct lh_error *err)
{
    Processes files = LONGHAUL__SANDBOX__V1__PROCESS_IMAGES__INIT;
    uint8_t hash[LAYER_ADDRESS];
    size_t len;

    files.files = m->processes->files;
    files.n_files = m->processes->n_files;
    lh_autofree uint8_t *bytes = lh_pack(&files.base, &len, err);
    if (!bytes || sodium_init() < 0)
        return LH_RESOURCE_EXHAUSTED;
    crypto_generichash(hash, sizeof hash, bytes, len, NULL, 0);
    lh_hex_print(hash, sizeof hash, address);
    return 0;
}

/* ---- where they can go on ---- */

/* Of the first processor, as the kernel names them; "" where it names none. */
static char *cpu_features(struct lh_error *err)
{
    static const char *const labels[] = {"\nflags\t", "\nFeatures\t"};
    lh_autofree char *info = lh_read_file("/proc/cpuinfo", CPUINFO_MAX, NULL, err);
    const char *at = NULL;

    if (!info)
        return NULL;
    for (size_t i = 0; !at && i < LH_ARRAY_SIZE(labels); i++)
        at = strstr(info, labels[i]);
    at = at ? strchr(at, ':') : NULL;
    char *list = at ? strndup(at + 2, strcspn(at + 2, "\n")) : strdup("");
    if (!list)
        lh_fail_errno(err, ENOMEM, "the processor's features");
    return list;
}

static int describe_host(Processes *p, struct lh_error *err)
{
    struct utsname u;

    if (uname(&u) < 0)
        return lh_fail_errno(err, errno, "uname");
    p->machine = strdup(u.machine);
    p->kernel = strdup(u.release);
    p->cpu = cpu_features(err);
    p->mac = strdup("");
    return p->machine && p->kernel && p->cpu && p->mac
               ? 0
               : lh_fail_errno(err, ENOMEM, "what this machine is");
}

static bool has_word(const char *list, const char *word, size_t len)
{
    for (const char *at = list; *at; at += strspn(at, " ")) {
        size_t n = strcspn(at, " ");
        if (n == len && !memcmp(at, word, len))
            return true;
        at += n;
    }
    return false;
}

static int check_cpu(const char *theirs, const char *ours, struct lh_error *err)
{
    for (const char *at = theirs; *at; at += strspn(at, " ")) {
        size_t n = strcspn(at, " ");
        if (!has_word(ours, at, n))
            return lh_fail(err, LH_FAILED_PRECONDITION,
                           "its processes ran on a processor with %.*s, which this one lacks; "
                           "import it with --files-only",
                           (int)n, at);
        at += n;
    }
    return 0;
}

static int check_host(const Processes *theirs, struct lh_error *err)
{
    lh_automsg(Processes) ours = calloc(1, sizeof *ours);

    if (!ours)
        return lh_fail_errno(err, ENOMEM, "what this machine is");
    longhaul__sandbox__v1__process_images__init(ours);
    int r = describe_host(ours, err);
    if (r < 0)
        return r;
    if (strcmp(theirs->machine, ours->machine) || strcmp(theirs->kernel, ours->kernel))
        return lh_fail(err, LH_FAILED_PRECONDITION,
                       "its processes ran on kernel %.80s (%.40s), this is %s (%s); import it with "
                       "--files-only",
                       theirs->kernel, theirs->machine, ours->kernel, ours->machine);
    return check_cpu(theirs->cpu, ours->cpu, err);
}

/* ---- the code ---- */

/* The key of this installation; with `make` it is made when there is none. */
static int load_key(struct daemon *d, bool make, struct mac_key *key, struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/process.key", d->state_dir);
    struct lh_error made = {0};

    if (!path)
        return lh_fail_errno(err, ENOMEM, "the key for processes");
    if (make && access(path, F_OK) < 0 && mac_key_create(path, &made) < 0 &&
        made.code != LH_ALREADY_EXISTS)
        return lh_fail(err, made.code, "%s", made.message);
    return mac_key_load(path, key, err);
}

static int code_of(const struct mac_key *key, const SnapshotManifest *m, uint8_t mac[MAC_BYTES],
                   struct lh_error *err)
{
    SnapshotManifest bare = *m;
    Processes unsigned_ = *m->processes;

    bare.processes = &unsigned_;
    unsigned_.mac = (char *)"";
    lh_autofree char *text = lh_json_print(&bare.base, err);
    return text ? mac_of_text(key, text, mac, err) : LH_RESOURCE_EXHAUSTED;
}

static int sign(struct daemon *d, SnapshotManifest *m, struct lh_error *err)
{
    uint8_t mac[MAC_BYTES];
    struct mac_key key;
    char *text = malloc(2 * MAC_BYTES + 1);
    int r = text ? load_key(d, true, &key, err) : lh_fail_errno(err, ENOMEM, "a code");

    if (r == 0)
        r = code_of(&key, m, mac, err);
    mac_key_forget(&key);
    if (r < 0) {
        free(text);
        return r;
    }
    lh_hex_print(mac, MAC_BYTES, text);
    free(m->processes->mac);
    m->processes->mac = text;
    return 0;
}

static int check_code(struct daemon *d, const SnapshotManifest *m, struct lh_error *err)
{
    uint8_t ours[MAC_BYTES], theirs[MAC_BYTES];
    struct lh_error why = {0};
    struct mac_key key;
    int r = load_key(d, false, &key, &why);

    if (r < 0 && r != LH_NOT_FOUND)
        return lh_fail(err, r, "%s", why.message);
    bool ok = r == 0 && lh_hex_parse(m->processes->mac, theirs, MAC_BYTES) &&
              code_of(&key, m, ours, &why) == 0 && mac_equal(ours, theirs);
    mac_key_forget(&key);
    return ok ? 0
              : lh_fail(err, LH_PERMISSION_DENIED,
                        "its processes are not believed: they carry no code of this "
                        "installation's key; copy %s/process.key from where it was exported, or "
                        "import it with --files-only",
                        d->state_dir);
}

/* ---- both ways ---- */

int processes_describe(struct daemon *d, int images, SnapshotManifest *m, struct lh_error *err)
{
    Processes *p = m->processes = calloc(1, sizeof *p);

    if (!p)
        return lh_fail_errno(err, ENOMEM, "a manifest");
    longhaul__sandbox__v1__process_images__init(p);
    int r = describe_host(p, err);
    if (r == 0)
        r = add_files(p, images, "", 0, err);
    if (r < 0)
        return r;
    qsort(p->files, p->n_files, sizeof *p->files, by_name);
    return sign(d, m, err);
}

int processes_admit(struct daemon *d, const SnapshotManifest *m, struct lh_error *err)
{
    int r = m->processes ? check_code(d, m, err) : 0;

    return r == 0 && m->processes ? check_host(m->processes, err) : r;
}

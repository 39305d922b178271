/* Images that share their pages with those of an earlier checkpoint.
 *
 * CRIU's own way to do so needs soft-dirty bits at the time of the dump, which many kernels lack,
 * and costs a fault for every page that is written.  What it leaves on disk is simple, though: a
 * run of pages may be marked as the parent's, and a restore then looks for it in the directory
 * "parent".  So pages are compared after the dump, when nobody waits: those with the same content
 * at the same address of the same task are left out and marked.  A restore reads them from where
 * they are; nothing is put together before it.
 *
 * "parent" is a directory of hard links to the base's maps and pages, not a link to the base:
 * images are whole in themselves, whatever becomes of the snapshots around them, and the reference
 * count of a file of pages is the one that the file system keeps.
 *
 * The stack grows by one a checkpoint; at DEPTH_MAX the next one stands on the lowest.  Compared is
 * by bytes: no hash is believed, none is kept.  Rejected: chunks in a store of their own, from
 * which a resume would first have to write the memory anew.  Shared memory between tasks stays
 * whole. */
#include "agentenv/criu/share.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/criu/image_file.h"
#include "agentenv/criu/memory.h"
#include "criu/criu.pb-c.h"
#include "proto/cleanup.h"
#include "proto/file.h"

enum { BATCH = 64, DEPTH_MAX = 8 };

static int link_file(int from, int to, const char *name, struct lh_error *err)
{
    return linkat(from, name, to, name, 0) < 0 && errno != EEXIST
               ? lh_fail_errno(err, errno, "linking image %s", name)
               : 0;
}

static int open_dir(int at, const char *name)
{
    return openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
}

/* With the owner and group of `like`.  Restored tasks open it when they have the sandbox's ids. */
static int make_dir(int at, const char *name, int like, struct lh_error *err)
{
    struct stat st;

    if (mkdirat(at, name, 0700) < 0 && errno != EEXIST)
        return lh_fail_errno(err, errno, "a directory for images");
    lh_autoclose int fd = open_dir(at, name);
    if (fd < 0 || fstat(like, &st) < 0 || fchown(fd, st.st_uid, st.st_gid) < 0 ||
        fchmod(fd, 0750) < 0)
        return lh_fail_errno(err, errno, "a directory for images");
    return lh_steal_fd(&fd);
}

/* ---- one task ---- */

struct task {
    const struct memory *own, *base;
    int map, pages; /* being written */
    uint64_t shared;
    struct memory_run open; /* not written yet; pages = 0: none */
    uint8_t mine[BATCH * MEMORY_PAGE], theirs[BATCH * MEMORY_PAGE];
    bool known[BATCH];
};

static int write_open_run(struct task *t, struct lh_error *err)
{
    Criu__PagemapEntry e = CRIU__PAGEMAP_ENTRY__INIT;

    if (!t->open.pages)
        return 0;
    e.vaddr = t->open.vaddr;
    e.has_flags = e.has_pages = 1;
    e.flags = t->open.flags;
    e.pages = t->open.pages;
    t->open.pages = 0;
    return image_write(t->map, &e.base, err);
}

/* `n` pages that go on with the open run or begin another. */
static int write_pages(struct task *t, uint64_t vaddr, size_t n, uint32_t flags,
                       const uint8_t *pages, struct lh_error *err)
{
    int r = 0;

    if (t->open.pages && t->open.flags != flags)
        r = write_open_run(t, err);
    if (!t->open.pages)
        t->open = (struct memory_run){.vaddr = vaddr, .flags = flags};
    t->open.pages += n;
    if (flags & MEMORY_IN_PARENT)
        t->shared += n;
    else if (r == 0)
        r = lh_write_all(t->pages, pages, n * MEMORY_PAGE, err);
    return r;
}

/* Whether page `i` of the batch is the base's. */
static bool is_shared(const struct task *t, size_t i)
{
    return t->known[i] &&
           !memcmp(t->mine + i * MEMORY_PAGE, t->theirs + i * MEMORY_PAGE, MEMORY_PAGE);
}

static int share_batch(struct task *t, const struct memory_run *run, uint64_t vaddr, size_t n,
                       struct lh_error *err)
{
    int r = memory_read(t->own, vaddr, n, t->mine, t->known, err);

    if (r == 0)
        r = memory_read(t->base, vaddr, n, t->theirs, t->known, err);
    for (size_t i = 0, end; r == 0 && i < n; i = end) {
        bool shared = is_shared(t, i);
        for (end = i + 1; end < n && is_shared(t, end) == shared;)
            end++;
        r = write_pages(t, vaddr + i * MEMORY_PAGE, end - i, shared ? MEMORY_IN_PARENT : run->flags,
                        t->mine + i * MEMORY_PAGE, err);
    }
    return r;
}

static int share_run(struct task *t, const struct memory_run *run, struct lh_error *err)
{
    int r = 0;

    if (!(run->flags & MEMORY_PRESENT)) {
        t->open = *run;
        return write_open_run(t, err);
    }
    for (uint64_t at = 0, n; r == 0 && at < run->pages; at += n) {
        n = run->pages - at < BATCH ? run->pages - at : BATCH;
        r = share_batch(t, run, run->vaddr + at * MEMORY_PAGE, n, err);
    }
    return r < 0 ? r : write_open_run(t, err);
}

static int write_head(const struct task *t, int images, const char *name, struct lh_error *err)
{
    Criu__PagemapHead head = CRIU__PAGEMAP_HEAD__INIT;
    struct image i = {0};
    int r = image_read(images, name, &i, err);
    lh_autofree uint8_t *bytes = i.bytes;

    head.pages_id = t->own->pages_id;
    if (r == 0)
        r = lh_write_all(t->map, bytes, IMAGE_MAGIC, err);
    return r < 0 ? r : image_write(t->map, &head.base, err);
}

static int new_file(int dir, const char *name, struct lh_error *err)
{
    int fd = openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);

    return fd < 0 ? lh_fail_errno(err, errno, "image %s", name) : fd;
}

static int share_memory(struct task *t, int images, int to, const char *name, struct lh_error *err)
{
    char pages[32];
    snprintf(pages, sizeof pages, "pages-%u.img", t->own->pages_id);
    lh_autoclose int map_fd = new_file(to, name, err);
    lh_autoclose int pages_fd = map_fd < 0 ? -1 : new_file(to, pages, err);

    if (pages_fd < 0)
        return err ? err->code : LH_INTERNAL;
    t->map = map_fd;
    t->pages = pages_fd;
    int r = write_head(t, images, name, err);
    for (size_t i = 0; r == 0 && i < t->own->n; i++)
        r = share_run(t, &t->own->runs[i], err);
    return r;
}

/* ---- the stack below ---- */

/* The map `name` of `base`, its pages, and what these stand on. */
static int link_stack(int base, int like, int to, const char *name, const struct memory *m,
                      struct lh_error *err)
{
    char pages[32];
    snprintf(pages, sizeof pages, "pages-%u.img", m->pages_id);
    lh_autoclose int parent = make_dir(to, MEMORY_PARENT, like, err);
    int r = parent < 0 ? parent : link_file(base, parent, name, err);

    if (r == 0)
        r = link_file(base, parent, pages, err);
    if (r < 0 || !m->parent)
        return r;
    lh_autoclose int below = open_dir(base, MEMORY_PARENT);
    return below < 0 ? lh_fail_errno(err, errno, "the images below")
                     : link_stack(below, like, parent, name, m->parent, err);
}

static unsigned depth(int dir)
{
    lh_autoclose int below = open_dir(dir, MEMORY_PARENT);

    return below < 0 ? 0 : 1 + depth(below);
}

/* `base` itself, or the lowest of its stack. */
static int choose_base(int base, struct lh_error *err)
{
    int fd = fcntl(base, F_DUPFD_CLOEXEC, 0), below;

    for (bool deep = depth(base) + 1 >= DEPTH_MAX; deep && fd >= 0;) {
        below = open_dir(fd, MEMORY_PARENT);
        if (below < 0)
            break;
        close(fd);
        fd = below;
    }
    return fd < 0 ? lh_fail_errno(err, errno, "images to share with") : fd;
}

/* ---- all of them ---- */

static int share_task(int images, int base, int to, const char *name, struct criu_shared *out,
                      struct lh_error *err)
{
    lh_auto(memory) own = NULL;
    lh_auto(memory) theirs = NULL;
    int r = memory_open(images, name, &own, err);

    if (r == 0)
        r = memory_open(base, name, &theirs, err);
    if (r < 0 || !own)
        return r;
    lh_autofree struct task *t = malloc(sizeof *t);
    if (!t)
        return lh_fail_errno(err, ENOMEM, "sharing pages");
    out->pages += own->bytes / MEMORY_PAGE;
    if (!theirs)
        return 0; /* a task that is new: linked, like all that is no memory */
    *t = (struct task){.own = own, .base = theirs};
    r = share_memory(t, images, to, name, err);
    if (r == 0)
        r = link_stack(base, images, to, name, theirs, err);
    out->shared += t->shared;
    return r;
}

typedef int name_fn(void *ctx, const char *name, struct lh_error *err);

static int each_file(int dir, name_fn *fn, void *ctx, struct lh_error *err)
{
    int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), r = 0;
    lh_autoclosedir DIR *d = fd < 0 ? NULL : fdopendir(fd);

    if (!d)
        return lh_fail_errno(err, errno, "reading a directory of images");
    for (struct dirent *e; r == 0 && (e = readdir(d));)
        if (e->d_name[0] != '.')
            r = fn(ctx, e->d_name, err);
    return r;
}

struct sharing {
    int images, base, to;
    struct criu_shared *out;
};

static int share_one(void *ctx, const char *name, struct lh_error *err)
{
    const struct sharing *s = ctx;

    return memory_is_map(name) ? share_task(s->images, s->base, s->to, name, s->out, err) : 0;
}

/* Everything that is not there by now. */
static int link_rest(void *ctx, const char *name, struct lh_error *err)
{
    const struct sharing *s = ctx;

    return link_file(s->images, s->to, name, err);
}

bool criu_shares(int images)
{
    return depth(images) > 0;
}

int criu_share(int images, int base, int to, struct criu_shared *out, struct lh_error *err)
{
    lh_autoclose int on = choose_base(base, err);
    struct sharing s = {images, on, to, out};

    *out = (struct criu_shared){0};
    if (on < 0)
        return on;
    if (criu_shares(images))
        return lh_fail(err, LH_FAILED_PRECONDITION, "these images share their pages already");
    int r = each_file(images, share_one, &s, err);
    return r == 0 ? each_file(images, link_rest, &s, err) : r;
}

static int check_one(void *ctx, const char *name, struct lh_error *err)
{
    lh_auto(memory) m = NULL;
    int r = memory_is_map(name) ? memory_open(*(int *)ctx, name, &m, err) : 0;

    if (r == 0 && m)
        r = memory_check(m, err);
    return r < 0 ? lh_wrap(err, "%s", name) : 0;
}

int criu_check(int images, struct lh_error *err)
{
    return each_file(images, check_one, &images, err);
}

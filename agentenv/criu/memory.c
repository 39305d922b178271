#include "agentenv/criu/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "agentenv/criu/image_file.h"
#include "criu/criu.pb-c.h"

bool memory_is_map(const char *name)
{
    unsigned id;
    int end = 0;

    return sscanf(name, "pagemap-%9u.img%n", &id, &end) == 1 && end && !name[end];
}

/* ---- reading maps ---- */

static int add_run(struct memory *m, const Criu__PagemapEntry *e, size_t *room,
                   struct lh_error *err)
{
    struct memory_run r = {.vaddr = e->vaddr,
                           .pages = e->has_pages ? e->pages : e->compat_pages,
                           .flags = e->has_flags   ? e->flags
                                    : e->in_parent ? MEMORY_IN_PARENT
                                                   : MEMORY_PRESENT,
                           .offset = m->bytes};
    uint64_t from = m->n ? m->runs[m->n - 1].vaddr + m->runs[m->n - 1].pages * MEMORY_PAGE : 0;

    if (r.vaddr % MEMORY_PAGE || r.vaddr < from || r.pages > (UINT64_MAX - r.vaddr) / MEMORY_PAGE)
        return lh_fail(err, LH_DATA_LOSS, "its runs of pages lie over each other");
    if (m->n == *room) {
        size_t more = *room ? 2 * *room : 64;
        struct memory_run *runs = reallocarray(m->runs, more, sizeof *runs);
        if (!runs)
            return lh_fail_errno(err, ENOMEM, "a map of memory");
        m->runs = runs;
        *room = more;
    }
    if (r.flags & MEMORY_PRESENT)
        m->bytes += r.pages * MEMORY_PAGE;
    m->runs[m->n++] = r;
    return 0;
}

static int read_map(struct memory *m, struct image *i, struct lh_error *err)
{
    lh_automsg(Criu__PagemapHead) head =
        (Criu__PagemapHead *)image_next(i, &criu__pagemap_head__descriptor, err);
    size_t room = 0;

    if (!head)
        return LH_DATA_LOSS;
    m->pages_id = head->pages_id;
    while (!image_at_end(i)) {
        lh_automsg(Criu__PagemapEntry) e =
            (Criu__PagemapEntry *)image_next(i, &criu__pagemap_entry__descriptor, err);
        int r = e ? add_run(m, e, &room, err) : LH_DATA_LOSS;
        if (r < 0)
            return r;
    }
    return 0;
}

static int load(struct memory *m, int dir, const char *name, struct lh_error *err)
{
    struct image i = {0};
    char pages[32];
    int r = image_read(dir, name, &i, err);

    if (r == 0)
        r = read_map(m, &i, err);
    free(i.bytes);
    if (r < 0)
        return r;
    snprintf(pages, sizeof pages, "pages-%u.img", m->pages_id);
    m->pages = openat(dir, pages, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    return m->pages < 0 ? lh_fail_errno(err, errno, "image %s", pages) : 0;
}

int memory_open(int dir, const char *name, struct memory **out, struct lh_error *err)
{
    *out = NULL;
    if (faccessat(dir, name, F_OK, 0) < 0)
        return errno == ENOENT ? 0 : lh_fail_errno(err, errno, "image %s", name);
    lh_auto(memory) m = calloc(1, sizeof *m);
    if (!m)
        return lh_fail_errno(err, ENOMEM, "image %s", name);
    m->pages = -1;
    int r = load(m, dir, name, err);
    lh_autoclose int parent =
        r < 0 ? -1 : openat(dir, MEMORY_PARENT, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (parent >= 0)
        r = memory_open(parent, name, &m->parent, err);
    else if (r == 0 && errno != ENOENT)
        r = lh_fail_errno(err, errno, "the images below %s", name);
    if (r < 0)
        return lh_wrap(err, "image %s", name);
    *out = lh_steal(&m);
    return 0;
}

void memory_close(struct memory *m)
{
    if (!m)
        return;
    memory_close(m->parent);
    lh_cleanup_close(&m->pages);
    free(m->runs);
    free(m);
}

/* ---- reading pages ---- */

/* The first run that ends behind an address; n = there is none. */
static size_t find_run(const struct memory *m, uint64_t vaddr)
{
    size_t low = 0, high = m->n;

    while (low < high) {
        size_t mid = (low + high) / 2;
        if (m->runs[mid].vaddr + m->runs[mid].pages * MEMORY_PAGE > vaddr)
            high = mid;
        else
            low = mid + 1;
    }
    return low;
}

static int read_run(const struct memory *m, const struct memory_run *r, uint64_t vaddr, size_t n,
                    uint8_t *pages, bool *known, struct lh_error *err)
{
    size_t len = n * MEMORY_PAGE;

    if (r->flags & MEMORY_IN_PARENT)
        return m->parent ? memory_read(m->parent, vaddr, n, pages, known, err) : 0;
    if (!(r->flags & MEMORY_PRESENT))
        return 0;
    if (pread(m->pages, pages, len, (off_t)(r->offset + (vaddr - r->vaddr))) != (ssize_t)len)
        return lh_fail(err, LH_DATA_LOSS, "pages-%u.img ends before its pages", m->pages_id);
    memset(known, true, n);
    return 0;
}

int memory_read(const struct memory *m, uint64_t vaddr, size_t n, uint8_t *pages, bool *known,
                struct lh_error *err)
{
    uint64_t end = vaddr + n * MEMORY_PAGE;
    int r = 0;

    memset(known, false, n);
    for (size_t i = find_run(m, vaddr); r == 0 && i < m->n && m->runs[i].vaddr < end; i++) {
        const struct memory_run *run = &m->runs[i];
        uint64_t run_end = run->vaddr + run->pages * MEMORY_PAGE;
        uint64_t from = run->vaddr > vaddr ? run->vaddr : vaddr, to = run_end < end ? run_end : end;
        size_t skip = (from - vaddr) / MEMORY_PAGE;
        r = read_run(m, run, from, (to - from) / MEMORY_PAGE, pages + skip * MEMORY_PAGE,
                     known + skip, err);
    }
    return r;
}

/* ---- whether all is there ---- */

/* Whether [from, to) is covered by runs, all the way down. */
static bool covers(const struct memory *m, uint64_t from, uint64_t to)
{
    if (!m)
        return false;
    for (size_t i = find_run(m, from); from < to; i++) {
        if (i == m->n || m->runs[i].vaddr > from)
            return false;
        uint64_t run_end = m->runs[i].vaddr + m->runs[i].pages * MEMORY_PAGE;
        uint64_t end = run_end < to ? run_end : to;
        if (!(m->runs[i].flags & MEMORY_PRESENT) &&
            !(m->runs[i].flags & MEMORY_IN_PARENT && covers(m->parent, from, end)))
            return false;
        from = end;
    }
    return true;
}

int memory_check(const struct memory *m, struct lh_error *err)
{
    struct stat st;

    if (fstat(m->pages, &st) < 0)
        return lh_fail_errno(err, errno, "pages-%u.img", m->pages_id);
    if ((uint64_t)st.st_size != m->bytes)
        return lh_fail(err, LH_DATA_LOSS, "pages-%u.img has %lld bytes instead of %llu",
                       m->pages_id, (long long)st.st_size, (unsigned long long)m->bytes);
    for (size_t i = 0; i < m->n; i++) {
        const struct memory_run *r = &m->runs[i];
        if (r->flags & MEMORY_IN_PARENT &&
            !covers(m->parent, r->vaddr, r->vaddr + r->pages * MEMORY_PAGE))
            return lh_fail(err, LH_DATA_LOSS, "pages at %#llx are in no image below",
                           (unsigned long long)r->vaddr);
    }
    return m->parent ? memory_check(m->parent, err) : 0;
}

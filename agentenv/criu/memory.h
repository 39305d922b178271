/* The memory of one task in images: pagemap-PID.img says which pages there are, in the order in
 * which they lie in pages-ID.img.  A run that is marked as the parent's lies in the images of the
 * directory "parent" beside it, which may have one of its own. */
#ifndef AGENTENV_CRIU_MEMORY_H
#define AGENTENV_CRIU_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/cleanup.h"
#include "proto/error.h"

#define MEMORY_PARENT "parent" /* CRIU's own name for it */

enum {
    MEMORY_PAGE = 4096,
    MEMORY_IN_PARENT = 1, /* flags of a run, CRIU's */
    MEMORY_PRESENT = 4,
};

struct memory_run {
    uint64_t vaddr, pages;
    uint64_t offset; /* in the file of pages, of a run that is present */
    uint32_t flags;
};

struct memory {
    struct memory_run *runs; /* by address, none over another */
    size_t n;
    uint32_t pages_id;
    int pages;             /* open file */
    uint64_t bytes;        /* that must be in it */
    struct memory *parent; /* NULL = none */
};

/* `name` in the directory, and its parents.  *out = NULL when there is no such file. */
int memory_open(int dir, const char *name, struct memory **out, struct lh_error *err);
void memory_close(struct memory *m); /* NULL is fine */
LH_DEFINE_AUTO(memory, memory_close)

/* `n` pages from an address on: known[i] says which of them there are, and these are read. */
int memory_read(const struct memory *m, uint64_t vaddr, size_t n, uint8_t *pages, bool *known,
                struct lh_error *err);
/* DATA_LOSS when a page of a run is nowhere. */
int memory_check(const struct memory *m, struct lh_error *err);

/* "pagemap-NUMBER.img": of a task, unlike those of shared memory. */
bool memory_is_map(const char *name);

#endif

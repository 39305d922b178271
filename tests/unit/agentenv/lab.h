/* A place to try sandboxes in: a root file system made from busybox, a host, and shorthands.  Every
 * test has its own, with names of its own, and leaves nothing. */
#ifndef TESTS_UNIT_AGENTENV_LAB_H
#define TESTS_UNIT_AGENTENV_LAB_H

#include "agentenv/sandbox/box.h"

/* For what takes no time, however loaded the machine is. */
enum { LAB_PATIENCE_MS = 60000 };

struct lab {
    char dir[64];  /* scratch directory; boxes live in dir/ID */
    char root[80]; /* the image */
    char parent[48];
    struct box_host *host;
};

/* NULL, or why sandboxes cannot run here. */
const char *lab_missing(void);

/* For a suite: .init and .fini.  A suite whose facility is missing is skipped. */
extern struct lab lab;
void lab_init(void);
void lab_fini(void);

void lab_open(struct lab *l);  /* ends the test on failure */
void lab_close(struct lab *l); /* fails the test if something was left */

/* A box of the image with small limits; `id` names its directory too. */
struct box *lab_start(struct lab *l, const char *id);
struct box_spec lab_spec(struct lab *l, const char *id, struct box_layer *layer);

struct lab_result {
    struct box_exec_result exec;
    struct lh_error error;
    int rc;
    char out[65536], err[4096];
    size_t out_len, err_len;
};

/* Runs `sh -c script` as root of the sandbox.  The result is static per thread. */
struct lab_result *lab_sh(struct box *b, const char *script, uint32_t timeout_ms);
struct lab_result *lab_exec(struct box *b, const struct box_exec_spec *spec);

/* Asserts exit status 0 and returns its stdout without the last newline. */
const char *lab_out(struct box *b, const char *script);

/* Puts a file of the host into the image. */
void lab_install(struct lab *l, const char *host_path, const char *name);

#endif

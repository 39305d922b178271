/* A sandbox held for its files (HOLD_FILES), and its root. */
#ifndef AGENTENV_DAEMON_OPENED_H
#define AGENTENV_DAEMON_OPENED_H

#include "agentenv/daemon/inroot.h"
#include "agentenv/daemon/internal.h"

struct opened {
    struct daemon *d;
    struct sandbox *s;
    struct inroot root;
};

/* States for open_files(). */
enum {
    FILES_ALIVE = SB_IN(SB_RUNNING) | SB_IN(SB_FROZEN),
    FILES_ALIVE_OR_NEW = FILES_ALIVE | SB_IN(SB_CREATING),
    FILES_READABLE = FILES_ALIVE | SB_IN(SB_DEAD),
};

int open_files(struct daemon *d, const char *id, unsigned states, struct opened *o,
               struct lh_error *err);
void close_files(struct opened *o);

/* gRPC strings are UTF-8: other bytes as \xHH.  NULL: no memory. */
char *files_printable(const char *name);

#endif

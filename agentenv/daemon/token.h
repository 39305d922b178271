/* Bearer tokens: rows of the registry. */
#ifndef AGENTENV_DAEMON_TOKEN_H
#define AGENTENV_DAEMON_TOKEN_H

#include "agentenv/daemon/db.h"

enum { TOKEN_NAME_SIZE = 65, TOKEN_PREFIX_SIZE = 257 };

struct token {
    char name[TOKEN_NAME_SIZE], owner_prefix[TOKEN_PREFIX_SIZE];
    int scope;
    uint32_t max_sandboxes;
};

int token_tables(struct db *db, struct lh_error *err);
/* UNAUTHENTICATED when there is no secret, or none such, or its time is over. */
int token_find(struct db *db, const char *secret, struct token *out, struct lh_error *err);

#endif

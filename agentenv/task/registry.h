/* Rows of the task registry, in agentenvd's database.
 *
 * A *candidate* is a task under verification: it has no row yet, and what it had before under the
 * same name stays in force.  It is found in memory by a key that no task can have as its name, so
 * that its sandboxes are made like any other's, and nothing of it is left when it is refused or the
 * daemon dies. */
#ifndef AGENTENV_TASK_REGISTRY_H
#define AGENTENV_TASK_REGISTRY_H

#include "agentenv/daemon/daemon.h"
#include "agentenv/task/task.h"

typedef Longhaul__Task__V1__RegisteredTask RegisteredTask;

int task_table_create(struct daemon *d, struct lh_error *err);

/* By name or candidate's key; never NULL parts (environment, verifier).  Free with
 * lh_message_free(). */
RegisteredTask *task_fetch(struct daemon *d, const char *name, struct lh_error *err);

/* Accepts it: replaces what the name stood for.  Durable after db_flush(). */
int task_store(struct daemon *d, const Task *task, const uint8_t digest[TASK_DIGEST], bool verified,
               struct lh_error *err);
/* Whether exactly this is registered already, and verified unless that is not asked for. */
bool task_is_registered(struct daemon *d, const Task *task, const uint8_t digest[TASK_DIGEST],
                        bool verified);
int task_delete(struct daemon *d, const char *name, struct lh_error *err);
/* Counts infrastructure failures in a row, of its setup or its verifier, and puts the task in
 * quarantine after too many.  Nothing of it is refused then; those who draw tasks pass over it. */
int task_note_verdict(struct daemon *d, const RegisteredTask *task, bool infra_failed,
                      struct lh_error *err);

/* Out of quarantine. */
int task_release(struct daemon *d, const char *name, struct lh_error *err);

struct candidate {
    char key[192];
    const Task *task; /* borrowed */
    struct candidate *next;
};
void candidate_add(struct candidate *c, const Task *task);
void candidate_remove(struct candidate *c);

#endif

/* What the tests of the remote tier share: sequences that are stored by one kvstored, pushed out of
 * its memory, and asked for again. */
#ifndef TESTS_INTEGRATION_KV_LAB_H
#define TESTS_INTEGRATION_KV_LAB_H

#include "../unit/kvstore/kit.h"

enum { LAB_UNITS = 20, LAB_SEQUENCES = 24, LAB_WAIT_MS = 60000 };

/* More than twice what a memory of MEMORY bytes holds; `slowly`: so that all that is evicted has
 * been written. */
void lab_store(const struct daemon *d, bool slowly);
/* How many sequences come back whole; every byte is right, or the test fails. */
unsigned lab_read(const struct daemon *d);
/* The same after a restart, which loses what is in memory and nothing else. */
unsigned lab_read_anew(struct daemon *d);
/* Until as many come back, or the test fails. */
void lab_wait(struct daemon *d, unsigned whole);
/* A port that nobody listens on. */
int lab_port(void);
/* A process that dies with the test.  `log`: its output. */
pid_t lab_spawn(const char *const argv[], const char *log);
void lab_end(pid_t pid, int signal);
bool lab_listens(int port, int ms);

#endif

/* agentenvd as a client meets it, for benches: a daemon with a state directory of its own and an
 * image "bench" of busybox and agentenv-witness, the calls of a sandbox's life, and medians.  One
 * daemon a program; calls may be made from any thread.  What fails returns a negative code. */
#ifndef TESTS_BENCH_DAEMON_KIT_H
#define TESTS_BENCH_DAEMON_KIT_H

#include <sys/types.h>

#include "proto/error.h"
#include "proto/id.h"
#include "proto/rpc.h"

extern struct rpc_channel *kit_channel;
extern char kit_dir[]; /* everything lies below it; root/ is the image's source */

/* The directory with the root file system; then, with threads from there on, the daemon. */
int kit_prepare(struct lh_error *err);
int kit_open(struct lh_error *err);
/* SIGKILL; and another daemon on the same state, until it answers a call. */
void kit_kill(void);
int kit_start(double *ms, struct lh_error *err);
void kit_close(void);
pid_t kit_daemon(void);
/* The directory of the sandboxes' cgroups in the v2 hierarchy. */
const char *kit_cgroups(void);

/* Of the image, or of the task when one is named; all belong to one owner. */
int kit_create(char id[LH_ID_SIZE], const char *task, struct lh_error *err);
int kit_remove(const char *id, struct lh_error *err);
int kit_remove_all(struct lh_error *err);
/* To its end, which must be status 0; at most 6 words, NULL behind them. */
int kit_exec(const char *id, const char *const *argv, struct lh_error *err);
int kit_shell(const char *id, const char *script, struct lh_error *err);
int kit_snapshot(const char *id, struct lh_error *err);
/* Freeze, Thaw, Hibernate or Resume. */
int kit_change(const char *method, const char *id, struct lh_error *err);
/* `children` has room for n. */
int kit_fork(const char *id, unsigned n, char (*children)[LH_ID_SIZE], struct lh_error *err);

struct kit_rate {
    double per_second;
    double cpu_ms; /* of each, of all processors and in anybody's name */
};

/* `once` again and again from that many threads. */
int kit_load(int (*once)(struct lh_error *err), int workers, int seconds, struct kit_rate *out,
             struct lh_error *err);

/* Sorts them. */
double kit_median(double *values, int n);
double kit_ms_since(int64_t start_us);

#endif

/* One run of a verifier in a sandbox made for it. */
#ifndef AGENTENV_TASK_JUDGE_H
#define AGENTENV_TASK_JUDGE_H

#include "agentenv/daemon/daemon.h"
#include "agentenv/task/registry.h"

#define VERIFIER_BIN TASK_VERIFIER_DIR "/bin"

typedef Longhaul__Task__V1__Verdict Verdict;

/* A verdict whose message says what the verifier did and printed. */
struct judgement {
    Verdict verdict; /* code and message point into this */
    char code[32], message[900];
};

struct verify_subject {
    struct daemon *d;
    const Task *task;
    const char *task_name; /* as task_fetch() takes it */
    const char *sandbox;   /* the agent's */
    uint32_t attempt;
    struct rpc_call *call; /* may be NULL */
};

/* Puts the verifier's files into `box`, runs it and concludes.  *broken: it crashed or missed a
 * program, and who is to blame is open. */
void judge_run(const struct verify_subject *s, const char *box, struct judgement *j, bool *broken);

void judge_conclude(struct judgement *j, int kind, const char *code, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
void judge_score(struct judgement *j, const Task *task, double reward, const char *message);

#endif

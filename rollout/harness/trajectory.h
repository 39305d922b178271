/* One trajectory, between harness.c (engine's thread) and turn.c (tool threads). */
#ifndef ROLLOUT_HARNESS_TRAJECTORY_H
#define ROLLOUT_HARNESS_TRAJECTORY_H

#include <stdbool.h>

#include "proto/channel.h"
#include "rollout/engine/engine.h"
#include "rollout/harness/sandbox.h"
#include "rollout/harness/tools.h"
#include "rollout/transcript.h"

enum trajectory_state {
    TRAJECTORY_READY,    /* the next turn can begin */
    TRAJECTORY_THINKING, /* the engine samples */
    TRAJECTORY_IN_TOOL,  /* a job has it */
    TRAJECTORY_REPORTED, /* DONE was sent; waits for SETTLED */
    TRAJECTORY_LOST,     /* could not be reported: no longer listed, so that it is reassigned */
};

/* A snapshot that is not needed once the message `seq` is durable. */
struct old_snapshot {
    char id[64];
    uint64_t seq;
};

struct trajectory {
    struct tool_job job; /* first: a job is its trajectory */
    struct trajectory *next;
    struct channel_message *message; /* owns `assign` */
    const Longhaul__Experience__V1__Assign *assign;
    struct channel_message
        *successor; /* ASSIGN of a higher attempt, to begin when this has ended */
    struct rpc_channel *agentenv;
    struct channel_worker *channel;
    struct rest *rest;
    Longhaul__Experience__V1__Budgets budgets;
    enum trajectory_state state;
    bool cancelled, settled; /* arrived while a job had it */

    char *owner; /* "JOB/TRAJECTORY" */
    Longhaul__Task__V1__RegisteredTask *task;
    struct sandbox sandbox;
    struct transcript transcript;
    size_t committed;  /* tokens in segments */
    size_t turn_first; /* first sampled token of this turn */
    unsigned turn;     /* turns committed */
    int64_t asked_ms;  /* when this turn was asked for, and how many the engine had then */
    unsigned asked_in_engine;
    int64_t started_ms; /* when the agent's clock began, if it had run without a pause */
    struct engine_sequence *sequence;
    struct old_snapshot *old;
    size_t n_old;
    bool done; /* set by a job: DONE was sent, or never can be */
    bool unreported;
};

/* Fits what is left of the turn, total and context budgets; 0 = the turn cannot begin. */
size_t trajectory_turn_room(const struct trajectory *t);

/* Jobs. */
void turn_prepare(struct tool_job *job); /* task, sandbox, prompt or committed tokens */
void turn_act(struct tool_job *job);     /* action, observation, commit point or end */
void turn_refuse(struct tool_job *job);  /* no budget for another turn: verify and end */

#endif

/* A channel in a fresh directory, and what its tests send over it. */
#ifndef TESTS_UNIT_PROTO_CHANNEL_KIT_H
#define TESTS_UNIT_PROTO_CHANNEL_KIT_H

#include <criterion/criterion.h>
#include <criterion/new/assert.h>

#include "proto/channel.h"

typedef Longhaul__Experience__V1__Envelope Envelope;

extern char channel_dir[], *channel_path, *channel_endpoint;

/* For .init and .fini. */
void channel_enter(void);
void channel_leave(void);

struct channel_intake *intake(void);
/* Resends after 50 ms. */
struct channel_worker *worker(const char *name, const char *instance, size_t window);
Envelope segment(uint32_t turn);
int send_turn(struct channel_worker *w, uint32_t turn, size_t bytes, bool reliable, int timeout_ms,
              struct lh_error *err);
/* Turn of the next message, acknowledged when `ack`; -1 when none comes. */
int next_turn(struct channel_intake *in, int timeout_ms, bool ack);
void wait_acked(struct channel_worker *w, uint64_t seq);

#endif

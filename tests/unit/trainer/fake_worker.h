/* A rollout worker as the intake's tests script it: it says what it is told to, over the real
 * channel. */
#ifndef TESTS_UNIT_TRAINER_FAKE_WORKER_H
#define TESTS_UNIT_TRAINER_FAKE_WORKER_H

#include "ledger_fixture.h"
#include "proto/channel.h"

#define BODY(x) LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY_##x

typedef Longhaul__Experience__V1__Envelope envelope;
typedef Longhaul__Experience__V1__Assign assign;

enum { WAIT_MS = 5000 };

extern const uint8_t version_id[16]; /* of every segment */

struct fake {
    struct channel_worker *channel;
    const char *name;
    char instance[LH_ID_SIZE];
};

struct fake fake_start(const char *endpoint, const char *name);
void fake_stop(struct fake *f);
void say_hello(struct fake *f, uint32_t capacity);
void say_heartbeat(struct fake *f, const char *const *ids, size_t n);
/* The next message of that kind; others are passed over.  NULL after wait_ms. */
struct channel_message *next_within(struct fake *f, int kind, int wait_ms);
struct channel_message *next(struct fake *f, int kind);
/* Next ASSIGN of another trajectory or attempt than those seen. */
struct channel_message *next_new_assign(struct fake *f, struct channel_message *const *seen,
                                        size_t n);
void send_segment(struct fake *f, const assign *a, uint32_t turn, const struct test_segment *t);
void send_turn(struct fake *f, const assign *a, uint32_t turn);
void send_done(struct fake *f, const assign *a, uint32_t turns, int kind, double reward);
/* INVALID because a daemon was away. */
void send_outage(struct fake *f, const assign *a, uint32_t turns);
void wait_acked(struct fake *f);

#endif

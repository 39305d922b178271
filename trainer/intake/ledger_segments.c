/* Segments and ends of trajectories: what workers send, refused or stored once, and read back. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/crc.h"
#include "trainer/intake/ledger_private.h"

/* Bytes of one record: tokens, logprobs, mask, spans, in this order. */
static size_t record_bytes(uint32_t tokens, uint32_t spans)
{
    return (size_t)tokens * 9 + spans * sizeof(struct ledger_span);
}

/* ABORTED, naming both attempts, unless `attempt` is the current one. */
static int check_attempt(const struct ledger_trajectory *t, uint32_t attempt, struct lh_error *err)
{
    if (attempt == t->attempt)
        return 0;
    return lh_fail(err, LH_ABORTED, "trajectory %s is at attempt %u, this is of attempt %u", t->id,
                   t->attempt, attempt);
}

/* 1 = the same is stored, 0 = nothing is, ALREADY_EXISTS = something else is. */
static int find_duplicate(struct ledger *l, const struct ledger_segment *s, uint32_t crc,
                          struct lh_error *err)
{
    db_autostmt sqlite3_stmt *q =
        db_prepare(l->db, err,
                   "SELECT tokens, crc FROM segments WHERE trajectory = ? AND attempt = ?"
                   " AND turn = ?",
                   "tii", s->trajectory, (int64_t)s->attempt, (int64_t)s->turn);
    int r = q ? db_step(q, err) : LH_INTERNAL;

    if (r <= 0)
        return r;
    if (sqlite3_column_int64(q, 0) != s->tokens || sqlite3_column_int64(q, 1) != crc)
        return lh_fail(err, LH_ALREADY_EXISTS,
                       "turn %u of trajectory %s, attempt %u, came twice with different content",
                       s->turn, s->trajectory, s->attempt);
    return 1;
}

static int insert_segment(struct ledger *l, const struct ledger_segment *s,
                          const struct segment_place *at, struct lh_error *err)
{
    return db_run(l->db, err,
                  "INSERT INTO segments (trajectory, attempt, turn, first_token, tokens, spans,"
                  " file, offset, length, crc, snapshot, temperature, agent_ms, last)"
                  " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                  "tiiiiiiiiitdii", s->trajectory, (int64_t)s->attempt, (int64_t)s->turn,
                  (int64_t)s->first_token, (int64_t)s->tokens, (int64_t)s->n_spans,
                  (int64_t)at->file, (int64_t)at->offset, (int64_t)at->length, (int64_t)at->crc,
                  s->snapshot, (double)s->temperature, s->agent_ms, (int64_t)s->last);
}

int ledger_append(struct ledger *l, const struct ledger_segment *s, struct lh_error *err)
{
    const struct iovec parts[] = {
        {(void *)s->token, s->tokens * sizeof *s->token},
        {(void *)s->logprob, s->tokens * sizeof *s->logprob},
        {(void *)s->mask, s->tokens},
        {(void *)s->spans, s->n_spans * sizeof *s->spans},
    };
    struct ledger_trajectory t;
    struct segment_place at;
    uint32_t crc = 0;
    int r;

    if ((r = ledger_find_trajectory(l, s->trajectory, &t, err)) < 0 ||
        (r = check_attempt(&t, s->attempt, err)) < 0)
        return r;
    for (size_t i = 0; i < LH_ARRAY_SIZE(parts); i++)
        crc = lh_crc32c(crc, parts[i].iov_base, parts[i].iov_len);
    if ((r = find_duplicate(l, s, crc, err)) != 0)
        return r;
    if (s->turn != t.turns || s->first_token != t.tokens || t.state >= TRAJECTORY_DONE)
        return lh_fail(err, LH_OUT_OF_RANGE,
                       "trajectory %s has %u turns and %u tokens, this is turn %u from token %u",
                       t.id, t.turns, t.tokens, s->turn, s->first_token);
    r = segment_files_append(&l->files, parts, LH_ARRAY_SIZE(parts), &at, err);
    return r < 0 ? r : insert_segment(l, s, &at, err);
}

int ledger_finish_trajectory(struct ledger *l, const struct ledger_done *d, struct lh_error *err)
{
    struct ledger_trajectory t;
    int r;

    if ((r = ledger_find_trajectory(l, d->trajectory, &t, err)) < 0 ||
        (r = check_attempt(&t, d->attempt, err)) < 0)
        return r;
    if (t.state == TRAJECTORY_DONE)
        return 1;
    if (t.state == TRAJECTORY_DROPPED)
        return lh_fail(err, LH_ABORTED, "trajectory %s was dropped with its group", t.id);
    if (d->turns != t.turns || d->tokens != t.tokens)
        return lh_fail(err, LH_OUT_OF_RANGE,
                       "trajectory %s ended after %u turns and %u tokens, but %u and %u are "
                       "committed",
                       t.id, d->turns, d->tokens, t.turns, t.tokens);
    return db_run(l->db, err,
                  "UPDATE trajectories SET state = ?, kind = ?, reward = ?, passed = ?, code = ?,"
                  " message = ?, finish = ?, turns = ?, tokens = ?, sampled = ?, wall_ms = ?"
                  " WHERE id = ?",
                  "iidittiiiiit", (int64_t)TRAJECTORY_DONE, (int64_t)d->kind, d->reward,
                  (int64_t)d->passed, d->code, d->message, (int64_t)d->finish, (int64_t)d->turns,
                  (int64_t)d->tokens, (int64_t)d->sampled, (int64_t)d->wall_ms, d->trajectory);
}

/* ---- reading back ---- */

static int allocate_history(struct ledger *l, const char *trajectory, struct ledger_history *h,
                            struct lh_error *err)
{
    int64_t tokens, spans;
    int r = db_integer(l->db, err, 0, &tokens,
                       "SELECT SUM(tokens) FROM segments WHERE trajectory = ? AND dead = 0", "t",
                       trajectory);

    if (r == 0)
        r = db_integer(l->db, err, 0, &spans,
                       "SELECT SUM(spans) FROM segments WHERE trajectory = ? AND dead = 0", "t",
                       trajectory);
    if (r < 0)
        return r;
    h->token = calloc((size_t)tokens + 1, sizeof *h->token);
    h->logprob = calloc((size_t)tokens + 1, sizeof *h->logprob);
    h->mask = calloc((size_t)tokens + 1, 1);
    h->spans = calloc((size_t)spans + 1, sizeof *h->spans);
    if (!h->token || !h->logprob || !h->mask || !h->spans)
        return lh_fail_errno(err, ENOMEM, "reading trajectory %s", trajectory);
    return 0;
}

static int read_record(struct ledger *l, sqlite3_stmt *s, struct ledger_history *h,
                       struct lh_error *err)
{
    uint32_t n = (uint32_t)sqlite3_column_int64(s, 0), spans = (uint32_t)sqlite3_column_int64(s, 1);
    const struct segment_place at = {
        .file = (uint32_t)sqlite3_column_int64(s, 2),
        .offset = (uint64_t)sqlite3_column_int64(s, 3),
        .length = (uint64_t)sqlite3_column_int64(s, 4),
        .crc = (uint32_t)sqlite3_column_int64(s, 5),
    };

    if (at.length != record_bytes(n, spans))
        return lh_fail(err, LH_DATA_LOSS, "a segment of %u tokens has %llu bytes", n,
                       (unsigned long long)at.length);
    lh_autofree char *bytes = malloc(at.length + 1);
    if (!bytes)
        return lh_fail_errno(err, ENOMEM, "reading a segment of %u tokens", n);
    int r = segment_files_read(l->segments_dir, &at, bytes, err);
    if (r < 0)
        return r;
    memcpy(h->token + h->n, bytes, n * 4ul);
    memcpy(h->logprob + h->n, bytes + n * 4ul, n * 4ul);
    memcpy(h->mask + h->n, bytes + n * 8ul, n);
    memcpy(h->spans + h->n_spans, bytes + n * 9ul, spans * sizeof *h->spans);
    h->n += n;
    h->n_spans += spans;
    h->turns++;
    h->temperature = (float)sqlite3_column_double(s, 6);
    strncpy(h->snapshot, column_text(s, 7), sizeof h->snapshot - 1);
    h->agent_ms = sqlite3_column_int64(s, 8);
    return 0;
}

int ledger_read_history(struct ledger *l, const char *trajectory, struct ledger_history *h,
                        struct lh_error *err)
{
    *h = (struct ledger_history){0};
    int r = allocate_history(l, trajectory, h, err);
    db_autostmt sqlite3_stmt *s =
        r < 0
            ? NULL
            : db_prepare(l->db, err,
                         "SELECT tokens, spans, file, offset, length, crc, temperature, snapshot,"
                         " agent_ms FROM segments WHERE trajectory = ? AND dead = 0 ORDER BY turn",
                         "t", trajectory);

    r = s ? 1 : LH_INTERNAL;
    while (r > 0 && (r = db_step(s, err)) > 0) {
        int f = read_record(l, s, h, err);
        r = f < 0 ? f : r;
    }
    if (r < 0) {
        ledger_history_finish(h);
        return lh_wrap(err, "trajectory %s", trajectory);
    }
    return 0;
}

void ledger_history_finish(struct ledger_history *h)
{
    free(h->token);
    free(h->logprob);
    free(h->mask);
    free(h->spans);
    *h = (struct ledger_history){0};
}

int ledger_each_snapshot(struct ledger *l, ledger_snapshot_fn *fn, void *ctx, struct lh_error *err)
{
    db_autostmt sqlite3_stmt *s =
        db_prepare(l->db, err,
                   "SELECT s.trajectory, s.snapshot, MAX(s.turn) FROM segments s"
                   " JOIN trajectories t ON t.id = s.trajectory WHERE t.state < ? AND s.dead = 0"
                   " AND s.last = 0 AND s.snapshot != '' GROUP BY s.trajectory",
                   "i", (int64_t)TRAJECTORY_DONE);
    int r = s ? 1 : LH_INTERNAL;

    while (r > 0 && (r = db_step(s, err)) > 0) {
        int f = fn(ctx, column_text(s, 0), column_text(s, 1), err);
        if (f < 0)
            return f;
    }
    return r;
}

int ledger_forget_snapshot(struct ledger *l, const char *snapshot, struct lh_error *err)
{
    return db_run(l->db, err, "UPDATE segments SET snapshot = '' WHERE snapshot = ?", "t",
                  snapshot);
}

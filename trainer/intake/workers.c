/* The table of workers: who lives, under which instance, and what to do with the work of the
 * others. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "trainer/intake/intake_private.h"

LH_LOG_COMPONENT("intake");

struct worker *intake_worker(struct intake *in, const char *name)
{
    for (size_t i = 0; i < in->n_workers; i++)
        if (!strcmp(in->workers[i]->name, name))
            return in->workers[i];
    if (in->n_workers == LH_ARRAY_SIZE(in->workers))
        return NULL;
    struct worker *w = calloc(1, sizeof *w);
    if (!w)
        return NULL;
    strncpy(w->name, name, sizeof w->name - 1);
    return in->workers[in->n_workers++] = w;
}

/* What a trajectory can go on with: the same cut the ledger makes. */
static int refresh(struct intake *in, struct trajectory *t, char snapshot[64], struct lh_error *err)
{
    struct ledger_history h;
    int r = ledger_find_trajectory(in->ledger, t->row.id, &t->row, err);

    if (r == 0)
        r = ledger_read_history(in->ledger, t->row.id, &h, err);
    if (r < 0)
        return r;
    memcpy(snapshot, h.snapshot, sizeof h.snapshot);
    ledger_history_finish(&h);
    return 0;
}

int intake_retry(struct intake *in, struct trajectory *t, bool invalid, struct lh_error *err)
{
    uint32_t invalids = t->row.invalid + invalid;
    char snapshot[64];

    const char *task = t->group->task->name;
    if (invalid && (invalids > in->options.infra_retries || quarantine_has(&in->quarantine, task)))
        return intake_drop_group(in, t->group, err);
    /* An invalid verdict may come from the very state it would resume in. */
    int r = ledger_next_attempt(in->ledger, t->row.id, t->row.attempt + 1, invalids, invalid, err);
    if (r == 0)
        r = refresh(in, t, snapshot, err);
    if (r < 0)
        return r;
    if (t->worker)
        t->worker->held--;
    t->worker = NULL;
    t->listed = false;
    t->cleaning = in->janitor != NULL;
    return in->janitor ? janitor_add(in->janitor, t->row.id, snapshot, t->row.attempt, err) : 0;
}

/* Moves everything a worker held elsewhere. */
static int reassign(struct intake *in, struct worker *w, const char *why, struct lh_error *err)
{
    uint64_t n = 0;

    for (size_t r = 0; r < in->n_rounds; r++) {
        struct round *round = in->rounds[r];
        for (size_t g = 0; g < round->n_groups; g++) {
            for (uint32_t m = 0; m < round->spec.members; m++) {
                struct trajectory *t = &round->groups[g]->members[m];
                if (t->worker != w)
                    continue;
                int e = intake_retry(in, t, false, err);
                if (e < 0)
                    return lh_wrap(err, "reassigning %s", t->row.id);
                n++;
            }
        }
    }
    in->reassigned += n;
    if (n)
        lh_warn("reassigned", "worker=%s trajectories=%llu reason=%s", w->name,
                (unsigned long long)n, why);
    return 0;
}

/* Counters of an instance that ended stay counted. */
static void retire_counters(struct intake *in, struct worker *w)
{
    in->past.tokens_decoded += w->last.tokens_decoded;
    in->past.spilled_bytes += w->last.spilled_bytes;
    in->past.loaded_bytes += w->last.loaded_bytes;
    in->past.store_lookups += w->last.store_lookups;
    in->past.store_hits += w->last.store_hits;
    in->past.hibernated += w->last.hibernated;
    in->past.hibernations_failed += w->last.hibernations_failed;
    w->last = (struct intake_stats){0};
    w->beaten = false;
}

int intake_worker_instance(struct intake *in, struct worker *w, const char *instance,
                           struct lh_error *err)
{
    w->alive = true;
    if (!strcmp(w->instance, instance))
        return 0;
    retire_counters(in, w);
    w->capacity = 0;
    strncpy(w->instance, instance, sizeof w->instance - 1);
    return reassign(in, w, "new-instance", err);
}

void intake_heartbeat(struct worker *w, const Longhaul__Experience__V1__Heartbeat *h)
{
    w->beaten = true;
    w->last = (struct intake_stats){
        .running = h->running,
        .waiting = h->waiting,
        .in_tool = h->in_tool,
        .spilled = h->spilled,
        .window = h->window,
        .kv_used_bytes = h->kv_used_bytes,
        .kv_budget_bytes = h->kv_budget_bytes,
        .load_wait_ms = h->load_wait_ms,
        .tokens_decoded = h->tokens_decoded,
        .spilled_bytes = h->spilled_bytes,
        .loaded_bytes = h->loaded_bytes,
        .store_lookups = h->store_lookups,
        .store_hits = h->store_hits,
        .hibernated = h->hibernated,
        .hibernations_failed = h->hibernations_failed,
    };
}

/* Listed once and no longer: the worker has lost it without knowing. */
static int find_lost(struct intake *in, struct lh_error *err)
{
    int64_t now = lh_now_ms();

    for (size_t r = 0; r < in->n_rounds; r++) {
        struct round *round = in->rounds[r];
        for (size_t g = 0; g < round->n_groups; g++) {
            for (uint32_t m = 0; m < round->spec.members; m++) {
                struct trajectory *t = &round->groups[g]->members[m];
                if (!t->worker || !t->listed || now - t->listed_ms < in->options.lost_ms)
                    continue;
                lh_warn("lost", "trajectory=%s worker=%s", t->row.id, t->worker->name);
                in->reassigned++;
                int e = intake_retry(in, t, false, err);
                if (e < 0)
                    return e;
            }
        }
    }
    return 0;
}

int intake_watch_workers(struct intake *in, struct lh_error *err)
{
    for (size_t i = 0; i < in->n_workers; i++) {
        struct worker *w = in->workers[i];
        if (!w->alive || channel_intake_silence_ms(in->channel, w->name) < in->options.silence_ms)
            continue;
        w->alive = false;
        int r = reassign(in, w, "silent", err);
        if (r < 0)
            return r;
    }
    return find_lost(in, err);
}

void intake_stats(struct intake *in, struct intake_stats *out)
{
    LH_LOCKED(&in->lock);
    *out = in->past;
    out->committed = in->committed;
    out->invalid = in->invalid;
    out->outages = in->outages;
    out->dropped = in->dropped;
    out->reassigned = in->reassigned;
    for (size_t i = 0; i < in->n_workers; i++) {
        const struct worker *w = in->workers[i];
        out->tokens_decoded += w->last.tokens_decoded;
        out->spilled_bytes += w->last.spilled_bytes;
        out->loaded_bytes += w->last.loaded_bytes;
        out->store_lookups += w->last.store_lookups;
        out->store_hits += w->last.store_hits;
        out->hibernated += w->last.hibernated;
        out->hibernations_failed += w->last.hibernations_failed;
        if (!w->alive)
            continue;
        out->workers++;
        out->running += w->last.running;
        out->waiting += w->last.waiting;
        out->in_tool += w->last.in_tool;
        out->spilled += w->last.spilled;
        out->window += w->last.window;
        out->kv_used_bytes += w->last.kv_used_bytes;
        out->kv_budget_bytes += w->last.kv_budget_bytes;
        if (w->last.load_wait_ms > out->load_wait_ms)
            out->load_wait_ms = w->last.load_wait_ms;
    }
}

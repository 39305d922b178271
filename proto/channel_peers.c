/* Which message of which stream comes next.  A stream is one instance of one worker; it is kept as
 * long as there is room, since forgetting it could hand a message on twice. */
#include <stdlib.h>
#include <string.h>

#include "proto/channel_core.h"

enum { MAX_PEERS = 1024, FORGET_MS = 10 * 60 * 1000 };

struct channel_peer *channel_peers_find(const struct channel_peers *ps, const char *name,
                                        const char *instance)
{
    struct channel_peer *p = ps->newest;

    while (p && (strcmp(p->name, name) != 0 || (instance && strcmp(p->instance, instance) != 0)))
        p = p->older;
    return p;
}

/* Makes room by forgetting the stream that has been silent longest, if that is long enough. */
static bool forget_one(struct channel_peers *ps, int64_t now_ms)
{
    struct channel_peer **oldest = &ps->newest;

    for (struct channel_peer **p = &ps->newest; *p; p = &(*p)->older)
        if ((*p)->heard_ms < (*oldest)->heard_ms)
            oldest = p;
    struct channel_peer *gone = *oldest;
    if (!gone || now_ms - gone->heard_ms < FORGET_MS)
        return false;
    *oldest = gone->older;
    free(gone);
    ps->n--;
    return true;
}

static struct channel_peer *add(struct channel_peers *ps, const char *name, const char *instance,
                                int64_t now_ms)
{
    if (ps->n >= MAX_PEERS && !forget_one(ps, now_ms))
        return NULL;
    struct channel_peer *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    strcpy(p->name, name);
    strcpy(p->instance, instance);
    p->older = ps->newest;
    ps->newest = p;
    ps->n++;
    return p;
}

/* "name/instance", as the envelope says it, too. */
static struct channel_peer *identify(struct channel_peers *ps, const void *id, size_t id_len,
                                     const char *instance, int64_t now_ms)
{
    char text[2 * CHANNEL_PEER];

    if (id_len >= sizeof text || memchr(id, 0, id_len))
        return NULL;
    memcpy(text, id, id_len);
    text[id_len] = 0;
    char *slash = strchr(text, '/');
    if (!slash || strcmp(slash + 1, instance) != 0 || !channel_instance_valid(instance))
        return NULL;
    *slash = 0;
    if (!channel_name_valid(text))
        return NULL;
    struct channel_peer *p = channel_peers_find(ps, text, instance);
    return p ? p : add(ps, text, instance, now_ms);
}

static enum channel_verdict take_control(struct channel_peer *p, uint64_t begins_behind)
{
    if (!p->synced) {
        p->synced = true;
        p->durable = begins_behind;
        p->next = begins_behind + 1;
    }
    p->ack_due = true;
    return CHANNEL_CONTROL;
}

static enum channel_verdict take_numbered(struct channel_peer *p, uint64_t seq)
{
    if (p->synced && seq == p->next) {
        p->next++;
        return CHANNEL_DELIVER;
    }
    bool known = p->synced && seq < p->next;
    p->ack_due |= known || !p->synced; /* tells how far we are, or who we are */
    return known ? CHANNEL_DUPLICATE : CHANNEL_GAP;
}

enum channel_verdict channel_peers_take(struct channel_peers *ps, const void *id, size_t id_len,
                                        const Longhaul__Experience__V1__Envelope *envelope,
                                        int64_t now_ms, struct channel_peer **from)
{
    struct channel_peer *p = identify(ps, id, id_len, envelope->instance, now_ms);
    bool control = envelope->body_case == LONGHAUL__EXPERIENCE__V1__ENVELOPE__BODY__NOT_SET;

    *from = p;
    if (!p || (control && envelope->seq))
        return CHANNEL_HOSTILE;
    p->heard_ms = now_ms;
    if (control)
        return take_control(p, envelope->ack);
    return envelope->seq ? take_numbered(p, envelope->seq) : CHANNEL_DELIVER;
}

void channel_peers_finish(struct channel_peers *ps)
{
    while (ps->newest) {
        struct channel_peer *p = ps->newest;
        ps->newest = p->older;
        free(p);
    }
    ps->n = 0;
}

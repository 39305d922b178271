/* A sandbox's rules of network: from its request into the registry, from there to the gate.
 *
 * The rules are recorded with the sandbox's row, before anything is opened; what is open lives in
 * this process only.  So a daemon that was killed leaves nothing, and the next one opens the same
 * again, on the same host ports. */
#include <errno.h>
#include <string.h>

#include "agentenv/daemon/internal.h"
#include "agentenv/network/gate.h"
#include "proto/parse.h"

enum { HOSTS_MAX = 256 << 10 };
#define LOOPBACK LONGHAUL__TASK__V1__NETWORK__NETWORK_LOOPBACK
#define NONE     LONGHAUL__TASK__V1__NETWORK__NETWORK_NONE

static V1(NetworkRules) * copy_rules(const V1(NetworkRules) * rules, struct lh_error *err)
{
    size_t len;
    lh_autofree uint8_t *packed = lh_pack(&rules->base, &len, err);

    return packed ? (void *)lh_parse(rules->base.descriptor, packed, len,
                                     (struct lh_parse_limits){0}, err)
                  : NULL;
}

static int check_ports(const V1(NetworkRules) * rules, struct lh_error *err)
{
    if (rules->n_ports > GATE_MAX_PORTS)
        return lh_fail(err, LH_INVALID_ARGUMENT, "%zu ports are too many: the limit is %d",
                       rules->n_ports, GATE_MAX_PORTS);
    for (size_t i = 0; i < rules->n_ports; i++) {
        const V1(PublishedPort) *p = rules->ports[i];
        if (p->port == 0 || p->port > UINT16_MAX || p->host_port > UINT16_MAX)
            return lh_fail(err, LH_INVALID_ARGUMENT, "port %u:%u: from 1 to 65535", p->host_port,
                           p->port);
    }
    return 0;
}

static bool is_empty(const V1(NetworkRules) * rules)
{
    return !rules || (rules->n_egress == 0 && rules->n_ports == 0);
}

static int set_rules(struct sandbox *s, const V1(NetworkRules) * rules, struct lh_error *err)
{
    lh_autofree struct net_rules *parsed = malloc(sizeof *parsed);

    if (is_empty(rules))
        return 0;
    if (!parsed)
        return lh_fail_errno(err, ENOMEM, "network rules");
    if (s->network == NONE)
        return lh_fail(err, LH_INVALID_ARGUMENT, "rules need a network, and NETWORK_NONE is none");
    int r = net_rules_parse(rules->egress, rules->n_egress, parsed, err);
    if (r == 0)
        r = check_ports(rules, err);
    if (r < 0)
        return r;
    s->network = LOOPBACK;
    s->rules = copy_rules(rules, err);
    return s->rules ? 0 : err->code;
}

static void forget_host_ports(V1(NetworkRules) * rules)
{
    for (size_t i = 0; rules && i < rules->n_ports; i++)
        rules->ports[i]->host_port = 0;
}

int network_describe(struct daemon *d, struct sandbox *s, const V1(CreateRequest) * req,
                     struct lh_error *err)
{
    lh_automsg(V1(NetworkRules)) kept = NULL;
    bool silent = !req->network && is_empty(req->rules);
    bool of_snapshot =
        silent && req->source_case == LONGHAUL__SANDBOX__V1__CREATE_REQUEST__SOURCE_SNAPSHOT;
    int r = of_snapshot ? registry_snapshot_rules(d, req->snapshot, &kept, err) : 0;

    forget_host_ports(kept);
    return r < 0 ? r : set_rules(s, kept ? kept : req->rules, err);
}

V1(NetworkRules) * network_rules_for_child(const struct sandbox *s, struct lh_error *err)
{
    V1(NetworkRules) *rules = copy_rules(s->rules, err);

    forget_host_ports(rules);
    return rules;
}

int network_fill(const struct sandbox *s, V1(Sandbox) * m)
{
    size_t n = s->rules ? s->rules->n_ports : 0;

    m->ports = n ? calloc(n, sizeof *m->ports) : NULL;
    for (size_t i = 0; m->ports && i < n; i++) {
        m->ports[i] = malloc(sizeof *m->ports[i]);
        if (!m->ports[i])
            return -1;
        longhaul__sandbox__v1__published_port__init(m->ports[i]);
        m->ports[i]->port = s->rules->ports[i]->port;
        m->ports[i]->host_port = s->rules->ports[i]->host_port;
        m->n_ports++;
    }
    return m->ports || !n ? 0 : -1;
}

/* What is there may be the agent's: whatever cannot be read is replaced. */
static int write_hosts(struct daemon *d, struct sandbox *s, const struct net_rules *rules,
                       struct lh_error *err)
{
    size_t len;
    lh_autofree char *old = daemon_get_file(d, s->id, "/etc/hosts", HOSTS_MAX, &len, NULL);
    lh_autofree char *text = net_rules_hosts(rules, old, err);

    return text ? daemon_put_file(d, s->id, "/etc/hosts", text, strlen(text), 0644, err)
                : err->code;
}

static int open_gate(struct daemon *d, struct sandbox *s, const struct net_rules *rules,
                     struct lh_error *err)
{
    struct gate_port ports[GATE_MAX_PORTS];
    bool chosen = false;

    for (size_t i = 0; i < s->rules->n_ports; i++)
        ports[i] = (struct gate_port){(uint16_t)s->rules->ports[i]->port,
                                      (uint16_t)s->rules->ports[i]->host_port};
    lh_autoclose int netns = box_net_fd(s->box, err);
    struct gate_opening *o =
        netns < 0 ? NULL : gate_open(d->gate, netns, rules, ports, s->rules->n_ports, err);
    if (!o)
        return err->code;
    pthread_mutex_lock(&d->lock);
    s->opening = o;
    for (size_t i = 0; i < s->rules->n_ports; i++) {
        chosen |= s->rules->ports[i]->host_port != ports[i].outside;
        s->rules->ports[i]->host_port = ports[i].outside;
    }
    pthread_mutex_unlock(&d->lock);
    return chosen ? registry_set_rules(d, s, err) : 0;
}

int network_open(struct daemon *d, struct sandbox *s, struct lh_error *err)
{
    lh_autofree struct net_rules *rules = malloc(sizeof *rules);

    if (!s->rules)
        return 0;
    if (!rules)
        return lh_fail_errno(err, ENOMEM, "network rules");
    int r = net_rules_parse(s->rules->egress, s->rules->n_egress, rules, err);
    if (r == 0 && s->state == SB_CREATING)
        r = write_hosts(d, s, rules, err);
    if (r == 0)
        r = open_gate(d, s, rules, err);
    return r < 0 ? lh_wrap(err, "network of sandbox %s", s->id) : 0;
}

void network_close(struct daemon *d, struct sandbox *s)
{
    pthread_mutex_lock(&d->lock);
    struct gate_opening *o = lh_steal(&s->opening);
    pthread_mutex_unlock(&d->lock);
    gate_close(o);
}

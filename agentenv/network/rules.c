#include "agentenv/network/rules.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "proto/cleanup.h"

static const uint32_t NAMES_NET = 0x7f400000; /* 127.64.0.0 */
static const char HOSTS_MARK[] = "# agentenv egress";

static int bad(struct lh_error *err, const char *rule, const char *why)
{
    return lh_fail(err, LH_INVALID_ARGUMENT, "egress \"%.300s\": %s", rule, why);
}

/* The whole of `text` as a number from 0 to max. */
static bool number(const char *text, unsigned long max, unsigned long *out)
{
    char *end;

    if (!isdigit((unsigned char)*text))
        return false;
    errno = 0;
    *out = strtoul(text, &end, 10);
    return !*end && !errno && *out <= max;
}

static bool looks_numeric(const char *host)
{
    return host[strspn(host, "0123456789./")] == 0;
}

static int parse_network(char *host, const char *rule, struct net_allow *a, struct lh_error *err)
{
    char *slash = strchr(host, '/');
    unsigned long bits = 32;
    struct in_addr in;

    if (slash)
        *slash++ = 0;
    if (inet_pton(AF_INET, host, &in) != 1 || (slash && !number(slash, 32, &bits)))
        return bad(err, rule, "no IPv4 address or network");
    a->mask = bits ? UINT32_MAX << (32 - bits) : 0;
    a->address = ntohl(in.s_addr);
    if (a->address & ~a->mask)
        return bad(err, rule, "the address has bits beyond the length of the network");
    if (bits < 8)
        return bad(err, rule,
                   "a network of more than 2^24 addresses is no list of what is allowed");
    return 0;
}

static bool name_valid(const char *name)
{
    size_t len = strlen(name);

    if (len == 0 || len > NET_NAME_MAX || name[0] == '.' || name[len - 1] == '.' ||
        strstr(name, ".."))
        return false;
    return name[strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789.-_")] == 0;
}

/* One address for a name, however many rules it has. */
static uint32_t address_of(const struct net_rules *r, const char *name)
{
    uint32_t last = NAMES_NET;

    for (size_t i = 0; i < r->n; i++) {
        if (!r->allow[i].name[0])
            continue;
        if (!strcmp(r->allow[i].name, name))
            return r->allow[i].address;
        last = r->allow[i].address > last ? r->allow[i].address : last;
    }
    return last + 1;
}

static int parse_name(char *host, const char *rule, const struct net_rules *r, struct net_allow *a,
                      struct lh_error *err)
{
    for (char *p = host; *p; p++)
        *p = (char)tolower((unsigned char)*p);
    if (!name_valid(host))
        return bad(err, rule, "no DNS name");
    snprintf(a->name, sizeof a->name, "%s", host);
    a->address = address_of(r, host);
    a->mask = UINT32_MAX;
    if (a->address - NAMES_NET > NET_MAX_NAMES)
        return bad(err, rule, "more than 200 names");
    return 0;
}

/* What people write elsewhere, and why it is not offered. */
static const char *not_offered(const char *rule)
{
    if (strchr(rule, '*'))
        return "no wildcards: each name has an address of its own inside; name every host";
    if (!strncasecmp(rule, "udp", 3) && (rule[3] == ':' || rule[3] == '/'))
        return "no UDP: it has no connections that could be carried over and ended";
    if (rule[0] == '[' || strstr(rule, "::"))
        return "no IPv6 inside; a name is reached by IPv6 where this machine does so";
    return NULL;
}

static int parse_rule(const char *rule, struct net_rules *out, struct lh_error *err)
{
    const char *why_not = not_offered(rule);
    lh_autofree char *copy = strdup(rule);
    char *ports = copy ? strrchr(copy, ':') : NULL, *rest = NULL;
    struct net_allow a = {0};

    if (!copy)
        return lh_fail_errno(err, ENOMEM, "egress");
    if (why_not)
        return bad(err, rule, why_not);
    if (!ports || !ports[1])
        return bad(err, rule, "write HOST:PORT[,PORT...]");
    *ports++ = 0;
    int r = looks_numeric(copy) ? parse_network(copy, rule, &a, err)
                                : parse_name(copy, rule, out, &a, err);
    for (char *p = strtok_r(ports, ",", &rest); p && r == 0; p = strtok_r(NULL, ",", &rest)) {
        unsigned long port;
        if (!number(p, UINT16_MAX, &port) || port == 0)
            return bad(err, rule, "a port is a number from 1 to 65535");
        if (out->n == NET_MAX_ALLOW)
            return bad(err, rule, "more than 256 pairs of host and port");
        a.port = (uint16_t)port;
        out->allow[out->n++] = a;
    }
    return r;
}

int net_rules_parse(char *const *egress, size_t n, struct net_rules *out, struct lh_error *err)
{
    int r = 0;

    out->n = 0;
    for (size_t i = 0; i < n && r == 0; i++)
        r = parse_rule(egress[i], out, err);
    return r;
}

const struct net_allow *net_rules_find(const struct net_rules *r, uint32_t address, uint16_t port)
{
    for (size_t i = 0; i < r->n; i++)
        if (r->allow[i].port == port && (address & r->allow[i].mask) == r->allow[i].address)
            return &r->allow[i];
    return NULL;
}

static void copy_others(FILE *to, const char *hosts)
{
    while (hosts && *hosts) {
        size_t len = strcspn(hosts, "\n");
        if (!memmem(hosts, len, HOSTS_MARK, strlen(HOSTS_MARK)))
            fprintf(to, "%.*s\n", (int)len, hosts);
        hosts += len + (hosts[len] == '\n');
    }
}

static bool first_of_name(const struct net_rules *r, size_t i)
{
    for (size_t k = 0; k < i; k++)
        if (!strcmp(r->allow[k].name, r->allow[i].name))
            return false;
    return r->allow[i].name[0];
}

char *net_rules_hosts(const struct net_rules *r, const char *hosts, struct lh_error *err)
{
    char *text = NULL;
    size_t len;
    FILE *f = open_memstream(&text, &len);

    if (!f)
        return lh_fail_errno(err, errno, "hosts"), NULL;
    copy_others(f, hosts ? hosts : "127.0.0.1 localhost\n");
    for (size_t i = 0; i < r->n; i++)
        if (first_of_name(r, i))
            fprintf(f, "127.64.0.%u %s %s\n", r->allow[i].address - NAMES_NET, r->allow[i].name,
                    HOSTS_MARK);
    if (fclose(f) != 0)
        return free(text), lh_fail_errno(err, ENOMEM, "hosts"), NULL;
    return text;
}

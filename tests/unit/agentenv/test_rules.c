/* Rules of network: what they say, what they do not, and what becomes of /etc/hosts. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <stdlib.h>
#include <string.h>

#include "agentenv/network/rules.h"
#include "proto/cleanup.h"

TestSuite(rules, .timeout = 20);

static struct net_rules *parse(const char *const *egress, size_t n)
{
    static struct net_rules rules;
    struct lh_error err = {0};

    cr_assert(net_rules_parse((char **)egress, n, &rules, &err) == 0, "%s", err.message);
    return &rules;
}

static uint32_t ip(unsigned a, unsigned b, unsigned c, unsigned d)
{
    return a << 24 | b << 16 | c << 8 | d;
}

Test(rules, networks_and_names_are_found_by_address_and_port)
{
    static const char *const egress[] = {"10.1.0.0/16:80,443", "10.2.3.4:22", "Example.org:443",
                                         "pypi.org:443", "example.org:80"};
    struct net_rules *r = parse(egress, LH_ARRAY_SIZE(egress));

    cr_assert(eq(sz, r->n, 6));
    cr_assert(net_rules_find(r, ip(10, 1, 255, 9), 443) != NULL);
    cr_assert(net_rules_find(r, ip(10, 1, 255, 9), 22) == NULL);
    cr_assert(net_rules_find(r, ip(10, 2, 0, 0), 80) == NULL);
    cr_assert(net_rules_find(r, ip(10, 2, 3, 4), 22) != NULL);
    cr_assert(net_rules_find(r, ip(127, 0, 0, 1), 443) == NULL);
    cr_assert(
        eq(str, (char *)net_rules_find(r, ip(127, 64, 0, 1), 443)->name, (char *)"example.org"));
    cr_assert(net_rules_find(r, ip(127, 64, 0, 1), 80) != NULL, "one address for a name");
    cr_assert(eq(str, (char *)net_rules_find(r, ip(127, 64, 0, 2), 443)->name, (char *)"pypi.org"));
}

Test(rules, what_is_no_rule_is_named)
{
    static const char *const bad[] = {
        "",          "host",           "host:",         ":80",
        "host:0",    "host:65536",     "host:80x",      "host:80,,x",
        "*.host:80", "10.0.0.0/33:80", "10.0.0.1/8:80", "0.0.0.0/0:443",
        "10.0.0:80", "ho st:80",       "::1:80",        "[::1]:80",
        "-\xff:80",  "a..b:80",        ".a:80",         "10.0.0.0/-1:80"};

    for (size_t i = 0; i < LH_ARRAY_SIZE(bad); i++) {
        static struct net_rules rules;
        struct lh_error err = {0};
        cr_assert(eq(int, net_rules_parse((char *[]){(char *)bad[i]}, 1, &rules, &err),
                     LH_INVALID_ARGUMENT),
                  "\"%s\"", bad[i]);
        cr_assert(strstr(err.message, "egress") != NULL);
    }
}

Test(rules, what_is_not_offered_says_why)
{
    static const struct {
        const char *rule, *why;
    } cases[] = {{"*.org:443", "no wildcards"},  {"udp:dns.org:53", "no UDP"},
                 {"UDP/1.1.1.1:53", "no UDP"},   {"[2001:db8::1]:443", "no IPv6 inside"},
                 {"2001:db8::1:443", "no IPv6"}, {"ho st:80", "no DNS name"}};

    for (size_t i = 0; i < LH_ARRAY_SIZE(cases); i++) {
        static struct net_rules rules;
        struct lh_error err = {0};
        cr_assert(eq(int, net_rules_parse((char *[]){(char *)cases[i].rule}, 1, &rules, &err),
                     LH_INVALID_ARGUMENT));
        cr_assert(strstr(err.message, cases[i].why) != NULL, "%s", err.message);
    }
}

Test(rules, there_are_not_more_than_fit)
{
    static struct net_rules rules;
    char *many[NET_MAX_ALLOW + 1];
    struct lh_error err = {0};
    char text[NET_MAX_ALLOW + 1][32];

    for (size_t i = 0; i < LH_ARRAY_SIZE(many); i++) {
        snprintf(text[i], sizeof text[i], "10.0.%zu.%zu:1", i / 256, i % 256);
        many[i] = text[i];
    }
    cr_assert(eq(int, net_rules_parse(many, NET_MAX_ALLOW, &rules, &err), 0));
    cr_assert(eq(int, net_rules_parse(many, NET_MAX_ALLOW + 1, &rules, &err), LH_INVALID_ARGUMENT));
    for (size_t i = 0; i < LH_ARRAY_SIZE(many); i++)
        snprintf(text[i], sizeof text[i], "n%zu:1", i);
    cr_assert(eq(int, net_rules_parse(many, NET_MAX_NAMES, &rules, &err), 0));
    cr_assert(eq(int, net_rules_parse(many, NET_MAX_NAMES + 1, &rules, &err), LH_INVALID_ARGUMENT));
}

Test(rules, hosts_gets_the_names_and_keeps_the_rest)
{
    static const char *const egress[] = {"a.org:1", "b.org:2", "a.org:3", "10.0.0.1:4"};
    struct net_rules *r = parse(egress, LH_ARRAY_SIZE(egress));
    lh_autofree char *once = net_rules_hosts(r, "1.2.3.4 mine", NULL);
    lh_autofree char *fresh = net_rules_hosts(r, NULL, NULL);
    static const char want[] = "1.2.3.4 mine\n127.64.0.1 a.org # agentenv egress\n"
                               "127.64.0.2 b.org # agentenv egress\n";

    cr_assert(eq(str, once, (char *)want));
    lh_autofree char *twice = net_rules_hosts(r, once, NULL);
    cr_assert(eq(str, twice, (char *)want));
    cr_assert(strncmp(fresh, "127.0.0.1 localhost\n127.64.0.1", 30) == 0);
}

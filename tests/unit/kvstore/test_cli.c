/* The command line against a real kvstored: what it prints in a pipe, and its exit codes. */
#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kit.h"
#include "kvstore/client/link.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/hex.h"

/* Output of `kvstore ARGS` parsed as JSON (NULL if it is none) and its exit code. */
static json_t *kvstore(const char *args, int *code)
{
    lh_autofree char *command = lh_format("%s %s 2>/dev/null", KVSTORE, args);
    FILE *f = popen(command, "r");

    json_t *out = json_loadf(f, 0, NULL);
    while (fgetc(f) != EOF)
        ;
    int status = pclose(f);
    *code = WEXITSTATUS(status);
    return out;
}

static long long number(json_t *o, const char *field)
{
    json_t *v = json_object_get(o, field);

    cr_assert(v != NULL, "no field %s", field);
    return (long long)json_number_value(v);
}

static json_t *of_job(const struct daemon *d, const char *command, int want)
{
    lh_autofree char *args = lh_format("%s %s", d->dir, command);
    int code;
    json_t *out = kvstore(args, &code);

    cr_assert(eq(int, code, want), "%s", command);
    return out;
}

static void fill(struct daemon *d, struct kv_client *c, struct kv_key *chain, size_t n)
{
    struct kv_key root = root_of(1);
    struct lh_error e = {0};

    (void)d;
    use_version(c, 1, false);
    chain_of(&root, 1, n, chain);
    cr_assert(gt(i64, put_units(c, chain, 0, n, &e), 0), "%s", e.message);
}

Test(cli, stat_and_ls)
{
    struct daemon d;
    struct kv_key chain[3000];

    daemon_start(&d, 64 << 20, 64 << 20);
    lh_auto(kv_client) c = client_of(&d, "a");
    fill(&d, c, chain, 3000);
    cr_assert(eq(sz, get_units(c, chain, 3000, 2990), 3000));

    json_t *stat = of_job(&d, "stat", 0);
    cr_assert(eq(llong, number(stat, "capacity_bytes"), 64 << 20));
    cr_assert(eq(llong, number(stat, "objects"), 3001));
    cr_assert(eq(llong, number(stat, "hits"), 1));
    cr_assert(eq(llong, number(stat, "pinned"), 0));
    json_decref(stat);

    json_t *roots = of_job(&d, "ls", 0);
    cr_assert(eq(sz, json_array_size(roots), 1));
    json_t *root = json_array_get(roots, 0);
    cr_assert(eq(llong, number(root, "objects"), 3001));
    cr_assert(eq(llong, number(root, "policy_step"), 1));
    lh_autofree char *ls = lh_format("ls %s", json_string_value(json_object_get(root, "root")));
    json_decref(roots);

    json_t *objects = of_job(&d, ls, 0);
    cr_assert(eq(sz, json_array_size(objects), 3001), "all pages of the listing, each object once");
    json_decref(objects);
    daemon_stop(&d);
}

static void spoil_segment(const struct daemon *d)
{
    struct lh_error e = {0};
    struct kv_link l;

    cr_assert(eq(int, kv_link_open(&l, d->socket, "raw", lh_now_ms() + 5000, &e), 0));
    l.map->base[0] ^= 1; /* blocks grow from the bottom */
    kv_link_close(&l);
}

Test(cli, verify_finds_what_is_corrupt)
{
    struct daemon d;
    struct kv_key chain[20];

    daemon_start(&d, 1 << 20, 1 << 20);
    lh_auto(kv_client) c = client_of(&d, "a");
    fill(&d, c, chain, 20);
    json_t *good = of_job(&d, "verify", 0);
    cr_assert(eq(llong, number(good, "objects"), 21));
    cr_assert(eq(llong, number(good, "corrupt"), 0));
    cr_assert(eq(llong, number(good, "bytes"), 20 * BLOCK + STATE));
    json_decref(good);
    spoil_segment(&d);
    json_t *bad = of_job(&d, "verify", 1);
    cr_assert(eq(llong, number(bad, "corrupt"), 1));
    json_t *object = json_array_get(json_object_get(bad, "corrupt_objects"), 0);
    cr_assert(eq(str, (char *)json_string_value(json_object_get(object, "part")), (char *)"block"));
    cr_assert(eq(llong, number(object, "unit"), 0));
    json_decref(bad);
    daemon_stop(&d);
}

Test(cli, wrong_use_has_its_exit_code)
{
    static const struct {
        const char *args;
        int code;
    } rows[] = {{"", 2},
                {"/tmp", 2},
                {"/tmp frobnicate", 2},
                {"/tmp stat more", 2},
                {"/tmp/no-such-job stat", 75},
                {"--socket=/tmp/no-such-socket stat", 75},
                {"--nonsense", 2},
                {"-o yaml /tmp stat", 2}};

    for (size_t i = 0; i < LH_ARRAY_SIZE(rows); i++) {
        int code;
        json_decref(kvstore(rows[i].args, &code));
        cr_assert(eq(int, code, rows[i].code), "kvstore %s", rows[i].args);
    }
}

Test(cli, a_bad_root_is_refused_and_tables_are_for_people)
{
    struct daemon d;
    struct kv_key chain[4];

    daemon_start(&d, 1 << 20, 1 << 20);
    lh_auto(kv_client) c = client_of(&d, "a");
    fill(&d, c, chain, 4);
    json_decref(of_job(&d, "ls xyz", 1));
    json_decref(of_job(&d, "ls 00000000000000000000000000000000", 1));
    lh_autofree char *command = lh_format("%s -o table --socket=%s ls", KVSTORE, d.socket);
    FILE *f = popen(command, "r");
    char line[256] = "";
    cr_assert(fgets(line, sizeof line, f) && strstr(line, "policy_step"));
    cr_assert(fgets(line, sizeof line, f) && strstr(line, " 5 "), "objects: %s", line);
    cr_assert(eq(int, pclose(f), 0));
    daemon_stop(&d);
}

Test(cli, drop_makes_a_root_unmatchable)
{
    struct daemon d;
    struct kv_key chain[4], root = root_of(1);
    char hex[33];

    daemon_start(&d, 1 << 20, 1 << 20);
    lh_auto(kv_client) c = client_of(&d, "a");
    fill(&d, c, chain, 4);
    lh_hex_print(root.bytes, sizeof root.bytes, hex);
    lh_autofree char *command = lh_format("drop %s", hex);
    json_decref(of_job(&d, "drop", 1));
    json_decref(of_job(&d, "drop 00000000000000000000000000000000", 1));
    cr_assert(eq(sz, get_units(c, chain, 4, 0), 4));
    json_decref(of_job(&d, command, 0));
    cr_assert(eq(sz, get_units(c, chain, 4, 0), 0));
    json_decref(of_job(&d, command, 1));
    daemon_stop(&d);
}

static const char *text(json_t *o, const char *field)
{
    const char *v = json_string_value(json_object_get(o, field));

    cr_assert(v != NULL, "no field %s", field);
    return v;
}

Test(cli, show_says_what_is_stored_and_where)
{
    struct daemon d;
    struct kv_key chain[20], root = root_of(1);
    char hex[33];

    daemon_start(&d, 1 << 20, 1 << 20);
    lh_auto(kv_client) c = client_of(&d, "a");
    fill(&d, c, chain, 20);
    cr_assert(eq(sz, get_units(c, chain, 20, 15), 20));

    json_t *t = of_job(&d, "show trajectory", 0);
    cr_assert(eq(llong, number(t, "puts"), 1));
    cr_assert(eq(llong, number(t, "put_bytes"), 20 * BLOCK + STATE));
    cr_assert(eq(llong, number(t, "hits"), 1));
    cr_assert(eq(llong, number(t, "hit_units"), 5));
    cr_assert(eq(llong, number(t, "units"), 20));
    cr_assert(eq(llong, number(t, "boundary"), 20));
    cr_assert(eq(llong, number(t, "in_memory"), 20));
    cr_assert(eq(llong, number(t, "states"), 1));
    json_decref(t);

    lh_hex_print(chain[7].bytes, sizeof chain[7].bytes, hex);
    lh_autofree char *unit = lh_format("show %s", hex);
    json_t *u = of_job(&d, unit, 0);
    cr_assert(eq(llong, number(u, "units"), 8));
    cr_assert(eq(llong, number(u, "boundary"), 0), "no state up to there");
    cr_assert(eq(llong, number(u, "continued"), 1));
    cr_assert(eq(str, (char *)text(u, "block_in"), (char *)"memory"));
    cr_assert(eq(str, (char *)text(u, "hash"), hex));
    json_decref(u);

    lh_hex_print(root.bytes, sizeof root.bytes, hex);
    lh_autofree char *of_root = lh_format("show %s", hex);
    json_t *r = of_job(&d, of_root, 0);
    cr_assert(eq(llong, number(r, "objects"), 21));
    cr_assert(eq(llong, number(r, "unit_tokens"), UNIT));
    json_decref(r);

    json_decref(of_job(&d, "show", 1));
    json_decref(of_job(&d, "show nobody", 1));
    json_decref(of_job(&d, "show 00000000000000000000000000000000", 1));
    use_version(c, 2, true);
    json_t *gone = of_job(&d, "show trajectory", 0);
    cr_assert(eq(llong, number(gone, "puts"), 1));
    cr_assert(json_object_get(gone, "units") == NULL, "its version is retired");
    json_decref(gone);
    daemon_stop(&d);
}

static size_t tenants_of(const struct daemon *d)
{
    json_t *stat = of_job(d, "stat", 0);
    size_t n = json_array_size(json_object_get(stat, "tenants"));

    json_decref(stat);
    return n;
}

Test(cli, bench_measures_and_leaves_nothing_behind, .timeout = 60)
{
    struct daemon d;
    struct kv_key chain[20];

    daemon_start(&d, 8 << 20, 8 << 20);
    lh_auto(kv_client) c = client_of(&d, "a");
    fill(&d, c, chain, 20);
    json_t *rows = of_job(&d, "bench", 0);
    cr_assert(eq(sz, json_array_size(rows), 4));
    for (size_t i = 0; i < 3; i++)
        cr_assert(
            gt(dbl, json_number_value(json_object_get(json_array_get(rows, i), "gb_per_s")), 0.0));
    json_decref(rows);
    json_t *roots = of_job(&d, "ls", 0);
    size_t live = 0, i;
    json_t *row;
    json_array_foreach(roots, i, row)
    {
        live += !json_is_true(json_object_get(row, "retired"));
    }
    cr_assert(eq(sz, live, 1), "only the worker's");
    json_decref(roots);
    cr_assert(eq(sz, get_units(c, chain, 20, 0), 20), "and all of that");
    int64_t deadline = lh_now_ms() + 30000;
    while (tenants_of(&d) > 1 && lh_ms_left(deadline)) /* its space returns in the background */
        usleep(10000);
    cr_assert(eq(sz, tenants_of(&d), 1));
    daemon_stop(&d);
}

Test(cli, bench_evicts_nobody)
{
    struct daemon d;
    struct kv_key chain[200];

    daemon_start(&d, 1 << 20, 1 << 20);
    lh_auto(kv_client) c = client_of(&d, "a");
    fill(&d, c, chain, 200); /* 200 pages of 256 */
    json_decref(of_job(&d, "bench", 1));
    cr_assert(eq(sz, get_units(c, chain, 200, 0), 200));
    daemon_stop(&d);
}

static char *output_of(const char *args)
{
    lh_autofree char *command = lh_format("%s %s", KVSTORE, args);
    FILE *f = popen(command, "r");
    char *all = calloc(1, 1 << 16);

    cr_assert(f && all && fread(all, 1, (1 << 16) - 1, f) > 0);
    cr_assert(eq(int, pclose(f), 0), "%s", args);
    return all;
}

Test(cli, metrics_are_for_prometheus)
{
    struct daemon d;
    struct kv_key chain[20];

    daemon_start(&d, 1 << 20, 1 << 20);
    lh_auto(kv_client) c = client_of(&d, "a");
    fill(&d, c, chain, 20);
    lh_autofree char *args = lh_format("%s metrics", d.dir);
    lh_autofree char *all = output_of(args);
    static const char *const lines[] = {
        "# TYPE kvstored_puts_total counter\n", "\nkvstored_puts_total 1\n",
        "\nkvstored_capacity_bytes 1048576\n", "\nkvstored_refused_total{reason=\"quota\"} 0\n",
        "\nkvstored_tenant_used_bytes{tenant=\"\"} "};
    for (size_t i = 0; i < LH_ARRAY_SIZE(lines); i++)
        cr_assert(strstr(all, lines[i]) != NULL, "%s not in %s", lines[i], all);
    daemon_stop(&d);
}

static char *get_metrics(const struct daemon *d, const char *path)
{
    lh_autofree char *log = lh_read_file(d->log, 1 << 20, NULL, NULL);
    const char *line = log ? strstr(log, "serving metrics") : NULL;
    const char *port = line ? strstr(line, " port=") : NULL;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    char *answer = calloc(1, 1 << 16);
    size_t n = 0;

    cr_assert(port != NULL && answer != NULL, "%s", log);
    a.sin_port = htons((uint16_t)atoi(port + strlen(" port=")));
    lh_autoclose int fd = socket(AF_INET, SOCK_STREAM, 0);
    cr_assert(eq(int, connect(fd, (struct sockaddr *)&a, sizeof a), 0));
    lh_autofree char *get = lh_format("GET %s HTTP/1.0\r\n\r\n", path);
    cr_assert(eq(int, lh_write_all(fd, get, strlen(get), NULL), 0));
    for (ssize_t r; (r = read(fd, answer + n, (1 << 16) - 1 - n)) > 0;)
        n += (size_t)r;
    return answer;
}

Test(cli, a_quota_is_kept_and_seen)
{
    struct daemon d;
    struct kv_key root = root_of(1), chain[20];
    struct lh_error e = {0};

    daemon_start_watched(&d, 1 << 20, "acme=128KiB"); /* 32 pages */
    struct kv_options o = {.path = d.socket,
                           .name = "a",
                           .tenant = "acme",
                           .unit_tokens = UNIT,
                           .block_bytes = BLOCK,
                           .state_bytes = STATE,
                           .timeout_ms = 5000};
    lh_auto(kv_client) c = kv_client_create(&o, &e);
    use_version(c, 1, false);
    for (unsigned seed = 0; seed < 5; seed++) {
        chain_of(&root, seed, 20, chain);
        cr_assert(gt(i64, put_units(c, chain, 0, 20, &e), 0), "%s", e.message);
    }
    json_t *stat = of_job(&d, "stat", 0);
    json_t *tenants = json_object_get(stat, "tenants");
    cr_assert(eq(sz, json_array_size(tenants), 2));
    json_t *acme = json_array_get(tenants, 1);
    cr_assert(eq(str, (char *)text(acme, "tenant"), (char *)"acme"));
    cr_assert(eq(llong, number(acme, "quota_bytes"), 128 << 10));
    cr_assert(le(llong, number(acme, "used_bytes"), 128 << 10));
    cr_assert(gt(llong, number(acme, "evicted"), 0));
    json_decref(stat);
    lh_autofree char *page = get_metrics(&d, "/metrics"), *none = get_metrics(&d, "/");
    cr_assert(strstr(page, "\nkvstored_tenant_quota_bytes{tenant=\"acme\"} 131072\n") != NULL, "%s",
              page);
    cr_assert(strstr(none, " 404 ") != NULL, "%s", none);
    cr_assert(eq(sz, get_units(c, chain, 20, 0), 20), "it serves on");
    daemon_stop(&d);
}

Test(cli, manual_and_completion_know_every_command)
{
    static const char *const words[] = {"stat", "ls",      "show",  "verify",
                                        "drop", "explain", "bench", "metrics"};
    lh_autofree char *man = output_of("man"), *completion = output_of("completion");
    lh_autofree char *help = output_of("--help");

    for (size_t i = 0; i < LH_ARRAY_SIZE(words); i++) {
        cr_assert(strstr(man, words[i]) != NULL, "%s", words[i]);
        cr_assert(strstr(completion, words[i]) != NULL, "%s", words[i]);
        cr_assert(strstr(help, words[i]) != NULL, "%s", words[i]);
    }
}
